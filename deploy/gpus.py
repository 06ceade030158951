"""Which GPUs each program of a run sees, by CUDA_VISIBLE_DEVICES: those that were asked for, or the next ones where
there are enough. Not yet run: needs two GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from configs.errors import Problem
from configs.infer import InferSettings, TeacherServerSettings
from configs.loading import COMMAND_LINE, Loaded, S
from configs.train import TrainSettings
from deploy.teacher import device_of

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """What the launcher sees. Example: with CUDA_VISIBLE_DEVICES=2,3 ``VisibleGpus(names=("2", "3"))``."""

    names: tuple[str, ...] = ()
    """Indices of the machine's GPUs, or UUIDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Who has which GPUs. Example: ``Gpus(sees={"infer": ("0",)}, takes={"infer": ("0",), "train": ("0",)})`` where the
    server was given the first of two, and the trainer, which sees both, takes it too."""

    sees: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a program's environment lists. Programs that see what the launcher sees are left out."""
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a program computes on: the first ones that it sees. Programs on a CPU are left out."""
    named: frozenset[str] = frozenset()
    """Programs for which the settings name GPUs."""
    line: str | None = None
    """Tells who takes which; None where there is nothing to choose."""

    def variables(self, role: str, *, number: int = 0, of: int = 1) -> dict[str, str]:
        """Environment variables that a program is started with, of several of its role each with its part."""
        if (sees := self.sees.get(role)) is None:
            return {}
        size = len(sees) // of
        return {VARIABLE: ",".join(sees[number * size : (number + 1) * size])}

    def shared(self, one: str, other: str) -> str | None:
        """A GPU that both programs take, if there is any."""
        return next((name for name in self.takes.get(one, ()) if name in self.takes.get(other, ())), None)


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> VisibleGpus:
    """The GPUs that a program would see; looks without loading torch. As CUDA does, it reads the environment's list up
    to the first entry that is none; indices are compared with the devices in `folder`, where these show."""
    if not (folder / "nvidiactl").exists():
        return VisibleGpus()
    num_shown, listed = len([*folder.glob("nvidia[0-9]*")]), environment.get(VARIABLE)
    if listed is None:
        return VisibleGpus(names=tuple(map(str, range(max(1, num_shown)))))

    def is_one(name: str) -> bool:
        return (not num_shown or int(name) < num_shown) if name.isdecimal() else name not in ("", "-1")

    return VisibleGpus(names=tuple(takewhile(is_one, (name.strip() for name in listed.split(",")))))


def gpus_of(
    asked: Mapping[str, Sequence[str]],
    train: Loaded[TrainSettings],
    infer: Loaded[InferSettings],
    teacher: Loaded[TeacherServerSettings] | None,
    visible: VisibleGpus,
    problems: list[Problem],
    *,
    replicas: int = 1,
) -> Gpus:
    """Of server, trainer, and teacher where its server is started; none, with problems added, where they cannot have
    what was asked for."""
    trainer, server = train.settings, infer.settings
    needs: dict[str, tuple[str, int]] = {
        "infer": (server.device, server.tp * server.dp * replicas),
        "train": (trainer.device, trainer.gpus),
    }
    if teacher is not None:
        needs["teacher"] = (device_of(teacher, infer), teacher.settings.tp * teacher.settings.dp)
    asked = {role: names for role, names in asked.items() if role in needs}
    on_gpus = {role: number for role, (device, number) in needs.items() if device != "cpu"}
    together = trainer.colocate or server.colocate or trainer.sleep_mode or server.sleep_mode
    found = [*_refused(asked, on_gpus, visible, together=together)]
    problems += found
    return Gpus() if found else _chosen(asked, on_gpus, visible, together=together)


def _refused(
    asked: Mapping[str, Sequence[str]], needs: Mapping[str, int], visible: VisibleGpus, *, together: bool
) -> Iterator[Problem]:
    for role, names in asked.items():
        strange = [name for name in names if name.isdecimal() and int(name) >= len(visible.names)]
        if role not in needs:
            message = "has no effect: the program computes on a CPU; remove it, or set the program's device to cuda"
        elif strange:
            seen = ", ".join(visible.names) or "none"
            message = f"there is no {' and no '.join(strange)}: an index counts in the GPUs that grpo sees: {seen}"
        elif len(set(names)) != needs[role]:
            takes = f"the program takes {needs[role]} (tp · dp of each server, gpus of a trainer)"
            message = f"is {len(set(names))} GPUs, and {takes}; name so many, or change that"
        elif together and role == "train" and set(names) != set(asked.get("infer", names)):
            message = "differs from infer_gpus, and with colocate and sleep_mode both are on the same ones; remove one"
        else:
            continue
        yield Problem(origin=COMMAND_LINE, key=f"{role}_gpus", value=",".join(names), message=message)


def _chosen(
    asked: Mapping[str, Sequence[str]], needs: Mapping[str, int], visible: VisibleGpus, *, together: bool
) -> Gpus:
    sees = {role: tuple(visible.names[int(n)] if n.isdecimal() else n for n in names) for role, names in asked.items()}
    if together and (given := sees.get("infer", sees.get("train"))) is not None:
        sees |= {role: sees.get(role, given) for role in ("infer", "train") if role in needs}
    named, open_ = frozenset(sees), [role for role in needs if role not in sees]
    left = [name for name in visible.names if not any(name in names for names in sees.values())]
    if not together and len(visible.names) > 1 and sum(needs[role] for role in open_) <= len(left):
        for role in open_:
            sees[role], left = tuple(left[: needs[role]]), left[needs[role] :]
    takes = {role: sees.get(role, visible.names)[:number] for role, number in needs.items()} if visible.names else {}
    line = None
    if takes and (asked or len(visible.names) > 1):
        told = ", ".join(f"grpo-{role} takes {' and '.join(names)}" for role, names in takes.items())
        line = f"GPUs: {told}; --infer_gpus, --train_gpus and --teacher_gpus choose others"
    return Gpus(sees=sees, takes=takes, named=named, line=line)


def threads_without_effect(loaded: Loaded[Any], gpus: Gpus) -> Iterator[Problem]:
    """Of a program for which GPUs are named."""
    if loaded.settings.role in gpus.named and "num_threads" in loaded.settings.model_fields_set:
        yield loaded.problem("num_threads", "has no effect on a GPU, and one is named for the program; remove it")


def on_named_gpus(loaded: Loaded[S], gpus: Gpus) -> Loaded[S]:
    """Where GPUs are named for a program, it must not fall back to the CPU: `auto` is `cuda`."""
    if loaded.settings.role not in gpus.named:
        return loaded
    return replace(loaded, settings=loaded.settings.model_copy(update={"device": "cuda"}))
