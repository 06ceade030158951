"""Micro-batches as bytes: msgpack maps, arrays as raw little-endian bytes in their natural width.

Token ids take 32 bits, log-probabilities float32, masks one bit a token; streams that are absent are left out.
Arrays are decoded as read-only views on the message. Everything is checked before it is used; nothing is unpickled.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from transport.errors import CorruptError, SchemaVersionError
from transport.types import SCHEMA_VERSION, MicroBatch, require

MAX_MESSAGE_BYTES = 1 << 34
_STREAMS = {
    "token_ids": np.dtype("<i4"),
    "inference_logprobs": np.dtype("<f4"),
    "advantages": np.dtype("<f4"),
    "temperatures": np.dtype("<f4"),
    "policy_versions": np.dtype("<i4"),
    "teacher_logprobs": np.dtype("<f4"),
}
_NUMBERS = ("step", "rank", "index", "num_micro_batches", "num_loss_tokens")


def encode(batches: Sequence[MicroBatch]) -> bytes:
    """The micro-batches of one rank and step as one message."""
    packed: bytes = msgpack.packb(
        {"schema_version": SCHEMA_VERSION, "micro_batches": [_encode_one(batch) for batch in batches]}
    )
    return packed


def decode(data: bytes) -> tuple[MicroBatch, ...]:
    """Inverse of `encode`. Raises `CorruptError` or `SchemaVersionError`, and nothing else, for any bytes."""
    require(len(data) <= MAX_MESSAGE_BYTES, f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        message = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise CorruptError(f"message is not msgpack: {error!r}") from error
    require(isinstance(message, dict), f"message is a {type(message).__name__}, expected a map")
    if (received := message.get("schema_version")) != SCHEMA_VERSION:
        raise SchemaVersionError(f"message has schema version {received!r}, this program reads {SCHEMA_VERSION}")
    batches = message.get("micro_batches")
    require(isinstance(batches, list), "message has no list of micro_batches")
    return tuple(_decode_one(batch) for batch in batches)


def _encode_one(batch: MicroBatch) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(batch, name) for name in ("run_id", *_NUMBERS)}
    fields["rollout_ids"] = list(batch.rollout_ids)
    fields["sequence_lengths"] = batch.sequence_lengths.astype("<i4", copy=False).tobytes()
    fields["loss_mask"] = np.packbits(batch.loss_mask, bitorder="little").tobytes()
    for name, dtype in _STREAMS.items():
        stream = getattr(batch, name)
        if stream is not None:
            fields[name] = stream.astype(dtype, copy=False).tobytes()
    return fields


def _decode_one(fields: Any) -> MicroBatch:
    require(isinstance(fields, dict), f"a micro-batch is a {type(fields).__name__}, expected a map")
    known = {"run_id", "rollout_ids", "sequence_lengths", "loss_mask", *_NUMBERS, *_STREAMS}
    require(set(fields) <= known, f"micro-batch has unknown fields {sorted(map(str, set(fields) - known))}")
    for name in _NUMBERS:
        value = fields.get(name)
        require(type(value) is int and 0 <= value < 1 << 62, f"micro-batch has {name} = {value!r}")
    run_id, rollout_ids = fields.get("run_id"), fields.get("rollout_ids")
    if not isinstance(run_id, str):
        raise CorruptError(f"micro-batch has run_id = {run_id!r}, expected a text")
    require(
        isinstance(rollout_ids, list) and all(isinstance(r, str) for r in rollout_ids),
        "rollout_ids are not texts",
    )
    present = [name for name in _STREAMS if name in fields or name != "teacher_logprobs"]
    streams: dict[str, Any] = {name: _view(fields, name, _STREAMS[name]) for name in present}
    return MicroBatch(
        run_id=run_id,
        rollout_ids=tuple(rollout_ids),
        sequence_lengths=_view(fields, "sequence_lengths", np.dtype("<i4")),
        loss_mask=_mask(fields, len(streams["token_ids"])),
        **{name: fields[name] for name in _NUMBERS},
        **streams,
    )


def _bytes(fields: dict[str, Any], name: str) -> bytes:
    raw = fields.get(name)
    if not isinstance(raw, bytes):
        raise CorruptError(f"micro-batch has {name} of type {type(raw).__name__}, expected bytes")
    return raw


def _view(fields: dict[str, Any], name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = _bytes(fields, name)
    require(
        len(raw) % dtype.itemsize == 0,
        f"{name} has {len(raw)} bytes, expected a multiple of {dtype.itemsize}",
    )
    return np.frombuffer(raw, dtype=dtype)


def _mask(fields: dict[str, Any], length: int) -> NDArray[np.bool_]:
    raw = _bytes(fields, "loss_mask")
    require(len(raw) == (length + 7) // 8, f"loss_mask has {len(raw)} bytes, expected {(length + 7) // 8}")
    bits = np.unpackbits(np.frombuffer(raw, np.uint8), count=length, bitorder="little")
    return bits.view(np.bool_)
