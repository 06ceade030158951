"""Tokens a second and peak memory of training steps on a GPU.

    python -m benchmarks.trainer_gpu [--check] [--shapes 0.6B 4B] [--compile] [--attention grpo_padded]

Qwen3 with random weights, made on the device, bfloat16, LoRA 16 on all linear layers, 16,384 packed tokens in samples
of 1,024, of which all but the first 128 carry loss. A step is the whole one: forward, loss, backward and AdamW with
8-bit state. Medians of 5 steps after 2 to warm up, without and with gradient checkpointing. Memory is the most that
torch has allocated, weights included. `--quantized` takes each quantized base instead, checkpointed.

Targets on an H200: 50,000 (0.6B) and 13,000 (4B) tokens a second. The last line is one JSON object. `--check` exits 1
where a figure misses its target. With `--device cpu --shapes tiny` it runs anywhere, for nothing but to see that it
does.

Not yet run: needs a GPU.
"""

import argparse
import gc
import importlib.metadata
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import parser, report
from configs.loss import LossSettings
from configs.train import QUANTIZED, TrainSettings
from trainer.distributed import ONE
from trainer.model import Policy, load_policy
from trainer.objective import Objective
from trainer.optim import Optimizer
from trainer.quantization import QUANTIZE
from transport.records import MicroBatch, Quantization

RANK = 16
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "0.6B": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "4B": {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
"""Those of Qwen3-0.6B and Qwen3-4B; both tie their embeddings."""
TARGETS = {"0.6B": 50_000.0, "4B": 13_000.0}
"""Tokens a second with the faster of no and full gradient checkpointing, on a plain base."""
WARM_UP, STEPS = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    shape: str
    checkpointing: bool
    quantization: Quantization | None

    @property
    def name(self) -> str:
        """As the figures are called."""
        return "_".join([self.shape, self.quantization or "bf16", *(["checkpointed"] if self.checkpointing else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was measured of a case."""

    tokens_per_s: float
    peak_bytes: int
    """0 where the device does not tell."""


def save_model(shape: str, folder: Path, device: torch.device) -> Path:
    """Random bfloat16 weights, drawn on the device."""
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=40_960, tie_word_embeddings=True, eos_token_id=1)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            Qwen3ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    return folder


def batch_of(*, num_tokens: int, sample_len: int, vocab_size: int) -> MicroBatch:
    """Random samples with nothing in common; an eighth of each is its prompt."""
    random, num_samples = np.random.default_rng(0), num_tokens // sample_len
    mask = np.tile(np.arange(sample_len) >= sample_len // 8, num_samples)
    return MicroBatch(
        run_id="run",
        step=1,
        rank=0,
        index=0,
        num_micro_batches=1,
        token_ids=random.integers(2, vocab_size, num_tokens, np.int32),
        sequence_lengths=np.full(num_samples, sample_len, np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
        advantages=random.standard_normal(num_samples, np.float32),
        temperatures=np.ones(num_samples, np.float32),
        version_runs=np.array([[0, num_tokens]], np.int32),
        rollout_ids=tuple(map(str, range(num_samples))),
    )


def settings_of(case: Case, folder: Path, options: argparse.Namespace) -> TrainSettings:
    """Those of a trainer with the case's base."""
    own: dict[str, Any] = {key: True for key, format in QUANTIZED.items() if format == case.quantization}
    own |= {"model": str(folder), "seed": 0, "lora_rank": RANK, "lora_alpha": 2 * RANK, "compile": options.compile}
    own |= {"gradient_checkpointing": case.checkpointing, "sequence_len": options.tokens}
    return TrainSettings.model_validate(own)


def measured(settings: TrainSettings, policy: Policy, batch: MicroBatch) -> Result:
    """Steps of the trainer, without publishing."""
    num_tokens = settings.sequence_len
    objective = Objective(policy, LossSettings(), ONE, sequence_len=num_tokens)
    optimizer = Optimizer(settings, policy.named_parameters)
    on_gpu, times_s = policy.device.type == "cuda", []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + STEPS):
        began_s = time.perf_counter()
        objective.accumulate([batch], step=1)
        optimizer.step(learning_rate=1e-5)
        if on_gpu:
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return Result(tokens_per_s=num_tokens / statistics.median(times_s[WARM_UP:]), peak_bytes=peak)


def measure(options: argparse.Namespace) -> dict[str, Result]:
    """All cases; each tells itself."""
    device, results = torch.device(options.device), {}
    cases: list[tuple[bool, Quantization | None]] = [(False, None), (True, None)]
    if options.quantized:
        cases = [(True, format) for format in QUANTIZE]
    for shape in options.shapes:
        batch = batch_of(
            num_tokens=options.tokens, sample_len=options.sample_len, vocab_size=SHAPES[shape]["vocab_size"]
        )
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
            folder = save_model(shape, Path(name), device)
            for checkpointing, quantization in cases:
                case = Case(shape=shape, checkpointing=checkpointing, quantization=quantization)
                settings = settings_of(case, folder, options)
                policy = load_policy(settings, folder, device, attention_kernel=options.attention)
                results[case.name] = result = measured(settings, policy, batch)
                print(f"{case.name:32} {result.tokens_per_s:12,.0f} tokens/s {result.peak_bytes / 2**30:8.2f} GiB")
                del policy
                gc.collect()
    return results


def machine(device: torch.device) -> str:
    """The device and the versions that matter."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    packages = ("torch", "transformers", "peft", "bitsandbytes", "flash-attn", "triton")
    versions = [f"{package} {version}" for package in packages if (version := _version(package))]
    return ", ".join([name, f"CUDA {torch.version.cuda}", *versions])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "4B"])
    command.add_argument("--quantized", action="store_true", help="quantized bases instead of the plain one")
    command.add_argument("--compile", action="store_true", help="compile the layers")
    command.add_argument("--attention", help="the attention kernel (default: the best that is installed)")
    command.add_argument("--device", default="cuda")
    command.add_argument("--tokens", type=int, default=16_384, help="packed tokens of a step")
    command.add_argument("--sample-len", type=int, default=1_024, help="tokens of each sample")
    options = command.parse_args()
    print(machine(torch.device(options.device)), end="\n\n")
    figures: dict[str, float] = {}
    for name, result in measure(options).items():
        figures |= {f"{name} tokens_per_s": result.tokens_per_s, f"{name} peak_gib": result.peak_bytes / 2**30}
        best = f"{name.partition('_')[0]} best_tokens_per_s"
        figures[best] = max(figures.get(best, 0.0), result.tokens_per_s)
    targets = {} if options.quantized else {f"{shape} best_tokens_per_s": (">=", one) for shape, one in TARGETS.items()}
    return report("trainer_gpu", figures, targets, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
