"""The trainer's part of the traces."""

import math
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer import traces
from grpo.trainer.loss import PolicyTokens
from grpo.trainer.objective import policy_inputs
from grpo.trainer.traces import TrainedTokens
from grpo.transport.traces import FOLDER, MASKS, TRAINED_SCHEMA, VOCABULARY_FILE, trained_path
from msgspec.structs import replace

from tests.trainer.bench import Bench, on_policy
from tests.trainer.models import CPU, VOCAB, tiny_batch


@pytest.fixture
def wanted(tmp_path: Path) -> Path:
    """A run folder in which somebody wants traces."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / VOCABULARY_FILE).touch()
    return tmp_path


def train(kept: TrainedTokens, steps: range) -> None:
    for step in steps:
        batch = replace(tiny_batch((6, 9)), step=step)
        inputs = policy_inputs(batch, CPU)
        num = len(inputs["inference_logprobs"])
        kept.add(batch, PolicyTokens(logprobs=torch.zeros(num), entropies=torch.zeros(num), **inputs))
        kept.write(step, [0])


def test_short_steps_are_all_written_though_the_first_takes_long(wanted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = traces.write_table

    def slow(table: pa.Table, path: Path) -> None:
        time.sleep(0.1)
        write(table, path)

    monkeypatch.setattr(traces, "write_table", slow)
    kept = TrainedTokens(wanted, LossSettings())
    train(kept, range(1, 4))
    kept.close()
    assert all(trained_path(wanted, step, 0).exists() for step in (1, 2, 3))


def test_a_rank_of_the_batch_of_which_nothing_was_computed_has_an_empty_part(wanted: Path) -> None:
    kept = TrainedTokens(wanted, LossSettings())
    inputs = policy_inputs(batch := tiny_batch((6, 9)), CPU)
    num = len(inputs["inference_logprobs"])
    kept.add(batch, PolicyTokens(logprobs=torch.zeros(num), entropies=torch.zeros(num), **inputs))
    kept.write(1, [0, 1])
    kept.close()
    assert [pq.read_table(trained_path(wanted, 1, rank)).num_rows for rank in (0, 1)] == [2, 0]


def test_nothing_is_kept_where_nobody_wants_traces(tmp_path: Path) -> None:
    kept = TrainedTokens(tmp_path, LossSettings())
    train(kept, range(1, 2))
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / VOCABULARY_FILE).touch()
    kept.write(1, [0])
    kept.close()
    assert not trained_path(tmp_path, 1, 0).exists()


def test_a_trained_token_is_told_once_as_it_was_before_the_first_step_with_why_it_was_left_out(
    tiny_model: Path, wanted: Path
) -> None:
    bench = Bench(tiny_model, wanted, max_steps=1, ppo_epochs=2)
    batch = on_policy(tiny_batch((6, 9)), bench.policy)  # of which 5 and 8 tokens carry loss
    shifted = batch.inference_logprobs.copy()
    shifted[3] += 2.3  # its ratio is 0.1
    bench.train(replace(batch, inference_logprobs=shifted))
    rows = pq.read_table(trained_path(wanted, 1, 0), schema=TRAINED_SCHEMA).to_pylist()
    first, second = rows
    assert [row["rollout"] for row in rows] == list(batch.rollout_ids)
    expected = batch.inference_logprobs[batch.loss_mask]
    assert [*first["trainer_logprobs"], *second["trainer_logprobs"]] == pytest.approx(expected.tolist(), abs=1e-5)
    reason = {MASKS[code] for row in rows for code in row["masked"]}
    assert (reason, [code > 0 for code in first["masked"]]) == ({"", "token_low"}, [False, False, True, False, False])
    assert all(0 < entropy <= math.log(VOCAB) for row in rows for entropy in row["entropy"])
