"""Micro-batches as bytes: a msgpack header, then the arrays as raw little-endian bytes in their natural width.

A message is `GRPO`, the header's length in 4 bytes, the header's checksum, the header, and the arrays, each padded to 8
bytes. The header holds the arrays' sizes and their checksum (XXH3), so that a damaged message is refused wherever it
comes from. Token ids take 32 bits, log-probabilities float32, masks one bit a token; a stream with one number a sample
is sent so; streams that are absent are left out.

Decoding gives read-only views on the message, without copying. Everything that a message says of itself is checked
before it is used; nothing is unpickled.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from transport.errors import CorruptError, SchemaVersionError
from transport.folders import Buffer
from transport.records import SCHEMA_VERSION, Hint, MicroBatch, PreferencePair, require

MAX_MESSAGE_BYTES = 1 << 36
MAX_HEADER_BYTES = 1 << 28
_MAGIC = b"GRPO"
_PREFIX = struct.Struct("<4sIQ")
_ALIGNMENT = 8

_I4, _F4, _BITS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_STREAMS: dict[str, np.dtype[Any]] = {
    "token_ids": _I4,
    "sequence_lengths": _I4,
    "loss_mask": _BITS,
    "inference_logprobs": _F4,
    "advantages": _F4,
    "temperatures": _F4,
    "version_runs": _I4,
    "teacher_logprobs": _F4,
    "adapters": _I4,
}
_OPTIONAL = {"teacher_logprobs", "adapters"}
_HINT_STREAMS = ("teacher_token_ids", "student_index", "teacher_index")
_PAIR_STREAMS = ("prompt_ids", "chosen_ids", "rejected_ids")
_NUMBERS = ("step", "rank", "index", "num_micro_batches", "num_loss_tokens", "num_hint_tokens", "num_pairs")
_FIELDS = {"run_id", "rollout_ids", "streams", "hints", "pairs", *_NUMBERS}


def encode(batches: Sequence[MicroBatch]) -> bytes:
    """The micro-batches of one rank and step as one message."""
    arrays: list[Buffer] = []
    fields = [_encode_one(batch, arrays) for batch in batches]
    padded = [piece for array in arrays for piece in (array, _padding(len(array)))]
    header: bytes = msgpack.packb(
        {
            "schema_version": SCHEMA_VERSION,
            "micro_batches": fields,
            "sizes": [len(array) for array in arrays],
            "checksum": _checksum(padded),
        }
    )
    prefix = _PREFIX.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header))
    return b"".join([prefix, header, _padding(len(header)), *padded])


def decode(data: Buffer) -> tuple[MicroBatch, ...]:
    """Inverse of `encode`. Raises `CorruptError` or `SchemaVersionError`, and nothing else, for any bytes."""
    view = memoryview(data).toreadonly()
    require(len(view) <= MAX_MESSAGE_BYTES, f"message of {len(view)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    require(len(view) >= _PREFIX.size, f"message of {len(view)} bytes is shorter than its prefix")
    magic, header_len, checksum = _PREFIX.unpack_from(view)
    require(magic == _MAGIC, f"message begins with {magic!r}, expected {_MAGIC!r}")
    end = _PREFIX.size + header_len
    require(end <= len(view), f"message of {len(view)} bytes, its header alone would take {end}")
    header = _header(view[_PREFIX.size : end], checksum)
    body = view[end + len(_padding(header_len)) :]
    arrays = iter(_split(body, header["sizes"]))
    require(_checksum([body]) == header["checksum"], "message's arrays have another checksum than its header says")
    decoded = tuple(_decode_one(fields, arrays) for fields in header["micro_batches"])
    require(next(arrays, None) is None, "message has arrays that belong to no micro-batch")
    return decoded


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNMENT)


def _checksum(arrays: Sequence[Buffer]) -> bytes:
    checksum = xxhash.xxh3_128()
    for array in arrays:
        checksum.update(array)
    return checksum.digest()


def _header(data: Buffer, checksum: int) -> dict[str, Any]:
    require(len(data) <= MAX_HEADER_BYTES, f"header of {len(data)} bytes, at most {MAX_HEADER_BYTES} are read")
    require(checksum == xxhash.xxh3_64_intdigest(data), "header has another checksum than the message says")
    try:
        header: Any = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise CorruptError(f"header is not msgpack: {error!r}") from error
    if not isinstance(header, dict):
        raise CorruptError(f"header is a {type(header).__name__}, expected a map")
    if (received := header.get("schema_version")) != SCHEMA_VERSION or type(received) is not int:
        raise SchemaVersionError(f"message has schema version {received!r}, this program reads {SCHEMA_VERSION}")
    known = {"schema_version", "micro_batches", "sizes", "checksum"}
    require(set(header) == known, f"header has the keys {sorted(map(str, header))}, expected {sorted(known)}")
    require(isinstance(header["micro_batches"], list), "header has no list of micro_batches")
    return header


def _split(body: memoryview, sizes: Any) -> list[memoryview]:
    """The arrays of a message, as views."""
    plain = isinstance(sizes, list) and all(type(s) is int and 0 <= s <= MAX_MESSAGE_BYTES for s in sizes)
    require(plain, "header's sizes are not numbers of bytes")
    total = sum(size + -size % _ALIGNMENT for size in sizes)
    require(total == len(body), f"message's arrays take {len(body)} bytes, its header speaks of {total}")
    arrays, offset = [], 0
    for size in sizes:
        arrays.append(body[offset : offset + size])
        offset += size + -size % _ALIGNMENT
    return arrays


def _raw(array: NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _encode_one(batch: MicroBatch, arrays: list[Buffer]) -> dict[str, Any]:
    present = []
    for name, dtype in _STREAMS.items():
        stream = getattr(batch, name)
        if stream is not None:
            present.append(name)
            arrays.append(_raw(np.packbits(stream, bitorder="little") if dtype is _BITS else stream, dtype))
    for _, hint in batch.hints:
        arrays += [_raw(getattr(hint, name), _I4) for name in _HINT_STREAMS]
    for pair in batch.pairs:
        arrays += [_raw(getattr(pair, name), _I4) for name in _PAIR_STREAMS]
    return {name: getattr(batch, name) for name in ("run_id", *_NUMBERS)} | {
        "rollout_ids": list(batch.rollout_ids),
        "streams": present,
        "hints": [[sample, hint.weight] for sample, hint in batch.hints],
        "pairs": [_pair_fields(pair) for pair in batch.pairs],
    }


def _pair_fields(pair: PreferencePair) -> list[float | str | int]:
    """The adapter only where it is not the first."""
    fields: list[float | str | int] = [pair.chosen_ref_logprob, pair.rejected_ref_logprob, pair.source]
    return [*fields, pair.adapter] if pair.adapter else fields


def _decode_one(fields: Any, arrays: Iterator[memoryview]) -> MicroBatch:
    if not isinstance(fields, dict):
        raise CorruptError(f"a micro-batch is a {type(fields).__name__}, expected a map")
    if fields.keys() != _FIELDS:
        raise CorruptError(f"micro-batch has the fields {sorted(map(str, fields))}, expected {sorted(_FIELDS)}")
    numbers = {name: fields[name] for name in _NUMBERS}
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise CorruptError(f"micro-batch has {name} = {value!r}, expected a number from 0")
    if not isinstance(fields["run_id"], str):
        raise CorruptError(f"micro-batch has run_id = {fields['run_id']!r}, expected a text")
    rollout_ids = _list_of(fields, "rollout_ids", str)
    streams = _streams(_list_of(fields, "streams", str), arrays)
    return MicroBatch(
        run_id=fields["run_id"],
        rollout_ids=tuple(rollout_ids),
        hints=tuple(_decode_hint(item, arrays) for item in _list_of(fields, "hints", list)),
        pairs=tuple(_decode_pair(item, arrays) for item in _list_of(fields, "pairs", list)),
        **numbers,
        **streams,
    )


def _list_of(fields: dict[str, Any], name: str, kind: type) -> list[Any]:
    items = fields[name]
    if not isinstance(items, list) or not all(type(item) is kind for item in items):
        raise CorruptError(f"micro-batch has {name} that are no list of {kind.__name__}")
    return items


def _streams(present: list[str], arrays: Iterator[memoryview]) -> dict[str, Any]:
    expected = [name for name in _STREAMS if name in present or name not in _OPTIONAL]
    if present != expected:
        raise CorruptError(f"micro-batch has the streams {present}, expected {expected}")
    streams: dict[str, Any] = {name: _view(name, _STREAMS[name], arrays) for name in present}
    length, bits = len(streams["token_ids"]), streams["loss_mask"]
    if len(bits) != (length + 7) // 8:
        raise CorruptError(f"loss_mask has {len(bits)} bytes, expected {(length + 7) // 8}")
    streams["loss_mask"] = np.unpackbits(bits, count=length, bitorder="little").view(np.bool_)
    runs = streams["version_runs"]
    if len(runs) % 2:
        raise CorruptError(f"version_runs has {len(runs)} numbers, expected pairs")
    streams["version_runs"] = runs.reshape(-1, 2)
    return streams


def _view(name: str, dtype: np.dtype[Any], arrays: Iterator[memoryview]) -> NDArray[Any]:
    raw = next(arrays, None)
    if raw is None:
        raise CorruptError(f"message has no array for {name}")
    if len(raw) % dtype.itemsize:
        raise CorruptError(f"{name} has {len(raw)} bytes, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)


def _decode_hint(item: list[Any], arrays: Iterator[memoryview]) -> tuple[int, Hint]:
    good = len(item) == 2 and type(item[0]) is int and type(item[1]) is float
    require(good, "a hint is not [sample, weight]")
    streams: dict[str, Any] = {name: _view(name, _I4, arrays) for name in _HINT_STREAMS}
    return item[0], Hint(weight=item[1], **streams)


def _decode_pair(item: list[Any], arrays: Iterator[memoryview]) -> PreferencePair:
    good = [type(value) for value in item] in ([float, float, str], [float, float, str, int])
    require(good, "a preference pair is not [chosen_ref_logprob, rejected_ref_logprob, source, adapter if not 0]")
    streams: dict[str, Any] = {name: _view(name, _I4, arrays) for name in _PAIR_STREAMS}
    chosen, rejected, source, *others = item
    adapter = others[0] if others else 0
    return PreferencePair(
        chosen_ref_logprob=chosen, rejected_ref_logprob=rejected, source=source, adapter=adapter, **streams
    )
