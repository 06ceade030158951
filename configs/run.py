"""The settings of a run: what its programs share, said once, and each program's own.

They come from one file (`run.yaml`, a folder with one, or a preset's name) or from one file for each program.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from configs.common import (
    FilesystemSending,
    ProcessSettings,
    Sending,
    all_conflicts,
)
from configs.cross import DTYPES, cross_problems, versions_at_once
from configs.errors import Problem, SettingsError
from configs.infer import InferSettings, TeacherServerSettings
from configs.keys import get, known_keys, put
from configs.loading import PROGRAMS, Loaded, S, validated
from configs.orch import OrchSettings
from configs.sources import COMMAND_LINE, Gathered, Given, Options, command_line, environment, read_yaml, split
from configs.train import SharedSettings, TrainSettings

PRESETS = Path(__file__).parent
RUN_FILE = "run.yaml"
ENV_PREFIX = "GRPO_RUN_"
"""What the names of environment variables begin with that hold what the programs share."""

_GPU = r"([0-9]+|(GPU|MIG)-[^\s,]+)"


def _joined(given: Any) -> Any:
    return ",".join(map(str, given)) if isinstance(given, list) else str(given) if isinstance(given, int) else given


Gpus: TypeAlias = Annotated[Annotated[str, Field(pattern=rf"^{_GPU}(,{_GPU})*$")] | None, BeforeValidator(_joined)]


class RunSettings(SharedSettings):
    """A run: what its programs share, then each program's own settings."""

    resume_step: int | None = Field(default=None, ge=-1)
    """The run goes back to the checkpoint of this step (-1: the newest complete one; null: as `resume` says)."""
    max_steps: PositiveInt | None = None
    """Number of training steps (null: until stopped)."""
    api_key_var: str = "VLLM_API_KEY"
    """Name of the environment variable that holds the inference server's API key."""
    rollout_transport: Sending = FilesystemSending()
    """How batches travel from the orchestrator to the trainer."""
    restarts: NonNegativeInt = 3
    """How often `grpo` starts each program again that has ended by itself."""
    infer_gpus: Gpus = None
    """GPUs of the server: indices or UUIDs with commas, as 0,1 (null: `grpo` chooses)."""
    train_gpus: Gpus = None
    """GPUs of the trainer (null: `grpo` chooses)."""
    teacher_gpus: Gpus = None
    """GPUs of the teacher's server (null: `grpo` chooses)."""
    train: TrainSettings
    """The trainer's own settings."""
    infer: InferSettings
    """The inference server's own settings."""
    orch: OrchSettings
    """The orchestrator's own settings."""
    teacher: TeacherServerSettings = TeacherServerSettings()
    """Settings of the teacher's server, which `grpo` starts where one is needed."""

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """The GPUs of each program that was given some."""
        given = {"infer": self.infer_gpus, "train": self.train_gpus, "teacher": self.teacher_gpus}
        return {role: tuple(names.split(",")) for role, names in given.items() if names is not None}


_TRAINER_KEYS = known_keys(TrainSettings)
SHARED: Mapping[str, tuple[str, ...]] = {
    "model": ("train.model", "infer.model", "orch.model.name"),
    "output_dir": ("train.output_dir", "infer.output_dir", "orch.output_dir"),
    "resume": ("train.resume", "orch.resume"),
    "resume_step": ("train.ckpt.resume_step", "orch.ckpt.resume_step"),
    "overwrite_output_dir": ("train.overwrite_output_dir",),
    "seed": ("train.seed", "infer.seed", "orch.seed"),
    "max_steps": ("train.max_steps", "orch.max_steps"),
    "device": ("train.device", "infer.device"),
    "colocate": ("train.colocate", "infer.colocate"),
    "sleep_mode": ("train.sleep_mode", "infer.sleep_mode", "orch.sleep_mode"),
    "sequence_len": ("train.sequence_len", "orch.seq_len"),
    "lora": ("train.lora",),
    "lora_rank": ("train.lora_rank", "orch.model.lora_rank"),
    "lora_alpha": ("train.lora_alpha", "orch.model.lora_alpha"),
    "lora_target_modules": ("train.lora_target_modules",),
    "lora_adapters": ("train.lora_adapters", "orch.model.lora_adapters"),
    "api_key_var": ("infer.api_key_var", "orch.client.api_key_var"),
    "rollout_transport.hwm": ("orch.rollout_transport.hwm",),
    **{key: (f"train.{key}", f"orch.{key}") for key in _TRAINER_KEYS if key.startswith("rollout_transport.")},
    **{key: (f"train.{key}",) for key in _TRAINER_KEYS if key.startswith("weight_broadcast.")},
}
"""Keys of a run, and those of the programs that they stand for, unless these are set too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The settings of a run that agree with each other."""

    settings: RunSettings
    train: Loaded[TrainSettings]
    infer: Loaded[InferSettings]
    orch: Loaded[OrchSettings]
    teacher: Loaded[TeacherServerSettings]
    given: Mapping[str, Given]
    """Dotted key of every value that was set, to how it was set."""

    def problem(self, key: str, message: str) -> Problem:
        """A problem with a key that the programs share."""
        origin = self.given[key].origin if key in self.given else "default"
        return Problem(origin=origin, key=key, value=get(self.settings.model_dump(), key), message=message)


