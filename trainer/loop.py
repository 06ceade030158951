"""The trainer's loop: receive, accumulate, step, publish."""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from configs.train import TrainSettings
from trainer.batch import check_step, loss_streams, packed_tokens
from trainer.canary import base_logprobs, canary_ids, canary_of
from trainer.errors import ModelError, NonFiniteError
from trainer.loss import policy_loss
from trainer.metrics import Metric, as_floats, merge
from trainer.model import Policy, Snapshot, load_policy
from trainer.optim import Optimizer, learning_rate
from transport.batches.base import BatchReceiver
from transport.batches.channel import open_receiver
from transport.files import Content
from transport.run import RunFolder, found_run, join_run
from transport.status import PeerWatch, StatusFile
from transport.types import MicroBatch, PolicySpec
from transport.weights.background import BackgroundPublisher
from transport.weights.base import CANARY_FILE, METRICS_FILE, PolicyPublisher, Weight
from transport.weights.channel import open_publisher
from transport.weights.identity import base_identity

log = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def run(settings: TrainSettings, model_folder: Path) -> None:
    """Everything `grpo-train` does once its settings are known and its model is found. Returns when the run is over."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = device_for(settings.device)
    if settings.weight_broadcast.type == "nccl" and device.type != "cuda":
        raise ModelError("weight_broadcast.type: nccl sends from GPU to GPU, and the trainer runs on a CPU")
    run_folder = join(settings)
    status = StatusFile(run_folder.status / "train.json")
    try:
        _train(settings, model_folder, device, run_folder, status)
    except BaseException as error:
        status.failed(error)
        raise


def _train(
    settings: TrainSettings, model_folder: Path, device: torch.device, run_folder: RunFolder, status: StatusFile
) -> None:
    status.set("loading the model")
    policy = load_policy(
        model_folder,
        name=settings.model,
        device=device,
        dtype=_DTYPES[settings.recipe],
        seed=settings.seed,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        target_modules=settings.lora_target_modules,
        sequence_len=settings.sequence_len,
    )
    trainer = Trainer(
        settings,
        policy,
        spec=policy_spec(settings, policy, base_identity(model_folder)),
        receiver=open_receiver(run_folder, rank=0, **settings.rollout_transport.model_dump()),
        publisher=open_publisher(run_folder, **settings.weight_broadcast.of_publisher()),
        status=status,
        orchestrator=PeerWatch(run_folder.status / "orch.json", name="grpo-orch"),
    )
    try:
        trainer.train()
    finally:
        trainer.close()


def device_for(setting: str) -> torch.device:
    """Where to train. Raises `ModelError` where a GPU is asked for and there is none."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ModelError("device: cuda, but torch sees no GPU; use device: auto, or install torch for CUDA")
    return torch.device("cuda" if available and setting != "cpu" else "cpu")


def join(settings: TrainSettings) -> RunFolder:
    """The run that the launcher founded, or a new one."""
    run_id = settings.run_id
    if run_id is None:
        run_id = found_run(settings.output_dir, overwrite=settings.overwrite_output_dir).run_id
    recorded = settings.model_dump(mode="json")
    timeout_s = settings.wait_timeout
    return join_run(settings.output_dir, role="train", settings=recorded, run_id=run_id, timeout_s=timeout_s)


def policy_spec(settings: TrainSettings, policy: Policy, identity: str) -> PolicySpec:
    """What every version of this run has in common."""
    return PolicySpec(
        base_model=identity,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        target_modules=settings.lora_target_modules,
        sequence_len=settings.sequence_len,
        dtype=policy.dtype_name,
        kind=settings.weight_broadcast.format,
    )


