"""Hands an environment, or rows and reward functions, of a script or a notebook to the processes that use them, by a
file and a name.

Nothing is pickled. A class or a function of a module or a script is named by its file. One of a notebook is written to
a file of the run, with what its code names: functions and classes with their source from the cells, imports, plain data
as it is now, and other values as the assignment that made them. Rows are written to a file of the run too.
"""

import argparse
import ast
import builtins
import inspect
import json
import math
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from grpo.orchestrator.rollouts.environment import Environment
from grpo.orchestrator.rollouts.rubric import NAMES, Rubric
from grpo.transport.errors import UserError
from grpo.transport.run import RUN_FILE

_MEND = "put it into a file and give its name, as 'my_env.py:MyEnv'"
_HELD_OUT = ("test", "validation", "eval")
"""Names of the split that is held out, the first that is there."""


def yaml_value(text: str) -> Any:
    """Returns what an option says in YAML, and so in JSON. Raises UserError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{text!r} is no YAML: {error}") from error


def name_of(env: Any) -> dict[str, Any]:
    """Returns what settings need to name an environment, before anything of it is written. Raises `UserError`."""
    if isinstance(env, str):
        return {"id": env}
    if isinstance(env, Mapping):
        return _checked(env)
    return {"id": _class_of(env).__name__}


def _checked(env: Mapping[str, Any]) -> dict[str, Any]:
    if "id" not in env:
        raise UserError(
            f"env has {', '.join(map(str, env))}, and no id; rows are given as dataset=ROWS, reward=F, or from "
            "a file by {'id': 'dataset', 'args': {'path': FILE, 'prompt': …, 'answer': …}}"
        )
    return dict(env)


def _class_of(env: Any) -> type[Environment]:
    cls = env if isinstance(env, type) else type(env)
    if not issubclass(cls, Environment):
        raise UserError(f"env is {env!r}, expected an object or a class derived from grpo.Environment, or an id")
    return cls


def template_arguments(text: str) -> dict[str, Any]:
    """Returns the chat template's arguments that an option names, as JSON, but for those that are null. Raises
    `argparse.ArgumentTypeError`."""
    if not isinstance(given := yaml_value(text), dict):
        raise argparse.ArgumentTypeError(f'{text[:40]!r}: expected names with values, as {{"enable_thinking": false}}')
    return {str(name): value for name, value in given.items() if value is not None}


def env_settings(env: Any, folder: Path, *, overwrite: bool) -> dict[str, Any]:
    """The settings (`orch.env[]`) of an environment that is given as an id, as settings, as an object or as a class.
    `folder` is the run's, which takes the file of a class that has none; `overwrite`: also in the place of another one.
    Raises `UserError`."""
    if isinstance(env, str | Mapping):
        return dict(name_of(env))
    cls = _class_of(env)
    settings: dict[str, Any] = {"id": _location(cls, folder, overwrite), "name": cls.__name__}
    if not isinstance(env, type) and env.made_with:
        settings["args"] = _plain(cls, env.made_with)
    return settings


def dataset_settings(
    data: Any, reward: Any, folder: Path, *, held_out: Any = None, overwrite: bool = False
) -> dict[str, Any]:
    """The settings (`orch.env[]`) of an environment with these rows and rewards, the arguments `dataset`, `reward` and
    `eval_dataset` of `grpo.train`. `folder` and `overwrite` are as for `env_settings`. Raises `UserError`, and
    ValueError for a reward function that no rubric can call."""
    if isinstance(data, Mapping) and "train" in data:
        found = [data[name] for name in _HELD_OUT if name in data]
        data, held_out = data["train"], found[0] if held_out is None and found else held_out
    splits = {name: given for name, given in (("path", data), ("eval_path", held_out)) if given is not None}
    files = {name: given for name, given in splits.items() if isinstance(given, str | Path)}
    rows = {name: _rows(given, name) for name, given in splits.items() if name not in files}
    rewards = list(reward) if isinstance(reward, list | tuple) else [] if reward is None else [reward]
    _check_rewards(rewards, rows.get("path"))
    args: dict[str, Any] = {
        name: str(Path(one).resolve() if Path(one).exists() else one) for name, one in files.items()
    }
    named = [_location(one, folder, overwrite) if callable(one) else one for one in rewards]
    args |= {"reward": named[0] if len(named) == 1 else named} if named else {}
    for name, some in rows.items():
        file = {"path": "dataset.jsonl", "eval_path": "eval_dataset.jsonl"}[name]
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in some)
        args[name] = str(_written(file, text, folder, overwrite).resolve())
    return {"id": "dataset", "args": args}


def _check_rewards(rewards: Sequence[Any], rows: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises `UserError` and ValueError for rewards that are neither names nor functions that a rubric can call with
    these rows; None where a file has them."""
    if functions := [one for one in rewards if callable(one)]:
        Rubric(functions)
    columns = {name for row in rows or () for name in row} - set(NAMES)
    for one in functions:
        if taken := [name for name in _parameters(one) if name in columns]:
            name = getattr(one, "__name__", type(one).__name__)
            raise UserError(
                f"reward function {name} takes {', '.join(taken)}, a name of a column; it gets the row whole, as "
                f"`example`: write def {name}(completion, example), and example[{taken[0]!r}]"
            )
    if wrong := [one for one in rewards if not callable(one) and not isinstance(one, str | Mapping)]:
        raise UserError(f"reward is {wrong[0]!r:.80}, expected a function, a name such as 'exact', or a list of these")
    if rows is not None and not rewards and any("answer" not in row for row in rows):
        raise UserError("reward is missing, and rows have no column `answer` to compare with; give reward=FUNCTION")


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none where it is written in C and does not say."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _rows(data: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a list of mappings, of a `Dataset` of `datasets`, or of a DataFrame of pandas or polars, as JSON can
    hold them. Raises `UserError`."""
    what = {"path": "dataset", "eval_path": "eval_dataset"}[name]
    if hasattr(data, "to_dicts"):
        data = data.to_dicts()  # polars
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("records")  # pandas
    if isinstance(data, Mapping) or not hasattr(data, "__len__"):
        kind = type(data).__name__
        raise UserError(
            f"{what} is a {kind}, expected a list of rows, a Dataset or a DataFrame, all of it in memory; of a stream "
            "take a part: list(itertools.islice(stream, 1000))"
        )
    rows = []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise UserError(f"{what}, row {number}, is a {type(row).__name__}, expected a mapping with a prompt")
        if "prompt" not in row:
            raise UserError(
                f"{what}, row {number}, has {', '.join(map(str, row)) or 'no columns'}, and no prompt; call the column "
                "with the question `prompt`, a text or a list of chat messages"
            )
        rows.append({str(key): _as_json(value, f"{what}, row {number}, column {key}") for key, value in row.items()})
    if not rows:
        raise UserError(f"{what} has no rows")
    return rows


def _as_json(value: Any, place: str) -> Any:
    """A value of a row as JSON has it: arrays as lists, times as texts, and missing numbers as null."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(one, place) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one, place) for one in value]
    if hasattr(value, "tolist"):
        return _as_json(value.tolist(), place)
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(f"{place}: is a {type(value).__name__}, which a file of rows cannot hold; remove the column")


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


def _location(cls: type | Callable[..., Any], folder: Path, overwrite: bool) -> str:
    """`module:Class` or `path/to/file.py:Class`, and the same for a function."""
    name, module = getattr(cls, "__qualname__", type(cls).__name__), sys.modules[cls.__module__]
    if not name.isidentifier() or not hasattr(cls, "__qualname__"):
        raise UserError(
            f"{name} has no name of its own at the top of its file or cell, by which other processes find it; "
            "define it there, by def or class"
        )
    file = getattr(module, "__file__", None)
    if cls.__module__ == "__main__":
        if file is not None:
            _check_guarded(Path(file))
        elif (cells := _cells()) is not None:
            file = _written(f"{name}.py", source_of(name, vars(module), cells), folder, overwrite)
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
    """Writes a file of the run. Raises `UserError` where the run has begun with another one."""
    path = folder / "code" / name
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
