"""Weights that are no adapter, as sharded safetensors with an index file like Hugging Face's. One shard at a time is in
memory."""

import json
from collections.abc import Iterator, Mapping, Sequence

from transport.errors import CorruptError
from transport.folders import Buffer, Chunks, Content
from transport.records import parse_json
from transport.weights.base import WEIGHTS_SUFFIX, Weight

INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


def shard_files(weights: Sequence[Weight], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, Content]:
    """Returns the files that hold `weights` in their order, the index last; none for no weights. A shard exceeds the
    limit only for one tensor."""
    if not weights:
        return {}
    shards = _divide(weights, max_shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}{WEIGHTS_SUFFIX}" for n in range(1, len(shards) + 1)]
    files: dict[str, Content] = {name: _shard(shard) for name, shard in zip(names, shards, strict=True)}
    weight_map = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    if len(weight_map) != len(weights):
        raise ValueError(f"{len(weights)} weights have {len(weight_map)} names, expected each to have its own")
    index = {"metadata": {"total_size": sum(weight.num_bytes for weight in weights)}, "weight_map": weight_map}
    return files | {INDEX_FILE: json.dumps(index, indent=1).encode()}


def weight_map(index: bytes, files: Mapping[str, object]) -> dict[str, str]:
    """Returns the shard that holds each tensor. Raises `CorruptError` unless the index names exactly the shards that
    are among `files`."""
    fields = parse_json(index, INDEX_FILE).get("weight_map")
    if not isinstance(fields, dict) or not all(isinstance(shard, str) for shard in fields.values()):
        raise CorruptError(f"{INDEX_FILE} has no weight_map of names to files")
    listed, named = {name for name in files if name.endswith(WEIGHTS_SUFFIX)}, set(fields.values())
    if listed != named:
        raise CorruptError(f"{INDEX_FILE} names the shards {sorted(named)}, the manifest lists {sorted(listed)}")
    return dict(fields)


def _divide(weights: Sequence[Weight], max_shard_bytes: int) -> list[list[Weight]]:
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not shards or weight.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    return shards


def _shard(weights: Sequence[Weight]) -> Chunks:
    def chunks() -> Iterator[Buffer]:
        from safetensors.torch import save  # imports torch, which only the trainer needs

        tensors = {weight.name: weight.tensor().cpu().contiguous() for weight in weights}
        for weight in weights:
            if tuple(tensors[weight.name].shape) != weight.shape:
                raise ValueError(
                    f"{weight.name} has shape {tuple(tensors[weight.name].shape)}, expected {weight.shape}"
                )
        yield save(tensors, metadata={"format": "pt"})

    return chunks
