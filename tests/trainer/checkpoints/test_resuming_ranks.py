"""A run of two ranks, stopped and resumed: the same weights, bit for bit, from each rank's own 8-bit state."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from grpo.trainer.checkpoint import CheckpointStore, Parts
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.folders import step_folder
from grpo.transport.run import RunFolder, create_run
from msgspec.structs import replace

from tests.trainer.bench import UNMASKED
from tests.trainer.forked import forked_ranks
from tests.trainer.models import tiny_batch

NUM_STEPS = 4
ARGUMENTS = ["--gpus", "2", "--zero_level", "2", "--device", "cpu"]
ARGUMENTS += ["--recipe", "fp32", "--num_threads", "1", "--sequence_len", "128", "--wait_timeout_s", "240"]
ARGUMENTS += ["--lora_rank", "256", "--learning_rate", "1e-3", "--optimizer", "adamw_8bit", "--ckpt.interval", "2"]
ARGUMENTS += [word for key, value in UNMASKED.items() for word in (f"--loss.{key}", str(value))]


@contextmanager
def founded(folder: Path) -> Iterator[RunFolder]:
    """A run with batches for two ranks."""
    one = create_run(folder)
    with BatchSender(one.batches, run_id=one.run_id, hwm=NUM_STEPS) as sender:
        for step in range(1, NUM_STEPS + 1):
            batches = [tiny_batch((6, 9), seed=2 * step), tiny_batch((4, 8), seed=2 * step + 1)]
            place = {"run_id": one.run_id, "step": step}
            sender.send(step, [[replace(batch, rank=rank, **place)] for rank, batch in enumerate(batches)])
        yield one


def train(run: RunFolder, model: Path, logs: Path, *options: str) -> None:
    arguments = [*ARGUMENTS, "--model", str(model), "--output_dir", str(run.path), "--run_id", run.run_id, *options]
    with forked_ranks(logs, arguments) as ranks:
        for rank in ranks:
            assert rank.end() == 0, rank.stderr


def last(run: RunFolder) -> Parts:
    return CheckpointStore(run).read(NUM_STEPS)[1]


def test_two_ranks_resume_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    with founded(tmp_path / "run") as run:
        train(run, tiny_model, tmp_path / "logs_of_one", "--max_steps", str(NUM_STEPS))
        expected = last(run)
        for folder in (run.checkpoints, run.broadcasts):  # as if it had been killed after step 2
            for step in (3, 4):
                shutil.rmtree(step_folder(folder, step), ignore_errors=True)
        train(run, tiny_model, tmp_path / "logs_after", "--max_steps", str(NUM_STEPS), "--ckpt.resume_step", "-1")
        received = last(run)
    assert received.keys() == expected.keys()
    for part, tensors in expected.items():
        assert received[part].keys() == tensors.keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(received[part][name], tensor)] == []
    coded = [name for name, tensor in expected["optimizer"].items() if tensor.dtype == torch.uint8]
    assert {name.split("/")[1] for name in coded} == {"rank_0", "rank_1"}
