"""A real trainer on the real filesystem channels, in processes that are forked by `tests.trainer.forked`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from grpo.configs.train import TrainSettings
from grpo.trainer.startup import run
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.folders import step_folder
from grpo.transport.records import MicroBatch
from grpo.transport.run import RunFolder, create_run
from msgspec.structs import replace

from tests.chaos.kill_points import kill_at
from tests.trainer.bench import UNMASKED
from tests.trainer.models import hint_for, tiny_batch

NUM_STEPS = 16
LOSS = UNMASKED | {"alpha_sdpo": 0.5, "sdpo": {"teacher": "ema", "ema_decay": 0.5}}
"""The teacher is a moving average, so that the state has all of its parts."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run with its batches; the sender removes what a checkpoint has passed."""

    folder: RunFolder
    model: Path
    optimizer: str

    def settings(self) -> dict[str, Any]:
        """With adapters large enough for 8-bit state, and a learning rate that depends on the step."""
        return {
            "model": str(self.model),
            "device": "cpu",
            "recipe": "fp32",
            "num_threads": 1,
            "sequence_len": 128,
            "lora_rank": 128,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 3,
            "max_steps": NUM_STEPS,
            "optimizer": self.optimizer,
            "loss": LOSS,
            "wait_timeout_s": 120.0,
            "output_dir": str(self.folder.path),
            "run_id": self.folder.run_id,
            "ckpt": {"interval": 2, "keep_last": 2, "keep_interval": 8},
        }

    def result(self) -> dict[str, bytes]:
        """The last version's weights, and what a further step would follow from."""
        files = [step_folder(self.folder.broadcasts, NUM_STEPS) / "adapter_model.safetensors"]
        checkpoint = step_folder(self.folder.path / "checkpoints", NUM_STEPS) / "trainer"
        files += sorted(checkpoint.glob("*.safetensors"))
        return {file.name: file.read_bytes() for file in files}

    def versions(self) -> dict[str, bytes]:
        """The weights of all versions that are there."""
        return {f.parent.name: f.read_bytes() for f in self.folder.broadcasts.glob("step_*/adapter_model.safetensors")}


def batch_of(step: int, run_id: str) -> MicroBatch:
    """Two samples, the first of them with a hint."""
    batch = tiny_batch((7, 9), seed=step)
    hint = hint_for(batch, 0, places=(4, 5, 6), before=3)
    logprobs = np.where(batch.loss_mask, np.float32(-4.0), np.float32(0.0))
    return replace(batch, run_id=run_id, step=step, inference_logprobs=logprobs, hints=((0, hint),))


@contextmanager
def training(folder: Path, model: Path, optimizer: str) -> Iterator[Training]:
    """A founded run whose batches have all been sent."""
    founded = create_run(folder)
    with BatchSender(founded.batches, run_id=founded.run_id, hwm=NUM_STEPS) as sender:
        for step in range(1, NUM_STEPS + 1):
            sender.send(step, [[batch_of(step, founded.run_id)]])
        sender.finish(NUM_STEPS)
        yield Training(folder=founded, model=model, optimizer=optimizer)


def start(context: ForkServerContext, settings: dict[str, Any], at: tuple[str, int] | None = None) -> BaseProcess:
    """A trainer, which kills itself at a call of `os` for the n-th time."""
    process = context.Process(target=_train, args=(settings, at))
    process.start()
    return process


def _train(settings: dict[str, Any], at: tuple[str, int] | None) -> None:
    if at is not None:
        kill_at(*at)
    run(TrainSettings.model_validate(settings), Path(settings["model"]))
