"""The micro-batches of one rank and step as one MessagePack message, and back.

    [schema version, data, header]

The header says what the micro-batches are, with their hints and preference pairs, and how many numbers of each stream
belong to each of them. `data` holds the streams one after the other, little-endian, in the order of `_STREAMS`, each
for all micro-batches at once: token ids and log-probabilities take 4 bytes a token, masks one, and a stream with one
number a sample is sent so. It begins at byte 8, so that its numbers are aligned.

Decoding gives read-only views on the message, without copying. Everything that a message says of itself is checked
before it is used, once over the whole streams; nothing is unpickled. Whoever stores or sends a message keeps a
checksum beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from grpo.transport.errors import CorruptError
from grpo.transport.folders import Buffer
from grpo.transport.records import (
    SCHEMA_VERSION,
    Hint,
    MicroBatch,
    Natural,
    PreferencePair,
    Record,
    Tolerance,
    check_version,
    require,
)
from numpy.typing import NDArray

MAX_MESSAGE_BYTES = 1 << 32
"""MessagePack's own limit for `data`: some 300 million tokens a rank and step."""
_DATA_AT = 8
_TOKENS, _SAMPLES = "token_ids", "sequence_lengths"
_MASK, _RUNS = "loss_mask", "version_runs"
_STREAMS: dict[str, tuple[str, str]] = {
    _TOKENS: ("<i4", "T"),
    _SAMPLES: ("<i4", "S"),
    "inference_logprobs": ("<f4", "T"),
    "advantages": ("<f4", "ST"),
    "temperatures": ("<f4", "ST"),
    _RUNS: ("<i4", "R"),
    "teacher_logprobs": ("<f4", "T0"),
    "adapters": ("<i4", "S0"),
    _MASK: ("|b1", "T"),
}
"""Of each stream the type, and how many numbers a micro-batch may have of it: one a token, one a sample, none, or two
for each of its runs of versions. The mask comes last, because it alone takes other than multiples of 4 bytes."""


class Header(Record, frozen=True, kw_only=True):
    """What a message says beside its streams; all that concerns the step stands once."""

    run_id: str
    step: Natural
    rank: Natural
    rollout_ids: tuple[tuple[str, ...], ...]
    """[B][S]"""
    envs: tuple[tuple[str, ...], ...]
    """[B][S], or [B][0]"""
    servers: tuple[tuple[str, ...], ...]
    """[B][S], or [B][0]"""
    tolerances: dict[str, Tolerance]
    hints: tuple[tuple[tuple[Natural, Hint], ...], ...]
    """[B]"""
    pairs: tuple[tuple[PreferencePair, ...], ...]
    """[B]"""
    counts: dict[str, list[Natural]]
    """Stream → [B] its numbers."""


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    schema_version: int
    data: memoryview
    header: Header


class _Versioned(msgspec.Struct, array_like=True):
    schema_version: int


def _to_bytes(array: NDArray[Any]) -> bytes:
    """Encodes a hint's or a pair's arrays, which are all ids and places."""
    return array.astype("<i4", casting="same_kind").tobytes()


def _to_array(kind: Any, data: bytes) -> NDArray[Any]:
    return np.frombuffer(data, "<i4")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_versions = msgspec.msgpack.Decoder(_Versioned)
_messages = msgspec.msgpack.Decoder(_Message, dec_hook=_to_array)
_OF_STEP = ("run_id", "step", "rank", "tolerances")
_of_step = attrgetter(*_OF_STEP)
_OF_BATCH = ("rollout_ids", "envs", "servers", "hints", "pairs")


def _new_memory(num_bytes: int) -> NDArray[np.uint8]:
    return np.empty(num_bytes, np.uint8)


