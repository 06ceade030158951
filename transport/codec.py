"""The micro-batches of one rank and step as one MessagePack message, and back.

    [schema version, header, padding, data]

The header says what the micro-batches are and how many numbers of each stream belong to each of them. `data` holds the
streams one after the other, little-endian, in the order of `_DTYPES`, each for all micro-batches at once: token ids and
log-probabilities take 4 bytes a token, masks one bit, and a stream with one number a sample is sent so. The padding
places `data` at a multiple of 8 bytes.

Decoding gives read-only views on the message, without copying. Everything that a message says of itself is checked
before it is used, once over the whole streams; nothing is unpickled. Whoever stores or sends a message keeps a
checksum beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.errors import CorruptError, SchemaVersionError
from transport.folders import Buffer
from transport.records import (
    SCHEMA_VERSION,
    Hint,
    MicroBatch,
    Natural,
    PreferencePair,
    Record,
    check_streams,
    require,
)

MAX_MESSAGE_BYTES = 1 << 32
"""MessagePack's own limit for `data`: some 300 million tokens a rank and step."""
_ALIGNMENT = 8
_PREFIX_BYTES = 5

_I4, _F4, _BITS = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
_DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": _I4,
    "sequence_lengths": _I4,
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
_OF_STEP = ("run_id", "step", "rank", "num_loss_tokens", "num_hint_tokens", "num_pairs")
_totals = attrgetter(*_OF_STEP)
_LOSS_MASK = "loss_mask"
"""Last, because it alone takes other than multiples of 4 bytes."""


class _Hint(Record, frozen=True, kw_only=True):
    micro_batch: Natural
    sample: Natural
    weight: float


class _Pair(Record, frozen=True, kw_only=True, omit_defaults=True):
    micro_batch: Natural
    chosen_ref_logprob: float
    rejected_ref_logprob: float
    source: str
    adapter: Natural = 0


class Header(Record, frozen=True, kw_only=True):
    """What a message says beside its streams; all that concerns the step stands once."""

    run_id: str
    step: Natural
    rank: Natural
    num_loss_tokens: Natural
    num_hint_tokens: Natural
    num_pairs: Natural
    rollout_ids: tuple[tuple[str, ...], ...]
    """[B][S]"""
    envs: tuple[tuple[str, ...], ...]
    """[B][S or 0]"""
    counts: dict[str, list[Natural]]
    """Stream → [B] its numbers; of a hint's or a pair's streams, how many each hint or pair has."""
    hints: list[_Hint]
    pairs: list[_Pair]


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    schema_version: int
    header: Header
    padding: bytes
    data: memoryview


class _Versioned(msgspec.Struct, array_like=True):
    schema_version: int


_encoder = msgspec.msgpack.Encoder()
_versions, _messages = msgspec.msgpack.Decoder(_Versioned), msgspec.msgpack.Decoder(_Message)


def encode(batches: Sequence[MicroBatch]) -> memoryview:
    """Returns the micro-batches of one rank and step, at least one, as one message. Raises `CorruptError` where they
    are not such as `decode` would give back."""
    totals = _totals(batches[0])
    for index, batch in enumerate(batches):
        if _totals(batch) != totals or (batch.index, batch.num_micro_batches) != (index, len(batches)):
            raise CorruptError(
                f"micro-batch {index} of {len(batches)} does not belong to the first one's rank and step"
            )
    pieces = dict(_pieces(batches))
    counts = {name: [stream.size for stream in arrays] for name, arrays in pieces.items()}
    header = Header(
        **dict(zip(_OF_STEP, totals, strict=True)),
        rollout_ids=tuple(batch.rollout_ids for batch in batches),
        envs=tuple(batch.envs for batch in batches),
        counts=counts,
        hints=[_Hint(micro_batch=b, sample=s, weight=hint.weight) for b, s, hint in _hints(batches)],
        pairs=[_pair_fields(b, pair) for b, pair in _pairs(batches)],
    )
    size = _num_bytes(counts)
    require(size < MAX_MESSAGE_BYTES, f"a rank's batch takes {size} bytes, at most {MAX_MESSAGE_BYTES} are sent")
    head = b"\x94" + _encoder.encode(SCHEMA_VERSION) + _encoder.encode(header)
    head += _encoder.encode(bytes(-(len(head) + 2 + _PREFIX_BYTES) % _ALIGNMENT))
    head += b"\xc6" + size.to_bytes(4, "big")
    message = np.empty(len(head) + size, np.uint8)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    streams = _streams(counts, message[len(head) :])
    for name, arrays in pieces.items():
        if name == _LOSS_MASK:
            streams[name][:] = np.packbits(np.concatenate(arrays), bitorder="little")
        else:
            np.concatenate(arrays, out=streams[name].reshape(-1, 2) if name == "version_runs" else streams[name])
    _check(counts, streams)
    return message.data.toreadonly()


