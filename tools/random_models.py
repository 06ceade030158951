"""Models with random weights, made offline for tests and benchmarks. What they generate is noise.

    python -m tools.random_models qwen3 --output qwen3-tiny

writes a model of a published family, tiny and random, with a tokenizer of the family's kind, its special tokens, chat
template and generation settings (`FAMILIES`). The others have the quickstart's tokenizer of bytes: `TINY` has the shape
of the embedded models (0.8M parameters), `MID` has 29M: enough work for the matrix products, rather than the overhead
of each step, to take the time; `HUNDRED` has 95M, of which the memory can be told from the rest of a process.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
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


CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"
"""The families' chat templates, in our own words: roles, system messages, thinking and tools as published."""
NUM_MERGED = 600
"""Size of a family's vocabulary besides its special tokens: the bytes, and what is merged most often."""
_SMALL = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}
"""A few hundred thousand parameters, in layers that vLLM's kernels for CPUs compute."""
TEXT = """
The farmer has 12 hens, and each of them lays 5 eggs in a week. How many eggs are that in 4 weeks? In one week there
are 12 * 5 = 60 eggs, in 4 weeks 60 * 4 = 240 eggs. The answer is 240. Anna buys 3 books for 7 dollars each and pays
with a note of 50 dollars. How much money does she get back? The books cost 3 * 7 = 21 dollars, so that she gets 50 -
21 = 29 dollars back. The answer is 29. A train travels 180 miles in 3 hours. How far does it travel in 5 hours at the
same speed? Its speed is 180 / 3 = 60 miles an hour, and 60 * 5 = 300 miles. The answer is 300. Think step by step,
write what you know, check the result, and end with the number. If you are not sure, say so. You are a helpful
assistant. What is the word for this? Reverse the letters of the word, and write it in small letters.
"""
"""What the families' tokenizers are trained on."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published family of models, as far as its tokenizer, template and shape tell it from others."""

    model_type: str
    config: Mapping[str, Any]
    """Keys of the configuration that are this family's, besides the sizes."""
    template: str
    """Name of its chat template."""
    tokenizer_class: str
    control: tuple[str, ...]
    """Special tokens, in the order of their ids."""
    marks: tuple[str, ...] = ()
    """Tokens of their own that are part of the text, and survive decoding without special tokens."""
    bos: str | None
    eos: str
    pad: str | None
    ends: tuple[str, ...]
    """Tokens that end an answer, as `generation_config.json` lists them."""
    sampling: Mapping[str, Any]
    """How its `generation_config.json` samples."""
    digits: str = ""
    """How many digits one token may hold, as a pattern."""
    byte_fallback: bool = False
    """SentencePiece's kind: spaces are `▁`, and bytes stand in for characters that are not in the vocabulary."""
    control_first: bool = False
    """Special tokens have the first ids, not the last ones."""
    adds_bos: bool = False
    """The tokenizer itself puts `bos` before every text."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Sizes besides `_SMALL`."""


