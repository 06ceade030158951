"""The sampling temperature of each policy version."""

import math

from configs.orch import OrchSettings


def temperature_of(settings: OrchSettings, version: int) -> float:
    """Of a schedule it is start + (end - start) · f(x), with x = version / (max_steps - 1), at most 1; f(x) = x for
    `linear` and (1 - cos(π x)) / 2 for `cosine`. Version max_steps - 1 is the newest that the last batch can be sampled
    under."""
    if (schedule := settings.sampling.temp_scheduler) is None:
        return settings.sampling.temperature
    assert settings.max_steps is not None, "the settings are checked"
    x = min(version / (settings.max_steps - 1), 1.0)
    share = x if schedule.type == "linear" else (1 - math.cos(math.pi * x)) / 2
    return schedule.start_temperature + (schedule.end_temperature - schedule.start_temperature) * share
