"""Finds an environment by its id."""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import symtable
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from grpo.orchestrator.rollouts.environment import Environment, episode_of
from grpo.transport.errors import UserError
from grpo.transport.extras import check_installed
from grpo.transport.importing import load_object

GROUP = "grpo.environments"
"""The group of entry points by which installed packages give names to their environments."""


def built_in() -> Mapping[str, str]:
    """Returns the classes of the environments that come with the product, by name."""
    try:
        names: Mapping[str, str] = importlib.import_module("grpo.environments").BUILT_IN
    except ModuleNotFoundError:
        return {}
    return names


def make_environment(env_id: str, args: dict[str, Any]) -> Environment:
    """Makes the environment of a built-in name, a name that an installed package registers, `module:Class`,
    `path/to/file.py:Class`, or the name of an installed package of the `verifiers` registry, whose settings `args` are
    then. Raises UserError, and what the environment's module and class raise."""
    environment = find_class(env_id)(**args)
    if not isinstance(environment, Environment):
        raise UserError(f"env.id = {env_id!r} is a {type(environment).__name__}; derive it from grpo.Environment")
    try:
        episode_of(environment)
    except ValueError as error:
        raise UserError(f"env.id = {env_id!r}: {error}") from None
    return environment


def find_class(env_id: str) -> Callable[..., Any]:
    """Returns what makes the environment of an id from its `args`. Raises UserError, and what the environment's module
    raises."""
    if (location := built_in().get(env_id, env_id)) and ":" in location:
        return cast(Callable[..., Any], load_object(location, setting="env.id"))
    if (registered := _registered(env_id)) is not None:
        return _load(registered)
    check_id(env_id)
    adapter = load_object(built_in()["verifiers"], setting="env.id")
    return lambda **args: adapter(env_id=env_id, env_args=args)


def _registered(env_id: str) -> EntryPoint | None:
    """Returns the entry point of a name. Raises UserError where two packages register it, or one registers a built-in
    name."""
    found = sorted(entry_points(group=GROUP, name=env_id), key=str)
    owners = [_owner(one) for one in found] + ["grpo itself"] * (env_id in built_in())
    if len(owners) > 1:
        raise UserError(
            f"env.id = {env_id!r} is registered by {' and by '.join(owners)}; uninstall one of them, or give the class "
            f"itself, such as env.id: {found[0].value}"
        )
    return found[0] if found else None


def _owner(registered: EntryPoint) -> str:
    return "a package without a name" if registered.dist is None else f"the package {registered.dist.name}"


def _load(registered: EntryPoint) -> Callable[..., Any]:
    about = f"env.id = {registered.name!r} of {_owner(registered)}"
    try:
        return cast(Callable[..., Any], load_object(registered.value, setting=about))
    except UserError:
        raise
    except BaseException as error:
        error.add_note(f"{about} cannot be imported from {registered.value}")
        raise


def check_arena(location: str) -> None:
    """Raises UserError for an `orch.arena` that leads nowhere. Imports nothing of it."""
    if (":" not in location and not location.endswith(".py")) or not _leads_somewhere(location, "orch.arena"):
        raise UserError(f"orch.arena = {location!r} leads nowhere, expected path/to/file.py:Class or module:Class")