def run_file(target: str | Path) -> Path:
    """The file of a run: the path itself, the `run.yaml` in a folder, or that of a preset. Raises `SettingsError`."""
    path = Path(target)
    if path.is_file():
        return path
    if (path / RUN_FILE).is_file():
        return path / RUN_FILE
    preset = PRESETS / str(target).replace("-", "_") / RUN_FILE
    if path.name == str(target) and not path.exists() and preset.is_file():
        return preset
    what = f"a folder without {RUN_FILE}" if path.is_dir() else "no file, no folder and no preset"
    message = f"is {what}; give a folder with {RUN_FILE}, such a file, or one of the presets {', '.join(presets())}"
    raise SettingsError([Problem(origin=COMMAND_LINE, key="run", value=str(target), message=message)])


def presets() -> list[str]:
    """Names of the presets that come with grpo."""
    return sorted(file.parent.name for file in PRESETS.glob(f"*/{RUN_FILE}"))


def load_run(target: str | Path | None, arguments: Sequence[str] = ()) -> Run:
    """The settings of a run, from its file and `--key value` arguments; without `target` from the files that `--train`,
    `--infer`, `--orch` and maybe `--teacher` give.

    Precedence, highest first: a program's key on the command line, a shared key there, environment, file, default.
    Raises `SettingsError` with every problem.
    """
    return load_given(target, *split(RunSettings, arguments))


def load_part(cls: type[S], target: str, arguments: Sequence[str]) -> S:
    """One program's settings of a run, with `arguments` of that program; those that programs share hold for all. Raises
    `SettingsError`."""
    names = {key: name for name, keys in SHARED.items() for key in keys}
    words, options = split(cls, arguments)
    own = [(f"{cls.role}.{key}", text) for key, text in options]
    run = load_given(target, words, [(names.get(key, key), text) for key, text in own])
    settings: S = getattr(run, cls.role).settings
    return settings


def load_given(target: str | Path | None, words: Sequence[str], options: Options) -> Run:
    """As `load_run`, of a command line that is taken apart."""
    files, own_files = _files(target, options), target is None
    gathered = Gathered()
    for prefix, file in files.items():
        layer = Gathered()
        layer.add(read_yaml(file, prefix), str(file), below=prefix)
        gathered = _shared_out(layer).over(gathered)
    programs: tuple[type[ProcessSettings], ...] = (TrainSettings, InferSettings, OrchSettings, TeacherServerSettings)
    prefixes = {ENV_PREFIX: "", **{cls.env_prefix: f"{cls.role}." for cls in programs}}
    gathered = _shared_out(environment(RunSettings, prefixes)).over(gathered)
    options = [one for one in options if one[0] not in PROGRAMS]
    gathered = _shared_out(command_line(RunSettings, words, options)).over(gathered)
    for section in (*PROGRAMS, "orch.model"):
        put(gathered.tree, section, {})
    if not own_files:
        _derive(gathered.tree)
    name = str(files.get("", "default"))
    missing = {} if own_files else {target: name for name, targets in SHARED.items() for target in targets}
    settings = validated(RunSettings, gathered, default_origin=name, missing=missing)
    return _checked(settings, gathered.given, {} if not own_files else files, name)


