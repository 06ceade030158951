"""Versions of the policy with their canaries, published beside the next step."""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from configs.common import publisher_arguments
from configs.train import TrainSettings
from trainer.canary import base_logprobs, canary_ids, canary_of
from trainer.colocate import while_exported
from trainer.model import Policy
from trainer.noise import NormNoise, noise_files
from trainer.parallel import Ranks
from trainer.weights import Snapshot
from transport.background import Background
from transport.folders import Content
from transport.records import PolicySpec, adapter_folders
from transport.run import RunFolder
from transport.shared_base.sharing import ImportedBase
from transport.weights.shards import Weight
from transport.weights.store import CANARY_FILE, METRICS_FILE, PolicyPublisher, open_publisher


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


def publisher_of(settings: TrainSettings, run: RunFolder, ranks: Ranks) -> PolicyPublisher | None:
    """The run's weight channel; None for other ranks than the main one, which is its only writer."""
    return open_publisher(run, **publisher_arguments(settings.weight_broadcast)) if ranks.is_main else None


class Publishing:
    """Makes versions of the policy as it is and publishes them in order. To be made before the policy is trained, or
    taken up from a checkpoint: it takes the base's log-probabilities from it."""

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
        """`publisher` is the main rank's; `imported` is the base that the policy computes on, where it is a
        server's."""
        self._policy, self._publisher, self._spec = policy, publisher, spec
        self._ranks, self._imported = ranks, imported
        waits_for = "versions to be published; see whether the disk, or the servers that receive them, answer"
        self._writer = Background("publish", timeout_s=settings.wait_timeout_s, waits_for=waits_for)
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
            times_s["time/write_version_s"] = self._writer.last_s
            files[METRICS_FILE] = json.dumps(dict(metrics) | self._noise.metrics(version) | times_s).encode()
        snapshot = self._policy.snapshot()
        if self._publisher is not None:
            self._writer.submit(partial(self._write, self._publisher, version, snapshot, files))
        self.publish_s, self._published_at_s = time.perf_counter() - started_s, began_s

    def check(self) -> None:
        """Raises the error of a version that could not be published."""
        self._writer.check()

    def flush(self) -> None:
        """Returns when all versions are published. Raises the error where one was not."""
        self._writer.flush()

    def close(self) -> None:
        """Ends when all versions are published, or have failed, or after some seconds."""
        self._writer.close()

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

    def _write(
        self, publisher: PolicyPublisher, version: int, snapshot: Snapshot, files: Mapping[str, Content]
    ) -> None:
        """The writer's job: publishes a version, whose weights are `snapshot`."""
        weights: Sequence[Weight] = ()
        if self._spec.kind == "adapter":
            files = {**self._policy.adapter_files(snapshot), **files}
        elif self._spec.kind == "merged":
            weights = self._policy.merged_weights(snapshot)
        else:
            weights = self._policy.full_weights(snapshot)
        publisher.publish(version=version, spec=self._spec, files=files, weights=weights)