def encode(batches: Sequence[MicroBatch], *, memory: Callable[[int], NDArray[np.uint8]] = _new_memory) -> memoryview:
    """Returns the micro-batches of one rank and step, at least one, as one message, in what `memory` gives for so many
    bytes. Raises `CorruptError` for what `decode` would refuse: what lies on disk is asked for at every start."""
    common = _of_step(batches[0])
    for index, batch in enumerate(batches):
        if _of_step(batch) != common or (batch.index, batch.num_micro_batches) != (index, len(batches)):
            raise CorruptError(f"micro-batch {index} of {len(batches)} is of another rank or step than the first")
    arrays = {name: [getattr(batch, name) for batch in batches] for name in _STREAMS}
    arrays = {name: pieces for name, pieces in arrays.items() if any(piece is not None for piece in pieces)}
    parts: dict[str, Any] = {name: tuple(getattr(batch, name) for batch in batches) for name in _OF_BATCH}
    header = Header(
        **dict(zip(_OF_STEP, common, strict=True)),
        **parts,
        counts={name: [0 if one is None else one.size for one in pieces] for name, pieces in arrays.items()},
    )
    size = _num_bytes(header.counts)
    require(size < MAX_MESSAGE_BYTES, f"a rank's batch takes {size} bytes, at most {MAX_MESSAGE_BYTES} are sent")
    head, tail = b"\x93\xcc" + bytes([SCHEMA_VERSION]) + b"\xc6" + size.to_bytes(4, "big"), _encoder.encode(header)
    message = memory(_DATA_AT + size + len(tail))
    message[:_DATA_AT] = np.frombuffer(head, np.uint8)
    message[_DATA_AT + size :] = np.frombuffer(tail, np.uint8)
    streams = _views(header.counts, message[_DATA_AT : _DATA_AT + size])
    for name, pieces in arrays.items():
        out = streams[name].reshape(-1, 2) if name == _RUNS else streams[name]
        try:
            np.concatenate([one for one in pieces if one is not None], out=out, casting="no")
        except (TypeError, ValueError) as error:
            raise CorruptError(f"{name} is not such as a micro-batch has: {error}") from error
    _check(header, streams)
    return message.data.toreadonly()


