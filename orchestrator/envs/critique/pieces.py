"""Unit tests as records have them: pieces of Python, each made to test something."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CHECK = "check"
"""What HumanEval calls the function that tests a candidate."""
_SAYS_NOTHING = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Pass,
)


def pieces_of(found: Any) -> list[str]:
    """A list of pieces, as it is or written as one text; any other text is one piece. Raises ValueError."""
    if isinstance(found, str):
        listed = _listed(found)
        return [found] if listed is None else pieces_of(listed)
    if not isinstance(found, Sequence) or not all(isinstance(piece, str) for piece in found):
        raise ValueError(f"the unit tests are {str(found)[:200]}: expected a list of pieces of Python, or one piece")
    return list(found)


def setup_of(record: Mapping[str, Any]) -> str:
    """What comes before each piece: the imports, then the rest. Raises ValueError."""
    lines: list[str] = []
    for key in ("test_imports", "setup", "test_setup_code"):
        if not isinstance(found := record.get(key) or [], str | list):
            raise ValueError(f"{key!r} is {str(found)[:200]}: expected Python, or a list of lines of it")
        lines += pieces_of(found)
    return "\n".join(line for line in lines if line.strip())


def testing(piece: str, entry_point: Any) -> str:
    """The piece, followed by calls of its test functions where it only defines them: `test_double()`, or
    `check(ENTRY_POINT)`. Raises ValueError where nothing in it would test anything."""
    try:
        tree = ast.parse(piece)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the unit test {_shown(piece)} is no Python: {error}") from None
    calls = list(_missing_calls(tree, piece, entry_point))
    if not calls and all(map(_says_nothing, tree.body)):
        raise ValueError(
            f"the unit test {_shown(piece)} would pass every program: it only defines, imports, names or compares "
            "values; let it assert something, or define functions test_… without arguments"
        )
    return "\n".join([piece, *calls])


def _missing_calls(tree: ast.Module, piece: str, entry_point: Any) -> Iterator[str]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        called, named = _elsewhere(tree, node)
        if node.name in called or (node.name in named and not _takes(node, int(node.name == _CHECK))):
            continue
        if node.name == _CHECK:
            if not isinstance(entry_point, str) or not entry_point.isidentifier():
                raise ValueError(
                    f"the unit test {_shown(piece)} defines check and does not call it: expected the function to check "
                    f"as 'entry_point', got {entry_point!r}"
                )
            if not _takes(node, 1):
                raise ValueError(
                    f"the unit test {_shown(piece)} defines check, which cannot be called with the function to check: "
                    "expected a plain function without decorators, of one argument"
                )
            yield f"{_CHECK}({entry_point})"
        elif node.name.startswith("test"):
            if not _takes(node, 0):
                raise ValueError(
                    f"the unit test {_shown(piece)} defines {node.name}, which cannot be called here: expected a plain "
                    "function without decorators and arguments"
                )
            yield f"{node.name}()"


def _elsewhere(tree: ast.Module, function: ast.stmt) -> tuple[set[str], set[str]]:
    """What is called outside of the function, and all names there."""
    others = [node for statement in tree.body if statement is not function for node in ast.walk(statement)]
    called = {node.func.id for node in others if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return called, {node.id for node in others if isinstance(node, ast.Name)}


def _takes(function: ast.FunctionDef | ast.AsyncFunctionDef, num: int) -> bool:
    """Whether a call with so many arguments runs the function's body."""
    if isinstance(function, ast.AsyncFunctionDef) or function.decorator_list:
        return False
    given = function.args
    most = len(given.posonlyargs) + len(given.args)
    fits = most - len(given.defaults) <= num and (num <= most or given.vararg is not None)
    return fits and None not in given.kw_defaults


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether a program passes it, unless what it calls raises: a result that is named or compared is not looked at."""
    if isinstance(statement, ast.Expr):
        return _is_not_looked_at(statement.value)
    return isinstance(statement, _SAYS_NOTHING)


def _is_not_looked_at(value: ast.expr) -> bool:
    if isinstance(value, ast.BoolOp):
        return all(map(_is_not_looked_at, value.values))
    if isinstance(value, ast.Compare | ast.UnaryOp | ast.BinOp):
        return True
    return not any(isinstance(node, ast.Call) for node in ast.walk(value))


def _listed(text: str) -> list[Any] | None:
    """The list that a text is, in JSON or in Python's words; None where it is none."""
    if not text.lstrip().startswith("["):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(value, list):
            return value
    return None


def _shown(piece: str) -> str:
    return repr(piece if len(piece) <= 100 else f"{piece[:100]}…")
