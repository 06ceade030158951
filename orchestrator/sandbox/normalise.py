"""One text for all ways to write down the same program."""

import ast
import warnings

_MOST_CHARACTERS = 10_000
"""Longer programs are compared as they are: whoever asks waits while one is parsed and written anew."""


def normalised(program: str) -> str:
    """The program without comments, documentation and formatting; the text itself where it does not parse."""
    if len(program) > _MOST_CHARACTERS:
        return program
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                _remove_documentation(node)
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program


def _remove_documentation(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        rest = node.body[1:]
        node.body = rest or ([] if isinstance(node, ast.Module) else [ast.Pass()])
