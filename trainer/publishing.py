"""Publishes versions of the policy with their canaries, beside the next step.

A canary is a fixed sequence whose log-probabilities prove which policy a server serves. On a GPU its forward pass runs
beside what the trainer does next: nothing waits for its numbers but the thread that writes the version.
"""

import copy
import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from grpo.configs.common import Broadcast, NcclBroadcast
from grpo.configs.train import TrainSettings
from grpo.trainer.colocate import while_exported
from grpo.trainer.distributed import Ranks
from grpo.trainer.model import Policy
from grpo.trainer.noise import NormNoise, hidden_norms, noise_files, with_noise
from grpo.trainer.packing import PackedTokens, pack_rows
from grpo.trainer.weights import Snapshot
from grpo.transport.background import Background
from grpo.transport.folders import Content, file_entry
from grpo.transport.receipts import RECEIPT_FILE, Receipt
from grpo.transport.records import Canary, FileEntry, PolicySpec, adapter_folders
from grpo.transport.run import RunFolder
from grpo.transport.shared_base import ImportedBase
from grpo.transport.weights.nccl import Rendezvous, WeightSender
from grpo.transport.weights.store import CANARY_FILE, METRICS_FILE, PolicyPublisher

log = logging.getLogger(__name__)

CANARY_TOKENS = 128
Later = Callable[[], tuple[float, ...]]


def policy_spec(settings: TrainSettings, policy: Policy, identity: str) -> PolicySpec:
    """Returns what every version of this run has in common; `identity` is the base model's."""
    return PolicySpec(
        base_model=identity,
        rank=settings.lora_rank if settings.lora else 0,
        alpha=settings.lora_alpha if settings.lora else 0,
        target_modules=policy.weights.target_modules,
        sequence_len=settings.pack_tokens,
        dtype=policy.dtype_name,
        kind=settings.weight_broadcast.format,
        norm_noise=settings.noise_scheduler.enabled,
        adapters=settings.lora_adapters,
        quantization=settings.quantization,
    )


def publisher_of(broadcast: Broadcast, run: RunFolder) -> PolicyPublisher:
    """Returns the run's weight channel, whose only writer is the main rank."""
    sender = None
    if isinstance(broadcast, NcclBroadcast):
        world_size = 1 + broadcast.inference_world_size
        rendezvous = Rendezvous(host=broadcast.host, port=broadcast.port, world_size=world_size)
        sender = WeightSender(rendezvous, timeout_s=broadcast.timeout)
    return PolicyPublisher(
        run.broadcasts,
        run_id=run.run_id,
        keep_last=broadcast.keep_last or (8 if broadcast.format == "adapter" else 2),
        keep_interval=broadcast.keep_interval,
        sender=sender,
    )


