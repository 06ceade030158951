"""Versions of the policy with their canaries, published beside the next step."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from configs.common import publisher_arguments
from configs.train import TrainSettings
from trainer.canary import base_logprobs, canary_ids, canary_of
from trainer.colocate import while_exported
from trainer.model import Policy
from trainer.noise import NormNoise, noise_files
from trainer.parallel import Ranks
from trainer.weights import Snapshot
from transport.folders import Content
from transport.records import PolicySpec, adapter_folders
from transport.run import RunFolder
from transport.shared_base.sharing import ImportedBase
from transport.weights.background import BackgroundPublisher
from transport.weights.base import CANARY_FILE, METRICS_FILE, PolicyPublisher, Weight
from transport.weights.channel import open_publisher

log = logging.getLogger(__name__)


def policy_spec(settings: TrainSettings, policy: Policy, identity: str) -> PolicySpec:
    """What every version of this run has in common; `identity` is the base model's."""
    return PolicySpec(
        base_model=identity,
        rank=settings.lora_rank if settings.lora else 0,
        alpha=settings.lora_alpha if settings.lora else 0,
        target_modules=settings.lora_target_modules if settings.lora else (),
        sequence_len=settings.sequence_len,
        dtype=policy.dtype_name,
        kind=settings.weight_broadcast.format,
        norm_noise=settings.noise_scheduler.enabled,
        adapters=settings.lora_adapters,
    )


class _Nowhere(PolicyPublisher):
    """The publisher of a rank that publishes nothing."""

    def publish(self, **_: Any) -> None:
        raise AssertionError("only the main rank publishes")


def publisher_of(settings: TrainSettings, run: RunFolder, ranks: Ranks) -> PolicyPublisher:
    """The run's weight channel, whose only writer is the main rank."""
    return open_publisher(run, **publisher_arguments(settings.weight_broadcast)) if ranks.is_main else _Nowhere()


class Publishing:
    """Makes versions of the policy as it is and publishes them in order. To be made before the policy is trained, or
    taken up from a checkpoint: it takes the base's log-probabilities from it."""

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        publisher: PolicyPublisher,
        *,
        spec: PolicySpec,
        ranks: Ranks,
        imported: ImportedBase | None,
    ) -> None:
        """`imported` is the base that the policy computes on, where it is a server's."""
        self._policy, self._spec, self._ranks, self._imported = policy, spec, ranks, imported
        self._publisher = BackgroundPublisher(publisher, timeout_s=settings.wait_timeout_s)
        self._canary_ids = canary_ids(seed=settings.seed, vocab_size=policy.vocab_size, special_ids=policy.special_ids)
        self._base_logprobs = base_logprobs(policy, self._canary_ids)
        noise = settings.noise_scheduler
        norms = policy.norms() if noise.enabled else {}
        self._noise = NormNoise(norms, noise, seed=settings.seed, max_steps=settings.max_steps, ranks=ranks)
        self.publish_s = 0.0
        """Seconds for which the newest version held up the training."""
        self._published_at_s = 0.0
        """When that began, on the wall clock."""

    def publish(self, *, version: int, metrics: Mapping[str, float] | None) -> None:
        """Makes the policy visible as `version`, with a canary for each adapter; its files are written beside the next
        step.

        Adds to the metrics `time/publish_s`, which holds up the training, with its beginning, and
        `time/write_version_s`, which does not: those of the version before. Collective. Raises `StorageError` where an
        earlier version could not be written.
        """
        began_s, started_s = time.time(), time.perf_counter()
        noise = self._noise.weights(version)
        with while_exported(self._imported):
            files: dict[str, Content] = {**self._canaries(version, noise), **noise_files(noise)}
        if metrics is not None:
            times_s = {"time/publish_s": self.publish_s, "time/publish_at_s": self._published_at_s}
            times_s["time/write_version_s"] = self._publisher.write_s
            files[METRICS_FILE] = json.dumps(dict(metrics) | self._noise.metrics(version) | times_s).encode()
        make = partial(self._make, self._policy.snapshot(), files)
        if self._ranks.is_main:
            self._publisher.publish(version=version, spec=self._spec, make=make)
        self.publish_s, self._published_at_s = time.perf_counter() - started_s, began_s

    def check(self) -> None:
        """Raises the error of a version that could not be published."""
        self._publisher.check()

    def flush(self) -> None:
        """Returns when all versions are published. Raises the error where one was not."""
        self._publisher.flush()

    def close(self) -> None:
        """Ends when all versions are published, or have failed, or after some seconds."""
        self._publisher.close()

    def _canaries(self, version: int, noise: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """The files with each adapter's canary."""
        return {
            f"{folder}{CANARY_FILE}": canary_of(
                self._policy,
                self._canary_ids,
                version=version,
                base=self._base_logprobs,
                noise=noise,
                adapter=adapter,
            ).to_json()
            for adapter, folder in enumerate(adapter_folders(self._spec.adapters))
        }

    def _make(self, snapshot: Snapshot, files: Mapping[str, Content]) -> tuple[dict[str, Content], Sequence[Weight]]:
        """Files and weights of a version, whose weights are `snapshot`."""
        if self._spec.kind == "adapter":
            return {**self._policy.adapter_files(snapshot), **files}, ()
        if self._spec.kind == "merged":
            return dict(files), self._policy.merged_weights(snapshot)
        return dict(files), self._policy.full_weights(snapshot)
