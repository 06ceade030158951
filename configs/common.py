"""What the settings of all three programs share: base classes, and loading from file, environment and command line.

Precedence, highest first: command line, environment, YAML file, default. Each value remembers where it came from,
so that an error can say which file or variable to mend.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from configs.errors import Problem, SettingsError

COMMAND_LINE = "command line"
DEFAULT = "default"


class Section(BaseModel):
    """A nested group of settings."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


def changed_fields(settings: BaseModel) -> set[str]:
    """Names of the fields that were set to something else than their default."""
    fields = type(settings).model_fields
    return {name for name in settings.model_fields_set if getattr(settings, name) != fields[name].get_default()}


class WeightBroadcastSettings(Section):
    """How policy versions travel from the trainer to the servers."""

    type: Literal["filesystem", "nccl"] = "filesystem"
    """`filesystem`: folders below `output_dir/broadcasts`. `nccl`: the weights from GPU to GPU, and a small folder
    that announces them; all servers must stay, and none can join late."""
    format: Literal["adapter", "merged", "full"] = "adapter"
    """`adapter`: the LoRA adapter; servers hold several versions at once. `merged`: the matrices that it changes, with
    it merged into them; servers decode faster, but hold one version, so that they drain before each switch. `full`:
    all weights, of `lora: false`; also one version at a time."""
    allow_rounding: bool = False
    """Let `merged` round to 16 bits, which loses the smaller part of each update."""
    max_shard_bytes: PositiveInt = 5_000_000_000
    """Largest file of weights in bytes, with `merged` and `full`."""
    keep_last: PositiveInt | None = None
    """How many of the newest versions stay on disk (null: 8, or 2 of `merged` and `full` ones). One that is in use
    always stays."""
    keep_interval: PositiveInt | None = None
    """Versions that are multiples of this stay on disk too (null: no others)."""
    host: str = "localhost"
    """Address of the trainer's machine, with `nccl`."""
    port: int = Field(default=29501, ge=1, le=65535)
    """Port at which trainer and servers meet, with `nccl`."""
    timeout: PositiveFloat = 1200.0
    """Seconds that the servers may take to receive a version, with `nccl`."""
    inference_world_size: PositiveInt = 1
    """Number of GPUs of all servers together, with `nccl`."""

    def of_publisher(self) -> dict[str, Any]:
        """What the trainer's end of the channel is made from."""
        keep_last = self.keep_last or (8 if self.format == "adapter" else 2)
        return self.model_dump(exclude={"format", "allow_rounding"}) | {"keep_last": keep_last}

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys of the trainer's that have no effect or contradict each other."""
        changed = changed_fields(self)
        if self.type == "nccl" and self.format == "adapter":
            yield "weight_broadcast.type", "sends whole matrices, not adapters; set weight_broadcast.format: merged"
        if self.format == "adapter":
            without_effect = {"max_shard_bytes", "allow_rounding"} & changed
            yield from _no_effect(without_effect, "with weight_broadcast.format: adapter; remove it")
        elif self.type == "nccl":
            yield from _no_effect({"max_shard_bytes"} & changed, "with weight_broadcast.type: nccl; remove it")
        if self.format == "full":
            yield from _no_effect({"allow_rounding"} & changed, "with weight_broadcast.format: full; remove it")
        if self.type == "filesystem":
            yield from _no_effect(_NCCL_KEYS & changed, "with weight_broadcast.type: filesystem; remove it")

    def conflicts_of_reader(self) -> Iterator[tuple[str, str]]:
        """Keys that only the trainer can honour."""
        ours = {"type", "format"}
        yield from _no_effect(changed_fields(self) - ours, "on the orchestrator; set it for the trainer")


