"""Finds an environment by its id."""

import contextlib
import difflib
import importlib.util
import symtable
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grpo.orchestrator.rollouts.environment import Environment, episode_of
from grpo.transport.errors import UserError
from grpo.transport.importing import load_object

BUILT_IN = {
    "reverse-text": "grpo.environments.reverse_text:ReverseText",
    "arithmetic": "grpo.environments.arithmetic:Arithmetic",
    "zorplex": "grpo.environments.zorplex:Zorplex",
    "debate": "grpo.environments.debate:Debate",
    "proposer-solver": "grpo.environments.proposer_solver:ProposerSolver",
    "critique": "grpo.environments.critique.critique:Critique",
    "dataset": "grpo.environments.data.dataset:Dataset",
    "verifiers": "grpo.environments.verifiers:Verifiers",
    "openenv": "grpo.environments.openenv:OpenEnv",
}


def make_environment(env_id: str, args: dict[str, Any]) -> Environment:
    """The environment of a built-in name, `module:Class`, `path/to/file.py:Class`, or the name of an installed package
    of the `verifiers` registry, whose settings `args` are then. Raises UserError."""
    found = find_class(env_id)
    environment = found(**args) if ":" in BUILT_IN.get(env_id, env_id) else found(env_id=env_id, env_args=args)
    if not isinstance(environment, Environment):
        raise UserError(f"env.id = {env_id!r} is a {type(environment).__name__}; derive it from grpo.Environment")
    try:
        episode_of(environment)
    except ValueError as error:
        raise UserError(f"env.id = {env_id!r}: {error}") from None
    return environment


def find_class(env_id: str) -> Any:
    """What an id names; for one of the `verifiers` registry, what adapts it. Raises as `make_environment`."""
    if ":" not in (location := BUILT_IN.get(env_id, env_id)):
        check_id(env_id)
        location = BUILT_IN["verifiers"]
    return load_object(location, setting="env.id")


def check_arena(location: str) -> None:
    """Raises UserError for an `orch.arena` that leads nowhere. Imports nothing of it."""
    if (":" not in location and not location.endswith(".py")) or not _leads_somewhere(location, "orch.arena"):
        raise UserError(f"orch.arena = {location!r} leads nowhere, expected path/to/file.py:Class or module:Class")


def _leads_somewhere(location: str, setting: str) -> bool:
    """Whether there is such a module. Raises UserError for a file that is not there, or has no such class."""
    module, _, name = location.partition(":")
    if not module.endswith(".py"):
        top = module.partition(".")[0]
        return bool(top) and (PathFinder.find_spec(top, ["", *sys.path]) or importlib.util.find_spec(top)) is not None
    if not Path(module).is_file():
        raise UserError(f"{setting} = {location!r}: no such file {Path(module).absolute()}")
    try:
        table = symtable.symtable(code := Path(module).read_text(encoding="utf-8"), module, "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{setting} = {location!r}: {error}") from None
    if name not in table.get_identifiers() and "import *" not in code:
        classes = [one.get_name() for one in table.get_children() if one.get_type() == "class"]
        raise UserError(f"{setting} = {location!r}: expected {module}:CLASS, with one of {classes}")
    return True


def check_id(env_id: str, args: Mapping[str, Any] | None = None) -> None:
    """Raises UserError for an id that leads nowhere, or to a package of `verifiers` that cannot be run. `args`: the
    environment's. Imports nothing of the environment's."""
    if env_id == "verifiers" and isinstance(package := (args or {}).get("env_id"), str):
        _check_package(package)
    if env_id in BUILT_IN:
        return
    if ":" in env_id or env_id.endswith(".py"):
        found = _leads_somewhere(env_id, "env.id")
    else:  # `owner/name@version` is installed as the module `name`
        found = _check_package(env_id)
    if not found:
        close = difflib.get_close_matches(env_id, BUILT_IN, n=1)
        raise UserError(
            f"unknown env.id = {env_id!r}{f'; did you mean {close[0]}?' if close else '.'} Built in: "
            f"{', '.join(sorted(BUILT_IN))}. Your own: module:Class or path/to/file.py:Class. One of the verifiers "
            "registry: install it (pip install 'grpo-pipeline[verifiers]', then prime env install OWNER/NAME), and "
            "give its name"
        )


def _check_package(name: str) -> bool:
    """Whether the package of a name of the `verifiers` registry is installed; `owner/name@version` is the module
    `name`. Raises UserError for one that is written for the library before 0.4."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if not module.isidentifier() or (spec := importlib.util.find_spec(module)) is None:
        return False
    names: set[str] = set()
    if spec.origin is not None and spec.origin.endswith(".py"):
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            names |= set(symtable.symtable(Path(spec.origin).read_text("utf-8"), spec.origin, "exec").get_identifiers())
    if "load_environment" in names and "__all__" not in names:
        raise UserError(
            f"the environment {name!r} is written for verifiers before 0.4 ({spec.origin} has load_environment, and no "
            "__all__ that names a Taskset); grpo runs those of 0.4 and later: install a newer version of the package, "
            "or give its dataset and its reward functions to a class derived from grpo.Environment"
        )
    return True
