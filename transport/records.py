"""The records that cross a process, a disk or a socket, each defined once and used by both ends.

Legend: `B` micro-batches of one rank and step, `S` samples, `T` packed tokens of one micro-batch, `L` tokens of one
sample.

Alignment, stated once: element t of every stream belongs to token t. A log-probability at t is that of token t given
the tokens before it in its sample. The first token of a sample has none, so its loss mask is False and its
log-probability 0. All streams of one record have the same length; an optional stream is absent (`None`), never zeros.

A sample refuses shapes that are not aligned when it is made. Micro-batches, of which a step may have hundreds, are
checked by the codec, over the whole arrays of a rank, when they are decoded.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
import numpy as np
from grpo.transport.errors import CorruptError, SchemaVersionError
from numpy.typing import NDArray

SCHEMA_VERSION = 8
_MAX_INT32 = 2**31 - 1
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that adapters may have: they become folders and names of models."""

PolicyKind = Literal["adapter", "merged", "full"]
"""The kind of a version's weights: a LoRA adapter; the base's changed matrices with the adapter merged into them; all
weights of the model."""

Quantization = Literal["nf4", "fp8", "nvfp4"]
"""Formats in which an adapter's base can be held."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
"""A number from 0."""


R = TypeVar("R")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all records: they do not change, and decoding one with a field too many, too few or of
    another type fails."""

    def to_json(self) -> bytes:
        """Returns the record as indented UTF-8 JSON."""
        return msgspec.json.format(msgspec.json.encode(self, enc_hook=_as_list), indent=1)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Returns the record that `data` holds. Raises `CorruptError`."""
        return _from_json(cls, data, cls.__name__)


def _from_json(kind: type[R], data: bytes, what: str) -> R:
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=array_of)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{what} cannot be read: {error}") from error


def _as_list(array: Any) -> list[Any]:
    return np.asarray(array).tolist()  # type: ignore[no-any-return]


def _as_bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def array_of(kind: Any, values: Any) -> NDArray[Any]:
    """Returns the array that a field of type Int32 or Float32 gets, of numbers (JSON) or of bytes (MessagePack). Raises
    ValueError."""
    dtype: Any = np.int32 if kind == Int32 else np.float32
    if isinstance(values, bytes | memoryview):
        return np.frombuffer(values, np.dtype(dtype).newbyteorder("<"))
    numbers = np.asarray(values)
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in ("i" if dtype is np.int32 else "if")):
        raise ValueError(f"expected a list of numbers, {'whole' if dtype is np.int32 else 'any'} ones")
    if dtype is np.int32 and len(numbers) and (numbers.min() < -_MAX_INT32 or numbers.max() > _MAX_INT32):
        raise ValueError(f"expected whole numbers up to {_MAX_INT32}")
    with np.errstate(over="ignore"):  # whoever reads it finds what float32 does not hold
        return numbers.astype(dtype)


MESSAGE_TYPE = "application/msgpack"
"""Media type of records as MessagePack, in which arrays are bytes: 8 a token with its log-probability."""
_to_message = msgspec.msgpack.Encoder(enc_hook=_as_bytes).encode
_to_compact_json = msgspec.json.Encoder(enc_hook=_as_list).encode


def to_body(content: object, media_type: str) -> bytes:
    """Returns records as the body of a request or response: MessagePack, or JSON in which arrays are lists."""
    return _to_message(content) if media_type == MESSAGE_TYPE else _to_compact_json(content)


def from_body(data: bytes, kind: type[R], media_type: str) -> R:
    """Returns the record of a body. Raises MsgspecError and UnicodeDecodeError."""
    decode = msgspec.msgpack.decode if media_type == MESSAGE_TYPE else msgspec.json.decode
    return decode(data, type=kind, dec_hook=array_of)


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Returns the JSON object that `data` holds, whatever its fields. Raises `CorruptError`."""
    return _from_json(dict[str, Any], data, what)


def check_version(version: object, what: str) -> None:
    """Raises `SchemaVersionError` for a version of the formats that this program does not read."""
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{what} has schema version {version!r}, this program reads {SCHEMA_VERSION}; run the same release of grpo "
            "in all three programs"
        )


def require(condition: bool, message: str) -> None:
    """Raises `CorruptError` with `message` unless `condition` holds."""
    if not condition:
        raise CorruptError(message)


def _check_ids(name: str, ids: Int32) -> None:
    require(len(ids) >= 1 and int(ids.min()) >= 0, f"{name} is empty or has a negative number")


