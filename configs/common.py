"""The parts of all settings: sections and their rules, common types of values, and the two transports."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from grpo.configs.facts import Hardware
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt

T = TypeVar("T")
Port: TypeAlias = Annotated[int, Field(ge=1, le=65535)]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**32)]
Seconds: TypeAlias = Annotated[float, Field(ge=0.001, le=1e7)]
Weight: TypeAlias = Annotated[float, Field(ge=0, le=1e6)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Quantization: TypeAlias = Literal["nf4", "fp8", "nvfp4"]
AdapterName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Temperature: TypeAlias = Annotated[float, Field(ge=0.01, le=100)]
Listed: TypeAlias = Annotated[
    tuple[T, ...], BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
]
"""A list, which may be given as one text with commas."""
TemplateArguments: TypeAlias = Annotated[
    dict[str, Any], AfterValidator(lambda given: {name: value for name, value in given.items() if value is not None})
]
"""Arguments of a chat template by name; null takes one back that a preset gives."""
Conflicts: TypeAlias = Iterator[tuple[str, str]]
"""Pairs of a dotted key and what is wrong with its value."""


def only(value: T, why: str) -> AfterValidator:
    """Refuses every other value than `value`, and says `why`."""

    def check(given: T) -> T:
        if given != value:
            raise ValueError(f"must be {value}: {why}")
        return given

    return AfterValidator(check)


def type_is(default: str) -> BeforeValidator:
    """The `type` of a section with alternatives, where none is given."""
    return BeforeValidator(lambda given: {"type": default, **given} if isinstance(given, Mapping) else given)


class OnlyWith:
    """Marks a field that has an effect only while another field of its section has one of `values` or, where none are
    given, is switched on (neither null nor false, 0 or empty).

    Example: ``decay_steps: Annotated[int | None, OnlyWith("lr_scheduler_type", "wsd")] = None``
    """

    def __init__(self, key: str, *values: object) -> None:
        self.key, self.values = key, values

    def holds(self, settings: BaseModel) -> bool:
        """Returns whether the marked field of `settings` has an effect."""
        value = getattr(settings, self.key)
        if not self.values:
            return bool(value)
        return any(one in self.values for one in (value if isinstance(value, tuple) else (value,)))

    def __str__(self) -> str:
        return f"{self.key}: {' or '.join(map(str, self.values))}" if self.values else self.key


class Section(BaseModel):
    """A group of settings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def conflicts(self) -> Conflicts:
        """Yields (key, message) for values that are valid alone but contradict another one of this section."""
        yield from ()

    @property
    def changed(self) -> set[str]:
        """Names of the fields that were set to something else than their default."""
        fields = type(self).model_fields
        return {name for name in self.model_fields_set if getattr(self, name) != fields[name].get_default()}


def all_conflicts(settings: Section, prefix: str = "") -> Conflicts:
    """Every conflict of a section and of those below it: what their `conflicts` find, and keys that have no effect
    because of what their `OnlyWith` names."""
    for name, field in type(settings).model_fields.items():
        value, key = getattr(settings, name), prefix + name
        missing = [one for one in field.metadata if isinstance(one, OnlyWith) and not one.holds(settings)]
        if missing and value is not None and name in settings.changed:
            for idle in changed_keys(value, key):
                yield idle, f"has no effect without {prefix}{missing[0]}; remove it, or set that"
        for position, one in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if isinstance(one, Section):
                yield from all_conflicts(one, f"{key}." if position is None else f"{key}.{position}.")
    yield from ((prefix + key, message) for key, message in settings.conflicts())


def changed_keys(value: Any, key: str) -> Iterator[str]:
    """The dotted key of a value or, where it is a section, of those of its values that are no defaults."""
    if not isinstance(value, Section):
        yield key
        return
    for name in sorted(value.changed):
        yield from changed_keys(getattr(value, name), f"{key}.{name}")


class ProcessSettings(Section):
    """Settings of one program."""

    role: ClassVar[str]
    env_prefix: ClassVar[str]
    """Beginning of the names of its environment variables."""
    exit_codes: ClassVar[str] = (
        "0 done, 1 the run failed, 2 settings that cannot be honoured, 75 a program that is needed has ended and this "
        "one may be started again, 76 a proof does not hold, 130 Ctrl-C, 143 SIGTERM"
    )

    @classmethod
    def fill(cls, tree: dict[str, Any], hardware: Hardware) -> None:
        """Fills in what follows from the device where a file of this program alone leaves it open."""


