"""Finds an environment by its id."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.envs.base import Environment

BUILT_IN = {"reverse-text": "orchestrator.envs.reverse_text:ReverseText"}


class UnknownEnvironment(ValueError):
    """An id that leads to no environment."""


def make_environment(env_id: str, args: dict[str, Any]) -> Environment:
    """The environment of a built-in name, `module:Class` or `path/to/file.py:Class`. Raises UnknownEnvironment."""
    cls = _find(BUILT_IN.get(env_id, env_id))
    environment = cls(**args)
    if not isinstance(environment, Environment) or not hasattr(environment, "rubric"):
        raise UnknownEnvironment(
            f"env.id = {env_id!r} is a {type(environment).__name__} without a rubric or a dataset; derive it from "
            "orchestrator.envs.Environment and give it both"
        )
    return environment


def _find(location: str) -> Any:
    module_name, colon, class_name = location.partition(":")
    if not colon:
        raise UnknownEnvironment(_unknown(location))
    module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_module(location, module_name)
    if not hasattr(module, class_name):
        raise UnknownEnvironment(f"env.id = {location!r}: {module_name} has no {class_name}")
    return getattr(module, class_name)


def _unknown(env_id: str) -> str:
    close = difflib.get_close_matches(env_id, BUILT_IN, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = ", ".join(sorted(BUILT_IN))
    return f"unknown env.id = {env_id!r}{hint} Built in: {known}. Your own: module:Class or path/to/file.py:Class"


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownEnvironment(f"env.id: no such file {path.absolute()}")
    name = f"grpo_env_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _add_working_directory()
    spec.loader.exec_module(module)
    return module


def _from_module(location: str, name: str) -> ModuleType:
    _add_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UnknownEnvironment(f"env.id = {location!r}: there is no module {error.name}; install it") from error


def _add_working_directory() -> None:
    """For a user's modules; not before, so that none of them stands in for one of ours."""
    if "" not in sys.path:
        sys.path.insert(0, "")
