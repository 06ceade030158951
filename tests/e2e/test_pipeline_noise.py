"""The whole pipeline with noise on the norm weights. The learning rate leaves the policy as it is and the noise is
large, so that whatever differs between versions is the noise."""

import pytest

from tests.e2e.test_pipeline import ROOT, grpo, metrics

pytestmark = pytest.mark.e2e
SIGMAS = {1: 0.0, 2: 1.0, 3: 1.0, 4: 0.1, 5: 0.1, 6: 0.0}
"""By version: 6 steps in 3 stages of 2, none, 1.0 and 0.1; version 6 samples no batch."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What a finished run has measured; batch n is sampled under version n - 1."""
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    page = (ROOT / "docs" / "noise.md").read_text()
    [command] = [line.split() for line in page.splitlines() if line.startswith("    grpo ")]
    done = grpo(
        *(*command[1:], "--train.noise_scheduler.num_stages", "3"),
        *("--train.noise_scheduler.sigma_start", "1.0", "--train.noise_scheduler.sigma_end", "0.1"),
        *("--output_dir", str(folder), "--max_steps", "6", "--train.learning_rate", "1e-9"),
        *("--orch.max_async_level", "0", "--orch.eval.interval", "1", "--orch.eval.num_examples", "100"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(folder)


def by_step(lines: list[dict[str, float]], key: str) -> dict[int, float]:
    return {int(line["progress/step"]): line[key] for line in lines if key in line}


def test_each_version_has_the_noise_of_its_stage(lines: list[dict[str, float]]) -> None:
    assert by_step(lines, "policy/noise_sigma") == pytest.approx(SIGMAS)


def test_every_version_was_proved_with_and_without_its_noise(lines: list[dict[str, float]]) -> None:
    assert len(by_step(lines, "policy/canary_max_abs")) == 6
    assert max(by_step(lines, "policy/canary_max_abs").values()) < 1e-4


def test_the_trainer_computes_without_the_noise_that_the_server_samples_with(lines: list[dict[str, float]]) -> None:
    mismatch = by_step(lines, "policy/mismatch_max_lag0")
    assert max(mismatch[step] for step in (1, 2)) < 1e-4  # versions 0 and 1
    assert min(mismatch[step] for step in (3, 4)) > 1.0  # versions 2 and 3, sigma 1.0
    assert min(mismatch[step] for step in (5, 6)) > 0.05  # versions 4 and 5, sigma 0.1


def test_rollouts_explore_and_evaluation_does_not(lines: list[dict[str, float]]) -> None:
    rewards, accuracies = by_step(lines, "reward/mean"), by_step(lines, "eval/accuracy")
    assert max(rewards[step] for step in (3, 4)) < 0.05 < min(rewards[step] for step in (1, 2))
    assert len(accuracies) == 7
    assert set(accuracies.values()) == {accuracies[0]}
    assert accuracies[0] > 0.2
