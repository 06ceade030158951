"""The trainer's part of the traces."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from msgspec.structs import replace

from configs.loss import LossSettings
from tests.trainer.models import CPU, tiny_batch
from trainer import traces
from trainer.loss import PolicyTokens
from trainer.objective import policy_inputs
from trainer.traces import TrainedTokens
from transport.traces import FOLDER, VOCABULARY_FILE, trained_path


def train(kept: TrainedTokens, steps: range) -> None:
    for step in steps:
        batch = replace(tiny_batch((6, 9)), step=step)
        inputs = policy_inputs(batch, CPU)
        num = len(inputs["inference_logprobs"])
        kept.add(batch, PolicyTokens(logprobs=torch.zeros(num), entropies=torch.zeros(num), **inputs))
        kept.write(step)


def test_short_steps_are_all_written_though_the_first_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / VOCABULARY_FILE).touch()
    write = traces.write_table

    def slow(table: pa.Table, path: Path) -> None:
        time.sleep(0.3)
        write(table, path)

    monkeypatch.setattr(traces, "write_table", slow)
    kept = TrainedTokens(tmp_path, LossSettings())
    train(kept, range(1, 4))
    kept.close()
    assert all(trained_path(tmp_path, step, 0).exists() for step in (1, 2, 3))


def test_nothing_is_kept_where_nobody_wants_traces(tmp_path: Path) -> None:
    kept = TrainedTokens(tmp_path, LossSettings())
    train(kept, range(1, 2))
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / VOCABULARY_FILE).touch()
    kept.write(1)
    kept.close()
    assert not trained_path(tmp_path, 1, 0).exists()
