"""Learning rates, by hand."""

from typing import Any

import pytest
from grpo.configs.train import TrainSettings
from grpo.trainer.optim import learning_rate


@pytest.mark.parametrize(
    ("schedule", "warmup_steps", "max_steps", "decay_steps", "expected"),
    [
        # rises in equal steps to the peak and stays there
        ("constant", 4, -1, None, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        # 2 of warm-up, then (n - 3) / 4 of the way; zero just after the last step
        ("linear", 2, 6, None, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        # progress 0, 1/4, 1/2, 3/4: (1 + cos π/4) / 2 = 0.853553
        ("cosine", 0, 4, None, [1.0, 0.8535534, 0.5, 0.1464466]),
        # 2 of warm-up, stable to step 8 - 4 = 4, then (n - 5) / 4 of the way
        ("wsd", 2, 8, 4, [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        # a tenth of the steps where nothing is said: 20 // 10 = 2, the first of them at the peak, the second half way
        ("wsd", 0, 20, None, [1.0] * 19 + [0.5, 0.0]),
        # 5 // 10 = 0, at least 1
        ("wsd", 0, 5, None, [1.0] * 5 + [0.0]),
        # a tenth of 20 is 2, of which only 1 is left after 19 of warm-up
        ("wsd", 19, 20, None, [n / 19 for n in range(1, 20)] + [1.0, 0.0]),
        # a run that was resumed with more steps than its decay was made for
        ("wsd", 2, 4, 9, [0.5, 1.0, 1.0, 0.5, 0.0]),
    ],
)
def test_the_rate_of_each_step(
    schedule: Any, warmup_steps: int, max_steps: int, decay_steps: int | None, expected: list[float]
) -> None:
    options = {"warmup_steps": warmup_steps, "max_steps": max_steps, "decay_steps": decay_steps}
    settings = TrainSettings(model="m", learning_rate=1.0, lr_scheduler_type=schedule, **options)
    assert [learning_rate(n, settings) for n in range(1, len(expected) + 1)] == pytest.approx(expected, rel=1e-7)