def _check_ascending(name: str, places: Int32, last: int) -> None:
    ascending = bool((np.diff(places) > 0).all()) and int(places[0]) >= 1 and int(places[-1]) <= last
    require(ascending, f"{name} is not ascending from 1 to at most {last}")


class Hint(Record, frozen=True, kw_only=True, eq=False):
    """A sample's turns in a context that holds a hint, for self-distillation.

    Example: the sample ``[5, 6, 7]`` with hint tokens 8, 9 before its last token:
    ``Hint(teacher_token_ids=[5, 6, 8, 9, 7], student_index=[2], teacher_index=[4], weight=1.0)``
    """

    teacher_token_ids: Int32
    """[L'] the sample's tokens with the hint inserted at the turn's boundary."""
    student_index: Int32
    """[K] places in the sample of the tokens that are compared, ascending, from 1."""
    teacher_index: Int32
    """[K] places of the same tokens in `teacher_token_ids`, ascending, from 1."""
    weight: float
    """Weight of this hint in the loss."""

    def __post_init__(self) -> None:
        student, teacher = len(self.student_index), len(self.teacher_index)
        require(student == teacher >= 1, f"a hint aligns {student} tokens with {teacher}, expected as many, and some")
        _check_ids("teacher_token_ids", self.teacher_token_ids)
        _check_ascending("teacher_index", self.teacher_index, len(self.teacher_token_ids) - 1)
        require(math.isfinite(self.weight), f"a hint has weight {self.weight}")

    def check_places(self, length: int) -> None:
        """Raises `CorruptError` where it names tokens beyond a sample of this length."""
        _check_ascending("student_index", self.student_index, length - 1)


