"""Starts the trainer: its device, its ranks, its place in a run, its model, its channels."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from grpo.configs.resuming import changes, record_of
from grpo.configs.train import TrainSettings
from grpo.trainer.checkpoint import CheckpointStore, Resumed, checkpoint_to_resume
from grpo.trainer.colocate import imported_for
from grpo.trainer.distributed import ONE, Ranks, is_communication, join_group, leave_group
from grpo.trainer.errors import ExporterGone, ModelError, OutOfMemory, RankFailed
from grpo.trainer.loading import publish_dequantized
from grpo.trainer.loop import Trainer
from grpo.trainer.low_precision import check_device
from grpo.trainer.memory import falling_back, keep_freed_memory, recorded_checkpointing
from grpo.trainer.model import load_policy
from grpo.trainer.publishing import policy_spec, publisher_of
from grpo.trainer.weights import AdapterWeights
from grpo.transport.batches.channel import open_receiver
from grpo.transport.batches.store import StepStore
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.cores import available_cores
from grpo.transport.run import RunFolder, is_at_work, join_run, only_one, open_run, recorded_program
from grpo.transport.run_warnings import kept_warnings
from grpo.transport.status import FINISHED, PeerWatch, StatusFile
from grpo.transport.weights.dequantized import FOLDER as DEQUANTIZED
from grpo.transport.weights.identity import base_identity

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(settings: TrainSettings, model_folder: Path) -> None:
    """Runs the trainer, once its settings are known and its model is found. Returns when the run is over."""
    local_rank, num_local_ranks = 0, 1
    if settings.num_ranks > 1:
        local_rank, num_local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = device_for(settings.device, local_rank=local_rank)
    of_gpus = {"offload": settings.offload, "sleep_mode": settings.sleep_mode}
    of_gpus |= {"weight_broadcast.type: nccl": settings.weight_broadcast.type == "nccl"}
    if device.type != "cuda" and (asked := [key for key, is_on in of_gpus.items() if is_on]):
        raise ModelError(f"{asked[0]} needs a GPU, and the trainer runs on a CPU; remove it")
    if settings.low_precision is not None:
        check_device(settings.low_precision, device)
    set_threads(settings.num_threads, num_local_ranks=num_local_ranks)
    if device.type == "cpu":
        keep_freed_memory()
    ranks = ONE if settings.num_ranks == 1 else _joined_ranks(settings, device)
    try:
        with joined(settings, base_identity(model_folder), ranks) as (run_folder, checkpoint):
            status = status_of(run_folder, ranks)
            kept = kept_warnings(run_folder.path, "train", step=lambda: status.step)
            try:
                with kept if ranks.is_main else nullcontext():  # the others would say the same
                    warn_of_cpu(settings.device, device)
                    _train(settings, model_folder, device, run_folder, status, checkpoint, ranks)
            except BaseException as error:
                if not isinstance(error, ExporterGone | OutOfMemory):  # which are no reasons for others to end
                    _write_failed(status, error, ranks)
                raise
    except RuntimeError as error:
        if ranks.size > 1 and is_communication(error):
            raise RankFailed(
                f"another rank is gone, or did not answer within {settings.wait_timeout_s:g} s (wait_timeout_s); its "
                f"log says why ({error})"
            ) from error
        raise
    leave_group()  # not after an error: it might wait for a rank that is gone


def _train(
    settings: TrainSettings,
    model_folder: Path,
    device: torch.device,
    run_folder: RunFolder,
    status: StatusFile,
    checkpoint: Resumed | None,
    ranks: Ranks,
) -> None:
    identity = base_identity(model_folder)
    if settings.quantization is not None and ranks.is_main:
        status.set("writing the values of its quantized base for the servers")
        publish_dequantized(
            model_folder,
            run_folder,
            base_model=identity,
            quantization=settings.quantization,
            dtype=getattr(torch, settings.dtype),
            device=device,
            colocate=settings.colocate,
        )
    if settings.quantization is not None and settings.colocate:
        model_folder = run_folder.path / DEQUANTIZED
    if settings.colocate:
        status.set("waiting for the server to share its base weights")
    imported = imported_for(settings, device)
    status.set("loading the model")
    checkpointing = recorded_checkpointing(settings, device, run_folder.path)
    policy = load_policy(settings, model_folder, device, ranks, imported=imported, checkpointing=checkpointing)
    if settings.init_adapter is not None and checkpoint is None:
        assert isinstance(policy.weights, AdapterWeights)
        policy.weights.load(Path(settings.init_adapter))
        policy.reshard()
    orchestrator = PeerWatch(run_folder.status / "orch.json", name="grpo-orch")
    gc.freeze()  # what is there stays: the collector never looks at it
    gc.enable()
    trainer = Trainer(
        settings,
        policy,
        run_folder=run_folder,
        spec=policy_spec(settings, policy, identity),
        receiver=open_receiver(
            run_folder,
            rank=ranks.rank,
            num_ranks=ranks.size,
            **settings.rollout_transport.model_dump(exclude={"hwm"}),
        ),
        publisher=publisher_of(settings.weight_broadcast, run_folder) if ranks.is_main else None,
        status=status,
        orchestrator=orchestrator,
        imported=imported,
        ranks=ranks,
    )
    signal.signal(signal.SIGUSR1, lambda *_: trainer.end_early())
    try:
        with falling_back(settings, device, run_folder.path, used=checkpointing):
            trainer.train(checkpoint)
    finally:
        trainer.close()


def status_of(run: RunFolder, ranks: Ranks) -> StatusFile:
    """Returns this rank's status file; the main rank's is the trainer's."""
    return StatusFile(run.status / ("train.json" if ranks.is_main else f"train.rank_{ranks.rank}.json"))


