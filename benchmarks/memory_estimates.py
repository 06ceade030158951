"""What the trainer is estimated to need of a device, for six shapes of Qwen3, and estimates against measurements.

    python -m benchmarks.memory_estimates [--check] [--only-table] [--models tiny mid large]

The table is arithmetic: no model is made or loaded. Its settings are grpo-train's defaults (bf16, 2,048 tokens, LoRA 16
on all linear layers, AdamW with 8-bit state) with gradient checkpointing; the server has an adapter's ten places and a
`max_model_len` of 4,096. Activations are told without checkpointing too. The last columns are what vLLM gets of a
device of 24 and of 80 GiB, as `gpu_memory_utilization`; "-" is where the settings are refused. A second table has the
same for steps of other sizes, with server and trainer apart, and in turns.

Then random models of 0.8, 29 and 108 million parameters are trained for a step each, on the CPU, in processes of their
own, and the most that was allocated above the loaded model is put beside its estimate (target: within a quarter).

The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.infer import InferSettings
from configs.train import TrainSettings
from deploy.memory.device import DeviceMemory
from deploy.memory.dry_step import DryStep, measure
from deploy.memory.estimate import GIB, MIB, Estimate, Shared, estimate
from deploy.memory.shapes import ModelShape
from deploy.memory.split import NoRoom, split
from tests.tiny_models import MID, TINY

_HEADS_OF_8 = {"num_key_value_heads": 8, "head_dim": 128}
_COMMON = {"model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960}
CONFIGS: dict[str, dict[str, Any]] = {
    name: _COMMON
    | _HEADS_OF_8
    | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    for name, hidden, inner, layers, heads, tied in (
        ("0.6B", 1024, 3072, 28, 16, True),
        ("1.7B", 2048, 6144, 28, 16, True),
        ("4B", 2560, 9728, 36, 32, True),
        ("8B", 4096, 12_288, 36, 32, False),
        ("14B", 5120, 17_408, 40, 40, False),
        ("32B", 5120, 25_600, 64, 64, False),
    )
}
"""From the config.json of Qwen3-0.6B to Qwen3-32B."""
FORMATS: dict[str, dict[str, Any]] = {"bf16": {}, "fp8": {"qlora_fp8": True}, "nf4": {"qlora_bnb": True}}
DEVICES_GIB = (24, 80)

LARGE = {
    "vocab_size": 32_768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MEASURED = {"tiny": (TINY, 4096), "mid": (MID, 2048), "large": (LARGE, 1024)}
"""Shapes of the models that are measured, and the tokens of their step."""
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32"},
    "bf16": {"recipe": "bf16"},
    "nf4": {"recipe": "bf16", "qlora_bnb": True},
    "4_adapters": {"recipe": "bf16", "lora_adapters": ("a", "b", "c", "d")},
}
LARGEST_ERROR = 0.25
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model that is measured."""

    model: str
    kind: str
    checkpointing: bool

    @property
    def name(self) -> str:
        """As the figures are called."""
        return "_".join([self.model, self.kind, *(["checkpointed"] if self.checkpointing else [])])

    def settings(self, folder: Path) -> TrainSettings:
        """The trainer's."""
        return TrainSettings(
            model=str(folder),
            device="cpu",
            num_threads=1,
            sequence_len=MEASURED[self.model][1],
            gradient_checkpointing=self.checkpointing,
            **KINDS[self.kind],
        )


def table() -> Iterator[str]:
    """The estimates of the six shapes."""
    names = [
        "model",
        "base of it",
        "parameters",
        "base",
        "adapter",
        "activations",
        "checkpointed",
        "1 weight",
        "own base",
    ]
    names += ["total", "saved", *(f"on {size} GiB" for size in DEVICES_GIB)]
    yield _row(names)
    for name, config in CONFIGS.items():
        for format, options in FORMATS.items():
            yield _row([name, format, *_figures(ModelShape.of_config(config), options)])


