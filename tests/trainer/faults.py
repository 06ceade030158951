"""Planting a fault in a module of trainer/, in memory: the file and the module that the programs import stay as they
are."""

import types
from dataclasses import dataclass
from pathlib import Path

import trainer

FOLDER = Path(trainer.__file__).parent


@dataclass(frozen=True)
class Fault:
    """`file` of trainer/ with `wrong` in the place of `right`, and what is wrong with it."""

    what: str
    file: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def new_module(file: str, right: str = "", wrong: str = "") -> types.ModuleType:
    """A module of its own from the source of `file`, with `wrong` in the place of `right`."""
    source = (FOLDER / file).read_text()
    module = types.ModuleType(f"faulty_{Path(file).stem}")
    exec(compile(source.replace(right, wrong), f"faulty {file}", "exec"), module.__dict__)
    return module


def planted(fault: Fault) -> types.ModuleType:
    """The module with the fault. AssertionError where its text is not there exactly once, because the source was
    changed: then the fault has to be written anew."""
    count = (FOLDER / fault.file).read_text().count(fault.right)
    assert count == 1, f"{fault.file} has {count} times what the fault replaces: {fault.right!r}"
    return new_module(fault.file, fault.right, fault.wrong)


def own_names(module: types.ModuleType) -> dict[str, object]:
    """Functions and classes that the module defines itself."""
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
