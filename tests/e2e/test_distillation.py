"""Learning from a teacher token by token, real vLLM included: a larger share of right answers without any reward, and
earlier versions of the policy as its own teachers."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.auxiliary import TeacherSettings
from orchestrator.teacher.served import ServedTeacher
from tests.e2e.plain_server import KEY, Live
from tests.e2e.test_pipeline import grpo, metrics
from transport.batches.store import StepStore

pytestmark = pytest.mark.e2e

EXACT = 1e-4


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def per_step(run: Path, metric: str) -> list[float]:
    return [line[metric] for line in metrics(run) if "loss/policy" in line]


# --- a better model ---


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the preset."""
    folder = tmp_path_factory.mktemp("distilled") / "run"
    done = grpo("configs/distillation", "--output_dir", str(folder), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_divergence_from_the_teacher_falls_by_half_or_more(distilled: Path) -> None:
    divergences = per_step(distilled, "policy/teacher_kl")
    assert divergences[0] > 1  # 1.5 nats a token; 0.17 in the end
    assert statistics.mean(divergences[-5:]) < 0.5 * statistics.mean(divergences[:3])


def test_the_student_learns_what_it_could_not_do_without_a_single_reward(distilled: Path) -> None:
    """From 0.32 to 0.97 of 200 held-out words; the standard error of such a share is at most √(0.25 / 200) = 0.035."""
    summary = summary_of(distilled)
    assert 0.25 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.8
    assert set(per_step(distilled, "reward/mean")) == {0.0}


def test_no_rollout_is_lost_and_what_is_trained_is_what_was_sampled(distilled: Path) -> None:
    summary = summary_of(distilled)
    assert summary["rollouts_dropped"] == {}
    assert sum(per_step(distilled, "teacher/failed")) == 0
    assert sum(per_step(distilled, "teacher/rows")) >= summary["rollouts_trained"]
    assert summary["mismatch_max_lag0"] < EXACT


# --- somebody else's server ---


async def test_openais_routes_of_a_real_vllm_score_as_ours_do(plain: Live) -> None:
    # The base's name in vLLM; asked as our kind, the teacher would be its newest policy.
    [base] = [one["id"] for one in plain.server.get("/v1/models").json()["data"] if one["parent"] is None]
    settings = TeacherSettings.model_validate(
        {"model": {"name": base}, "client": {"base_url": [f"{plain.server.url}/v1"]}}
    )
    rows = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"Reverse: hello", b"Reverse: word", b"a b")]
    found = []
    for ours in (False, True):
        teacher = ServedTeacher(settings, api_key=KEY, seq_len=512, ours=ours)
        try:
            found.append([await teacher.score(row, 1.0) for row in rows])
        finally:
            await teacher.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=EXACT)


# --- the policy as it was ---


def taught_by_itself(folder: Path, *, num_steps: int, every: int, weight: str, options: tuple[str, ...] = ()) -> Path:
    """A finished run of the quickstart at a temperature other than 1, strictly on-policy."""
    words = [*("--max_steps", str(num_steps), "--orch.max_async_level", "0", "--orch.sampling.temperature", "0.8")]
    words += [*("--orch.teacher_model.policy_every", str(every), "--train.loss.teacher_tau", weight)]
    words += [*("--orch.eval.num_examples", "0", "--infer.max_loras", "11"), *options]
    done = grpo("configs/quickstart", "--output_dir", str(folder), *words, timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def largest_gap(run: Path, step: int) -> float:
    """Between what the teacher and what the sampler gave the sampled tokens of a batch, in nats."""
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    batches = StepStore(run / "batches", run_id=run_id).read(step, 0, 1)
    assert batches is not None
    gaps = []
    for batch in batches:
        assert batch.teacher_logprobs is not None
        gaps.append(float(np.abs(batch.teacher_logprobs - batch.inference_logprobs)[batch.loss_mask].max()))
    return max(gaps)


def test_the_version_that_teaches_scores_its_own_samples_as_it_sampled_them(tmp_path: Path) -> None:
    few = ("--orch.batch_size", "64")
    run = taught_by_itself(tmp_path / "run", num_steps=5, every=2, weight="0.1", options=few)
    # Step n is sampled by version n - 1; versions 0, 2 and 4 teach from when they are live.
    assert [largest_gap(run, step) < EXACT for step in range(1, 6)] == [True, False, True, False, True]
    assert min(largest_gap(run, 2), largest_gap(run, 4)) > 100 * EXACT