def canary_ids(config: Any, *, seed: int) -> tuple[int, ...]:
    """Returns 128 seeded token ids for a model with this configuration.

    They come from the lower half of the vocabulary: added special tokens, and rows that pad the embedding, lie at the
    end.
    """
    special: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        special.update(value if isinstance(value, list) else [] if value is None else [value])
    candidates = np.setdiff1d(np.arange(max(2, config.vocab_size // 2)), sorted(special))
    drawn = np.random.default_rng(seed).choice(candidates, size=CANARY_TOKENS)
    return tuple(int(token) for token in drawn)


class CanaryMaker:
    """Makes the canaries of a policy's versions. Must be created before the policy is trained or restored from a
    checkpoint, because it computes the base's log-probabilities."""

    def __init__(self, policy: Policy, token_ids: tuple[int, ...]) -> None:
        self._policy, self._token_ids = policy, token_ids
        self._packed = functools.cache(self._pack)
        with policy.weights.disabled():
            self._base = self._logprobs(adapter=0)()

    def beside(self, policy: Policy) -> "CanaryMaker":
        """Returns one for another policy on the same base, whose log-probabilities are not computed again."""
        other = copy.copy(self)
        other._policy, other._packed = policy, functools.cache(other._pack)
        return other

    def begin(
        self, *, version: int, noise: Mapping[str, torch.Tensor], adapter: int = 0
    ) -> Callable[[Snapshot], Canary]:
        """Launches the forward pass of the policy with this adapter as it is now, at temperature 1. The returned
        function waits for the numbers and builds the canary with the version's weights. `noise` are its noisy norm
        weights, if any. Collective."""
        logprobs, noisy = self._logprobs(adapter), None
        if noise:
            with with_noise(hidden_norms(self._policy.causal_lm), noise):
                noisy = self._logprobs(adapter)

        def canary(snapshot: Snapshot) -> Canary:
            return Canary(
                version=version,
                token_ids=self._token_ids,
                logprobs=logprobs(),
                base_logprobs=self._base,
                dtype=self._policy.dtype_name,
                is_zero=self._policy.weights.is_base(snapshot, version=version, adapter=adapter),
                noisy_logprobs=None if noisy is None else noisy(),
            )

        return canary

    @torch.no_grad()
    def _logprobs(self, adapter: int) -> Later:
        values = self._policy.logprobs(self._packed(adapter))
        if not values.is_cuda:
            return lambda: tuple(values.tolist())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def later() -> tuple[float, ...]:
            done.synchronize()
            return tuple(host.tolist())

        return later

    def _pack(self, adapter: int) -> PackedTokens:
        """Returns one sample whose tokens but the first are all targets."""
        ids = np.array(self._token_ids, np.int32)
        return pack_rows([(ids, np.arange(1, len(ids)))], [adapter], self._policy.device)


class Publishing:
    """Takes snapshots of the policy and publishes them as versions, in order."""

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        publisher: PolicyPublisher | None,
        *,
        spec: PolicySpec,
        ranks: Ranks,
        imported: ImportedBase | None,
    ) -> None:
        """Must be created before the policy is trained, see `CanaryMaker`. `imported` is the base if the policy
        computes on a server's."""
        self._policy, self._publisher, self._spec, self._imported = policy, publisher, spec, imported
        waits_for = "versions to be published; see whether the disk, or the servers that receive them, answer"
        self._before: dict[str, FileEntry] = {}
        """The adapters' files of the version before."""
        self._writer = Background("publish", timeout_s=settings.wait_timeout_s, waits_for=waits_for)
        self._canaries = CanaryMaker(policy, canary_ids(policy.causal_lm.config, seed=settings.seed))
        noise = settings.noise_scheduler
        self.norms = hidden_norms(policy.causal_lm) if noise.enabled else {}
        """Norms of the hidden state, where versions have noise."""
        self.noise = NormNoise(self.norms, noise, seed=settings.seed, max_steps=settings.max_steps)
        """The noise of each version."""

    def publish(self, *, version: int, metrics: Mapping[str, float] | None, receipt: Receipt | None = None) -> None:
        """Takes a snapshot of the policy as `version` and a canary of each adapter, and hands them to the thread that
        writes the files beside the next step. Blocks only for the copy from device to host. `metrics` and `receipt` are
        those of the step that gave it.

        Adds `time/write_version_s` of the version before to the metrics. Collective. Raises `StorageError` if an
        earlier version could not be written.
        """
        snapshot, noise = self._policy.weights.snapshot(), self.noise.weights(version)
        with while_exported(self._imported):
            canaries = {
                f"{folder}{CANARY_FILE}": self._canaries.begin(version=version, noise=noise, adapter=adapter)
                for adapter, folder in enumerate(adapter_folders(self._spec.adapters))
            }
        if (publisher := self._publisher) is not None:
            files: dict[str, Content] = dict(noise_files(noise))
            if metrics is not None:
                times_s = {"time/write_version_s": self._writer.last_s}
                files[METRICS_FILE] = json.dumps(dict(metrics) | self.noise.metrics(version) | times_s).encode()

            if receipt is not None:
                files[RECEIPT_FILE] = receipt.to_json()

            def write() -> None:
                made, weights = self._policy.weights.make(snapshot, merged=self._spec.kind == "merged")
                self._compare(version, made, metrics)
                proofs = {name: canary(snapshot).to_json() for name, canary in canaries.items()}
                whole: dict[str, Content] = {**made, **files, **proofs}
                publisher.publish(version=version, spec=self._spec, files=whole, weights=weights)

            self._writer.submit(write)

    def _compare(self, version: int, made: Mapping[str, bytes], metrics: Mapping[str, float] | None) -> None:
        """Warns of a step that had a gradient and a learning rate, and whose adapters are to the bit those before."""
        before, self._before = self._before, {name: file_entry(data) for name, data in made.items()}
        if not before or before != self._before or metrics is None:
            return
        if (norm := metrics.get("optim/grad_norm", 0.0)) > 0 and metrics.get("optim/learning_rate", 0.0) > 0:
            log.warning(
                "step %d changed nothing: version %d is to the bit the one before, although the step had a gradient of "
                "norm %.3g at learning rate %.3g; see whether the rate is too small for the weights' type",
                *(version, version, norm, metrics["optim/learning_rate"]),
            )

    def check(self) -> None:
        """Raises the error of a version that could not be published."""
        self._writer.check()

    def flush(self) -> None:
        """Returns when all versions are published. Raises the error of one that could not be."""
        self._writer.flush()

    def close(self) -> None:
        """Returns when all versions are published, or one has failed, or after some seconds."""
        self._writer.close()
