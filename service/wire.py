"""Reads training data of the client's requests into arrays, and writes its answers.

The schema is that of the client's own package, the extra `service`; client and service need not have the same version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from grpo.service.errors import Refused
from grpo.service.log import Received, Sample, tokens_digest
from grpo.transport.records import Float32, Int32
from tinker.proto import tinker_public_pb2 as schema

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest body of a request, after decompression; a client sends at most 5 MB of data in one by itself."""
MAX_CANDIDATES = 256
"""Targets of one token at most."""
_NUMPY: dict[int, np.dtype[Any]] = {
    schema.DTYPE_FLOAT32: np.dtype("<f4"),
    schema.DTYPE_INT64: np.dtype("<i8"),
    schema.DTYPE_INT32: np.dtype("<i4"),
}
INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "gspo": ("target_tokens", "logprobs", "advantages"),
    "dro": ("target_tokens", "logprobs", "advantages"),
}
"""The losses that are served, and the arrays that each takes for every datum, all as long as its tokens."""
_CLIPPED = ("clip_low_threshold", "clip_high_threshold")
CONFIG = {"ppo": _CLIPPED, "cispo": _CLIPPED, "gspo": _CLIPPED, "dro": ("beta",)}
"""What `loss_fn_config` may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence. Example: tokens [5, 6, 7] with targets [6, 7, 8]; target i is predicted from tokens 0 … i. Where
    each token has several candidates, those of token 0 come first."""

    id: str = ""
    """Number of its request and its own in that, as `4/0`."""
    token_ids: Int32
    """[L]"""
    targets: Int32
    """[L · candidates]"""
    candidates: int = 1
    """Targets of each token."""
    inputs: Mapping[str, Float32]
    """The loss's other arrays, each [L · candidates]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """The data of one `forward` or `forward_backward`."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float]
    forward_only: bool


def decompressed(body: bytes, encoding: str) -> bytes:
    """Returns the body without its Content-Encoding. Raises `Refused`."""
    if not encoding:
        return body
    if encoding != "zstd":
        raise Refused(f"Content-Encoding is {encoding!r:.40}, expected zstd or none", status=415)
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_BODY_BYTES).stream_reader(body) as reader:
            plain: bytes = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"the body is not zstd: {error}") from error
    if len(plain) > MAX_BODY_BYTES:
        raise Refused(f"the body has more than {MAX_BODY_BYTES} bytes; send fewer datums in a request", status=413)
    return plain


def parse(body: bytes) -> Any:
    """Returns the protobuf message of a forward_backward. Raises `Refused`."""
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is no ForwardBackwardRequest: {error}") from error
    return message


def received(message: Any) -> Received:
    """Returns the datums of a parsed message as they came: a datum's tokens are those of its input and, where there is
    one, its last target."""
    lengths, digests = [], []
    for datum in message.data:
        ids = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
        targets = datum.loss_fn_inputs.get("target_tokens")
        dtype = None if targets is None else _NUMPY.get(targets.dtype)
        last = b"" if targets is None or dtype is None else targets.dense[-dtype.itemsize :]
        if dtype is not None and dtype.kind == "i" and len(last) == dtype.itemsize:
            ids += np.frombuffer(last, dtype).astype("<i4").tobytes()
        lengths.append(len(ids) // 4)
        digests.append(tokens_digest(ids))
    return Received(forward_only=message.forward_only, lengths=lengths, digests=digests)


def read_forward_backward(message: Any, *, vocab_size: int, max_tokens: int) -> ForwardBackward:
    """Returns the data of a parsed message. Raises `Refused` for what the loss or the model cannot take, with the
    datum's number."""
    if message.loss_fn not in INPUTS:
        raise Refused(f"loss_fn is {message.loss_fn!r:.60}; this service has {', '.join(INPUTS)}")
    config = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise Refused(f"loss_fn_config has {key} = {value.text!r:.60}, expected a number")
        config[key] = value.number
    known = CONFIG.get(message.loss_fn, ())
    if unknown := sorted(config.keys() - set(known)):
        expected = ", ".join(known) or "nothing"
        raise Refused(f"loss_fn_config has {unknown[0]}, and {message.loss_fn} takes {expected}")
    if not message.data:
        raise Refused("there are no datums, expected at least one")
    names, data = INPUTS[message.loss_fn], []
    for number, datum in enumerate(message.data):
        try:
            one = _datum(datum, names, message.loss_fn, vocab_size=vocab_size, max_tokens=max_tokens)
            data.append(replace(one, id=f"{message.seq_id}/{number}"))
        except Refused as error:
            raise Refused(f"datum {number}: {error}") from error
    if len(numbers := {datum.candidates for datum in data}) > 1:
        raise Refused(f"target_tokens have {sorted(numbers)} candidates a token, expected one number in a request")
    return ForwardBackward(data=data, loss_fn=message.loss_fn, config=config, forward_only=message.forward_only)


def _datum(datum: Any, names: Sequence[str], loss_fn: str, *, vocab_size: int, max_tokens: int) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"model_input has a chunk of kind {kind}; only tokens are served")
        chunks.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), "model_input"))
    token_ids = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    if not 1 <= len(token_ids) <= max_tokens:
        raise Refused(f"model_input has {len(token_ids)} tokens, expected 1 to {max_tokens}")
    given = datum.loss_fn_inputs
    if set(given) != set(names):
        raise Refused(f"loss_fn_inputs are {sorted(given)}, and {loss_fn} takes {sorted(names)}")
    shape = list(given["target_tokens"].shape)
    candidates = shape[1] if loss_fn == "cross_entropy" and len(shape) == 2 else 1
    if not 1 <= candidates <= MAX_CANDIDATES:
        raise Refused(f"target_tokens have {candidates} candidates a token, expected 1 to {MAX_CANDIDATES}")
    arrays = {name: _tensor(given[name], name, len(token_ids), candidates) for name in names}
    targets = arrays.pop("target_tokens")
    for name, ids in (("model_input", token_ids), ("target_tokens", targets)):
        if ids.dtype.kind != "i":
            raise Refused(f"{name} has the type {ids.dtype}, expected int64")
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise Refused(f"{name} has the id {bad}, expected 0 to {vocab_size - 1}")
    for name, values in arrays.items():
        if not np.isfinite(values).all():
            raise Refused(f"{name} has the value {values[~np.isfinite(values)][0]}, expected finite ones")
    floats = {name: values.astype(np.float32) for name, values in arrays.items()}
    whole: Any = {"token_ids": token_ids.astype(np.int32), "targets": targets.astype(np.int32)}
    return Datum(**whole, candidates=candidates, inputs=floats)


