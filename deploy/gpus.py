"""Which GPUs each program of a run takes: what was asked for, or divided where there are enough. Not yet run: needs two
GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from configs.errors import Problem, SettingsError
from configs.infer import InferSettings, TeacherServerSettings
from configs.loading import Loaded, S
from configs.sources import COMMAND_LINE
from configs.train import TrainSettings
from deploy.teacher import device_of

VARIABLE = "CUDA_VISIBLE_DEVICES"
_WHAT_TAKES_THEM = {
    "infer": "the server's tp · dp (infer.yaml)",
    "train": "the trainer's gpus (train.yaml)",
    "teacher": "the teacher's tp · dp (teacher.yaml)",
}
_ON_CPU = {
    "teacher": "has no effect: the teacher's server computes on a CPU, as the policy's unless --teacher.device says "
    "otherwise; remove it, or set --teacher.device cuda"
}
_OPTIONS = "--infer_gpus, --train_gpus and --teacher_gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """What the launcher sees. Example: with CUDA_VISIBLE_DEVICES=2,3 ``VisibleGpus(names=("2", "3"), listed=True)``."""

    names: tuple[str, ...] = ()
    """Indices of the machine's GPUs, or UUIDs."""
    listed: bool = False
    """Whether the environment lists them; otherwise they are all that the machine has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Who has which GPUs.

    Example: ``Gpus(sees={"infer": ("0",)}, takes={"infer": ("0",), "train": ("0",)})`` where the server was given the
    first of two, and the trainer, which sees both, takes it too.
    """

    sees: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a program's environment lists. Programs that see what the launcher sees are left out."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a program computes on: the first ones that it sees. Programs on a CPU are left out."""
    named: frozenset[str] = frozenset()
    """Programs for which the command line names GPUs."""
    line: str | None = None
    """Tells who takes which; None where there is nothing to choose."""

    def variables(self, role: str) -> dict[str, str]:
        """Environment variables that a program is started with."""
        return {VARIABLE: ",".join(self.sees[role])} if role in self.sees else {}

    def shared(self, one: str, other: str) -> str | None:
        """A GPU that both programs take, if there is any."""
        return next((name for name in self.takes.get(one, ()) if name in self.takes.get(other, ())), None)


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> VisibleGpus:
    """The GPUs that a program would see; looks without loading torch. As CUDA does, it reads the environment's list up
    to the first entry that is none; indices are compared with the devices in `folder`, where these show."""
    listed = environment.get(VARIABLE)
    if not (folder / "nvidiactl").exists():
        return VisibleGpus(listed=listed is not None)
    num_shown = len([*folder.glob("nvidia[0-9]*")])
    if listed is None:
        return VisibleGpus(names=tuple(map(str, range(max(1, num_shown)))))

    def is_one(name: str) -> bool:
        if name.isdecimal():
            return not num_shown or int(name) < num_shown
        return name not in ("", "-1")

    return VisibleGpus(names=tuple(takewhile(is_one, (name.strip() for name in listed.split(",")))), listed=True)


def gpus_of(
    asked: Mapping[str, Sequence[str]],
    train: Loaded[TrainSettings],
    infer: Loaded[InferSettings],
    teacher: Loaded[TeacherServerSettings] | None,
    visible: VisibleGpus,
    problems: list[Problem],
) -> Gpus:
    """Of server, trainer, and teacher where its server is started; none, with problems added, where they cannot have
    what was asked for."""
    trainer, server = train.settings, infer.settings
    needs: dict[str, tuple[str, int]] = {
        "infer": (server.device, server.tp * server.dp),
        "train": (trainer.device, trainer.gpus),
    }
    if teacher is None:
        asked = {role: names for role, names in asked.items() if role != "teacher"}
    else:
        needs["teacher"] = (device_of(teacher, infer), teacher.settings.tp * teacher.settings.dp)
    on_gpus = {role: number for role, (device, number) in needs.items() if device != "cpu"}
    together = trainer.colocate or server.colocate or trainer.sleep_mode or server.sleep_mode
    try:
        return choose(asked, needs=on_gpus, visible=visible, together=together)
    except SettingsError as error:
        problems += error.problems
        return Gpus()


def threads_without_effect(loaded: Loaded[Any], gpus: Gpus) -> Iterator[Problem]:
    """Of a program for which GPUs are named."""
    if loaded.settings.role in gpus.named and "num_threads" in loaded.settings.model_fields_set:
        yield loaded.problem("num_threads", "has no effect on a GPU, and the command line names one for it; remove it")


def on_named_gpus(loaded: Loaded[S], gpus: Gpus) -> Loaded[S]:
    """Where GPUs are named for a program, it must not fall back to the CPU: `auto` is `cuda`."""
    if loaded.settings.role not in gpus.named:
        return loaded
    return replace(loaded, settings=loaded.settings.model_copy(update={"device": "cuda"}))