def decode(data: Buffer) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of a message. Raises `CorruptError` or `SchemaVersionError`, and nothing else, for any
    bytes."""
    require(len(data) <= MAX_MESSAGE_BYTES, f"message of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        if (version := _versions.decode(data).schema_version) != SCHEMA_VERSION:
            raise SchemaVersionError(f"message has schema version {version}, this program reads {SCHEMA_VERSION}")
        message = _messages.decode(memoryview(data).toreadonly())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"message cannot be read: {error}") from error
    header = message.header
    _check_counts(header)
    expected = _num_bytes(header.counts)
    require(len(message.data) == expected, f"message has {len(message.data)} bytes of data, its header says {expected}")
    streams = _streams(header.counts, np.frombuffer(message.data, np.uint8))
    return tuple(_split(header, _check(header.counts, streams)))


def _pieces(batches: Sequence[MicroBatch]) -> Iterator[tuple[str, list[NDArray[Any]]]]:
    """Yields the arrays of each stream that is there, the mask's last."""
    for name in _DTYPES:
        arrays = list(map(attrgetter(name), batches))
        if name in _OPTIONAL:
            if all(array is None for array in arrays):
                continue
            absent = np.empty(0, _DTYPES[name])
            arrays = [absent if array is None else array for array in arrays]
        yield name, arrays
    if hints := [hint for _, _, hint in _hints(batches)]:
        yield from ((name, [getattr(hint, name) for hint in hints]) for name in _HINT_STREAMS)
    if pairs := [pair for _, pair in _pairs(batches)]:
        yield from ((name, [getattr(pair, name) for pair in pairs]) for name in _PAIR_STREAMS)
    yield _LOSS_MASK, [batch.loss_mask for batch in batches]


def _hints(batches: Sequence[MicroBatch]) -> Iterator[tuple[int, int, Hint]]:
    return ((b, sample, hint) for b, batch in enumerate(batches) for sample, hint in batch.hints)


def _pairs(batches: Sequence[MicroBatch]) -> Iterator[tuple[int, PreferencePair]]:
    return ((b, pair) for b, batch in enumerate(batches) for pair in batch.pairs)


def _pair_fields(micro_batch: int, pair: PreferencePair) -> _Pair:
    return _Pair(
        micro_batch=micro_batch,
        chosen_ref_logprob=pair.chosen_ref_logprob,
        rejected_ref_logprob=pair.rejected_ref_logprob,
        source=pair.source,
        adapter=pair.adapter,
    )


def _dtype(name: str) -> np.dtype[Any]:
    return _BITS if name == _LOSS_MASK else _DTYPES.get(name, _I4)


def _num_items(name: str, counts: Sequence[int]) -> int:
    """How many items a stream's data has: 8 places of a mask are one."""
    return (sum(counts) + 7) // 8 if name == _LOSS_MASK else sum(counts)


def _num_bytes(counts: Mapping[str, Sequence[int]]) -> int:
    return sum(_num_items(name, one) * _dtype(name).itemsize for name, one in counts.items())