FAMILIES = {
    "qwen3": Family(
        model_type="qwen3",
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 40960},
        template="qwen3",
        tokenizer_class="Qwen2Tokenizer",
        control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        marks=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        ends=("<|im_end|>", "<|endoftext|>"),
        sampling={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    "llama3": Family(
        model_type="llama",
        config={
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            },
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        template="llama3",
        tokenizer_class="PreTrainedTokenizerFast",
        control=(
            *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>"),
            *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad=None,
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        sampling={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        digits="{1,3}",
        adds_bos=True,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        config={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 512,
            "query_pre_attn_scalar": 32,
            "max_position_embeddings": 32768,
        },
        template="gemma3",
        tokenizer_class="GemmaTokenizer",
        control=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        ends=("<eos>", "<end_of_turn>"),
        sampling={"do_sample": True, "top_k": 64, "top_p": 0.95},
        byte_fallback=True,
        control_first=True,
        adds_bos=True,
        shape={"num_key_value_heads": 1},
    ),
    "phi4": Family(
        model_type="phi3",
        config={
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
                **{"original_max_position_embeddings": 4096, "short_factor": [1.0] * 12},
                "long_factor": [1.0 + number for number in range(12)],
            },
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "sliding_window": 262144,
            "rms_norm_eps": 1e-5,
        },
        template="phi4_mini",
        tokenizer_class="GPT2Tokenizer",
        control=(
            *("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        ),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|endoftext|>",
        ends=("<|end|>", "<|endoftext|>"),
        sampling={},
        digits="{1,3}",
    ),
    "lfm2": Family(
        model_type="lfm2",
        config={
            "layer_types": ["conv", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "max_position_embeddings": 128000,
            **{"block_dim": 128, "block_ff_dim": 256, "block_auto_adjust_ff_dim": False, "block_multiple_of": 256},
            **{"block_ffn_dim_multiplier": 1.0, "block_norm_eps": 1e-5, "block_use_swiglu": True},
            **{"conv_L_cache": 3, "conv_bias": False, "conv_dim": 128, "conv_dim_out": 128},
        },
        template="lfm2",
        tokenizer_class="PreTrainedTokenizerFast",
        control=(
            *("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>"),
            *("<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>"),
            *("<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        bos="<|startoftext|>",
        eos="<|im_end|>",
        pad="<|pad|>",
        ends=("<|im_end|>",),
        sampling={},
        digits="{1,3}",
        control_first=True,
        adds_bos=True,
    ),
}


def make_family(path: Path, name: str, *, seed: int = 0) -> Path:
    """Saves a tiny random model of a published family under `path`, and returns `path`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    family = FAMILIES[name]
    tokenizer = _tokenizer(family)
    tokenizer.save_pretrained(path)
    saved = path / "tokenizer_config.json"
    settings = json.loads(saved.read_text()) | {"tokenizer_class": family.tokenizer_class}
    saved.write_text(json.dumps(settings, indent=2, ensure_ascii=False))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in family.control}
    ends = [ids[token] for token in family.ends]
    special = {"bos_token_id": ids.get(family.bos or family.control[0]), "pad_token_id": ids.get(family.pad or "")}
    sizes = {**_SMALL, **family.shape, **family.config}
    config = AutoConfig.for_model(family.model_type, **sizes, **special, eos_token_id=ids[family.eos])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**special, eos_token_id=ends, **family.sampling)
    model.to(getattr(torch, family.dtype)).save_pretrained(path)
    return path


def _tokenizer(family: Family) -> Any:
    """Returns a tokenizer of the family's kind, trained on `TEXT`."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(tokenizers.Regex(_WORDS.replace("NUMBERS", family.digits)), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts: dict[str, Any] = {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": pre_tokenizers.Sequence([split, to_bytes]),
        "decoder": decoders.ByteLevel(),
    }
    if family.byte_fallback:
        parts = {
            "normalizer": normalizers.Replace(" ", "▁"),
            "pre_tokenizer": pre_tokenizers.Split(" ", "merged_with_previous"),
            "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        }

    def built(model: Any) -> Any:
        backend = tokenizers.Tokenizer(model)
        for name, part in parts.items():
            setattr(backend, name, part)
        return backend

    singles = [f"<0x{byte:02X}>" for byte in range(256)] if family.byte_fallback else []
    alphabet = [] if family.byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    size = NUM_MERGED - len(singles)
    learning = built(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learning.train_from_iterator([TEXT], trainer)
    learned = json.loads(learning.to_str())["model"]
    first = [*family.control, *singles] if family.control_first else singles
    vocab = {
        token: number for number, token in enumerate([*first, *sorted(learned["vocab"], key=learned["vocab"].get)])
    }
    how: dict[str, Any] = {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True} if singles else {}
    backend = built(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in learned["merges"]], **how))
    backend.add_special_tokens(list(family.control))
    backend.add_tokens(list(family.marks))
    if family.adds_bos:
        bos = (family.bos, backend.token_to_id(family.bos))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", pair=f"{family.bos} $A {family.bos} $B", special_tokens=[bos]
        )
    elif not family.byte_fallback:
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    special = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad}
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, **special, clean_up_tokenization_spaces=False, add_bos_token=family.adds_bos
    )
    made.chat_template = (CHAT_TEMPLATES / f"{family.template}.jinja").read_text()
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args()
    make_family(args.output, args.family, seed=args.seed)


if __name__ == "__main__":
    main()
