"""Models with random weights and the quickstart's tokenizer, made offline for tests and benchmarks.

`TINY` has the shape of the embedded models (0.8M parameters), `MID` has 29M: enough work for the matrix products,
rather than the overhead of each step, to take the time; `HUNDRED` has 95M, of which the memory can be told from the
rest of a process. What they generate is noise.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

QUICKSTART_MODEL = Path(__file__).parents[1] / "configs/quickstart/model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
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

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
"""The smallest model of any type that vLLM's kernels for CPUs compute, with weights so large that attention matters."""
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_expand": 1}
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"sliding_window": 512} for kind in ("cwm", "exaone4", "gemma3_text", "ministral", "olmo3")},
    "gemma4_text": {
        "sliding_window": 512,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 259,
        "hidden_size_per_layer_input": 32,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 192,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_dim": 128, "block_ff_dim": 192, "conv_dim": 128},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
"""What a model type needs besides `SMALL`."""


def small_config(kind: str, **changes: Any) -> Any:
    """Returns the configuration of a small model of this type."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(SMALL | KINDS.get(kind, {}) | changes))


def make_small(path: Path, kind: str, **changes: Any) -> Path:
    """Saves a small random model of this type in float32, with a tokenizer, under `path`, and returns `path`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=258, pad_token_id=256)
    model.save_pretrained(path)
    for name in TOKENIZER_FILES:
        shutil.copyfile(QUICKSTART_MODEL / name, path / name)
    return path


def make_random(
    path: Path, shape: Mapping[str, int], *, dtype: Literal["float32", "bfloat16"] = "float32", seed: int = 0
) -> Path:
    """Saves a random Qwen3 of this shape under `path`, and returns `path`."""
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