class PreferencePair(Record, frozen=True, kw_only=True, eq=False):
    """Two continuations of one prompt; teachers prefer the first.

    Example: ``PreferencePair(prompt_ids=[5, 6], chosen_ids=[7], rejected_ids=[8, 9], chosen_ref_logprob=-1.2,
    rejected_ref_logprob=-3.4, source="2 of 3 teachers")``
    """

    prompt_ids: Int32
    """[Lp] at least one token."""
    chosen_ids: Int32
    """[Lc] at least one token."""
    rejected_ids: Int32
    """[Lr] at least one token."""
    chosen_ref_logprob: float
    """Natural log-probability of the whole of `chosen_ids` under the reference model."""
    rejected_ref_logprob: float
    """Natural log-probability of the whole of `rejected_ids` under the reference model."""
    source: str
    """Where the preference comes from."""
    adapter: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT32)] = 0
    """Index of the adapter that it trains."""
    score_gap: float = 1.0
    """Score of the first minus score of the second; a score is the share of teachers that would have done it."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            _check_ids(name, getattr(self, name))
        for name in ("chosen_ref_logprob", "rejected_ref_logprob", "score_gap"):
            require(math.isfinite(getattr(self, name)), f"a preference pair has {name} = {getattr(self, name)}")


NO_TEACHER_LOGPROB = 1.0
"""The value in `teacher_logprobs` of a token that the teacher does not know: no log-probability is above 0."""


class Tolerance(Record, frozen=True, kw_only=True):
    """How far a server's log-probabilities may be from the trainer's, in nats: what it was held to when it proved its
    newest version. Example: ``Tolerance(gap=1e-4, measure="max_abs")``"""

    gap: float
    """At temperature 1, of the figure that `measure` names."""
    measure: Literal["max_abs", "mean_abs"]
    """The largest difference of any token (both compute in float32), or the mean one."""


class TrainingSample(Record, frozen=True, kw_only=True, eq=False):
    """One sequence that the policy may be trained on.

    Example: ``TrainingSample(token_ids=[5, 6, 7], loss_mask=[False, True, True], inference_logprobs=[0, -0.1, -2.3],
    advantages=0.5, temperatures=1.0, policy_versions=((3, 3),), env="reverse-text", group_id="17",
    rollout_id="17/2", reward=1.0, stop_reason="stop")``
    """

    token_ids: Int32
    """[L] prompt and sampled tokens as the server saw them."""
    loss_mask: Bool
    """[L] True where the policy sampled the token and it may be trained."""
    inference_logprobs: Float32
    """[L] natural log, under the policy that sampled, at the sampling temperature; 0 where not sampled."""
    advantages: Float32 | float
    """[L], or one number for all tokens."""
    temperatures: Float32 | float
    """[L], or one number for all tokens."""
    teacher_logprobs: Float32 | None = None
    """[L] natural log, under the teacher; absent without a teacher."""
    policy_versions: tuple[tuple[int, int], ...]
    """Runs of (version, number of tokens) in order; the numbers sum to L. A prompt has its answer's version."""
    hint: Hint | None = None
    """This sample with a hint in its context; absent without one."""
    env: str
    """Label of the environment."""
    group_id: str
    """Samples of one group share their baseline."""
    rollout_id: str
    """Unique in the run."""
    reward: float
    """The rollout's total reward."""
    stop_reason: str
    """`stop` or `length`."""
    adapter: int = 0
    """Index of the adapter that sampled it and that it trains."""
    server: str = ""
    """The server that sampled it; of several turns by several servers, their names with spaces between. Empty where no
    server did."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        streams = (self.loss_mask, self.inference_logprobs, self.advantages, self.temperatures, self.teacher_logprobs)
        lengths = {len(stream) for stream in streams if isinstance(stream, np.ndarray)}
        lengths.add(sum(count for _, count in self.policy_versions))
        aligned = length > 0 and lengths == {length}
        require(aligned, f"sample {self.rollout_id} has {length} tokens, and streams of {sorted(lengths)}")
        require(not self.loss_mask[0], f"sample {self.rollout_id}: the first token cannot carry loss")
        if self.hint is not None:
            self.hint.check_places(length)


class MicroBatch(Record, frozen=True, eq=False, gc=False):
    """Samples packed one after the other, for one forward and backward pass.

    Example: two samples of 3 and 2 tokens: ``token_ids=[5, 6, 7, 5, 9], sequence_lengths=[3, 2]``; the boundaries
    are those lengths and nothing else.
    """

    run_id: str
    """The run that it belongs to."""
    step: int
    """The step that it trains, from 1."""
    rank: int
    """The data-parallel rank that it is for."""
    index: int
    """Its place among the micro-batches of its rank in this step, from 0."""
    num_micro_batches: int
    """How many micro-batches the rank has in this step."""
    token_ids: Int32
    """[T]"""
    sequence_lengths: Int32
    """[S] tokens of each sample; they sum to T."""
    loss_mask: Bool
    """[T]"""
    inference_logprobs: Float32
    """[T]"""
    advantages: Float32
    """[S] where each sample has one, or [T]; `per_token` gives [T]."""
    temperatures: Float32
    """[S] where each sample has one, or [T]; `per_token` gives [T]."""
    version_runs: Int32
    """[R, 2] runs of (version, number of tokens) in order; the numbers sum to T."""
    rollout_ids: tuple[str, ...]
    """[S]"""
    teacher_logprobs: Float32 | None = None
    """[T]"""
    adapters: Int32 | None = None
    """[S] index of each sample's adapter; absent where all are of the first one."""
    hints: tuple[tuple[int, Hint], ...] = ()
    """(index of the sample, its hint), which trains the sample's adapter."""
    pairs: tuple[PreferencePair, ...] = ()
    """Preference pairs that are trained along with the samples."""
    envs: tuple[str, ...] = ()
    """[S] the environment of each sample, or none."""
    servers: tuple[str, ...] = ()
    """[S] the server of each sample, or none, as `TrainingSample.server`."""
    tolerances: dict[str, Tolerance] = msgspec.field(default_factory=dict)
    """By server. One that is not among them proves nothing."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """[S] offset of each sample's first token."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        return ends - self.sequence_lengths

    @property
    def position_ids(self) -> Int32:
        """[T] position of each token in its own sample, from 0."""
        positions = np.arange(len(self.token_ids)) - np.repeat(self.starts, self.sequence_lengths)
        return positions.astype(np.int32)

    @property
    def policy_versions(self) -> Int32:
        """[T] the version that each token was sampled under."""
        return np.repeat(self.version_runs[:, 0], self.version_runs[:, 1])

    def per_token(self, stream: Float32) -> Float32:
        """[T] a stream that may have one number a sample."""
        return stream if len(stream) == len(self.token_ids) else np.repeat(stream, self.sequence_lengths)