def conflicts_of_adapters(key: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of adapters that are none, or that stand for one adapter."""
    if len(set(names)) < len(names):
        yield key, "names an adapter twice; give each a name of its own"
    elif len(names) == 1:
        yield key, "has no effect with one name: one adapter is what there is without it; remove it or name another"


_NCCL_KEYS = {"host", "port", "timeout", "inference_world_size"}


def _no_effect(keys: set[str], why: str) -> Iterator[tuple[str, str]]:
    for key in sorted(keys):
        yield f"weight_broadcast.{key}", f"has no effect {why}"


class RolloutTransportSettings(Section):
    """How batches travel from the orchestrator to the trainer."""

    type: Literal["filesystem", "zmq"] = "filesystem"
    """`filesystem`: folders below `output_dir/batches`. `zmq`: sockets; the orchestrator binds."""
    host: str = "localhost"
    """Address of the orchestrator, with `zmq`. One that other machines reach needs a key."""
    port: int = Field(default=5555, ge=1, le=65535)
    """Port of the orchestrator, with `zmq`."""
    hwm: int = Field(default=10, ge=1)
    """High-water mark: with this many batches sent and not received, the orchestrator waits."""
    key_var: str = "GRPO_TRANSPORT_KEY"
    """Name of the environment variable that holds the key of both ends, with `zmq`. Where it is set, the sockets are
    encrypted and admit only who has the key."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect."""
        for key in sorted({"host", "port", "key_var"} & changed_fields(self)):
            if self.type == "filesystem":
                yield f"rollout_transport.{key}", "has no effect with rollout_transport.type: filesystem; remove it"


class ProcessSettings(BaseSettings):
    """Settings of one program. Subclasses set the environment prefix and the role."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        env_nested_delimiter="__",
        env_parse_none_str="null",
        protected_namespaces=(),
    )
    role: ClassVar[str]
    exit_codes: ClassVar[str] = "0 done, 1 the run failed, 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"
    commands: ClassVar[Mapping[str, str]] = {}
    """What the program does instead of its usual work, each with a file and without settings: option to its help."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (key, message) for values that are valid alone but contradict another or would have no effect."""
        yield from ()

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only explicit values: `load` reads and merges the sources itself."""
        return (init_settings,)


S = TypeVar("S", bound=ProcessSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S]):
    """Settings together with where each value came from."""

    settings: S
    origins: Mapping[str, str]
    """Dotted key of every value that was set, to where it was set."""
    file: str
    """Name of the YAML file, or of the program where there was none."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with `key` of these settings."""
        return Problem(origin=self.origin(key), key=key, value=value_at(self.settings, key), message=message)

    def origin(self, key: str) -> str:
        """Where the value of `key` came from."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            if found := self.origins.get(".".join(parts[:length])):
                return found
        return f"{self.file} ({DEFAULT})"


def value_at(settings: BaseModel, key: str) -> object:
    """The value of a dotted key; `env.0.id` reaches into lists."""
    value: Any = settings
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else getattr(value, part)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


# --- keys ---------------------------------------------------------------------------------------------------------


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The nested settings classes that a field's annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_of(inner)]


def known_keys(cls: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a settings class, sections included (`sampling`, `sampling.max_tokens`, …)."""
    keys = []
    for name, field in cls.model_fields.items():
        keys.append(prefix + name)
        for section in sections_of(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def nearest_key(cls: type[BaseModel], key: str) -> str | None:
    """The known key that most resembles `key`, compared whole and by its last part."""
    known = known_keys(cls)
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.75):
        return close[0]
    last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
    close = difflib.get_close_matches(key.rsplit(".", 1)[-1], last, n=1, cutoff=0.6)
    return last[close[0]] if close else None


def _unknown(cls: type[BaseModel], key: str) -> str:
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    nearest = nearest_key(cls, plain)
    return f"unknown key; did you mean {nearest}?" if nearest else "unknown key; --help lists the known ones"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for name, value in high.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


# --- sources ------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every problem is reported in one form."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError([Problem(origin=COMMAND_LINE, key=self.prog, value=sys.argv[1:], message=message)])


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                problem = f"the key {key} stands twice; merge the two"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    def fail(message: str) -> SettingsError:
        return SettingsError([Problem(origin=str(path), key="(file)", value=str(path), message=message)])

    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError:
        raise fail("no such file; give the path of a YAML file with settings") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise fail(f"cannot be read as YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise fail(f"holds a {type(tree).__name__}, expected a mapping of keys to values")
    return {str(key): value for key, value in tree.items()}


def _environment(cls: type[ProcessSettings]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Values, their origins, and problems, from environment variables with the program's prefix."""
    prefix = str(cls.model_config["env_prefix"])
    known, origins, problems = set(known_keys(cls)), {}, []
    for name, value in os.environ.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix).lower().replace("__", ".")
            origins[key] = f"environment variable {name}"
            if key not in known:
                problems.append(Problem(origin=origins[key], key=key, value=value, message=_unknown(cls, key)))
    values = EnvSettingsSource(cls, case_sensitive=False, env_parse_none_str="null")() if origins else {}
    return {k: v for k, v in values.items() if any(o.split(".")[0] == k for o in origins)}, origins, problems


def _unknown_arguments(cls: type[BaseModel], arguments: Sequence[str]) -> list[Problem]:
    problems = []
    for position, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        key, _, value = argument[2:].partition("=")
        rest = arguments[position + 1 : position + 2]
        received = value or (rest[0] if rest and not rest[0].startswith("--") else "")
        problems.append(Problem(origin=COMMAND_LINE, key=key, value=received, message=_unknown(cls, key)))
    if arguments and not problems:
        message = "unexpected argument; FILE.yaml comes first, and settings are given as --key value"
        problems.append(Problem(origin=COMMAND_LINE, key=arguments[0], value=arguments[0], message=message))
    return problems


def _problems_of(
    error: ValidationError, cls: type[ProcessSettings], origins: Mapping[str, str], default_origin: str
) -> list[Problem]:
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        origin = next((origins[k] for k in _prefixes(key) if k in origins), default_origin)
        if item["type"] == "extra_forbidden":
            problems.append(Problem(origin=origin, key=key, value=item["input"], message=_unknown(cls, key)))
        elif item["type"] == "missing":
            message = f"required; set it in the file, or give --{key}"
            problems.append(Problem(origin=origin, key=key, value=None, message=message))
        else:
            problems.append(Problem(origin=origin, key=key, value=item["input"], message=item["msg"]))
    return problems


def _prefixes(key: str) -> Iterator[str]:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def make_parser(cls: type[ProcessSettings], prog: str) -> tuple[argparse.ArgumentParser, Any]:
    """A parser with every setting as an option, and the source that reads what it parsed."""
    usage = f"{prog} [FILE.yaml] [--dry-run] [--key value ...]"
    epilog = f"exit codes: {cls.exit_codes}"
    parser = _Parser(prog=prog, usage=usage, description=cls.__doc__, epilog=epilog, allow_abbrev=False)
    help_text = "resolve, check and print the effective settings, and stop"
    parser.add_argument("--dry-run", action="store_true", help=help_text)
    for name, about in cls.commands.items():
        parser.add_argument(f"--{name}", metavar="PATH", help=about)
    source: Any = CliSettingsSource(
        cls, root_parser=parser, cli_avoid_json=True, cli_hide_none_type=True, cli_parse_none_str="null"
    )
    return parser, source


def load(cls: type[S], *, file: str | Path | None, arguments: Sequence[str] = ()) -> Loaded[S]:
    """Settings of one program from its YAML file, the environment and `--key value` arguments.

    Raises `SettingsError` with every problem: unknown keys, values of a wrong type or out of range, required keys
    that are missing, contradictions, and keys that would have no effect.
    """
    parser, source = make_parser(cls, f"grpo-{cls.role}")
    parsed, unknown = parser.parse_known_args(list(arguments))
    source(parsed_args=parsed)
    from_cli: dict[str, Any] = source()
    from_env, env_origins, problems = _environment(cls)
    name = str(file) if file is not None else f"grpo-{cls.role}"
    from_file = _read_yaml(Path(file)) if file is not None else {}
    problems += _unknown_arguments(cls, unknown)
    origins = {key: name for key, _ in _flat(from_file)} | env_origins
    origins |= {key: COMMAND_LINE for key, _ in _flat(from_cli)}
    try:
        settings = cls.model_validate(_merge(_merge(from_file, from_env), from_cli))
    except ValidationError as error:
        problems += [p for p in _problems_of(error, cls, origins, name) if p not in problems]
        raise SettingsError(problems) from None
    loaded = Loaded(settings=settings, origins=origins, file=name)
    problems += [loaded.problem(key, message) for key, message in settings.conflicts()]
    if problems:
        raise SettingsError(problems)
    return loaded


def dump(settings: ProcessSettings) -> str:
    """The effective settings as YAML, defaults included."""
    text: str = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """Settings for the `main()` of one program; answers `--help` and `--dry-run` itself.

    Exits with status 0 after those two, and with status 2 and every problem on standard error where the settings
    cannot be honoured.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, _ = make_parser(cls, f"grpo-{cls.role}")
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    try:
        options, _ = parser.parse_known_args(arguments)
        settings = load(cls, file=file, arguments=arguments).settings
    except SettingsError as error:
        exit_with_problems(error)
    if options.dry_run:
        print(dump(settings), end="")
        raise SystemExit(0)
    return settings


def exit_with_problems(error: SettingsError) -> NoReturn:
    """Prints every problem on standard error and exits with status 2."""
    print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr)
    raise SystemExit(2)
