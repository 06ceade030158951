"""Schedules of the sampling temperature."""

from pathlib import Path

import pytest
from grpo.orchestrator.loops.sample import temperature_of

from tests.orchestrator.fakes import settings_for


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # From 1.2 to 0.4 in 4 equal steps of -0.2: versions 0 to 4 of 5 steps. There it stays.
        (("linear", 1.2, 0.4), [1.2, 1.0, 0.8, 0.6, 0.4, 0.4]),
        # (1 - cos(π x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1 is 0, 0.1464, 0.5, 0.8536, 1.
        (("cosine", 1.0, 2.0), [1, 1.146447, 1.5, 1.853553, 2, 2]),
        (None, [1.0] * 6),
    ],
)
def test_a_schedule_goes_from_version_0_to_the_last_batchs_version(
    schedule: tuple[str, float, float] | None, expected: list[float]
) -> None:
    keys = ("type", "start_temperature", "end_temperature")
    chosen = {"temp_scheduler": dict(zip(keys, schedule, strict=True))} if schedule else {}
    settings = settings_for(Path("x"), max_steps=5, sampling=chosen, client={})
    assert [temperature_of(settings, version) for version in range(6)] == pytest.approx(expected)
