"""Tokens a second, MFU and peak memory of training steps on a GPU.

    python -m benchmarks.trainer_gpu [--check] [--shapes 0.6B 4B] [--packs 16384x1024 …] [--keep none selective full]

Qwen3 with random weights, made on the device, bfloat16, LoRA 16 on all linear layers, compiled. A pack `16384x1024` is
16,384 tokens in samples of 1,024, of which all but the first eighth carry loss. A step is the whole one: forward, loss,
backward and AdamW with 8-bit state. Medians of 5 steps after 2 to warm up. Layers keep for their backward pass in turn
what `--keep` says; what does not fit into memory is told so. Memory is the most that torch has allocated, weights
included. `--quantized` takes each quantized base instead, keeping least.

Targets on an H200: 50,000 (0.6B) and 13,000 (4B) tokens a second in samples of 1,024, 30,000 and 9,000 in one of
16,384. The last line is one JSON object, and so is that of each figure. `--check` exits 1 where a figure misses its
target. With `--device cpu --shapes tiny` it runs anywhere, for nothing but to see that it does.

Not yet run: needs a GPU.
"""

import argparse
import gc
import importlib.metadata
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.loss import LossSettings
from grpo.configs.train import QUANTIZED, TrainSettings
from grpo.trainer.distributed import ONE
from grpo.trainer.flops import peak_flops, step_flops
from grpo.trainer.memory import ActivationCheckpointing, release_memory
from grpo.trainer.model import Policy, load_policy
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from grpo.trainer.quantization import QUANTIZE
from grpo.transport.records import MicroBatch, Quantization
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import parser, report

RANK = 16
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "0.6B": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "4B": {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
"""Shapes of Qwen3-0.6B and Qwen3-4B; both tie their embeddings."""
TARGETS = {
    "0.6B best 16384x1024": 50_000.0,
    "4B best 16384x1024": 13_000.0,
    "0.6B best 16384x16384": 30_000.0,
    "4B best 16384x16384": 9_000.0,
}
"""Tokens a second by the best of what layers may keep, on a plain base."""
PACKS = ("16384x1024", "16384x16384", "8192x1024", "2048x1024")
WARM_UP, STEPS = 2, 5


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


def settings_of(folder: Path, quantization: Quantization | None, options: argparse.Namespace) -> TrainSettings:
    """Returns the settings of a trainer with such a base."""
    own: dict[str, Any] = {key: True for key, format in QUANTIZED.items() if format == quantization}
    own |= {"model": str(folder), "seed": 0, "lora_rank": RANK, "lora_alpha": 2 * RANK, "compile": not options.eager}
    return TrainSettings.model_validate(own | {"sequence_len": max(tokens for tokens, _ in options.packs)})


def measured(settings: TrainSettings, policy: Policy, batch: MicroBatch) -> dict[str, float]:
    """Steps of the trainer, without publishing."""
    objective = Objective(policy, LossSettings(), ONE, pack_tokens=settings.pack_tokens)
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
    step_s = statistics.median(times_s[WARM_UP:])
    found = {"tokens_per_s": len(batch.token_ids) / step_s, "first_step_s": times_s[0]}
    if (peak := peak_flops(policy.device)) is not None:
        found["mfu"] = step_flops(policy, [batch], LossSettings()) / step_s / peak
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if on_gpu else {})


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures by name; each tells itself as soon as it is there."""
    device, figures = torch.device(options.device), dict[str, float]()
    cases: list[tuple[ActivationCheckpointing, Quantization | None]] = [(keep, None) for keep in options.keep]
    if options.quantized:
        cases = [("full", format) for format in QUANTIZE]
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
            folder = save_model(shape, Path(name), device)
            for keep, quantization in cases:
                of_case = measure_case(f"{shape} {quantization or keep}", shape, folder, keep, quantization, options)
                figures |= of_case
                for key, value in of_case.items():
                    if key.endswith(" tokens_per_s"):
                        best = f"{shape} best {key.split()[2]}"
                        figures[best] = max(figures.get(best, 0.0), value)
                gc.collect()
                release_memory(device)
    return figures


def measure_case(
    name: str,
    shape: str,
    folder: Path,
    keep: ActivationCheckpointing,
    quantization: Quantization | None,
    options: argparse.Namespace,
) -> dict[str, float]:
    """One policy's figures on every pack; the longest is the first, and what it compiles serves all."""
    device, figures = torch.device(options.device), dict[str, float]()
    settings = settings_of(folder, quantization, options)
    kinds: dict[str, Any] = {"checkpointing": keep, "attention_kernel": options.attention}
    policy = load_policy(settings, folder, device, **kinds)
    for tokens, sample_len in options.packs:
        batch = batch_of(num_tokens=tokens, sample_len=sample_len, vocab_size=SHAPES[shape]["vocab_size"])
        try:
            found = measured(settings, policy, batch)
        except torch.cuda.OutOfMemoryError:
            found = {"out_of_memory": 1.0}
            for parameter in policy.parameters:
                parameter.grad = None
        mine = {f"{name} {tokens}x{sample_len} {key}": value for key, value in found.items()}
        print(json.dumps(mine), flush=True)
        figures |= mine
    return figures


def machine(device: torch.device) -> str:
    """The device and the versions that matter."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    packages = ("torch", "transformers", "peft", "bitsandbytes", "flash-attn", "flash-attn-3", "triton")
    versions = [f"{package} {version}" for package in packages if (version := _version(package))]
    return ", ".join([name, f"CUDA {torch.version.cuda}", *versions])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pack(text: str) -> tuple[int, int]:
    tokens, sample_len = map(int, text.split("x"))
    return tokens, sample_len


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "4B"])
    command.add_argument("--packs", nargs="+", type=_pack, default=[*map(_pack, PACKS)], help="TOKENSxSAMPLE_TOKENS")
    command.add_argument("--keep", nargs="+", choices=("none", "selective", "full"), default=["selective", "none"])
    command.add_argument("--quantized", action="store_true", help="quantized bases instead of the plain one")
    command.add_argument("--eager", action="store_true", help="do not compile the layers")
    command.add_argument("--attention", help="the attention kernel (default: the best that is installed)")
    command.add_argument("--device", default="cuda")
    options = command.parse_args()
    on = machine(torch.device(options.device))
    print(on, end="\n\n", flush=True)
    targets = {} if options.quantized else {name: (">=", target) for name, target in TARGETS.items()}
    return report("trainer_gpu", measure(options), targets, check=options.check, machine=on)


if __name__ == "__main__":
    raise SystemExit(main())
