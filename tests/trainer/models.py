"""Tiny random models and batches for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import ONE, Ranks, local_tensor, shard_like
from grpo.trainer.memory import ActivationCheckpointing
from grpo.trainer.metrics import Metric, numbers_of, reduced, states_of
from grpo.trainer.model import Policy, load_policy
from grpo.trainer.publishing import CanaryMaker
from grpo.trainer.weights import AdapterWeights
from grpo.transport.records import Canary, Hint, MicroBatch, PreferencePair
from grpo.transport.shared_base import ImportedBase
from msgspec.structs import replace
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.transport.samples import micro_batch

VOCAB = 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CPU = torch.device("cpu")


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Of a tiny model, whose attention matters (large weights)."""


def save_tiny_model(folder: Path, **changes: object) -> Path:
    """A random Qwen3."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**(SIZES | changes))).save_pretrained(folder)
    return folder


QUANTIZED_BY = {"nf4": "qlora_bnb", "fp8": "qlora_fp8", "nvfp4": "qlora_fp4"}


def tiny_settings(folder: Path, *, quantization: str | None = None, **changes: Any) -> TrainSettings:
    """Of a trainer in float32 with an adapter of rank 4, without the rules that hold between keys."""
    fields = {"recipe": "fp32", "seed": 0, "lora_rank": 4, "lora_alpha": 8, "sequence_len": 128, "optimizer": "adamw"}
    fields |= {QUANTIZED_BY[quantization]: True} if quantization else {}
    return TrainSettings(model="tiny", **(fields | changes))


def tiny_policy(
    folder: Path,
    *,
    moved: bool = True,
    device: torch.device = CPU,
    ranks: Ranks = ONE,
    imported: ImportedBase | None = None,
    checkpointing: ActivationCheckpointing | None = None,
    attention_kernel: str | None = None,
    **settings: Any,
) -> Policy:
    """A policy whose B is random too where `moved`, as after some training."""
    options: Any = {"imported": imported, "checkpointing": checkpointing, "attention_kernel": attention_kernel}
    policy = load_policy(tiny_settings(folder, **settings), folder, device, ranks, **options)
    if moved:
        with torch.no_grad():
            for parameter in policy.parameters:
                change = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.1
                local_tensor(parameter).add_(local_tensor(shard_like(change.to(device), parameter)))
        policy.reshard()
    return policy


def files_of(policy: Policy) -> dict[str, bytes]:
    """The adapters' files as they are now."""
    assert isinstance(policy.weights, AdapterWeights)
    return policy.weights.files(policy.weights.snapshot())


def write_files(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def is_zero(policy: Policy, adapter: int = 0) -> bool:
    """Whether this adapter changes nothing."""
    return policy.weights.is_base(policy.weights.snapshot(), version=1, adapter=adapter)


def canary_of(
    policy: Policy,
    token_ids: tuple[int, ...],
    *,
    version: int,
    noise: dict[str, torch.Tensor] | None = None,
    adapter: int = 0,
) -> Canary:
    """The canary of the policy as it is now."""
    making = CanaryMaker(policy, token_ids).begin(version=version, noise=noise or {}, adapter=adapter)
    return making(policy.weights.snapshot())


def tiny_batch(lengths: tuple[int, ...], *, seed: int = 0, **changes: object) -> MicroBatch:
    """Random samples of version 0 within the tiny vocabulary, with a stream element for every token."""
    batch = micro_batch(lengths=lengths, seed=seed, per_token=True)
    token_ids = np.random.default_rng(seed).integers(2, VOCAB, sum(lengths), np.int32)
    version_runs = np.array([[0, sum(lengths)]], np.int32)
    return replace(batch, **({"token_ids": token_ids, "version_runs": version_runs} | changes))


def with_shared_prompt(batch: MicroBatch, *samples: int) -> MicroBatch:
    """These samples begin with the same 6 tokens, without loss."""
    token_ids, mask = batch.token_ids.copy(), batch.loss_mask.copy()
    for start in batch.starts[list(samples)]:
        token_ids[start : start + 6] = [3, 7, 4, 7, 5, 9]
        mask[start : start + 6] = False
    return replace(batch, token_ids=token_ids, loss_mask=mask)


def only(batch: MicroBatch, samples: Sequence[int], **changes: object) -> MicroBatch:
    """The batch of these samples, in this order."""
    rows = np.concatenate([np.arange(batch.sequence_lengths[s]) + batch.starts[s] for s in samples])
    hints = dict(batch.hints)
    taken: dict[str, object] = {
        "sequence_lengths": batch.sequence_lengths[list(samples)],
        "version_runs": np.array([[0, len(rows)]], np.int32),
        "rollout_ids": tuple(batch.rollout_ids[s] for s in samples),
        "hints": tuple((place, hints[s]) for place, s in enumerate(samples) if s in hints),
    }
    for name in ("token_ids", "loss_mask", "inference_logprobs", "advantages", "temperatures", "teacher_logprobs"):
        stream = getattr(batch, name)
        taken[name] = None if stream is None else stream[rows]
    return replace(batch, **(taken | changes))


def hint_for(batch: MicroBatch, sample: int, *, places: tuple[int, ...], before: int, weight: float = 1.0) -> Hint:
    """A hint for one sample: three tokens put in before its token `before`; the tokens at `places`, all of them from
    `before` on, are compared."""
    start = int(batch.starts[sample])
    ids = batch.token_ids[start : start + int(batch.sequence_lengths[sample])]
    inserted = np.random.default_rng(sample).integers(2, VOCAB, 3, np.int32)
    index = np.array(places, np.int32)
    return Hint(
        teacher_token_ids=np.concatenate([ids[:before], inserted, ids[before:]]),
        student_index=index,
        teacher_index=index + 3,
        weight=weight,
    )


def as_floats(*parts: dict[str, Metric]) -> dict[str, float]:
    """The metrics of these micro-batches together, each as one number."""
    return numbers_of(reduced(states_of(parts)))


def pair_of(
    prompt: list[int], chosen: list[int], rejected: list[int], *, references: tuple[float, float] = (-1.0, -2.0)
) -> PreferencePair:
    """A preference pair with the references' log-probabilities of both continuations."""
    return PreferencePair(
        prompt_ids=np.array(prompt, np.int32),
        chosen_ids=np.array(chosen, np.int32),
        rejected_ids=np.array(rejected, np.int32),
        chosen_ref_logprob=references[0],
        rejected_ref_logprob=references[1],
        source="2 of 3 teachers",
    )
