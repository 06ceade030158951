"""The sampling temperature of each policy version."""

import math
from collections.abc import Callable

from configs.orch import OrchSettings


def make_temperature(settings: OrchSettings) -> Callable[[int], float]:
    """Temperature by policy version. Of a schedule it is start + (end - start) · f(x), with x = version /
    (max_steps - 1), at most 1; f(x) = x for `linear` and (1 - cos(π x)) / 2 for `cosine`. Version max_steps - 1 is the
    newest that the last batch can be sampled under."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        return lambda version: settings.sampling.temperature
    assert settings.max_steps is not None, "the settings are checked"
    start, end, last_version = schedule.start_temperature, schedule.end_temperature, settings.max_steps - 1

    def at(version: int) -> float:
        x = min(version / last_version, 1.0)
        return start + (end - start) * (x if schedule.type == "linear" else (1 - math.cos(math.pi * x)) / 2)

    return at
