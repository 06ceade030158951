"""Weights that are no adapter, and their files: sharded safetensors with an index like Hugging Face's. One
shard at a time is in memory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from grpo.transport.errors import CorruptError
from grpo.transport.folders import Buffer, Content
from grpo.transport.records import parse_json, require

INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_SUFFIX = ".safetensors"
_LARGE = (_SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OTHERS_OWN = ("config.json", "hf_quant_config.json", "manifest.json", "STABLE", "README.md")
_MORE_TEMPLATES = "additional_chat_templates"
"""Where transformers keeps a tokenizer's other chat templates, by name."""
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def is_weights(name: str) -> bool:
    """Returns whether a version's file holds weights, which only servers read."""
    return name.endswith(_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of a version that is no adapter:
    ``Weight(name="model.norm.weight", dtype="float32", shape=(128,), tensor=lambda: norm)``"""

    name: str
    """Name in the base model's checkpoint."""
    dtype: str
    """Type as torch names it: `float32`, `float16`, `bfloat16`."""
    shape: tuple[int, ...]
    tensor: Callable[[], Any]
    """Returns it as a tensor, in main memory or where the trainer computes; called when it is written or sent."""

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


def shard_files(weights: Sequence[Weight], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, Content]:
    """Returns the files that hold `weights` in their order, the index last; none for no weights. A shard exceeds the
    limit only for one tensor."""
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not shards or weight.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    named = {f"model-{n:05d}-of-{len(shards):05d}{_SUFFIX}": shard for n, shard in enumerate(shards, 1)}
    weight_map = {weight.name: name for name, shard in named.items() for weight in shard}
    index = {"metadata": {"total_size": sum(weight.num_bytes for weight in weights)}, "weight_map": weight_map}
    files: dict[str, Content] = {name: _content(shard) for name, shard in named.items()}
    return files | {INDEX_FILE: json.dumps(index, indent=1).encode()} if files else {}


def checkpoint_files(folder: Path, *, dtype: str) -> dict[str, Content]:
    """Returns the files of a checkpoint besides its weights, tokenizer and chat template included; its config.json then
    describes plain weights in `dtype`."""
    config = json.loads((folder / "config.json").read_bytes())
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    files: dict[str, Content] = {"config.json": json.dumps(config, indent=1).encode()}
    for path in sorted([*folder.iterdir(), *(folder / _MORE_TEMPLATES).glob("*.jinja")]):
        plain = path.name not in _OTHERS_OWN and not path.name.endswith(_LARGE)
        if path.is_file() and plain and not path.name.startswith("."):
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def weight_map(index: bytes, files: Mapping[str, object]) -> dict[str, str]:
    """Returns the shard that holds each tensor. Raises `CorruptError` unless the index names exactly the shards that
    are among `files`."""
    fields = parse_json(index, INDEX_FILE).get("weight_map")
    if not isinstance(fields, dict) or not all(isinstance(shard, str) for shard in fields.values()):
        raise CorruptError(f"{INDEX_FILE} has no weight_map of names to files")
    listed, named = sorted(filter(is_weights, files)), sorted(set(fields.values()))
    require(listed == named, f"{INDEX_FILE} names the shards {named}, the manifest lists {listed}")
    return dict(fields)


def _content(weights: Sequence[Weight]) -> Callable[[], Iterator[Buffer]]:
    """A shard, made when it is written."""

    def chunks() -> Iterator[Buffer]:
        from safetensors.torch import save  # imports torch, which only the trainer needs

        tensors = {weight.name: weight.tensor().cpu().contiguous() for weight in weights}
        for weight in weights:
            if (shape := tuple(tensors[weight.name].shape)) != weight.shape:
                raise ValueError(f"{weight.name} has shape {shape}, expected {weight.shape}")
        yield save(tensors, metadata={"format": "pt"})

    return chunks
