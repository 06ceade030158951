"""Traces: what the orchestrator writes of a step, and what the trainer's part adds."""

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from grpo.configs.reporting import TraceSettings
from grpo.orchestrator.monitoring.traces import Traces
from grpo.orchestrator.rollouts.records import EpisodeResult, Failure, single_row
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport import traces as stored
from grpo.transport.http import Choice
from grpo.transport.traces import TRAINED_SCHEMA, merge_trained, token_key, trace_path, traced_steps, trained_path
from msgspec.structs import replace

from tests.orchestrator import made

IDS = np.array([5, 6, 8, 9], np.int32)
TASK = replace(made.TASK, env="words", index=3)


def result(name: str, reward: float) -> EpisodeResult:
    completion = Choice(token_ids=[8, 9], logprobs=[-0.5, -0.25], finish_reason="stop")
    row = single_row([5, 6], completion, opening=(6,), version=1, temperature=1.0)
    row = replace(row, versions=((1, 3), (2, 1)))
    step = made.step(completion=completion, text="ab", version=1)
    return replace(made.result(name, step, rewards=reward, rows=(row,), task=TASK), fields={"answer": "ba"})


def group() -> ScoredGroup:
    logprobs = {"inference_logprobs": np.array([0, 0, -0.5, -0.25], np.float32), "policy_versions": ((1, 3), (2, 1))}
    mask = np.array([False, False, True, True])
    logprobs["teacher_logprobs"] = np.array([0, 0, -0.3, -0.2], np.float32)
    sample = made.sample("7/0", IDS, loss_mask=mask, advantages=0.5, group_id="7", reward=1.0, **logprobs)
    both = [result("7/0", 1.0), result("7/1", 0.0)]
    return ScoredGroup(results=both, samples=[sample], found=[], withheld={"7/1": "repetition"})


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by rollout."""
    return {row["rollout"]: row for row in pq.read_table(path, schema=stored.SCHEMA).to_pylist()}


def written(run: Path, settings: TraceSettings | None = None, *, step: int = 1) -> Path:
    traces = Traces(run, settings or TraceSettings(), num_ranks=1)
    failed = EpisodeResult(id="8/0", task=TASK, failure=Failure(reason="env_error", message="boom"))
    traces.dropped([failed], "env_error")
    traces.shipped(step, [group()])
    traces.close()
    return trace_path(run, step)


def test_traces_that_wait_are_bounded_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group of two rows of four tokens counts as 200 bytes."""
    monkeypatch.setattr("grpo.orchestrator.monitoring.traces.MAX_WAITING_BYTES", 500)
    monkeypatch.setattr("grpo.orchestrator.monitoring.traces.MAX_DROPPED_BYTES", 250)
    released, traces = threading.Event(), Traces(tmp_path, TraceSettings(), num_ranks=1)
    traces._later(1, released.wait)  # the disk is slow
    for step in (1, 2, 3):
        traces.dropped([result(f"{step}/{place}", 0.0) for place in range(2)], "env_error")
        traces.shipped(step, [group()] if step == 1 else [])
    assert "the disk is slower than the run" in caplog.text
    released.set()
    traces.close()
    assert [step for step in (1, 2, 3) if trace_path(tmp_path, step).exists()] == [1]


def leave_part(run: Path, *, step: int = 1) -> None:
    """What the trainer leaves of the one trained rollout."""
    row = {
        "rollout": "7/0",
        "key": token_key(IDS),
        "trainer_logprobs": np.array([-0.4, -0.75], np.float32),
        "entropy": np.array([0.5, 1.5], np.float32),
        "masked": np.array([0, 2], np.int8),
    }
    stored.write_table(stored.make_table([row], TRAINED_SCHEMA), trained_path(run, step, 0))