def _tensor(tensor: Any, name: str, length: int, candidates: int) -> Any:
    """Returns [L · candidates] of a tensor message of shape [L], or [L, candidates]."""
    is_flat = len(tensor.shape) <= 1 and candidates == 1
    if tensor.WhichOneof("encoding") != "dense" or not (is_flat or list(tensor.shape) == [length, candidates]):
        raise Refused(f"{name} has the shape {list(tensor.shape)} or is sparse; expected one value for each token")
    if (dtype := _NUMPY.get(tensor.dtype)) is None:
        raise Refused(f"{name} has the type {tensor.dtype}, expected float32 or int64")
    values = _array(tensor.dense, dtype, name)
    if len(values) != length * candidates:
        raise Refused(f"{name} has {len(values)} values for {length} tokens of model_input")
    return values


def _array(data: bytes, dtype: "np.dtype[Any]", name: str) -> Any:
    if len(data) % dtype.itemsize:
        raise Refused(f"{name} has {len(data)} bytes, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def forward_backward_answer(
    outputs: Mapping[str, Sequence[Float32]], metrics: Mapping[str, float], *, candidates: int = 1
) -> bytes:
    """Returns the answer's bytes: `outputs` are the arrays of each datum by name, with `candidates` for each token; a
    metric's name ends with how several answers are to be reduced, as `loss:sum`."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    record = message.loss_fn_outputs.add()
    for name, arrays in outputs.items():
        record.num_datums = len(arrays)
        field = record.fields[name]
        field.dtype = schema.DTYPE_FLOAT32
        if candidates > 1:
            field.trailing_shape.append(candidates)
        field.data = np.concatenate(arrays).astype("<f4").tobytes()
        field.offsets = np.cumsum([0, *(4 * len(one) for one in arrays)]).astype("<i8").tobytes()
    content: bytes = message.SerializeToString(deterministic=True)
    return content


def sequences_of(content: bytes) -> list[tuple[Int32, Float32]]:
    """Returns tokens and log-probabilities [L] of each sequence in an answer of `asample`."""
    message = schema.SampleResponse()
    message.ParseFromString(content)
    return [(np.frombuffer(one.tokens, "<i4"), np.frombuffer(one.logprobs, "<f4")) for one in message.sequences]


def samples_of(prompt: Sequence[int], content: bytes, *, version: int | None) -> list[Sample]:
    """Returns the samples in an answer of `asample`."""
    start = np.array(prompt, "<i4").tobytes()
    return [
        Sample(
            tokens=tokens_digest(start + tokens.tobytes()),
            logprobs=tokens_digest(logprobs.tobytes()),
            num_tokens=len(tokens),
            version=version,
        )
        for tokens, logprobs in sequences_of(content)
    ]