class Canary(Record, frozen=True, kw_only=True):
    """Log-probabilities of one fixed sequence under a policy version, as the trainer computed them.

    A server that has loaded the version computes the same; agreement proves that what is served is what was trained.
    """

    version: Natural
    token_ids: tuple[int, ...]
    """[L] fixed and seeded, the same for all versions of a run."""
    logprobs: tuple[float, ...]
    """[L - 1] under the policy, temperature 1; element i is that of token i + 1."""
    base_logprobs: tuple[float, ...]
    """[L - 1] under the base model without an adapter."""
    dtype: str
    """Type of the trainer's computation, `float32` or `bfloat16`."""
    is_zero: bool
    """The adapter changes nothing (its B matrices are all zero), so the policy's log-probabilities are the base's."""
    noisy_logprobs: tuple[float, ...] | None = None
    """[L - 1] under the policy with this version's noise on the norm weights; None where it has none."""

    def __post_init__(self) -> None:
        expected = len(self.token_ids) - 1
        require(expected >= 1, f"a canary of {len(self.token_ids)} tokens, expected at least 2")
        for name in ("logprobs", "base_logprobs", "noisy_logprobs"):
            values = getattr(self, name)
            if values is None:
                continue
            require(len(values) == expected, f"canary has {len(values)} {name}, expected {expected}")
            require(bool(np.isfinite(values).all()), f"canary has {name} that are not finite")

    def cut(self, length: int) -> "Canary":
        """Returns the canary of the first `length` tokens, whose log-probabilities are the same without the rest."""
        num, noisy = length - 1, self.noisy_logprobs
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:num],
            base_logprobs=self.base_logprobs[:num],
            noisy_logprobs=None if noisy is None else noisy[:num],
        )


class PolicySpec(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The facts that all versions of a run's policy share; the programs compare them before they work together."""

    base_model: str
    """Identity of the base model, see `base_identity`."""
    rank: Natural
    """LoRA rank."""
    alpha: Natural
    """LoRA alpha."""
    target_modules: tuple[str, ...]
    """Names of the linear layers that have an adapter."""
    sequence_len: Natural
    """Longest packed micro-batch that the trainer takes, in tokens."""
    dtype: str
    """Type of the trainer's computation."""
    kind: PolicyKind = "adapter"
    """Kind of weights in a version's files. With `full` there is no adapter: rank and alpha are 0, targets empty."""
    norm_noise: bool = False
    """Versions may bring noise on the norm weights, for sampling; a server must have been started for it."""
    adapters: tuple[str, ...] = ()
    """Names of a version's adapters, where it has several of the same rank, alpha and targets; the first is that of
    whoever names none. Empty: there is one, without a name."""
    quantization: Quantization | None = None
    """How the trainer holds the base; servers must have the same numbers."""

    def __post_init__(self) -> None:
        names = self.adapters
        several = len(names) > 1 and len(set(names)) == len(names) and all(map(ADAPTER_NAME.fullmatch, names))
        require(not names or several, f"the adapters are {names}, expected several different plain names")


def adapter_folders(adapters: Sequence[str]) -> tuple[str, ...]:
    """Returns where in a version's folder the files of each of these adapters lie: "" for the first or only one,
    `adapters/NAME/` for each other one."""
    return ("", *(f"adapters/{name}/" for name in adapters[1:]))


class FileEntry(Record, frozen=True, kw_only=True):
    """One file of a delivery."""

    size_bytes: Natural
    digest: str
    """Kind and hexadecimal value, `xxh3_128:…`."""


class Manifest(Record, frozen=True, kw_only=True):
    """The files of a folder, and the version of the formats."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    files: dict[str, FileEntry]

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Returns the manifest that `data` holds. Raises `CorruptError` or `SchemaVersionError`."""
        check_version(parse_json(data, cls.__name__).get("schema_version"), cls.__name__)
        return super().from_json(data)

    @property
    def folders(self) -> Sequence[str]:
        """The folders that files may lie in: "" for the delivery's own folder, `adapters/NAME/` below it."""
        return ("",)

    def __post_init__(self) -> None:
        for name in self.files:
            folder, slash, own = name.rpartition("/")
            plain = f"{folder}{slash}" in self.folders and own not in ("", ".", "..") and not set(own) & {"\\", "\0"}
            require(plain, f"the manifest names the file {name!r}, expected a plain file name")


class BatchManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of a step's folder. `(run_id, step)` identifies the delivery."""

    step: Natural


class PolicyManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of a policy version's folder."""

    version: Natural
    spec: PolicySpec

    @property
    def folders(self) -> Sequence[str]:
        return adapter_folders(self.spec.adapters)
