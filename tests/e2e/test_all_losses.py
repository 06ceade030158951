"""Rewards, hints and teachers' disagreement in one run, with real vLLM and teachers behind a real HTTP server."""

import json
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.e2e.runs import Run, trained
from tests.e2e.scripted_teachers import scripted_teachers
from transport.traces import trace_path

pytestmark = pytest.mark.e2e
NUM_STEPS, BATCH_SIZE = 5, 64


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`grpo configs/all_channels`, for fewer steps, with weights by which they suffice."""
    folder = tmp_path_factory.mktemp("all_channels") / "run"
    words = ("--max_steps", NUM_STEPS, "--orch.eval.num_examples", "40")
    words += ("--train.loss.alpha_sdpo", "1", "--train.loss.beta_replay", "0.1")
    with scripted_teachers("all_channels") as teachers:
        return trained("configs/all_channels", folder, *words, *teachers)


def test_every_step_learns_from_rewards_and_hints_and_from_pairs_once_teachers_have_answered(run: Run) -> None:
    assert len(run.steps) == NUM_STEPS
    for line in run.steps:
        shares = [line[f"optim/grad_share_{stream}"] for stream in ("policy", "sdpo", "dpo")]
        assert sum(shares) == pytest.approx(1)
        assert line["hints/given"] == line["hints/errors"]
    # In which step the first pairs are depends on when teachers have answered.
    pairs = [line.get("policy/dpo_pairs", 0) for line in run.steps]
    assert sum(pairs) > 0
    assert sum(line["pairs/made"] for line in run.steps) > 0
    assert all((line["optim/grad_share_dpo"] > 0) == (num > 0) for line, num in zip(run.steps, pairs, strict=True))
    assert sum(line["hints/given"] for line in run.steps) > BATCH_SIZE


def test_no_rollout_is_lost_and_what_is_trained_is_what_was_sampled(run: Run) -> None:
    assert run.summary["rollouts_dropped"] == {}
    assert run.summary["rollouts_trained"] == NUM_STEPS * BATCH_SIZE
    assert run.summary["mismatch_max_lag0"] < 1e-4


def test_calls_that_fail_become_rarer(run: Run) -> None:
    versions = (run.summary["evaluations"][version] for version in ("0", str(NUM_STEPS)))
    before, after = (found["eval/measure/tool_error_rate/zorplex"] for found in versions)
    assert before > 0.3
    assert after < 0.6 * before


def test_a_failed_call_of_a_conversation_has_its_hint_beside_it(run: Run) -> None:
    traces: list[dict[str, Any]] = pq.read_table(trace_path(run.folder, 1)).to_pylist()
    errors = [[one["error"] for one in json.loads(row["messages"]) if "error" in one] for row in traces]
    assert sum(map(bool, errors)) > BATCH_SIZE * 0.5
    for row, messages in zip(traces, errors, strict=True):
        assert (row["hint"] is not None) == bool(messages)
        assert not messages or row["hint"].endswith(tuple(messages))