def _leads_somewhere(location: str, setting: str) -> bool:
    """Tells whether there is such a module. Raises UserError for a file that is not there, or has no such class."""
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
    """Raises UserError for an id that leads nowhere, or to a package of `verifiers` that cannot be run, and for `args`
    that the environment's class does not take. Imports nothing of a person's."""
    if env_id == "verifiers" and isinstance(package := (args or {}).get("env_id"), str):
        _check_package(package)
    registered, known = _registered(env_id), built_in()
    if env_id in known:
        if args is not None:
            _check_args(env_id, known[env_id], args)
        _check_extras(env_id, args or {})
        return
    if registered is not None:
        if not _leads_somewhere(registered.value, "env.id"):
            where = f"{_owner(registered)} registers {registered.value} for it"
            raise UserError(f"env.id = {env_id!r}: {where}, and there is no such module; install the package again")
        return
    if ":" in env_id or env_id.endswith(".py"):
        found = _leads_somewhere(env_id, "env.id")
        if found and args is not None:
            _check_args(env_id, env_id, args)
    else:  # `owner/name@version` is installed as the module `name`
        found = "verifiers" in known and _check_package(env_id)
    if not found:
        others = {one.name for one in entry_points(group=GROUP)}
        close = difflib.get_close_matches(env_id, {*known, *others}, n=1)
        raise UserError(
            f"unknown env.id = {env_id!r}{f'; did you mean {close[0]}?' if close else '.'} Built in: "
            f"{', '.join(sorted(known)) or 'none'}. Of installed packages: "
            f"{', '.join(sorted(others)) or 'none'}. Your own: module:Class or path/to/file.py:Class. "
            "One of the verifiers registry: install it (pip install 'grpo-pipeline[verifiers]', then prime "
            "env install OWNER/NAME), and give its name"
        )


def _check_extras(env_id: str, args: Mapping[str, Any]) -> None:
    """Raises UserError for a built-in environment whose libraries are not installed."""
    extras = importlib.import_module("grpo.environments").EXTRAS
    if env_id in extras:
        check_installed(extras[env_id], f"env.id: {env_id}")
    if env_id == "dataset":
        known = importlib.import_module("grpo.environments.data.dataset").KNOWN
        reward = args.get("reward") or known.get(args.get("path"), {}).get("reward")
        if reward == "math" or (isinstance(reward, list | tuple) and "math" in reward):
            check_installed("math", "reward: math")


def _check_args(env_id: str, location: str, args: Mapping[str, Any]) -> None:
    """Raises UserError for arguments that are missing or not taken, where the source says which there are."""
    module, _, name = location.partition(":")
    file: str | None = module
    if not module.endswith(".py"):
        spec = importlib.util.find_spec(module) if location in built_in().values() else None
        file = None if spec is None else spec.origin
    if file is None or (taken := _arguments(Path(file), name)) is None:
        return
    unknown, missing = (
        [one for one in args if one not in taken],
        [one for one in taken if taken[one] and one not in args],
    )
    if unknown or missing:
        close = difflib.get_close_matches(unknown[0], taken, n=1) if unknown else []
        what = f"{unknown[0]!r} is not known{f'; did you mean {close[0]}?' if close else ''}" if unknown else ""
        raise UserError(
            f"env.args of {env_id}: {what or f'{missing[0]!r} is missing'}; {name} takes {', '.join(taken) or 'none'}"
        )
    path = args.get("path")
    is_file = env_id == "dataset" and isinstance(path, str) and Path(path).suffix and path.count("/") != 1
    if is_file and not Path(str(path)).exists():
        raise UserError(f"env.args of dataset: path = {path!r}: no such file {Path(str(path)).absolute()}")


def _arguments(file: Path, name: str) -> dict[str, bool] | None:
    """The arguments of a class or a function at the top of a file, and whether each must be given. None where the
    source does not say: it takes any, inherits them, or is decorated."""
    found = [one for one in ast.parse(file.read_bytes()).body if getattr(one, "name", None) == name]
    if len(found) != 1 or getattr(made := found[0], "decorator_list", []):
        return None
    if isinstance(made, ast.ClassDef):
        own = [one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        if not own:
            return {} if [ast.unparse(base) for base in made.bases] in (["Environment"], ["grpo.Environment"]) else None
        made = own[0]
    if not isinstance(made, ast.FunctionDef) or made.args.kwarg is not None:
        return None
    by_place = [one.arg for one in (*made.args.posonlyargs, *made.args.args)]
    first_default = len(by_place) - len(made.args.defaults)
    taken = {one: number < first_default for number, one in enumerate(by_place)}
    if isinstance(found[0], ast.ClassDef):
        taken.pop(by_place[0])
    return taken | {
        one.arg: default is None for one, default in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
    }


def _check_package(name: str) -> bool:
    """Tells whether the package of a name of the `verifiers` registry is installed; `owner/name@version` is the module
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
