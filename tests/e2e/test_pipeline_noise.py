"""The whole pipeline with noise on the norm weights. The learning rate leaves the policy as it is and
the noise is large, so that whatever differs between versions is the noise."""

import pytest

from tests.e2e.runs import Run, trained
from tests.pages import Page

pytestmark = pytest.mark.e2e
SIGMAS = {1: 0.0, 2: 1.0, 3: 1.0, 4: 0.1, 5: 0.1, 6: 0.0}
"""By version: 6 steps in 3 stages of 2, none, 1.0 and 0.1; version 6 samples no batch."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run; batch n is sampled under version n - 1."""
    preset, *words = Page("docs/versions.md").command("grpo quickstart --train.noise_scheduler")
    return trained(
        *(preset, tmp_path_factory.mktemp("pipeline") / "run", *words, "--train.noise_scheduler.num_stages", "3"),
        *("--train.noise_scheduler.sigma_start", "1.0", "--train.noise_scheduler.sigma_end", "0.1"),
        *("--max_steps", "6", "--train.learning_rate", "1e-9", "--orch.batch_size", "128"),
        *("--orch.max_async_level", "0", "--orch.eval.interval", "1", "--orch.eval.num_examples", "40"),
    )


def test_each_version_has_the_noise_of_its_stage(run: Run) -> None:
    assert run.by_step("policy/noise_sigma") == pytest.approx(SIGMAS)


def test_every_version_was_proved_with_and_without_its_noise(run: Run) -> None:
    assert len(run.by_step("policy/canary_max_abs")) == 6
    assert max(run.by_step("policy/canary_max_abs").values()) < 1e-4


def test_the_trainer_computes_without_the_noise_that_the_server_samples_with(run: Run) -> None:
    mismatch = run.by_step("policy/mismatch_max_lag0")
    assert max(mismatch[step] for step in (1, 2)) < 1e-4  # versions 0 and 1
    assert min(mismatch[step] for step in (3, 4)) > 1.0  # versions 2 and 3, sigma 1.0
    assert min(mismatch[step] for step in (5, 6)) > 0.05  # versions 4 and 5, sigma 0.1


def test_rollouts_explore_and_evaluation_does_not(run: Run) -> None:
    rewards, accuracies = run.by_step("reward/mean"), run.by_step("eval/accuracy")
    # 0 to 0.008, and 0.20 to 0.35, in 4 runs of different seeds
    assert max(rewards[step] for step in (3, 4)) < 0.04 < min(rewards[step] for step in (1, 2))
    assert len(accuracies) == 7
    assert set(accuracies.values()) == {accuracies[0]}
    assert accuracies[0] > 0.1