def choose(
    asked: Mapping[str, Sequence[str]], *, needs: Mapping[str, int], visible: VisibleGpus, together: bool
) -> Gpus:
    """Gives each program the GPUs that were asked for it. The others take, in the order of `needs`, the next ones that
    no option names; where these are too few for all of them, or server and trainer are to be `together` on their
    device, they see what the launcher sees. An index in `asked` counts in that. Raises `SettingsError`."""
    if problems := [*_refused(asked, needs, visible)]:
        raise SettingsError(problems)
    sees = {role: tuple(_name(name, visible) for name in names) for role, names in asked.items()}
    if together:
        sees = _shared_by_both(sees, needs)
    named, open_ = frozenset(sees), [role for role in needs if role not in sees]
    if problems := [*_mixed(sees, open_, visible), *_wrong_number(asked, sees, needs, together=together)]:
        raise SettingsError(problems)
    left = [name for name in visible.names if not any(name in names for names in sees.values())]
    num_open = sum(needs[role] for role in open_)
    divided = bool(open_) and not together and len(visible.names) > 1 and num_open <= len(left)
    if divided:
        for role in open_:
            sees[role], left = tuple(left[: needs[role]]), left[needs[role] :]
    takes = {role: sees.get(role, visible.names)[:number] for role, number in needs.items()} if visible.names else {}
    line = _line(takes, visible, asked=bool(asked), divided=divided, open_=open_)
    return Gpus(sees=sees, takes=takes, named=named, line=line)


def _line(
    takes: Mapping[str, tuple[str, ...]], visible: VisibleGpus, *, asked: bool, divided: bool, open_: Sequence[str]
) -> str | None:
    if not takes or not (asked or len(visible.names) > 1):
        return None
    told = "GPUs: " + ", ".join(f"grpo-{role} takes {' and '.join(names)}" for role, names in takes.items())
    if divided:
        return f"{told}, divided by grpo; {_OPTIONS} choose others"
    return f"{told}, the first ones that they see; {_OPTIONS} choose others" if open_ else told


def _shared_by_both(sees: Mapping[str, tuple[str, ...]], needs: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Server and trainer with the same GPUs where only one of them was given any. Raises `SettingsError`."""
    both = {role: sees[role] for role in ("infer", "train") if role in sees}
    if len(set(both.values())) > 1:
        why = "with --colocate and --sleep_mode server and trainer compute on the same ones"
        raise SettingsError([_problem("train", both["train"], f"differs from --infer_gpus, and {why}; remove one")])
    return {**sees, **{role: names for names in both.values() for role in ("infer", "train") if role in needs}}


def _refused(asked: Mapping[str, Sequence[str]], needs: Mapping[str, int], visible: VisibleGpus) -> Iterator[Problem]:
    """What is wrong with one option by itself, and the machine."""
    for role, names in asked.items():
        if role not in needs:
            yield _problem(role, names, _ON_CPU.get(role, "has no effect with device: cpu; remove one of the two"))
        elif not visible.names:
            yield _problem(role, names, f"no GPU is visible here (/dev/nvidiactl, {VARIABLE}); remove it")
        elif strange := [name for name in names if not _is_there(name, visible)]:
            seen = f"sees {_number(len(visible.names))}: {', '.join(visible.names)}"
            message = f"there is no {' and no '.join(strange)}: grpo {seen}; give indices below {len(visible.names)}"
            named = any(not name.isdecimal() for name in visible.names)
            yield _problem(role, names, f"{message}, which count in this list{', or names in it' if named else ''}")
        elif len({_name(name, visible) for name in names}) < len(names):
            yield _problem(role, names, f"is one GPU by two names, of {', '.join(visible.names)}; name it once")


def _is_there(name: str, visible: VisibleGpus) -> bool:
    if name.isdecimal():
        return int(name) < len(visible.names)
    return name in visible.names or not visible.listed


def _name(name: str, visible: VisibleGpus) -> str:
    """What CUDA knows it by: an index counts in what the launcher sees."""
    return visible.names[int(name)] if name.isdecimal() else name


def _mixed(sees: Mapping[str, tuple[str, ...]], open_: Sequence[str], visible: VisibleGpus) -> Iterator[Problem]:
    """UUIDs beside indices, of which it is not known whether they are the same, unless the environment lists them."""
    if visible.listed:
        return
    by_uuid = {role: names for role, names in sees.items() if any(not name.isdecimal() for name in names)}
    of_index = [f"--{role}_gpus" for role, names in sees.items() if any(name.isdecimal() for name in names)]
    if by_uuid and (others := [*of_index, *(f"grpo-{role}, for which none is named" for role in open_)]):
        for role, names in by_uuid.items():
            message = f"names a GPU by its UUID, which may be one of {' and '.join(others)}; use UUIDs for all, or none"
            yield _problem(role, names, message)


def _wrong_number(
    asked: Mapping[str, Sequence[str]],
    sees: Mapping[str, tuple[str, ...]],
    needs: Mapping[str, int],
    *,
    together: bool,
) -> Iterator[Problem]:
    """Too few GPUs for a program, or more than it takes; of those that two programs share, more than either takes."""
    for role, names in asked.items():
        sharing = ("infer", "train") if together and role != "teacher" else (role,)
        numbers = {one: needs[one] for one in sharing if one in needs}
        if any(len(sees[one]) < number for one, number in numbers.items()) or len(names) > max(numbers.values()):
            taken = " and ".join(f"{_WHAT_TAKES_THEM[one]} = {number}" for one, number in numbers.items())
            message = f"is {_number(len(names))}, and {taken}; name {max(numbers.values())}, or change that"
            yield _problem(role, names, message)


def _number(number: int) -> str:
    return f"{number} GPU" + ("" if number == 1 else "s")


def _problem(role: str, names: Sequence[str], message: str) -> Problem:
    return Problem(origin=COMMAND_LINE, key=f"{role}_gpus", value=",".join(names), message=message)