def _figures(shape: ModelShape, options: dict[str, Any]) -> Iterator[str]:
    train = TrainSettings(model="qwen3", gradient_checkpointing=True, **options)
    kept_all = estimate(train.model_copy(update={"gradient_checkpointing": False}), shape, device="cuda")
    one = estimate(train, shape, device="cuda")
    yield f"{shape.num_parameters:,}"
    adapter = one.adapter + one.gradients + one.optimizer
    for part in (one.base + one.shared, adapter, kept_all.kept + kept_all.working, one.kept + one.working):
        yield f"{part / GIB:.2f}"
    for part in (one.dequantized, one.base, one.total, one.shared):
        yield f"{part / GIB:.2f}"
    for size in DEVICES_GIB:
        yield _utilization(train, shape, size * GIB)


def turns_table() -> Iterator[str]:
    """The server's share of the larger device in bf16, the whole base shared: apart, and in turns (`sleep_mode`)."""
    steps = [(2048, True), (2048, False), (8192, True), (8192, False)]
    yield " ".join([f"{'model':>6}", *(f"{num:>9} {'checkp.' if one else '':7}" for num, one in steps)])
    for name, config in CONFIGS.items():
        shares = []
        for num_tokens, checkpointing in steps:
            train = TrainSettings(model="qwen3", gradient_checkpointing=checkpointing, sequence_len=num_tokens)
            both = (train, train.model_copy(update={"sleep_mode": True}))
            shape, device_bytes = ModelShape.of_config(config), max(DEVICES_GIB) * GIB
            apart, in_turns = (_utilization(one, shape, device_bytes, shared="all") for one in both)
            shares.append(f"{apart:>6} to {in_turns:7}")
        yield " ".join([f"{name:>6}", *shares])


def _utilization(train: TrainSettings, shape: ModelShape, device_bytes: int, *, shared: Shared = "linear") -> str:
    infer, memory = (
        InferSettings(model="qwen3", max_model_len=4096, sleep_mode=train.sleep_mode),
        DeviceMemory(total=device_bytes, free=device_bytes),
    )
    try:
        return f"{split(train, infer, shape, memory=memory, shared=shared).utilization:.3f}"
    except NoRoom:
        return "-"


def _row(cells: list[str]) -> str:
    widths = (6, 10, 16, 8, 8, 12, 13, 9, 9, 7, 7, 10, 10)
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def save_model(folder: Path, shape: dict[str, int], *, dtype: str) -> Path:
    """Random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, eos_token_id=1)
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def compared(models: list[str]) -> Iterator[tuple[Case, Estimate, DryStep]]:
    """Each case with its estimate and what was measured."""
    for model in models:
        with tempfile.TemporaryDirectory() as name:
            folder = save_model(Path(name), MEASURED[model][0], dtype="bfloat16")
            shape = ModelShape.of_folder(folder)
            for kind in KINDS:
                for checkpointing in (False, True):
                    case = Case(model=model, kind=kind, checkpointing=checkpointing)
                    settings = case.settings(folder)
                    estimated = estimate(settings, shape, device="cpu")
                    yield case, estimated, measure(settings, folder, timeout_s=_TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--only-table", action="store_true", help="measure nothing")
    parser.add_argument("--models", nargs="+", choices=MEASURED, default=list(MEASURED), help="what is measured")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}\n")
    began_s = time.perf_counter()
    told = list(table())
    figures: dict[str, float] = {"table_ms": (time.perf_counter() - began_s) * 1e3}
    print("\n".join(told), "", *turns_table(), f"\nGiB; computed in {figures['table_ms']:.0f} ms\n", sep="\n")
    missed = []
    if not options.only_table:
        print(f"{'':24} {'estimated':>12} {'allocated':>12} {'of it':>7} {'held':>12}")
    for case, estimated, measured in compared([] if options.only_table else options.models):
        ratio = estimated.step / measured.allocated
        figures[f"{case.name}_ratio"] = round(ratio, 4)
        figures[f"{case.name}_held_ratio"] = round(measured.held / measured.allocated, 4)
        missed += [] if abs(ratio - 1) <= LARGEST_ERROR else [case.name]
        sizes = (f"{size / MIB:8.1f} MiB" for size in (estimated.step, measured.allocated))
        verdict = "MISSED" if case.name in missed else ""
        print(f"{case.name:24} {' '.join(sizes)} {ratio:7.3f} {measured.held / MIB:8.1f} MiB {verdict}", flush=True)
    print(json.dumps(figures))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
