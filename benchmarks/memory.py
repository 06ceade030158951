"""The estimate of docs/memory.md beside what a dry step measures, for random models, as a table in Markdown.

    python -m benchmarks.memory [--device cuda]

Both are without the base and without what a process takes with its libraries (`FIXED_BYTES` of the estimate).
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from configs.train import TrainSettings
from deploy.memory import measure
from tools.random_models import make_hundred, make_mid, make_tiny_random
from trainer.estimate import FIXED_BYTES

MIB = 2**20
MODELS = {"0.8M, 512 tokens": (make_tiny_random, 512), "29M, 2,048 tokens": (make_mid, 2048)}
MODELS |= {"95M, 512 tokens": (make_hundred, 512)}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"recipe": "fp32"},
    "bf16": {"recipe": "bf16"},
    "bf16, checkpointing": {"recipe": "bf16", "gradient_checkpointing": True},
    "nf4, checkpointing": {"recipe": "bf16", "gradient_checkpointing": True, "qlora_bnb": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    print(
        f"| model | kind | estimated, MiB | measured on {device}, MiB | measured / estimated |\n|---|---|---|---|---|"
    )
    for name, (make, num_tokens) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = make(Path(folder) / "model", dtype="bfloat16")
            for kind, options in KINDS.items():
                threads = {"num_threads": 1} if device == "cpu" else {}
                settings = TrainSettings(model=name, device=device, sequence_len=num_tokens, **threads, **options)
                found = measure(settings, model)
                estimated = (found.estimated - FIXED_BYTES) / MIB
                measured = (found.in_step - found.between) / MIB
                row = (name, kind, f"{estimated:,.0f}", f"{measured:,.0f}", f"{measured / estimated:.2f}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
