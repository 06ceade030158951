"""Finds what users name: `module:attribute` or `path/to/file.py:attribute`."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from grpo.transport.errors import UserError

T = TypeVar("T")
MAX_TRACEBACK_CHARACTERS = 10_000


class FunctionFailed(ValueError):
    """A user's function that decides about a group raised something, or returned what it must not."""


def called(name: str, function: Callable[..., T], *given: Any) -> T:
    """Calls a user's function, and returns its result. Raises FunctionFailed with the traceback of what it raises."""
    try:
        return function(*given)
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
        raise FunctionFailed(f"{name} raised {type(error).__name__}\n{text}") from error


def load_object(location: str, *, setting: str) -> Any:
    """Returns what `location` names: `module:name` or `path/to/file.py:name`. A file is imported once in a process.

    `setting` is the key that gave it, for messages. Raises UserError where there is no such thing, and what the module
    itself raises.

    Example: ``load_object("my_codec.py:Chess", setting="env.args.codec")()``
    """
    module_name, colon, name = location.partition(":")
    if not colon:
        raise UserError(f"{setting} = {location!r}: expected module:name or path/to/file.py:name")
    if module_name.endswith(".py"):
        module = _from_file(Path(module_name), setting)
    else:
        module = _from_module(location, module_name, setting)
    if not hasattr(module, name):
        raise UserError(f"{setting} = {location!r}: {module_name} has no {name}")
    return getattr(module, name)


def _from_file(path: Path, setting: str) -> ModuleType:
    """Imports a file once in a process, under a module name of its own."""
    if not path.is_file():
        raise UserError(f"{setting}: no such file {path.absolute()}")
    path = path.resolve()
    name = f"grpo_user_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _add_working_directory()
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(location: str, name: str, setting: str) -> ModuleType:
    _add_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UserError(f"{setting} = {location!r}: there is no module {error.name}; install it") from error


def _add_working_directory() -> None:
    """For a user's modules; not before, so that none of them stands in for one of ours."""
    if "" not in sys.path:
        sys.path.insert(0, "")
