"""The records that cross a process boundary.

Legend: `S` samples, `T` packed tokens of one micro-batch, `L` tokens of one sample.

Alignment, stated once: element t of every stream belongs to token t. A log-probability at t is that of token t given
the tokens before it in its sample. The first token of a sample has none, so its loss mask is False and its
log-probability 0. All streams of one record have the same length; an optional stream is absent (`None`), never zeros.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from transport.errors import CorruptError, SchemaVersionError

SCHEMA_VERSION = 1
_MAX_INT32 = 2**31 - 1
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that adapters may have: they become folders and names of models."""

PolicyKind = Literal["adapter", "merged", "full"]
"""What a version's weights are: a LoRA adapter; the base's changed matrices with the adapter merged into them; all
weights of the model."""

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def require(condition: bool, message: str) -> None:
    """Raises `CorruptError` with `message` unless `condition` holds."""
    if not condition:
        raise CorruptError(message)


def _check_stream(name: str, stream: NDArray[Any], dtype: type[np.generic], length: int) -> None:
    if stream.dtype != dtype or stream.shape != (length,):
        received = f"{stream.dtype}{list(stream.shape)}"
        raise CorruptError(f"{name} is {received}, expected {np.dtype(dtype)}[{length}]")


def _check_optional(name: str, stream: NDArray[Any] | None, dtype: type[np.generic], length: int) -> None:
    if stream is not None:
        _check_stream(name, stream, dtype, length)


def _check_range(name: str, stream: NDArray[Any], low: int, high: int) -> None:
    if len(stream):
        smallest, largest = int(stream.min()), int(stream.max())
        inside = smallest >= low and largest <= high
        require(inside, f"{name} reach from {smallest} to {largest}, expected {low}..{high}")


def _check_finite(name: str, stream: Float32 | None) -> None:
    # The sum of squares is finite only if every element is: one pass, no temporary array. It overflows for absurd
    # numbers too, hence the second look.
    if stream is not None and not math.isfinite(np.dot(stream, stream)) and not np.isfinite(stream).all():
        raise CorruptError(f"{name} has values that are not finite")


def _check_ids(name: str, ids: Int32) -> None:
    # Negative numbers are large ones when read without sign: one pass instead of two.
    if len(ids) and int(ids.view(np.uint32).max()) > _MAX_INT32:
        raise CorruptError(f"{name} has the negative number {int(ids.min())}")