def _streams(counts: Mapping[str, Sequence[int]], data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """The streams as views of `data`, each for all micro-batches, the mask as bits."""
    streams, offset = {}, 0
    for name, one in counts.items():
        size = _num_items(name, one) * _dtype(name).itemsize
        streams[name] = data[offset : offset + size].view(_dtype(name))
        offset += size
    return streams


def _check(counts: Mapping[str, Sequence[int]], streams: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Checks the values of all streams, and gives them as a `MicroBatch` has them."""
    num_tokens = sum(counts["token_ids"])
    mask = np.unpackbits(streams[_LOSS_MASK], count=num_tokens, bitorder="little").view(np.bool_)
    whole = streams | {"version_runs": streams["version_runs"].reshape(-1, 2), _LOSS_MASK: mask}
    check_streams(whole, {**counts, "version_runs": [count // 2 for count in counts["version_runs"]]})
    return whole


def _check_counts(header: Header) -> None:
    """Checks that each stream that must be there is, in its place, with a number for each micro-batch."""
    counts, names = header.counts, [name for name in _DTYPES if name in header.counts or name not in _OPTIONAL]
    names += [*(_HINT_STREAMS if header.hints else ()), *(_PAIR_STREAMS if header.pairs else ()), _LOSS_MASK]
    require(list(counts) == names, f"message has the streams {list(counts)}, expected {names}")
    num = len(header.rollout_ids)
    require(num >= 1 and len(header.envs) == num, "message has no micro-batches, or other environments")
    for name, one in counts.items():
        of = header.hints if name in _HINT_STREAMS else header.pairs if name in _PAIR_STREAMS else header.rollout_ids
        require(len(one) == len(of), f"message has {len(one)} counts of {name}, expected {len(of)}")
    require(counts[_LOSS_MASK] == counts["token_ids"], "message has other counts of loss_mask than of token_ids")
    require(not any(count % 2 for count in counts["version_runs"]), "version_runs has an odd count, expected pairs")
    owners = [hint.micro_batch for hint in header.hints] + [pair.micro_batch for pair in header.pairs]
    require(
        max(owners, default=0) < num, f"message has a hint or pair of micro-batch {max(owners, default=0)} of {num}"
    )


def _split(header: Header, streams: Mapping[str, NDArray[Any]]) -> Iterator[MicroBatch]:
    """Yields each micro-batch's views of the streams."""
    cuts: dict[str, list[Any]] = {}
    for name, counts in header.counts.items():
        width = 2 if name == "version_runs" else 1
        ends = list(accumulate((count // width for count in counts), initial=0))
        cuts[name] = [streams[name][start:end] for start, end in pairwise(ends)]
    for name in _OPTIONAL & cuts.keys():
        cuts[name] = [cut if len(cut) else None for cut in cuts[name]]
    hints: list[list[tuple[int, Hint]]] = [[] for _ in header.rollout_ids]
    for place, hint in enumerate(header.hints):
        own = {name: cuts[name][place] for name in _HINT_STREAMS}
        hints[hint.micro_batch].append((hint.sample, Hint(weight=hint.weight, **own)))
    pairs: list[list[PreferencePair]] = [[] for _ in header.rollout_ids]
    for place, pair in enumerate(header.pairs):
        fields = msgspec.structs.asdict(pair)
        pairs[fields.pop("micro_batch")].append(PreferencePair(**fields, **{n: cuts[n][place] for n in _PAIR_STREAMS}))
    own_streams = [name for name in (*_DTYPES, _LOSS_MASK) if name in cuts]
    for index, rollout_ids in enumerate(header.rollout_ids):
        yield MicroBatch(
            run_id=header.run_id,
            step=header.step,
            rank=header.rank,
            index=index,
            num_micro_batches=len(header.rollout_ids),
            num_loss_tokens=header.num_loss_tokens,
            num_hint_tokens=header.num_hint_tokens,
            num_pairs=header.num_pairs,
            rollout_ids=rollout_ids,
            envs=header.envs[index],
            hints=tuple(hints[index]),
            pairs=tuple(pairs[index]),
            **{name: cuts[name][index] for name in own_streams},
        )
