"""Digests of the files of the user's that settings name. A reward decides what a run comes to as much as a setting."""

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_NAMES = {"id", "arena", "import_path"}
"""Settings that name code, as `file.py:name` or `module:name`."""
_DATA = {"templates", "pairs"}
"""Settings that name data; those in `args` and `kwargs` may name either."""
MAX_BYTES = 256 * 2**20
"""A larger file is known by its size alone."""
_MAX_FILES = 500


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each file that these settings name, by their key and the file's path as it is given:
    `env.0.id my_env.py`. Code brings the modules beside it that it imports, and those that these import."""
    found: dict[str, str] = {}
    for key, text in _texts(settings):
        *above, last = key.split(".")
        is_argument = not {"args", "kwargs"}.isdisjoint(above)
        path, colon, _ = text.partition(":")
        is_code = last in _NAMES or (is_argument and path.endswith(".py"))
        if is_code and colon and (own := _code(path)) is not None:
            found |= {f"{key} {shown}": _digest(file) for shown, file in own}
        elif (last in _DATA or is_argument) and _is_file(Path(text)):
            found[f"{key} {text}"] = _digest(Path(text))
    return found


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, str):
        yield key, tree
    elif isinstance(tree, (Mapping, list)):
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _texts(value, f"{key}.{name}" if key else str(name))


def _code(location: str) -> list[tuple[str, Path]] | None:
    """The file that `path/to/file.py` or `module` leads to, and those beside it that it imports, each with the path
    that a person knows it by. None where it leads to none, or to one of ours."""
    if location.endswith(".py"):
        return _with_imported([Path(location)], Path(location).parent) if _is_file(Path(location)) else None
    parts = location.split(".")
    if parts[0] == "grpo" or not all(map(str.isidentifier, parts)):
        return None
    spec = PathFinder.find_spec(parts[0], ["", *sys.path])
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
    return _with_imported([*_files(root, parts)], root)


def _with_imported(waiting: list[Path], root: Path) -> list[tuple[str, Path]]:
    """Files, and what they and those import of what lies below `root`. Of an installed package, its own alone."""
    found = list[Path]()
    while waiting and len(found) < _MAX_FILES:
        if (file := waiting.pop()) not in found:
            found.append(file)
            waiting += [] if "site-packages" in file.resolve().parts else _imported(file, root)
    return [(str(file), file) for file in found]


def _imported(file: Path, root: Path) -> Iterator[Path]:
    """The files below `root` that a module names in its imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = [*file.parents[: node.level]][-1] if node.level else root
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files(above, [*parts, alias.name])


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """The file of a module below `root`, and of the packages that it is in; the innermost comes first."""
    for number in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:number])
        yield from (one for one in (place.with_suffix(".py"), place / "__init__.py") if _is_file(one))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _digest(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            return f"{size} bytes"
        with file.open("rb") as opened:
            return f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}"
    except OSError as error:
        return f"unreadable: {error.strerror}"
