"""Schedules of the sampling temperature."""

import pytest

from orchestrator.temperature import temperature_schedule


def test_a_linear_schedule_goes_straight_from_version_0_to_the_last_batchs_version() -> None:
    # From 1.2 to 0.4 in 4 equal steps of -0.2: versions 0 to 4 of 5 steps.
    at = temperature_schedule("linear", start_temperature=1.2, end_temperature=0.4, max_steps=5)
    assert [at(version) for version in range(5)] == pytest.approx([1.2, 1.0, 0.8, 0.6, 0.4])


def test_a_cosine_schedule_changes_little_at_both_ends() -> None:
    # (1 - cos(π x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1 is 0, 0.1464, 0.5, 0.8536, 1.
    at = temperature_schedule("cosine", start_temperature=1.0, end_temperature=2.0, max_steps=5)
    assert [at(version) for version in range(5)] == pytest.approx([1, 1.146447, 1.5, 1.853553, 2])


def test_after_its_end_the_schedule_stays_there() -> None:
    at = temperature_schedule("cosine", start_temperature=1.0, end_temperature=0.5, max_steps=3)
    assert at(3) == at(30) == pytest.approx(0.5)


def test_a_schedule_over_one_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_steps"):
        temperature_schedule("linear", start_temperature=1.0, end_temperature=0.5, max_steps=1)