def _files(target: str | Path | None, options: Options) -> dict[str, Path]:
    """What the keys of each file begin with, to the file. Raises `SettingsError`."""
    named: dict[str, Path] = {}
    problems = []

    def problem(key: str, value: object, message: str) -> None:
        problems.append(Problem(origin=COMMAND_LINE, key=key, value=value, message=message))

    for role, text in options:
        if role in PROGRAMS and role in named:
            problem(role, text, "is given twice; give it once")
        elif role in PROGRAMS:
            named[role] = Path(text or "")
            if target is not None:
                problem(role, text, f"{target} has the settings of all programs; remove one of the two")
    if target is None and not named:
        problem("run", None, f"none is given; give a folder with {RUN_FILE}, or one of {', '.join(presets())}")
    elif target is None:
        for role in PROGRAMS[:3]:
            if role not in named:
                problem(role, None, f"no file; give a run's folder, file or name, or --{role} FILE")
    if problems:
        raise SettingsError(problems)
    return {"": run_file(target)} if target is not None else {f"{role}.": file for role, file in named.items()}


_ABSENT = object()


def _shared_out(layer: Gathered) -> Gathered:
    """The same with the shared keys given to the programs."""
    for name, targets in SHARED.items():
        if (value := get(layer.tree, name)) is None:
            continue
        for target in targets:
            if get(layer.tree, target, _ABSENT) is _ABSENT:
                put(layer.tree, target, value)
                layer.given[target] = layer.given.get(name, Given(COMMAND_LINE, name))
    return layer


def _derive(tree: dict[str, Any]) -> None:
    """Fills in what follows for one program from the settings of another."""
    train = tree["train"] if isinstance(tree["train"], dict) else {}
    broadcast = train.get("weight_broadcast")
    nccl = get(broadcast, "type") == "nccl"
    if train.get("lora") in (False, "false"):
        put(tree, "train.weight_broadcast.format", "full")
    kind = get(tree, "train.weight_broadcast.format", "merged" if nccl else "adapter")
    if kind != "adapter":
        put(tree, "orch.weight_broadcast.format", kind)
        put(tree, "infer.enable_lora", False)
    elif (rank := train.get("lora_rank")) is not None:
        put(tree, "infer.max_lora_rank", rank)
    if nccl:
        put(tree, "orch.weight_broadcast.type", "nccl")
        put(tree, "infer.weight_broadcast_type", "nccl")
        sizes = [get(tree, f"infer.{key}", 1) for key in ("tp", "dp")]
        put(tree, "train.weight_broadcast.inference_world_size", math.prod(int(size) for size in sizes))
    if get(train, "noise_scheduler.enabled") in (True, "true"):
        put(tree, "infer.norm_noise", True)


def _fitted(settings: RunSettings, *, own_files: bool) -> tuple[TrainSettings, InferSettings]:
    """Trainer and server with what one leaves open and the other says: device and type of base weights that they share,
    and room for all versions that are in flight."""
    train, infer = settings.train, settings.infer
    of_train: dict[str, Any] = {}
    of_infer: dict[str, Any] = {}
    if train.colocate and infer.colocate:
        device = next((one for one in (train.device, infer.device) if one != "auto"), "auto")
        of_train = {"device": device}
        of_infer = {"device": device, "dtype": DTYPES[train.recipe]}
    if infer.enable_lora and not own_files:
        needed = versions_at_once(train, settings.orch, norm_noise=infer.norm_noise)
        of_infer["max_loras"] = max(infer.max_loras, needed)
    of_train = {key: value for key, value in of_train.items() if key not in train.model_fields_set}
    of_infer = {key: value for key, value in of_infer.items() if key not in infer.model_fields_set}
    return train.model_copy(update=of_train), infer.model_copy(update=of_infer)


def _checked(settings: RunSettings, given: Mapping[str, Given], files: Mapping[str, Path], name: str) -> Run:
    """The run, if its programs' settings contradict neither themselves nor each other. Raises `SettingsError`."""

    def loaded(own: S) -> Loaded[S]:
        prefix = f"{own.role}."
        return Loaded(
            settings=own,
            given={key.removeprefix(prefix): one for key, one in given.items() if key.startswith(prefix)},
            file=str(files.get(prefix, name)),
            prefix="" if prefix in files else prefix,
        )

    train, infer = _fitted(settings, own_files=bool(files))
    orch, teacher = loaded(settings.orch), loaded(settings.teacher)
    run = Run(settings=settings, train=loaded(train), infer=loaded(infer), orch=orch, teacher=teacher, given=given)
    programs: tuple[Loaded[Any], ...] = (run.train, run.infer, run.orch, run.teacher)
    problems = [one.problem(key, message) for one in programs for key, message in all_conflicts(one.settings)]
    problems += cross_problems(run.train, run.infer, run.orch)
    if problems:
        raise SettingsError([one for position, one in enumerate(problems) if one not in problems[:position]])
    return run
