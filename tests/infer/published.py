"""Policy versions for tests: random LoRA adapters, their log-probabilities by Hugging Face PEFT, and their folders."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from grpo.infer.checks import PEFT_PREFIX, tensor_shapes
from grpo.transport.records import Canary, PolicySpec
from grpo.transport.run import RunFolder
from grpo.transport.weights.identity import base_identity
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CANARY_FILE, PolicyPublisher
from peft import PeftModel
from transformers import AutoModelForCausalLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CANARY_IDS = tuple(range(40, 72))


def random_tensors(model_dir: Path, *, seed: int, rank: int, scale: float) -> dict[str, torch.Tensor]:
    """A and B of every target layer, normal with standard deviation `scale` (B) and 1/sqrt(I) (A)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(model_dir).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            num_outputs, num_inputs = shape
            a = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
            b = torch.randn(num_outputs, rank, generator=generator) * scale
            tensors |= {f"{PEFT_PREFIX}{module}.lora_A.weight": a, f"{PEFT_PREFIX}{module}.lora_B.weight": b}
    return tensors


def logprobs_of(model: torch.nn.Module, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """[L - 1] log-probabilities of tokens 1 … L-1 by a Hugging Face model."""
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits.float() / temperature, dim=-1)
    picked = logprobs[0, :-1].gather(1, ids[0, 1:, None])
    return [float(x) for x in picked[:, 0]]


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """Publishes versions of random adapters for one base model into one run."""

    run: RunFolder
    model_dir: Path
    rank: int = 8
    alpha: int = 16

    def spec(self) -> PolicySpec:
        """The run's policy."""
        return PolicySpec(
            base_model=base_identity(self.model_dir),
            rank=self.rank,
            alpha=self.alpha,
            target_modules=TARGETS,
            sequence_len=256,
            dtype="float32",
        )

    def files(self, *, version: int, seed: int, scale: float = 0.1) -> dict[str, bytes]:
        """A whole and right version: adapter, configuration, canary."""
        return dict(self._files(version, seed, scale))

    @functools.cache  # noqa: B019 - the canary takes Hugging Face a second or more
    def _files(self, version: int, seed: int, scale: float) -> dict[str, bytes]:
        tensors = random_tensors(self.model_dir, seed=seed, rank=self.rank, scale=scale)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": TARGETS,
            "lora_dropout": 0.0,
            "bias": "none",
            "base_model_name_or_path": None,
        }
        files = {ADAPTER_FILE: safetensors.torch.save(tensors), ADAPTER_CONFIG_FILE: json.dumps(config).encode()}
        return files | {CANARY_FILE: self._canary(version, files, is_zero=scale == 0.0)}

    def publish(self, version: int, files: Mapping[str, bytes], spec: PolicySpec | None = None) -> Path:
        """Writes the folder with a manifest that fits the files."""
        publisher = PolicyPublisher(self.run.broadcasts, run_id=self.run.run_id)
        publisher.publish(version=version, spec=spec or self.spec(), files=files)
        return self.run.broadcasts / f"step_{version:06d}"

    def _canary(self, version: int, files: Mapping[str, bytes], *, is_zero: bool) -> bytes:
        folder = self.run.path / "canary_model"
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        policy = reference(self.model_dir, folder)
        logprobs = logprobs_of(policy, CANARY_IDS)
        with policy.disable_adapter():
            base_logprobs = logprobs_of(policy, CANARY_IDS)
        return Canary(
            version=version,
            token_ids=CANARY_IDS,
            logprobs=tuple(logprobs),
            base_logprobs=tuple(base_logprobs),
            dtype="float32",
            is_zero=is_zero,
        ).to_json()


def reference(model_dir: Path, adapter_dir: Path) -> PeftModel:
    """The policy by Hugging Face and PEFT in float32."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter_dir).eval()
