"""What the trainer starts with: its device, its place in a run, its model."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.resuming import TRAINER_MAY_CHANGE
from configs.train import TrainSettings
from trainer.checkpoints.files import Checkpoint
from trainer.checkpoints.resuming import checkpoint_store, checkpoint_to_resume
from trainer.colocate import while_exported
from trainer.errors import ModelError, RankFailed, RanksApart
from trainer.model import Policy, load_policy
from trainer.parallel import ONE, Ranks, join_group, leave_group
from trainer.peers import is_timeout
from transport.batches.store import StepStore
from transport.checkpoints import Checkpoints
from transport.errors import RunFolderError
from transport.run import RunFolder, changes_of, is_at_work, join_run, only_one, open_run
from transport.shared_base.sharing import ImportedBase

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def place_on_machine(settings: TrainSettings) -> tuple[int, int]:
    """Which of this machine's ranks this is, and how many there are, as torchrun says."""
    if settings.gpus == 1:
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def device_for(setting: str, *, local_rank: int = 0) -> torch.device:
    """Where to train; of several GPUs the one of this rank. Warns where `auto` is a CPU although GPUs are listed for
    this process. Raises `ModelError` where a GPU is asked for and there is none."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ModelError("device: cuda, but torch sees no GPU; use device: auto, or install torch for CUDA")
    listed = os.environ.get(_VISIBLE, "").strip()
    if setting == "auto" and not available and listed not in ("", "-1") and torch.backends.cuda.is_built():
        log.warning(
            "%s is %s, and torch sees no GPU: the trainer computes on the CPU; see whether the machine has that GPU; "
            "device: cuda makes this an error",
            _VISIBLE,
            listed,
        )
    return torch.device("cuda", local_rank) if available and setting != "cpu" else torch.device("cpu")


def set_threads(num_threads: int | None, *, num_local_ranks: int = 1) -> None:
    """Gives this rank so many threads, or its share of what torch would take."""
    if num_threads is None and num_local_ranks > 1:
        num_threads = max(1, torch.get_num_threads() // num_local_ranks)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


@contextmanager
def joined_ranks(settings: TrainSettings, device: torch.device) -> Iterator[Ranks]:
    """Takes part in the group of all ranks where there are several. Raises `ModelError` where torchrun has started
    another number than `gpus`, or there are too few GPUs. Collective."""
    yield ONE if settings.gpus == 1 else _several(settings, device)
    leave_group()  # not after an error: it might wait for a rank that is gone


def _several(settings: TrainSettings, device: torch.device) -> Ranks:
    if (num_started := int(os.environ["WORLD_SIZE"])) != settings.gpus:
        raise ModelError(f"gpus: {settings.gpus}, and torchrun started {num_started} processes; make them equal")
    if device.type == "cuda":
        if device.index >= (num_gpus := torch.cuda.device_count()):
            raise ModelError(f"gpus: {settings.gpus}, and torch sees {num_gpus} on this machine; lower gpus")
        torch.cuda.set_device(device)
    return join_group(device, timeout_s=settings.wait_timeout_s)


@contextmanager
def joined(settings: TrainSettings, base_model: str, ranks: Ranks) -> Iterator[tuple[RunFolder, Checkpoint | None]]:
    """The run that the launcher made, or the one in `output_dir`, or a new one; and the checkpoint to go on from.

    Within it, no other trainer works in the run. The main rank joins for all. Collective. Raises `ResumeError`,
    `RunFolderError` and others.
    """
    if not ranks.is_main:
        yield _joined_by_main(settings, ranks)
        return
    path, recorded = Path(settings.output_dir), settings.model_dump(mode="json")
    _make_folder(path)
    with only_one(path, "train"):
        run = open_run(path, resume=settings.resume, overwrite=settings.overwrite_output_dir)
        who: dict[str, Any] = {"role": "train", "settings": recorded, "base_model": base_model}
        who["may_change"] = TRAINER_MAY_CHANGE
        checkpoint = checkpoint_to_resume(settings, run, changes_of(path, **who))
        join_run(path, **who, run_id=settings.run_id, timeout_s=settings.wait_timeout_s)
        if not is_at_work(path, "orch"):
            Checkpoints(run).settle(role="train")
            if settings.run_id is None:  # otherwise the launcher knows whether an orchestrator is to come
                StepStore(run.batches, run_id=run.run_id).remove_finished()
        ranks.from_main([run.run_id, None if checkpoint is None else checkpoint.step])
        yield run, checkpoint


def _joined_by_main(settings: TrainSettings, ranks: Ranks) -> tuple[RunFolder, Checkpoint | None]:
    """What the main rank has joined, for another rank."""
    try:
        run_id, step = ranks.from_main(None)
    except RuntimeError as error:
        if is_timeout(error):
            raise RanksApart(
                f"waited {settings.wait_timeout_s:g} s (wait_timeout_s) for rank 0, which joins the run for all; raise "
                f"it, or see the log of rank 0 ({error})"
            ) from error
        raise RankFailed(f"rank 0, which joins the run for all, has ended: {error}") from error
    folder = RunFolder(path=Path(settings.output_dir), run_id=run_id)
    return folder, None if step is None else checkpoint_store(folder.path, run_id).read(step)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be a run's folder: {error}; give another output_dir") from error


def policy_for(
    settings: TrainSettings,
    model_folder: Path,
    device: torch.device,
    ranks: Ranks,
    *,
    imported: ImportedBase | None = None,
) -> Policy:
    """The model in `model_folder`, as the settings say it shall be trained. Raises `ModelError`, and `ExporterGone`
    where the server whose base was `imported` has ended meanwhile. Collective."""
    with while_exported(imported):
        return load_policy(
            model_folder,
            name=settings.model,
            device=device,
            dtype=DTYPES[settings.recipe],
            seed=settings.seed,
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            target_modules=settings.lora_target_modules,
            sequence_len=settings.sequence_len,
            adapters=settings.lora_adapters,
            lora=settings.lora,
            quantization=settings.quantization,
            imported=imported,
            gradient_checkpointing=settings.gradient_checkpointing,
            compile_layers=settings.compile,
            ranks=ranks,
            zero_level=settings.zero_level,
        )
