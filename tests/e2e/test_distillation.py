"""Learning from a teacher token by token, real vLLM included: more right answers without any reward, by a teacher whose
server `grpo` starts."""

import statistics
from pathlib import Path

import pytest
import yaml
from grpo.transport.status import read_status

from tests.e2e.runs import Run, trained

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("distilled") / "run"
    words = ("--max_steps", "12", "--orch.batch_size", "64", "--orch.eval.num_examples", "100")
    return trained("configs/distillation", folder, *words)


def test_the_divergence_from_the_teacher_falls_by_half_or_more(distilled: Run) -> None:
    divergences = [line["policy/teacher_kl"] for line in distilled.steps]
    assert divergences[0] > 0.5
    # 0.30 to 0.34 of it in 4 runs of different seeds
    assert statistics.mean(divergences[-3:]) < 0.5 * statistics.mean(divergences[:3])


def test_the_student_learns_what_it_could_not_do_without_a_single_reward(distilled: Run) -> None:
    summary = distilled.summary
    assert 0.2 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.65  # 0.92 to 0.96 in 4 runs of different seeds
    assert {line["reward/mean"] for line in distilled.steps} == {0.0}


def test_the_teachers_server_leaves_the_run_alone(distilled: Run) -> None:
    folder = distilled.folder
    settings = yaml.safe_load((folder / "settings" / "teacher.yaml").read_text())
    assert settings["enable_lora"] is False
    assert settings["output_dir"] != str(folder)
    assert not Path(settings["output_dir"]).exists()
    assert (read_status(folder / "status" / "teacher.json") or {})["state"] == "finished"
    assert len(list((folder / "status").glob("infer.*.json"))) == 1


def test_no_rollout_is_lost_and_what_is_trained_is_what_was_sampled(distilled: Run) -> None:
    summary = distilled.summary
    assert summary["rollouts_dropped"] == {}
    assert sum(line["teacher/failed"] for line in distilled.steps) == 0
    assert sum(line["teacher/rows"] for line in distilled.steps) >= summary["rollouts_trained"]
    assert summary["mismatch_max_lag0"] < 1e-4
