"""Programs that say the same have one key: results of the one hold for the other."""

import ast
import builtins
import functools
import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence

_MOST_CHARACTERS = 10_000
"""Longer programs are compared as they are: whoever asks waits while one is parsed and written anew."""
_LOOKS_AT_NAMES = {"eval", "exec", "locals", "globals", "vars", "dir", "inspect", "f_locals", "f_globals"}
_LOOKS_AT_NAMES |= {"__dict__", "__code__", "__annotations__", "__globals__"}
"""Names by which a program looks at its own variables' names."""
_DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NAME_FIELD: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.MatchMapping: "rest",
}
"""The field in which a node has the name of a variable."""


def key_of(program: str, tests: str, *, keep: frozenset[str] = frozenset()) -> bytes:
    """Returns 32 bytes for the normalised program and its tests. `tests` names everything else that a result depends
    on, `keep` the names that the tests may use."""
    first, second = (text.encode("utf-8", "surrogatepass") for text in (normalised(program, keep), tests))
    return hashlib.blake2b(len(first).to_bytes(8, "big") + first + second, digest_size=32).digest()


@functools.lru_cache(maxsize=1024)
def normalised(program: str, keep: frozenset[str] = frozenset()) -> str:
    """Returns the program without comments, documentation and formatting, its variables called v_0, v_1, …; those in
    `keep` and those whose names may matter stay. Returns the text itself where it does not parse."""
    if len(program) > _MOST_CHARACTERS:
        return program
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        _rename_variables(list(ast.walk(tree)), keep)
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def _rename_variables(nodes: Sequence[ast.AST], keep: frozenset[str]) -> None:
    """Names variables and parameters by their first place. A name stays that is a built-in one or bound in a class,
    that is used for anything else (an attribute, a keyword, a function) or stands in a text. All stay where a program
    may look at names."""
    named = [(node, field) for node in nodes if (field := _NAME_FIELD.get(type(node))) and getattr(node, field)]
    bound = {getattr(node, field) for node, field in named if not isinstance(getattr(node, "ctx", None), ast.Load)}
    words = {word for node in nodes for text in _other_texts(node) for word in re.findall(r"\w+", text)}
    used = list(dict.fromkeys(getattr(node, field) for node, field in named))
    if _LOOKS_AT_NAMES & {*used, *words} or any(isinstance(node, ast.alias) and node.name == "*" for node in nodes):
        return
    fixed = keep | words | set(dir(builtins)) | _names_in_classes(nodes)
    variables = [name for name in used if name in bound - fixed and not name.startswith("__")]
    names = {name: f"v_{place}" for place, name in enumerate(variables)}
    if not ({*used} | fixed) - names.keys() & {*names.values()}:
        for node, field in named:
            setattr(node, field, names.get(getattr(node, field), getattr(node, field)))


def _other_texts(node: ast.AST) -> Iterator[str]:
    """Yields all texts of a node but a variable's name."""
    for field, value in ast.iter_fields(node):
        if field != _NAME_FIELD.get(type(node)):
            yield from (text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))


def _names_in_classes(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names in the bodies of classes, outside of their methods: they are attributes."""
    bodies = [statement for node in nodes if isinstance(node, ast.ClassDef) for statement in node.body]
    outside = [one for one in bodies if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.id for statement in outside for node in ast.walk(statement) if isinstance(node, ast.Name)}
