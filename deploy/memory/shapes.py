"""What a base model and its adapter consist of, from config.json alone: names, shapes and bytes of the weights.

Knows decoders whose layers are attention and a gated MLP, by their `model_type`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Quantization = Literal["nf4", "fp8", "nvfp4"]
Shape = tuple[int, ...]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_NF4_BLOCK, _NF4_NESTED_BLOCK, _FP8_BLOCK, _NVFP4_BLOCK = 64, 256, 128, 16


class ShapeError(ValueError):
    """A base model whose weights are not known from its config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes, as its config.json names them. Example: Qwen3-0.6B has 28 layers of hidden size 1,024."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    longest: int
    """Tokens of the longest sequence that the model allows."""
    tied: bool
    """Whether the LM head is the embedding."""
    biased: frozenset[str]
    """Linear layers with a bias."""

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelShape":
        """That of the model in `folder`. Raises `ShapeError` where it is of another kind than this knows."""
        return cls.of_config(json.loads((folder / "config.json").read_bytes()))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """That of a config.json. Raises `ShapeError`."""
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ShapeError(
                f"model_type is {family!r}, and memory is estimated for {', '.join(_FAMILIES)}; "
                "set gpu_memory_utilization (infer.yaml) yourself"
            )
        if missing := [key for key in _KEYS if key not in config]:
            raise ShapeError(f"config.json of {family} has no {', '.join(missing)}; the model's sizes are needed")
        num_heads = config["num_attention_heads"]
        default_head_dim = 128 if family == "qwen3" else config["hidden_size"] // num_heads
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or default_head_dim,
            longest=config["max_position_embeddings"],
            tied=config.get("tie_word_embeddings", False),
            biased=_biased(family, config),
        )

    @property
    def norms_queries(self) -> bool:
        """Whether each head's queries and keys go through a norm."""
        return self.family == "qwen3"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of one layer's linear layers, by their own names."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }

    def parameters(self) -> dict[str, Shape]:
        """Shape of every parameter, by its name in Hugging Face's model. A tied head is the embedding."""
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}"
            shapes |= {f"{prefix}.{name}": shape for name, shape in self._layer().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Of the base, the embedding counted once where it is tied."""
        return sum(math.prod(shape) for shape in self.parameters().values())

    @property
    def num_linear_parameters(self) -> int:
        """Of the weights of all layers' linear layers, which are what is quantized."""
        return self.num_layers * sum(rows * columns for rows, columns in self.linears.values())

    def adapter(self, rank: int, target_modules: Sequence[str]) -> list[int]:
        """Number of elements of each of an adapter's matrices: A [rank, in] and B [out, rank] of each target."""
        sizes = [size for name in target_modules for size in self.linears[name]]
        return [rank * size for size in sizes] * self.num_layers

    def kv_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Of the keys and values of so many tokens."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_tokens * element_bytes

    def linear_bytes(self, quantization: Quantization | None, element_bytes: int) -> int:
        """Of the weights of all layers' linear layers, quantized or of so many bytes each."""
        shapes = self.linears.values()
        if quantization is None:
            return self.num_linear_parameters * element_bytes
        return self.num_layers * sum(_QUANTIZED_BYTES[quantization](*shape) for shape in shapes)

    def base_bytes(self, quantization: Quantization | None, element_bytes: int) -> int:
        """Of the whole base; what is not quantized has so many bytes each."""
        rest = self.num_parameters - self.num_linear_parameters
        return self.linear_bytes(quantization, element_bytes) + rest * element_bytes

    def _layer(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, shape in self.linears.items():
            block = "self_attn" if name in _ATTENTION else "mlp"
            shapes[f"{block}.{name}.weight"] = shape
            if name in self.biased:
                shapes[f"{block}.{name}.bias"] = shape[:1]
        if self.norms_queries:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        norms = ("input_layernorm", "post_attention_layernorm")
        return shapes | {f"{name}.weight": (self.hidden_size,) for name in norms}


def _biased(family: str, config: Mapping[str, Any]) -> frozenset[str]:
    if family == "qwen2":
        return frozenset(_ATTENTION[:3])
    attention = _ATTENTION if family != "mistral" and config.get("attention_bias") else ()
    return frozenset(attention) | frozenset(_MLP if family == "llama" and config.get("mlp_bias") else ())


def _nf4_bytes(rows: int, columns: int) -> int:
    """4 bits a weight, a byte for each block of 64, 4 bytes for each 256 blocks and for the matrix."""
    blocks = -(-rows * columns // _NF4_BLOCK)
    return blocks * (_NF4_BLOCK // 2 + 1) + 4 * -(-blocks // _NF4_NESTED_BLOCK) + 4


def _fp8_bytes(rows: int, columns: int) -> int:
    """8 bits a weight, 4 bytes for each block of 128 by 128."""
    return rows * columns + 4 * -(-rows // _FP8_BLOCK) * -(-columns // _FP8_BLOCK)


def _nvfp4_bytes(rows: int, columns: int) -> int:
    """4 bits a weight, a byte for each block of 16 of a row, 4 bytes for the matrix."""
    return rows * -(-columns // _NVFP4_BLOCK) * (_NVFP4_BLOCK // 2 + 1) + 4


_QUANTIZED_BYTES = {"nf4": _nf4_bytes, "fp8": _fp8_bytes, "nvfp4": _nvfp4_bytes}