def _write_failed(status: StatusFile, error: BaseException, ranks: Ranks) -> None:
    """Writes the error to the status, unless this rank was told to end: then another rank has failed, or the user ends
    them all."""
    if isinstance(error, SystemExit) and not ranks.is_main:
        status.set(FINISHED, message="told to end")
    else:
        status.failed(error)


def device_for(setting: str, *, local_rank: int = 0) -> torch.device:
    """Returns the device to train on, with several GPUs this rank's. Raises `ModelError` if a GPU is asked for and
    there is none."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ModelError("device: cuda, but torch sees no GPU; use device: auto, or install torch for CUDA")
    return torch.device("cuda", local_rank) if available and setting != "cpu" else torch.device("cpu")


def warn_of_cpu(setting: str, device: torch.device) -> None:
    """Logs a warning if `auto` means a CPU although GPUs are listed for this process."""
    listed = os.environ.get(_VISIBLE, "").strip()
    if setting == "auto" and device.type == "cpu" and listed not in ("", "-1") and torch.backends.cuda.is_built():
        log.warning(
            "%s is %s, and torch sees no GPU: the trainer computes on the CPU; see whether the machine has that GPU; "
            "device: cuda makes this an error",
            _VISIBLE,
            listed,
        )


def set_threads(num_threads: int | None, *, num_local_ranks: int = 1) -> None:
    """Sets the number of this rank's threads, by default its share of the cores that torch would take and this process
    may use."""
    cores = available_cores()
    if num_threads is None:
        num_threads = max(1, min(torch.get_num_threads(), cores) // num_local_ranks)
    torch.set_num_threads(num_threads)
    log.info("computes with %d threads (num_threads); this process may use %d cores", num_threads, cores)


def _joined_ranks(settings: TrainSettings, device: torch.device) -> Ranks:
    """Joins the group of all ranks. Raises `ModelError` if torchrun has started another number of processes than
    `gpus`, or if there are too few GPUs. Collective."""
    if (num_started := int(os.environ["LOCAL_WORLD_SIZE"])) != settings.gpus:
        raise ModelError(f"gpus: {settings.gpus}, and torchrun started {num_started} processes; make them equal")
    if device.type == "cuda":
        if device.index >= (num_gpus := torch.cuda.device_count()):
            raise ModelError(f"gpus: {settings.gpus}, and torch sees {num_gpus} on this machine; lower gpus")
        torch.cuda.set_device(device)
    return join_group(device, timeout_s=settings.wait_timeout_s)


@contextmanager
def joined(settings: TrainSettings, base_model: str, ranks: Ranks) -> Iterator[tuple[RunFolder, Resumed | None]]:
    """Yields the run that the launcher made, or the one in `output_dir`, or a new one; and the checkpoint to resume
    from.

    Until the block ends, no other trainer can work in the run. The main rank joins for all. Collective. Raises
    `ResumeError`, `RunFolderError` and others.
    """
    path = Path(settings.output_dir)
    if not ranks.is_main:
        run_id, step = ranks.broadcast(None)
        run = RunFolder(path=path, run_id=run_id)
        yield run, None if step is None else CheckpointStore(run).read(step)
        return
    with only_one(path, "train"):
        run = open_run(path, resume=settings.resume, overwrite=settings.overwrite_output_dir)
        record = record_of(settings.model_dump(mode="json"), base_model)
        compare = partial(changes, "train", now=record, run=path)
        changed = {key for key, *_ in compare(recorded_program(path, "train"))}
        checkpoint = checkpoint_to_resume(settings, run, changed)
        limits: dict[str, Any] = {"run_id": settings.run_id, "timeout_s": settings.wait_timeout_s}
        join_run(path, role="train", record=record, compare=compare, **limits)
        if not is_at_work(path, "orch"):
            Checkpoints(run).settle(role="train")
            if settings.run_id is None:  # otherwise the launcher knows whether an orchestrator is to come
                StepStore(run.batches, run_id=run.run_id).remove_finished()
        ranks.broadcast([run.run_id, None if checkpoint is None else checkpoint[0].step])
        yield run, checkpoint
