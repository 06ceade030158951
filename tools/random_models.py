"""Models with random weights and the quickstart's tokenizer, made offline for tests and benchmarks.

    python -m tools.random_models mid PATH [--dtype bfloat16] [--seed 0]

`tiny` has the shape of the quickstart's model (0.8M parameters), `mid` has 29M: enough work for the
matrix products, rather than the overhead of each step, to take the time; `hundred` has 95M, of which the memory
can be told from the rest of a process. What they generate is noise.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Literal

QUICKSTART_MODEL = Path(__file__).parents[1] / "configs/quickstart/model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

DtypeName = Literal["float32", "bfloat16"]

TINY = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
# The tokenizer uses 259 of the 8192 ids. The others decode to nothing, as unused rows of real models do.
MID = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}

HUNDRED = MID | {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}


def make_tiny_random(path: Path, *, dtype: DtypeName = "float32", seed: int = 0) -> Path:
    """Save a random model of 0.8M parameters under `path`, and return `path`."""
    return _make(path, TINY, dtype, seed)


def make_mid(path: Path, *, dtype: DtypeName = "bfloat16", seed: int = 0) -> Path:
    """Save a random model of 29M parameters under `path`, and return `path`."""
    return _make(path, MID, dtype, seed)


def make_hundred(path: Path, *, dtype: DtypeName = "float32", seed: int = 0) -> Path:
    """Save a random model of 95M parameters under `path`, and return `path`."""
    return _make(path, HUNDRED, dtype, seed)


def _make(path: Path, shape: dict[str, int], dtype: DtypeName, seed: int) -> Path:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **shape,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        # Large enough for attention to matter and for the distribution over tokens not to be flat.
        initializer_range=0.06,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=258, pad_token_id=256)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    for name in TOKENIZER_FILES:
        shutil.copyfile(QUICKSTART_MODEL / name, path / name)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=("tiny", "mid", "hundred"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 for mid, else float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make = {"tiny": make_tiny_random, "mid": make_mid, "hundred": make_hundred}[args.size]
    print(make(args.path, seed=args.seed, **({"dtype": args.dtype} if args.dtype else {})))


if __name__ == "__main__":
    main()
