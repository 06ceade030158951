"""A trainer on in-memory channels, with a tiny random model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.loop import Trainer
from grpo.trainer.model import Policy
from grpo.trainer.packing import packed_tokens
from grpo.trainer.publishing import policy_spec
from grpo.transport.records import MicroBatch
from grpo.transport.run import RunFolder
from grpo.transport.shared_base import ImportedBase
from grpo.transport.status import PeerWatch, StatusFile
from msgspec.structs import replace

from tests.memory_channels import MemoryBatches, MemoryBatchReceiver, MemoryPolicies
from tests.trainer.models import CPU, tiny_policy

UNMASKED = {
    **{"token_mask_low": 0.0, "token_mask_high": 1e30, "geo_mask_low": 0.0, "geo_mask_high": 1e30},
    "sequence_mask_high": 1e30,
}
"""Loss settings under which every token is trained, however far its log-probability is from the one it came with."""


def settings_for(folder: Path, **changes: Any) -> TrainSettings:
    options = {
        "model": str(folder),
        "device": "cpu",
        "recipe": "fp32",
        "sequence_len": 128,
        "lora_rank": 4,
        "lora_alpha": 8,
        "learning_rate": 1e-2,
        "wait_timeout_s": 60.0,
    }
    return TrainSettings.model_validate(options | changes)


class Bench:
    """A trainer on in-memory channels."""

    def __init__(
        self,
        folder: Path,
        tmp_path: Path,
        *,
        policies: MemoryPolicies | None = None,
        imported: ImportedBase | None = None,
        **changes: Any,
    ) -> None:
        self.settings = settings_for(folder, **changes)
        self.channel, self.policies = MemoryBatches(), policies or MemoryPolicies(run_id="run")
        own = {"lora": self.settings.lora, "lora_adapters": self.settings.lora_adapters}
        self.policy = tiny_policy(folder, moved=False, imported=imported, **own)
        self.status_path = tmp_path / "train.json"
        self.trainer = Trainer(
            self.settings,
            self.policy,
            run_folder=RunFolder(path=tmp_path, run_id="run"),
            spec=policy_spec(self.settings, self.policy, "identity"),
            receiver=MemoryBatchReceiver(self.channel),
            publisher=self.policies,
            status=StatusFile(self.status_path),
            orchestrator=PeerWatch(tmp_path / "orch.json", name="grpo-orch"),
            imported=imported,
        )

    def send(self, step: int, *batches: MicroBatch) -> None:
        self.channel.send(step, [[replace(batch, step=step) for batch in batches]])

    def train(self, *batches: MicroBatch) -> None:
        """One step for each."""
        for step, batch in enumerate(batches, start=1):
            self.send(step, batch)
        self.channel.finish(len(batches))
        self.trainer.train()
        self.trainer.close()

    def files(self, version: int) -> dict[str, bytes]:
        return self.policies.versions[version][1]

    def metrics(self, version: int) -> dict[str, float]:
        loaded: dict[str, float] = json.loads(self.files(version)["metrics.json"])
        return loaded


def on_policy(batch: MicroBatch, policy: Policy) -> MicroBatch:
    """The batch with the log-probabilities of `policy`, as a perfect server would have given them."""
    logprobs = np.zeros(len(batch.token_ids), np.float32)
    with torch.no_grad():
        logprobs[batch.loss_mask] = policy.logprobs(packed_tokens(batch, CPU)).numpy()
    return replace(batch, inference_logprobs=logprobs)
