"""The settings of a run: what its programs share, said once, and each program's own.

They come from one file (`run.yaml`, a folder with one, or a preset's name), from one file for each program, or from the
command line alone, which then gives at least `--model` and `--env`.
"""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo.configs.common import HttpBroadcast, ProcessSettings, TemplateArguments, all_conflicts
from grpo.configs.cross import AGREED, cross_problems, versions_at_once
from grpo.configs.defaults import fill
from grpo.configs.errors import Problem, SettingsError
from grpo.configs.evaluation import Environments
from grpo.configs.facts import Hardware, model_facts, this_hardware
from grpo.configs.infer import InferSettings, TeacherServerSettings
from grpo.configs.keys import drop, find, get, put
from grpo.configs.loading import ABSENT, COMMAND_LINE, Given, LoadedSettings, S, Texts, Values, read_yaml, split
from grpo.configs.orch import OrchSettings
from grpo.configs.topology import Topology
from grpo.configs.train import QUANTIZED, SharedSettings, TrainSettings
from pydantic import Field, NonNegativeInt, PositiveInt

PRESETS = Path(__file__).parent
RUN_FILE = "run.yaml"
OUTPUTS = Path("outputs")
"""The folder that holds the folders of runs which have not been given one."""
MAX_STEPS = 200
"""Steps of a run for which nobody has said how many."""
ENV_PREFIX = "GRPO_RUN_"
"""Beginning of the names of environment variables with shared settings."""
PROGRAMS: Mapping[str, type[ProcessSettings]] = {
    "train": TrainSettings,
    "infer": InferSettings,
    "orch": OrchSettings,
    "teacher": TeacherServerSettings,
}
"""The sections of a run's file that hold settings of one program."""