def decode(data: Buffer) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of a message. Raises `CorruptError` or `SchemaVersionError`, and nothing else, for any
    bytes."""
    require(len(data) <= MAX_MESSAGE_BYTES, f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        check_version(_versions.decode(data).schema_version, "a batch's message")
        message = _messages.decode(memoryview(data).toreadonly())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"message cannot be read: {error}") from error
    header, num_bytes = message.header, len(message.data)
    names = [name for name, (_, numbers) in _STREAMS.items() if name in header.counts or "0" not in numbers]
    require(list(header.counts) == names, f"message has the streams {list(header.counts)}, expected {names}")
    expected = _num_bytes(header.counts)
    require(num_bytes == expected, f"message has {num_bytes} bytes of data, its header says {expected}")
    streams = _views(header.counts, np.frombuffer(message.data, np.uint8))
    flags = streams[_MASK].view(np.uint8)
    require(flags.size == 0 or int(flags.max()) <= 1, "loss_mask has other bytes than 0 and 1")
    _check(header, streams)
    return _split(header, streams)


def _num_bytes(counts: Mapping[str, Sequence[int]]) -> int:
    return sum(sum(one) * np.dtype(_STREAMS[name][0]).itemsize for name, one in counts.items())


def _views(counts: Mapping[str, Sequence[int]], data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """The streams as views of `data`, each for all micro-batches."""
    streams, offset = {}, 0
    for name, one in counts.items():
        dtype = np.dtype(_STREAMS[name][0])
        size = sum(one) * dtype.itemsize
        streams[name] = data[offset : offset + size].view(dtype)
        offset += size
    return streams


def _check(header: Header, streams: Mapping[str, NDArray[Any]]) -> None:
    """Raises `CorruptError` unless the micro-batches are such as a trainer can train on."""
    counts, num = header.counts, len(header.rollout_ids)
    tokens, samples = counts[_TOKENS], counts[_SAMPLES]
    columns = (*counts.values(), header.envs, header.servers, header.hints, header.pairs)
    require(all(len(column) == num for column in columns), f"not all of the message is of {num} micro-batches")
    for name, own in counts.items():
        allowed = {"T": tokens, "S": samples, "0": [0] * num, "R": own}
        chosen = [allowed[numbers] for numbers in _STREAMS[name][1]]
        fits = own in chosen or all(one in rest for one, *rest in zip(own, *chosen, strict=True))
        require(fits, f"{name} has another number of values than there are tokens or samples in each micro-batch")
    require(min(samples, default=0) >= 1, "a micro-batch has no samples")
    require([len(ids) for ids in header.rollout_ids] == samples, "each sample needs one rollout id")
    for names, what in ((header.envs, "an environment"), (header.servers, "a server")):
        named = all(len(one) in (0, of) for one, of in zip(names, samples, strict=True))
        require(named, f"each sample or none of a micro-batch has {what}")
    require(not any(count % 2 for count in counts[_RUNS]), "version_runs has an odd count, expected pairs")
    lengths, runs = streams[_SAMPLES], streams[_RUNS].reshape(-1, 2)
    _check_sums(_SAMPLES, lengths, samples, tokens)
    _check_sums(_RUNS, runs[:, 1], [count // 2 for count in counts[_RUNS]], tokens)
    for name in {_TOKENS, _RUNS, "adapters"} & streams.keys():
        require(int(streams[name].min()) >= 0, f"{name} has a negative number")
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    require(not streams[_MASK][first].any(), "the first token of a sample cannot carry loss")
    for name, stream in streams.items():
        finite = stream.dtype != np.float32 or bool(np.isfinite(stream).all())
        require(finite, f"{name} has values that are not finite")
    require(float(streams["temperatures"].min()) > 0, "temperatures has values that are not above 0")
    starts = list(accumulate(samples, initial=0))
    for index, (sample, hint) in ((i, one) for i, hints in enumerate(header.hints) for one in hints):
        require(sample < samples[index], f"a hint for sample {sample}, there are {samples[index]}")
        hint.check_places(int(lengths[starts[index] + sample]))


def _check_sums(name: str, values: NDArray[np.int32], counts: Sequence[int], expected: Sequence[int]) -> None:
    """Checks that each micro-batch's numbers of tokens are above 0 and sum to what it has."""
    require(min(counts) >= 1 and sum(counts) == len(values) and int(values.min()) >= 1, f"{name} has no tokens")
    begins = np.cumsum(counts, dtype=np.int64) - np.asarray(counts, np.int64)
    sums = np.add.reduceat(values, begins, dtype=np.int64)
    require(bool((sums == np.asarray(expected)).all()), f"{name} does not sum to each micro-batch's tokens")


def _split(header: Header, streams: Mapping[str, NDArray[Any]]) -> tuple[MicroBatch, ...]:
    """The micro-batches, with their views of the streams."""
    num = len(header.rollout_ids)
    columns: dict[str, Iterable[Any]] = {name: repeat(getattr(header, name)) for name in _OF_STEP}
    columns |= {name: getattr(header, name) for name in _OF_BATCH}
    columns |= {"index": range(num), "num_micro_batches": repeat(num)}
    for name, counts in header.counts.items():
        width, stream = (2, streams[name].reshape(-1, 2)) if name == _RUNS else (1, streams[name])
        ends = list(accumulate((count // width for count in counts), initial=0))
        cuts = [stream[start:end] for start, end in pairwise(ends)]
        columns[name] = [cut if len(cut) else None for cut in cuts] if "0" in _STREAMS[name][1] else cuts
    # By place, because by name it takes twice as long.
    return tuple(map(MicroBatch, *(columns.get(name, repeat(None)) for name in MicroBatch.__struct_fields__)))