def test_every_rollout_is_there_with_what_became_of_it(tmp_path: Path) -> None:
    rows = read(written(tmp_path))
    reasons = {name: row["drop_reason"] for name, row in rows.items()}
    assert reasons == {"7/0": None, "7/1": "repetition", "8/0": "env_error"}
    assert [row["trained"] for row in rows.values()] == [True, False, False]
    first = rows["7/0"]
    assert first["token_ids"] == [5, 6, 8, 9]
    assert first["versions"] == [1, 1, 1, 2]
    assert first["advantages"] == [0, 0, 0.5, 0.5]
    assert (first["group"], first["example"], first["num_tokens"], first["advantage"]) == (7, 3, 2, 0.5)
    assert json.loads(first["messages"]) == [*TASK.messages, {"role": "assistant", "content": "ab"}]
    assert first["teacher_logprobs"] == pytest.approx([0, 0, -0.3, -0.2])
    assert json.loads(first["fields"]) == {"answer": "ba"}
    assert (rows["8/0"]["token_ids"], rows["8/0"]["failure"], rows["8/0"]["fields"]) == (None, "boom", None)


def test_the_trainers_part_is_added_to_what_it_trained(tmp_path: Path) -> None:
    path = written(tmp_path)
    leave_part(tmp_path)
    assert merge_trained(tmp_path, 1, 1)
    rows = read(path)
    assert rows["7/0"]["trainer_logprobs"] == pytest.approx([0, 0, -0.4, -0.75])
    assert rows["7/0"]["masked"] == [0, 0, 0, 2]
    assert rows["7/0"]["max_log_ratio"] == pytest.approx(-0.5)
    assert (rows["7/0"]["mean_entropy"], rows["7/0"]["num_masked"]) == (1.0, 1)
    assert rows["7/1"]["trainer_logprobs"] is None
    assert not trained_path(tmp_path, 1, 0).exists()


def test_a_part_that_comes_late_is_added_with_a_later_step_or_at_the_end(tmp_path: Path) -> None:
    traces = Traces(tmp_path, TraceSettings(), num_ranks=1)
    traces.shipped(1, [group()])
    traces.trained(1)
    leave_part(tmp_path)
    traces.close()
    assert read(trace_path(tmp_path, 1))["7/0"]["num_masked"] == 1


def test_what_killed_programs_left_is_added_or_goes(tmp_path: Path) -> None:
    written(tmp_path)  # its trainer was killed, and trains it again after a restart
    leave_part(tmp_path, step=1)
    leave_part(tmp_path, step=2)  # whose trace was never written
    (tmp_path / "traces" / ".step_000003.parquet.5f0c.tmp").write_bytes(b"half")
    traces = Traces(tmp_path, TraceSettings(), num_ranks=1)
    traces.shipped(3, [group()])
    traces.trained(3)
    leave_part(tmp_path, step=3)
    traces.close()
    assert [read(trace_path(tmp_path, step))["7/0"]["num_masked"] for step in (1, 3)] == [1, 1]
    left = sorted(path.name for path in (tmp_path / "traces").rglob("*.*"))
    assert left == ["step_000001.parquet", "step_000003.parquet"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"every": None}, []), ({"every": 2}, [1, 2, 4]), ({"keep_last": 2}, [3, 4]), ({"max_bytes": 1}, [4])],
)
def test_settings_say_what_stays(tmp_path: Path, settings: dict[str, Any], kept: list[int]) -> None:
    for step in range(1, 5):
        written(tmp_path, TraceSettings(**settings), step=step)
    assert [step for step in range(1, 5) if trace_path(tmp_path, step).exists()] == kept


def test_the_folder_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        written(tmp_path, step=step)
    looked = Mock(side_effect=traced_steps)
    monkeypatch.setattr("grpo.orchestrator.monitoring.traces.traced_steps", looked)
    traces = Traces(tmp_path, TraceSettings(keep_last=2), num_ranks=1)
    for step in (3, 4):
        traces.shipped(step, [group()])
    traces.close()
    assert looked.call_count == 1
    assert traced_steps(tmp_path) == [3, 4]


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("no folder")
    written(tmp_path)
    assert (tmp_path / "traces").read_text() == "no folder"