def _check_ascending(name: str, places: Int32, last: int) -> None:
    ascending = bool((np.diff(places) > 0).all()) and int(places[0]) >= 1 and int(places[-1]) <= last
    require(ascending, f"{name} is not ascending from 1 to at most {last}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """The same turns in a context that holds a hint, for self-distillation.

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
        num_aligned, length = len(self.student_index), len(self.teacher_token_ids)
        _check_stream("teacher_token_ids", self.teacher_token_ids, np.int32, length)
        _check_stream("student_index", self.student_index, np.int32, num_aligned)
        _check_stream("teacher_index", self.teacher_index, np.int32, num_aligned)
        require(num_aligned >= 1, "a hint aligns no tokens, expected at least one")
        _check_ids("teacher_token_ids", self.teacher_token_ids)
        _check_ascending("student_index", self.student_index, _MAX_INT32)
        _check_ascending("teacher_index", self.teacher_index, length - 1)
        require(math.isfinite(self.weight), f"a hint has weight {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two continuations of one prompt, of which teachers prefer the first.

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
    adapter: int = 0
    """The adapter that it trains, by its place among the run's."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            ids = getattr(self, name)
            _check_stream(name, ids, np.int32, len(ids))
            require(len(ids) >= 1, f"a preference pair has no {name}")
            _check_ids(name, ids)
        for name in ("chosen_ref_logprob", "rejected_ref_logprob"):
            require(math.isfinite(getattr(self, name)), f"a preference pair has {name} = {getattr(self, name)}")
        require(0 <= self.adapter <= _MAX_INT32, f"a preference pair has adapter {self.adapter}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
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
    """The same sample with a hint; absent without one."""
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
    """The adapter that sampled it and that it trains, by its place among the run's."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        require(length >= 1, f"sample {self.rollout_id} is empty, expected at least one token")
        _check_stream("token_ids", self.token_ids, np.int32, length)
        _check_stream("loss_mask", self.loss_mask, np.bool_, length)
        _check_stream("inference_logprobs", self.inference_logprobs, np.float32, length)
        for name in ("advantages", "temperatures"):
            stream = getattr(self, name)
            if isinstance(stream, np.ndarray):
                _check_stream(name, stream, np.float32, length)
        _check_optional("teacher_logprobs", self.teacher_logprobs, np.float32, length)
        require(0 <= self.adapter <= _MAX_INT32, f"sample {self.rollout_id} has adapter {self.adapter}")
        require(not self.loss_mask[0], f"sample {self.rollout_id}: the first token cannot carry loss")
        covered = sum(count for _, count in self.policy_versions)
        require(covered == length, f"policy_versions cover {covered} tokens, expected {length}")
        if self.hint is not None:
            _check_ascending("student_index", self.hint.student_index, length - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
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
    num_loss_tokens: int
    """True elements of `loss_mask` in the whole step, over all ranks: the normaliser of the policy loss."""
    num_hint_tokens: int = 0
    """Aligned tokens of all hints in the whole step, over all ranks: the normaliser of the self-distillation loss."""
    num_pairs: int = 0
    """Preference pairs in the whole step, over all ranks: the normaliser of the preference loss."""
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
    teacher_logprobs: Float32 | None = None
    """[T]"""
    adapters: Int32 | None = None
    """[S] the adapter of each sample, by its place among the run's; absent where all are of the first."""
    hints: tuple[tuple[int, Hint], ...] = ()
    """(index of the sample, its hint), which trains the sample's adapter."""
    pairs: tuple[PreferencePair, ...] = ()
    """Preference pairs that are trained along with the samples."""
    rollout_ids: tuple[str, ...]
    """[S]"""

    def __post_init__(self) -> None:
        length, num_samples = len(self.token_ids), len(self.sequence_lengths)
        _check_stream("sequence_lengths", self.sequence_lengths, np.int32, num_samples)
        require(num_samples >= 1, "a micro-batch has no samples")
        _check_range("sequence_lengths", self.sequence_lengths, 1, _MAX_INT32)
        total = int(self.sequence_lengths.sum(dtype=np.int64))
        require(total == length, f"sequence_lengths sum to {total}, expected {length} tokens")
        num_ids = len(self.rollout_ids)
        require(num_ids == num_samples, f"{num_ids} rollout ids for {num_samples} samples")
        _check_stream("token_ids", self.token_ids, np.int32, length)
        _check_ids("token_ids", self.token_ids)
        _check_stream("loss_mask", self.loss_mask, np.bool_, length)
        require(not self.loss_mask[self.starts].any(), "the first token of a sample cannot carry loss")
        _check_stream("inference_logprobs", self.inference_logprobs, np.float32, length)
        for name in ("advantages", "temperatures"):
            stream = getattr(self, name)
            _check_stream(name, stream, np.float32, num_samples if len(stream) == num_samples else length)
        _check_optional("teacher_logprobs", self.teacher_logprobs, np.float32, length)
        _check_optional("adapters", self.adapters, np.int32, num_samples)
        if self.adapters is not None:
            _check_range("adapters", self.adapters, 0, _MAX_INT32)
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ("inference_logprobs", "advantages", "temperatures", "teacher_logprobs"):
                _check_finite(name, getattr(self, name))
        require(bool((self.temperatures > 0).all()), "temperatures has values that are not above 0")
        self._check_version_runs(length)
        require(0 <= self.index < self.num_micro_batches, f"index {self.index} of {self.num_micro_batches}")
        for sample, hint in self.hints:
            require(0 <= sample < num_samples, f"a hint for sample {sample}, there are {num_samples}")
            _check_ascending("student_index", hint.student_index, int(self.sequence_lengths[sample]) - 1)

    def _check_version_runs(self, length: int) -> None:
        runs = self.version_runs
        if runs.dtype != np.int32 or runs.ndim != 2 or runs.shape[1] != 2 or len(runs) < 1:
            raise CorruptError(f"version_runs is {runs.dtype}{list(runs.shape)}, expected int32[runs, 2]")
        _check_range("versions", runs[:, 0], 0, _MAX_INT32)
        _check_range("version runs' numbers of tokens", runs[:, 1], 1, _MAX_INT32)
        covered = int(runs[:, 1].sum(dtype=np.int64))
        require(covered == length, f"version_runs cover {covered} tokens, expected {length}")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Log-probabilities of one fixed sequence under a policy version, as the trainer computed them.

    A server that has loaded the version computes the same; agreement proves that what is served is what was trained.
    """

    version: int
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

    def to_json(self) -> bytes:
        """As UTF-8 JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Canary":
        """Raises `CorruptError` where `data` is no canary."""
        fields = parse_json(data, "canary")
        try:
            noisy = fields["noisy_logprobs"]
            return cls(
                version=int(fields["version"]),
                token_ids=tuple(int(i) for i in fields["token_ids"]),
                logprobs=tuple(float(x) for x in fields["logprobs"]),
                base_logprobs=tuple(float(x) for x in fields["base_logprobs"]),
                dtype=str(fields["dtype"]),
                is_zero=bool(fields["is_zero"]),
                noisy_logprobs=None if noisy is None else tuple(float(x) for x in noisy),
            )
        except (KeyError, TypeError) as error:
            raise CorruptError(f"canary lacks or misuses a field: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What all versions of a run's policy have in common; the programs compare it before they work together."""

    base_model: str
    """Identity of the base model, see `base_identity`."""
    rank: int
    """LoRA rank."""
    alpha: int
    """LoRA alpha."""
    target_modules: tuple[str, ...]
    """Names of the linear layers that have an adapter."""
    sequence_len: int
    """Longest packed micro-batch that the trainer takes, in tokens."""
    dtype: str
    """Type of the trainer's computation."""
    kind: PolicyKind = "adapter"
    """What the files of a version hold. Without an adapter, `full`, rank and alpha are 0 and there are no targets."""
    norm_noise: bool = False
    """Versions may bring noise on the norm weights, for sampling; a server must have been started for it."""
    adapters: tuple[str, ...] = ()
    """Names of a version's adapters, where it has several of the same rank, alpha and targets; the first is that of
    whoever names none. Empty: there is one, without a name."""


def adapter_folders(adapters: Sequence[str]) -> tuple[str, ...]:
    """Where in a version's folder the files of each of these adapters lie, as what their names begin with: those of the
    first, or only one, in the folder itself, those of another in `adapters/NAME/`."""
    return ("", *(f"adapters/{name}/" for name in adapters[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a delivery."""

    size_bytes: int
    digest: str
    """Kind and hexadecimal value, as `sha256:…` or `xxh3_128:…`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchManifest:
    """What a step's folder holds. `(run_id, step, attempt)` identifies the delivery."""

    run_id: str
    step: int
    attempt: int
    files: dict[str, FileEntry]

    def to_json(self) -> bytes:
        """As UTF-8 JSON."""
        return _manifest_json(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> "BatchManifest":
        """Raises `CorruptError` or `SchemaVersionError`."""
        fields = _parse_manifest(data)
        return cls(
            run_id=_str(fields, "run_id"),
            step=_int(fields, "step"),
            attempt=_int(fields, "attempt"),
            files=_files(fields),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyManifest:
    """What a policy version's folder holds."""

    run_id: str
    version: int
    attempt: int
    spec: PolicySpec
    files: dict[str, FileEntry]

    def to_json(self) -> bytes:
        """As UTF-8 JSON."""
        fields = asdict(self)
        if not self.spec.adapters:
            del fields["spec"]["adapters"]
        return _manifest_json(fields)

    @classmethod
    def from_json(cls, data: bytes) -> "PolicyManifest":
        """Raises `CorruptError` or `SchemaVersionError`."""
        fields = _parse_manifest(data)
        spec = fields.get("spec")
        if not isinstance(spec, dict):
            raise CorruptError("manifest has no spec")
        kind = _str(spec, "kind")
        require(kind in get_args(PolicyKind), f"manifest has a policy of the unknown kind {kind!r}")
        policy = PolicySpec(
            base_model=_str(spec, "base_model"),
            rank=_int(spec, "rank"),
            alpha=_int(spec, "alpha"),
            target_modules=_names(spec, "target_modules"),
            sequence_len=_int(spec, "sequence_len"),
            dtype=_str(spec, "dtype"),
            kind=cast(PolicyKind, kind),
            norm_noise=_bool(spec, "norm_noise"),
            adapters=_adapters(spec),
        )
        return cls(
            run_id=_str(fields, "run_id"),
            version=_int(fields, "version"),
            attempt=_int(fields, "attempt"),
            spec=policy,
            files=_files(fields, folders=adapter_folders(policy.adapters)),
        )


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object; `CorruptError` where `data` is something else."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{what} is a JSON {type(fields).__name__}, expected an object")
    return fields


def _manifest_json(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema_version": SCHEMA_VERSION} | fields, indent=1).encode()


def _parse_manifest(data: bytes) -> dict[str, Any]:
    fields = parse_json(data, "manifest")
    if (received := fields.get("schema_version")) != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"manifest has schema version {received!r}, this program reads {SCHEMA_VERSION}; "
            "run the same release of grpo in all three programs"
        )
    return fields


def _str(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise CorruptError(f"manifest has {key} = {value!r}, expected a text")
    return value


def _bool(fields: dict[str, Any], key: str) -> bool:
    value = fields.get(key)
    if not isinstance(value, bool):
        raise CorruptError(f"manifest has {key} = {value!r}, expected true or false")
    return value


def _int(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptError(f"manifest has {key} = {value!r}, expected a number from 0")
    return value


def _names(fields: dict[str, Any], key: str) -> tuple[str, ...]:
    names = fields.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CorruptError(f"manifest's spec has no list of {key}")
    return tuple(names)


def _adapters(spec: dict[str, Any]) -> tuple[str, ...]:
    """Names that folders may have; none, or at least two."""
    if "adapters" not in spec:
        return ()
    names = _names(spec, "adapters")
    good = len(names) > 1 and len(set(names)) == len(names) and all(map(ADAPTER_NAME.fullmatch, names))
    require(good, f"manifest's spec has the adapters {names}, expected several different plain names")
    return names


def _files(fields: dict[str, Any], *, folders: tuple[str, ...] = ("",)) -> dict[str, FileEntry]:
    """Those in the delivery's folder itself, "", or in one of these in it, as `adapters/NAME/`."""
    files = fields.get("files")
    if not isinstance(files, dict):
        raise CorruptError("manifest has no files")
    entries = {}
    for name, entry in files.items():
        folder, slash, own = name.rpartition("/")
        placed = f"{folder}{slash}" in folders and own not in ("", ".", "..") and not set(own) & {"\\", "\0"}
        plain = isinstance(entry, dict) and placed
        require(plain, f"manifest names the file {name!r}, expected a plain file name with size and digest")
        entries[name] = FileEntry(size_bytes=_int(entry, "size_bytes"), digest=_str(entry, "digest"))
    return entries