class RunSettings(SharedSettings):
    """A run: what its programs share, then each program's own settings."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Go back to the checkpoint of this step (-1: the newest; null: as `resume` says)."""
    output_dir: str = Field(default="outputs", pattern=r"^[^\x00]*\S[^\x00]*$")
    """The run's folder, relative to the current directory (default: below `outputs`, named after run.yaml's folder, or
    environment and model)."""
    max_steps: PositiveInt | None = MAX_STEPS
    """Training steps (null: until stopped)."""
    max_tokens: PositiveInt | None = None
    """Longest answer in tokens (`orch.sampling.max_tokens`). Default lengths, and a preset's, grow with it."""
    env: Environments = ()
    """Environments to train on, as `orch.env`; on the command line `--env FILE:CLASS`, for each one."""
    chat_template_kwargs: TemplateArguments = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`, everywhere (`grpo docs models`); null removes
    one of a preset."""
    api_key_var: str = "VLLM_API_KEY"
    """Environment variable with the inference server's API key."""
    restarts: NonNegativeInt = 3
    """Times that `grpo` restarts a program that ended by itself."""
    infer_replicas: PositiveInt = 1
    """Servers that `grpo` starts on this machine (`grpo launch` uses `topology`)."""
    topology: Topology = Topology()
    """What runs where on a cluster, for `grpo launch`."""
    train: TrainSettings
    """The trainer's own settings."""
    infer: InferSettings
    """The inference server's own settings."""
    orch: OrchSettings
    """The orchestrator's own settings."""
    teacher: TeacherServerSettings = TeacherServerSettings()
    """Settings of the teacher's server, which `grpo` starts where one is needed."""


SHARED: Mapping[str, tuple[str, ...]] = {
    **{key: targets for key, targets in AGREED.items() if not key.startswith(("ckpt.", "max_async_level"))},
    "overwrite_output_dir": ("train.overwrite_output_dir",),
    "resume_with_changed_code": ("train.resume_with_changed_code", "orch.resume_with_changed_code"),
    "env": ("orch.env",),
    "seed": ("train.seed", "infer.seed", "orch.seed"),
    "max_steps": ("train.max_steps", "orch.max_steps"),
    "max_tokens": ("orch.sampling.max_tokens",),
    "device": ("train.device", "infer.device"),
    "lora": ("train.lora",),
    "proofs.share": ("train.proofs.share",),
    "lora_target_modules": ("train.lora_target_modules",),
}
"""Keys of a run, and those of the programs that they stand for, unless these are set too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """The settings of a run that agree with each other."""

    settings: RunSettings
    train: LoadedSettings[TrainSettings]
    infer: LoadedSettings[InferSettings]
    orch: LoadedSettings[OrchSettings]
    teacher: LoadedSettings[TeacherServerSettings]
    given: Given
    hardware: Hardware
    """Where trainer and server are to run, from which defaults follow."""
    source: tuple[str | Path | None, tuple[str, ...]] = None, ()
    """The run and the arguments that these settings were loaded from."""
    notes: tuple[str, ...] = ()
    """Lines for people: settings that were left open, and what became of them."""

    def problem(self, key: str, message: str) -> Problem:
        """Returns a problem with a key that the programs share."""
        origin = self.given[key][0] if key in self.given else "default"
        return Problem(origin=origin, key=key, value=get(self.settings.model_dump(), key), message=message)


def run_file(target: str | Path) -> Path:
    """Returns the file of a run: the path itself, the `run.yaml` in a folder, or that of a preset. Raises
    `SettingsError`."""
    path = Path(target)
    preset = PRESETS / str(target).replace("-", "_") / RUN_FILE
    if path.is_file():
        return path
    if (path / RUN_FILE).is_file():
        return path / RUN_FILE
    if path.name == str(target) and not path.exists() and preset.is_file():
        return preset
    what = f"a folder without {RUN_FILE}" if path.is_dir() else "no file, no folder and no preset"
    if ".py" in path.suffix:
        what += "; an environment is given as --env FILE:CLASS, after a run or with --model"
    elif is_model(target):
        what += f"; a model is given as --model {target}, with --env"
    if close := difflib.get_close_matches(str(target), presets(), n=1):
        what += f" (did you mean {close[0]}?)"
    message = f"is {what}; give a folder with {RUN_FILE}, such a file, or one of the presets {', '.join(presets())}"
    raise SettingsError([Problem(origin=COMMAND_LINE, key="run", value=str(target), message=message)])


def is_model(target: str | Path) -> bool:
    """Returns whether a word looks like a model: a folder with `config.json`, or a Hugging Face id."""
    if Path(target).exists():
        return Path(target, "config.json").is_file() and not Path(target, RUN_FILE).is_file()
    return re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.yaml)", str(target)) is not None


def presets() -> list[str]:
    """Returns the names of the presets that come with grpo."""
    return sorted(file.parent.name for file in PRESETS.glob(f"*/{RUN_FILE}"))


def load_run(
    target: str | Path | None, arguments: Sequence[str] = (), *, hardware: Hardware | None = None
) -> LoadedRun:
    """Returns the settings of a run, from its file and `--key value` arguments; without `target` from the files that
    `--train`, `--infer`, `--orch` and maybe `--teacher` give, or from the arguments alone. Defaults are those for
    `hardware` (None: this machine's).

    Precedence, highest first: a program's key on the command line, a shared key there, environment, file, default.
    Raises `SettingsError` with every problem.
    """
    options = _one_list(split(RunSettings, arguments))
    files, idle = _files(target, options), set[tuple[str, str]]()
    while True:
        try:
            found = _loaded(target, options, files, idle, hardware or this_hardware())
            return replace(found, source=(target, tuple(arguments)))
        except SettingsError as error:
            mended = {(one.origin, one.key) for one in error.problems if one.ineffective and is_preset(one.origin)}
            if mended <= idle:
                raise
            idle |= mended


def _one_list(options: Texts) -> Texts:
    """Returns the options with all values of `--env` as one list."""
    given = [text for key, text in options if key == "env" and text is not None]
    if len(given) < 2 or any(text.startswith("[") for text in given):
        return options
    members = [text if text.startswith("{") else json.dumps({"id": text}) for text in given]
    return [*((key, text) for key, text in options if key != "env"), ("env", f"[{', '.join(members)}]")]


def is_preset(origin: str) -> bool:
    """Returns whether a value's origin is the file of a preset."""
    return Path(origin).name == RUN_FILE and Path(origin).parent.parent == PRESETS


def _loaded(
    target: str | Path | None,
    options: Texts,
    files: Mapping[str, Path],
    idle: Set[tuple[str, str]],
    hardware: Hardware,
) -> LoadedRun:
    """Does the work of `load_run`, without `idle`: file and key of a preset's settings that another one has left
    without effect. The user has not given them, and need not take them back."""
    values = Values(shared=SHARED)
    for prefix, file in files.items():
        tree = read_yaml(file, prefix)
        for key in [key for origin, key in idle if origin == str(file)]:
            drop(tree, key)
        values.add(tree, str(file), below=prefix)
    values.add_environment(RunSettings, ENV_PREFIX)
    for role, cls in PROGRAMS.items():
        values.add_environment(cls, cls.env_prefix, below=f"{role}.")
    values.check_environment({ENV_PREFIX: RunSettings, **{cls.env_prefix: cls for cls in PROGRAMS.values()}})
    values.add_options(RunSettings, [one for one in options if one[0] not in PROGRAMS])
    for section in (*PROGRAMS, "orch.model"):
        put(values.tree, section, {})
    if not files and not any(get(values.tree, key) for key in ("train.model", "orch.env", "orch.arena")):
        values.problems.append(_no_run())
        raise SettingsError(values.problems)
    notes = _named_and_ended(values, None if target is None else files[""])
    _derive(values)
    notes += fill(values, hardware, model_facts(get(values.tree, "train.model")), is_preset=is_preset)
    own_files = {role: file for role, file in files.items() if role}
    name = str(files.get("", "default" if own_files else "grpo"))
    missing = {key: name for name, keys in SHARED.items() for key in keys if not own_files}
    settings = values.validated(RunSettings, default=name, missing=missing)
    return replace(_checked(settings, values.given, own_files, name, hardware), notes=notes)


def _no_run() -> Problem:
    message = (
        f"is not given; give --model MODEL --env ENVIRONMENT, a folder with {RUN_FILE}, such a file, or one of the "
    )
    return Problem(origin=COMMAND_LINE, key="run", value=None, message=f"{message}presets {', '.join(presets())}")


def _named_and_ended(values: Values, file: Path | None) -> tuple[str, ...]:
    """Gives a run a folder of its own and an end, where nobody has. Returns what is to be told of that."""
    tree, notes = values.tree, list[str]()
    if all(get(tree, key, ABSENT) is ABSENT for key in ("output_dir", *SHARED["output_dir"])):
        names = [] if file is None else [file.absolute().parent.name if file.name == RUN_FILE else file.stem]
        folder = str(OUTPUTS / folder_name(names or [*_env_names(tree), Path(str(get(tree, "train.model"))).name]))
        values.add({"output_dir": folder}, "default")
    if all(get(tree, key, ABSENT) is ABSENT for key in ("max_steps", *SHARED["max_steps"])):
        values.add({"max_steps": MAX_STEPS}, "default")
        notes.append(f"{MAX_STEPS} steps: max_steps is not given; --max_steps null goes on until it is stopped")
    elif get(tree, "train.max_steps", ABSENT) is None:
        values.tree["train"]["max_steps"] = -1
    if file is not None and is_preset(str(file)) and not is_preset(values.given.get("model", (str(file), ""))[0]):
        name = file.parent.name
        notes.append(f"{name} is settings for a model of its own; grpo --model and --env alone have defaults for yours")
    return tuple(notes)


def folder_name(names: Sequence[str]) -> str:
    """Returns a name for a run's folder, of plain letters: `MyEnv-Qwen3-4B`."""
    return re.sub(r"[^\w.]+", "-", "-".join(names))[:100].strip("-.") or "run"


def _env_names(tree: Mapping[str, Any]) -> list[str]:
    """Returns short names of the environments: `MyEnv` of `my_env.py:MyEnv`, `codes` of the data set `codes.csv`."""
    given = get(tree, "orch.env") or get(tree, "orch.arena")
    names = []
    for one in given if isinstance(given, list) else [given]:
        env = {"id": one} if isinstance(one, str) else one if isinstance(one, Mapping) else {}
        path = get(env, "args.path")
        name = Path(path).stem if env.get("id") == "dataset" and isinstance(path, str) else env.get("id", "")
        names.append(str(env.get("name") or name).rpartition(":")[2])
    return names


def load_part(cls: type[S], target: str, arguments: Sequence[str]) -> S:
    """Returns one program's settings of a run, with `arguments` of that program; shared keys hold for all. Raises
    `SettingsError`."""
    names = {key: name for name, keys in SHARED.items() for key in keys}
    given = split(cls, arguments)
    if wrong := [(key, text) for key, text in given if key.startswith(f"{cls.role}.") and find(cls, key) is None]:
        message = f"grpo-{cls.role} has its own settings only; leave the first part out: --"
        raise SettingsError(
            [
                Problem(origin=COMMAND_LINE, key=key, value=text, message=message + key.partition(".")[2])
                for key, text in wrong
            ]
        )
    own = [(f"{cls.role}.{key}", text) for key, text in given]
    words = [f"--{names.get(key, key)}" + ("" if text is None else f"={text}") for key, text in own]
    settings: S = getattr(load_run(target, words), cls.role).settings
    return settings


def _files(target: str | Path | None, options: Texts) -> dict[str, Path]:
    """Returns the files by the beginning of their keys. Raises `SettingsError`."""
    given = [(key, text) for key, text in options if key in PROGRAMS]
    named, message = dict(given), "no file; give --train, --infer and --orch FILE, or a run in their place"
    for number, (key, text) in enumerate(given):
        if target is not None or key in dict(given[:number]):
            two = "is one of two files of the same settings; give one alone"
            raise SettingsError([Problem(origin=COMMAND_LINE, key=key, value=text, message=two)])
    if target is not None:
        return {"": run_file(target)}
    if named and (missing := [key for key in ("train", "infer", "orch") if key not in named]):
        raise SettingsError([Problem(origin=COMMAND_LINE, key=key, value=None, message=message) for key in missing])
    return {f"{role}.": Path(text or "") for role, text in named.items()}


def _derive(values: Values) -> None:
    """Fills in what follows for one program from the settings of another, where that leaves it open."""
    tree = values.tree
    if get(tree, "train.lora") in (False, "false"):
        put(tree, "train.weight_broadcast.format", "full")
    if (kind := get(tree, "train.transport_type")) is not None:
        put(tree, "train.rollout_transport.type", kind)
    if nccl := get(tree, "train.weight_broadcast.type") == "nccl":
        sizes = [str(get(tree, f"infer.{key}", 1)) for key in ("tp", "dp")]
        if all(map(str.isdecimal, sizes)):
            put(tree, "train.weight_broadcast.inference_world_size", math.prod(map(int, sizes)))
    for targets in AGREED.values():
        said = [key for key in targets if get(tree, key, ABSENT) is not ABSENT][:1]
        for key in targets if said else ():
            if get(tree, key, ABSENT) is ABSENT and key != "train.max_async_level":
                put(tree, key, get(tree, said[0]))
                values.given[key] = values.given.get(said[0], ("default", said[0]))
    if get(tree, "train.weight_broadcast.type") == "http":
        default = HttpBroadcast()
        host = get(tree, "train.weight_broadcast.host", default.host)
        port = get(tree, "train.weight_broadcast.port", default.port)
        put(tree, "infer.weight_broadcast_url", f"http://{host}:{port}")
    if get(tree, "train.weight_broadcast.format", "merged" if nccl else "adapter") != "adapter":
        put(tree, "infer.enable_lora", False)
    elif (rank := get(tree, "train.lora_rank")) is not None:
        put(tree, "infer.max_lora_rank", rank)
    if get(tree, "train.noise_scheduler.enabled") in (True, "true"):
        put(tree, "infer.norm_noise", True)
    for key, kind in QUANTIZED.items():
        if get(tree, f"train.{key}") in (True, "true"):
            put(tree, "infer.base_quantization", kind)


def _fitted(settings: RunSettings) -> tuple[TrainSettings, InferSettings]:
    """Returns trainer and server with the settings that one leaves open and the other has: the device that they
    share, and room for all versions that are in flight."""
    train, infer = settings.train, settings.infer
    of_infer: dict[str, Any] = {}
    if train.colocate and infer.colocate:
        device = next((one for one in (train.device, infer.device) if one != "auto"), "auto")
        train = train if "device" in train.model_fields_set else train.model_copy(update={"device": device})
        of_infer = {"device": device}
    if infer.enable_lora:
        needed = versions_at_once(settings.orch, norm_noise=infer.norm_noise)
        of_infer["max_loras"] = needed
    return train, infer.model_copy(update={k: v for k, v in of_infer.items() if k not in infer.model_fields_set})


def _checked(
    settings: RunSettings, given: Given, files: Mapping[str, Path], name: str, hardware: Hardware
) -> LoadedRun:
    """Returns the run if its programs' settings contradict neither themselves nor each other. Raises
    `SettingsError`."""

    def loaded(own: S) -> LoadedSettings[S]:
        prefix = f"{own.role}."
        return LoadedSettings(
            settings=own,
            given={key.removeprefix(prefix): one for key, one in given.items() if key.startswith(prefix)},
            file=str(files.get(prefix, name)),
            prefix="" if prefix in files else prefix,
        )

    train, infer = _fitted(settings)
    orch, teacher = loaded(settings.orch), loaded(settings.teacher)
    run = LoadedRun(
        settings=settings,
        train=loaded(train),
        infer=loaded(infer),
        orch=orch,
        teacher=teacher,
        given=given,
        hardware=hardware,
    )
    programs: tuple[LoadedSettings[Any], ...] = (run.train, run.infer, run.orch, run.teacher)
    problems = [one.problem(key, message) for one in programs for key, message in all_conflicts(one.settings)]
    problems += [run.problem(key, message) for key, message in all_conflicts(run.settings.topology, "topology.")]
    problems += cross_problems(run.train, run.infer, run.orch)
    if problems:
        raise SettingsError([*{(one.origin, one.key, one.message): one for one in problems}.values()])
    return run
