"""Hands an environment of a script or a notebook to the processes that run it, by a file and a name.

Nothing is pickled. A class of a module or a script is named by its file. A class of a notebook is written to a file of
the run, with what its code names: functions and classes with their source from the cells, imports, plain data as it is
now, and other values as the assignment that made them.
"""

import ast
import builtins
import json
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from grpo.orchestrator.rollouts.environment import Environment
from grpo.transport.errors import UserError
from grpo.transport.run import RUN_FILE

_MEND = "put it into a file and give its name, as env='my_env.py:MyEnv'"


def yaml_value(text: str) -> Any:
    """Returns what an option says in YAML, and so in JSON. Raises UserError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r} is no YAML: {error}") from error


def env_settings(env: Any, folder: Path, *, overwrite: bool) -> dict[str, Any]:
    """The settings (`orch.env[]`) of an environment that is given as an id, as settings, as an object or as a class.
    `folder` is the run's, which takes the file of a class that has none; `overwrite`: also in the place of another one.
    Raises `UserError`."""
    if isinstance(env, str):
        return {"id": env}
    if isinstance(env, Mapping):
        if "id" not in env:
            raise UserError(
                f"env has {', '.join(map(str, env))}, and no id; rows of a data set are given by an environment's "
                "`dataset`, or from a file by {'id': 'dataset', 'args': {'path': FILE, 'prompt': …, 'answer': …}}"
            )
        return dict(env)
    cls = env if isinstance(env, type) else type(env)
    if not issubclass(cls, Environment):
        raise UserError(f"env is {env!r}, expected an object or a class derived from grpo.Environment, or an id")
    settings: dict[str, Any] = {"id": _location(cls, folder, overwrite), "name": cls.__name__}
    if not isinstance(env, type) and env.made_with:
        settings["args"] = _plain(cls, env.made_with)
    return settings


def _plain(cls: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as settings hold them."""
    for name, value in arguments.items():
        try:
            kept = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            kept = False
        if not kept:
            kind = type(value).__name__
            raise UserError(
                f"{cls.__name__} was made with {name}, a {kind}, which settings cannot hold: it is made again in other "
                "processes; give it a number, a text, a list or a mapping, for example the path of a file"
            )
    return dict(arguments)


def _location(cls: type, folder: Path, overwrite: bool) -> str:
    """`module:Class` or `path/to/file.py:Class`."""
    name, module = cls.__qualname__, sys.modules[cls.__module__]
    if not name.isidentifier():
        raise UserError(f"{name} is defined within a function or a class; define it at the top of its file or cell")
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__":
        if file is not None:
            _check_guarded(Path(file))
        elif (cells := _cells()) is not None:
            file = _written(name, source_of(name, vars(module), cells), folder, overwrite)
        else:
            raise UserError(f"{name} has no file: it was typed in; {_MEND}")
    elif file is None or "." in cls.__module__:
        return f"{cls.__module__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def _check_guarded(script: Path) -> None:
    """Raises `UserError` where importing the script, as the environment's processes do, would call `train` again."""
    frame = sys._getframe()
    while frame.f_back is not None and (frame.f_code.co_name, frame.f_globals["__name__"]) != ("<module>", "__main__"):
        frame = frame.f_back
    try:
        statements = ast.parse(script.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return
    for one in statements:
        is_here = one.lineno <= frame.f_lineno <= (one.end_lineno or one.lineno)
        if is_here and not (isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)):
            raise UserError(
                f"{script.name}, line {frame.f_lineno}: processes that run the environment import this file, and would "
                'start the run again; put that line below: if __name__ == "__main__":'
            )


def _cells() -> list[str] | None:
    """The source of every cell that has run, in order; None outside IPython."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return None if shell is None else [str(cell) for cell in shell.user_ns["In"]]


def _written(name: str, source: str, folder: Path, overwrite: bool) -> Path:
    """Writes the source of `name` to a file of the run. Raises `UserError` where the run has begun with another one."""
    path = folder / "code" / f"{name}.py"
    if path.exists() and path.read_text() != source and (folder / RUN_FILE).exists() and not overwrite:
        raise UserError(
            f"{folder} holds a run with another {name}; give another output_dir, overwrite_output_dir=True, or "
            "resume_with_changed_code=True"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def source_of(name: str, values: Mapping[str, Any], cells: Sequence[str]) -> str:
    """A module with `name` and all that it names, from the cells of a notebook. `values` are the notebook's globals.
    Raises `UserError`."""
    statements: dict[str, str] = {}
    for cell in cells:
        statements |= dict(_statements(cell))
    written: dict[str, str] = {}
    waiting: list[str] = []

    def add(one: str) -> None:
        if one in written or one in waiting:
            return
        waiting.append(one)
        text = _statement(one, values[one], statements)
        for other in sorted(_globals(text)):
            if other in values and not hasattr(builtins, other):
                add(other)
        written[one] = text

    add(name)
    return "\n\n".join([f'"""{name}, from a notebook."""', *dict.fromkeys(written.values())]) + "\n"


def _statements(cell: str) -> Iterator[tuple[str, str]]:
    """Each name that a cell gives a value at its top level, and the statement's source."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return
    for node in tree.body:
        text = "\n".join(cell.splitlines()[min(_lines(node)) - 1 : node.end_lineno])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, text
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.With, ast.For, ast.If, ast.Try)):
            stored = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
            yield from ((one, text) for one in stored)


def _lines(node: Any) -> list[int]:
    return [node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]


def _statement(name: str, value: Any, statements: Mapping[str, str]) -> str:
    """A statement that gives `name` its value elsewhere: plain data, an import, or the source. Raises `UserError`."""
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    home, known_as = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(home, str) and home != "__main__" and getattr(sys.modules.get(home), known_as, None) is value:
        return f"from {home} import {known_as} as {name}"
    if name in statements:
        return statements[name]
    raise UserError(f"{name}, a {type(value).__name__}, is used by the environment, and no cell defines it; {_MEND}")


def _globals(source: str) -> set[str]:
    """The global names that a statement uses."""
    tables, found = [symtable.symtable(source, "cell", "exec")], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_module = table.get_type() == "module"
        found |= {
            one.get_name() for one in table.get_symbols() if one.is_global() or (is_module and one.is_referenced())
        }
    return found
