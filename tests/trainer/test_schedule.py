"""Learning rates, by hand."""

from typing import Any

import pytest
from grpo.configs.train import TrainSettings
from grpo.trainer.optim import learning_rate


def rates(
    schedule: Any, *, warmup_steps: int, max_steps: int, steps: int, decay_steps: int | None = None
) -> list[float]:
    options = {"warmup_steps": warmup_steps, "max_steps": max_steps, "decay_steps": decay_steps}
    settings = TrainSettings(model="m", learning_rate=1.0, lr_scheduler_type=schedule, **options)
    return [learning_rate(n, settings) for n in range(1, steps + 1)]


def test_warm_up_rises_in_equal_steps_to_the_peak_and_constant_stays_there() -> None:
    assert rates("constant", warmup_steps=4, max_steps=-1, steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_zero_just_after_the_last_step() -> None:
    # 2 of warm-up, then (n - 3) / 4 of the way
    assert rates("linear", warmup_steps=2, max_steps=6, steps=7) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_cosine_is_half_way_at_half_time() -> None:
    # progress 0, 1/4, 1/2, 3/4: (1 + cos π/4) / 2 = 0.853553
    expected = [1.0, 0.8535534, 0.5, 0.1464466]
    assert rates("cosine", warmup_steps=0, max_steps=4, steps=4) == pytest.approx(expected)


def test_wsd_rises_stays_and_falls_over_its_last_steps_to_zero_just_after_the_last_one() -> None:
    # 2 of warm-up, stable to step 8 - 4 = 4, then (n - 5) / 4 of the way
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates("wsd", warmup_steps=2, max_steps=8, steps=9, decay_steps=4) == expected


def test_wsd_falls_over_a_tenth_of_the_steps_where_nothing_else_is_said() -> None:
    # 20 // 10 = 2 steps: the first of them at the peak, the second half way
    assert rates("wsd", warmup_steps=0, max_steps=20, steps=21) == [1.0] * 19 + [0.5, 0.0]


def test_wsd_with_few_steps_falls_after_the_last_one_and_never_during_the_warm_up() -> None:
    # 5 // 10 = 0, at least 1
    assert rates("wsd", warmup_steps=0, max_steps=5, steps=6) == [1.0] * 5 + [0.0]
    # a tenth of 20 is 2, of which only 1 is left after 19 of warm-up
    assert rates("wsd", warmup_steps=19, max_steps=20, steps=21)[18:] == [1.0, 1.0, 0.0]
    # a run that was resumed with more steps than its decay was made for
    assert rates("wsd", warmup_steps=2, max_steps=4, steps=5, decay_steps=9) == [0.5, 1.0, 1.0, 0.5, 0.0]