class Shared(Section):
    """Settings that every program of a run has."""

    model: Any = None
    """The model."""
    output_dir: str = Field(default="outputs", pattern=r"^[^\x00]*\S[^\x00]*$")
    """The run's folder, relative to the current directory; the same for all programs."""
    seed: Seed = 42
    """Seed of everything that is random."""
    sleep_mode: bool = False
    """The server sleeps while the trainer steps, so both fit on one GPU; needs `max_async_level: 0`."""


class OnDevice(Section):
    """Settings of programs that compute."""

    fp32_lm_head: bool = False
    """The LM head is computed in float32. Server and trainer agree better; costs a copy of the head."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` takes a GPU if there is one."""
    colocate: bool = False
    """Server and trainer share one device and one copy of the base weights."""


class ProofSettings(Section):
    """Proofs of what was sampled and trained (`grpo docs proofs`)."""

    on_failure: Literal["stop", "drop", "warn"] = "stop"
    """After a failed proof: `stop` ends the run with exit code 76, before the version is served; `drop` leaves samples
    of failed spot proofs out of the step; `warn` only warns."""


class SpotProofSettings(ProofSettings):
    """Proofs of what was sampled and trained (`grpo docs proofs`)."""

    share: Share = 0.01
    """Share of a batch's older samples that the trainer scores again under their version, at least two a step on
    average (0: none)."""


# --- how batches travel -------------------------------------------------------------------------------------------


class FilesystemTransport(Section):
    """Folders below `output_dir/batches`."""

    type: Literal["filesystem"] = "filesystem"
    hwm: PositiveInt = 10
    """Most batches sent but not yet received (high-water mark)."""


class ZmqTransport(Section):
    """ZeroMQ sockets; the orchestrator binds."""

    type: Literal["zmq"] = "zmq"
    hwm: PositiveInt = 10
    """Most batches sent but not yet received (high-water mark)."""
    host: str = "localhost"
    """The orchestrator's address."""
    port: Port = 5555
    """The orchestrator's port."""
    key_var: str = "GRPO_TRANSPORT_KEY"
    """Environment variable with the key."""


Transport: TypeAlias = Annotated[FilesystemTransport | ZmqTransport, Field(discriminator="type"), type_is("filesystem")]


# --- how policy versions travel -----------------------------------------------------------------------------------


class _Broadcast(Section):
    allow_rounding: Annotated[bool, OnlyWith("format", "merged")] = False
    """Merged weights may be rounded to 16 bits; small updates are lost."""
    keep_last: PositiveInt | None = None
    """Newest versions that stay on disk, besides those in use (null: 8, or 2 of `merged` and `full` ones)."""
    keep_interval: PositiveInt | None = None
    """Versions that are multiples of this stay too (null: none)."""


class FilesystemBroadcast(_Broadcast):
    """Folders below `output_dir/broadcasts`."""

    type: Literal["filesystem"] = "filesystem"
    format: Literal["adapter", "merged", "full"] = "adapter"
    """`adapter`: the LoRA adapter; servers hold several versions. `merged`: weights with the adapter merged in, one
    version at a time. `full`: all weights."""


class HttpBroadcast(_Broadcast):
    """Over HTTP, to servers that share no folder with the orchestrator."""

    type: Literal["http"] = "http"
    format: Literal["adapter", "merged", "full"] = "adapter"
    """`adapter`: the LoRA adapter; servers hold several versions. `merged`: weights with the adapter merged in, one
    version at a time. `full`: all weights."""
    host: str = "localhost"
    """The orchestrator's address."""
    port: Port = 5556
    """The orchestrator's port."""
    key_var: str = "GRPO_TRANSPORT_KEY"
    """Environment variable with the key (if unset, the run's own)."""


class NcclBroadcast(_Broadcast):
    """From GPU to GPU. No server can join late."""

    type: Literal["nccl"] = "nccl"
    format: Literal["merged", "full"] = "merged"
    """`merged`: weights with the adapter merged in. `full`: all weights."""
    host: str = "localhost"
    """The trainer's address."""
    port: Port = 29501
    """Port at which trainer and servers meet."""
    timeout: Seconds = 1200.0
    """Seconds that servers may take to receive a version."""
    inference_world_size: PositiveInt = 1
    """GPUs of all servers together."""


Broadcast: TypeAlias = Annotated[
    FilesystemBroadcast | HttpBroadcast | NcclBroadcast, Field(discriminator="type"), type_is("filesystem")
]


def adapter_conflicts(key: str, names: tuple[str, ...]) -> Conflicts:
    """Yields a conflict for names of adapters that are given twice, and for a single one."""
    if len(set(names)) < len(names):
        yield key, "names an adapter twice; give each a name of its own"
    elif len(names) == 1:
        yield key, "has no effect with one name: one adapter is what there is without it; remove it or name another"