class Trainer:
    """One run's training, from version 0 to the last step."""

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        *,
        spec: PolicySpec,
        receiver: BatchReceiver,
        publisher: PolicyPublisher,
        status: StatusFile,
        orchestrator: PeerWatch,
    ) -> None:
        self._settings, self._policy, self._spec = settings, policy, spec
        self._receiver, self._status = receiver, status
        self._orchestrator = orchestrator
        self._publisher = BackgroundPublisher(publisher)
        self._optimizer = Optimizer(
            policy.parameters,
            betas=(settings.adam_beta1, settings.adam_beta2),
            epsilon=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
        )
        self._canary_ids = canary_ids(seed=settings.seed, vocab_size=policy.vocab_size, special_ids=policy.special_ids)
        self._base_logprobs = base_logprobs(policy, self._canary_ids)
        self._times_s: dict[str, float] = {}

    def train(self) -> None:
        """Publishes version 0, then makes version n from batch n until `max_steps` or the orchestrator's end."""
        self.publish(version=0, metrics=None)
        step = 0
        while step != self._settings.max_steps:
            batches = self.receive(step + 1)
            if batches is None:
                break
            step += 1
            metrics = self.update(step, batches)
            self.publish(version=step, metrics=metrics)
        self._publisher.flush()
        log.info("finished after step %d", step)
        self._status.set("finished", step=step)

    def close(self) -> None:
        """Ends the batch channel, and the publishing when all versions are published."""
        self._receiver.close()
        self._publisher.close()

    def receive(self, step: int) -> tuple[MicroBatch, ...] | None:
        """Batch `step`, checked; None where the orchestrator ended the run before it."""
        self._status.set("waiting", step=step, waiting_for=f"orchestrator: batch {step}")
        with self._timed("time/wait_batch_s"):
            batches = self._receiver.receive(step, timeout_s=self._settings.wait_timeout, check=self._check)
        if batches is not None:
            check_step(batches, sequence_len=self._settings.sequence_len, vocab_size=self._policy.vocab_size)
        return batches

    def _check(self) -> None:
        """Ends a wait that is in vain: a version was not published, or the orchestrator has failed."""
        self._publisher.check()
        self._orchestrator.check()

    def update(self, step: int, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Forward, loss and backward for each micro-batch, then one optimizer step. Returns its metrics."""
        self._status.set("training", step=step)
        rate = self._learning_rate(step)
        with self._timed("time/train_s"):
            metrics = as_floats(merge([self._accumulate(batch) for batch in batches]))
            grad_norm = self._apply(step, metrics["loss/policy"], rate)
        num_tokens = sum(len(batch.token_ids) for batch in batches)
        return metrics | {
            "optim/grad_norm": grad_norm,
            "optim/learning_rate": rate,
            "perf/train_tokens": float(num_tokens),
            "perf/train_tokens_per_s": num_tokens / self._times_s["time/train_s"],
        }

    def publish(self, *, version: int, metrics: Mapping[str, float] | None) -> None:
        """Makes the policy visible as `version`, with its canary; its files are written beside the next step.

        `time/publish_s`, which holds up the training, and `time/write_version_s`, which does not, are those of the
        version before. Raises `StorageError` where an earlier version could not be written.
        """
        self._status.set("publishing", step=version)
        files: dict[str, Content] = {}
        if metrics is not None:
            self._times_s["time/write_version_s"] = self._publisher.write_s
            files[METRICS_FILE] = json.dumps(dict(metrics) | self._times_s).encode()
            log.info("step %d: %s", version, _summary(metrics))
        with self._timed("time/publish_s"):
            canary = canary_of(self._policy, self._canary_ids, version=version, base=self._base_logprobs)
            files[CANARY_FILE] = canary.to_json()
            make = partial(self._make, self._policy.snapshot(), files)
            self._publisher.publish(version=version, spec=self._spec, make=make)

    def _make(self, snapshot: Snapshot, files: Mapping[str, Content]) -> tuple[dict[str, Content], Sequence[Weight]]:
        """Files and weights of a version, whose adapter is `snapshot`."""
        if self._spec.kind == "adapter":
            return {**self._policy.adapter_files(snapshot), **files}, ()
        return dict(files), self._policy.merged_weights(snapshot)

    def _accumulate(self, batch: MicroBatch) -> dict[str, Metric]:
        """Adds one micro-batch's gradients; one without loss tokens has none."""
        if not batch.loss_mask.any():
            return {}
        streams = loss_streams(batch, self._policy.device)
        logprobs = self._policy.logprobs(packed_tokens(batch, self._policy.device))
        loss, metrics = policy_loss(
            logprobs,
            inference_logprobs=streams.inference_logprobs,
            advantages=streams.advantages,
            sample_ids=streams.sample_ids,
            num_samples=streams.num_samples,
            lags=streams.lags,
            num_loss_tokens=streams.num_loss_tokens,
            **self._settings.loss.model_dump(),
        )
        loss.backward()
        return metrics

    def _apply(self, step: int, loss: float, rate: float) -> float:
        try:
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss}")
            return self._optimizer.step(learning_rate=rate)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {step} is not finite: {error}; it was not applied, version {step - 1} is the last good one; "
                f"lower learning_rate, or look at batch {step} for what is unusual"
            ) from error

    def _learning_rate(self, step: int) -> float:
        settings = self._settings
        return learning_rate(
            step,
            peak=settings.learning_rate,
            schedule=settings.lr_scheduler_type,
            warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._times_s[key] = time.perf_counter() - started_s


def _summary(metrics: Mapping[str, float]) -> str:
    shown = ("loss/policy", "policy/kl", "policy/masked", "optim/grad_norm", "perf/train_tokens_per_s")
    return " ".join(f"{key} {metrics[key]:.4g}" for key in shown)
