"""Imports of large libraries without what takes most of their time and serves nothing here."""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def import_transformers_by_names() -> Iterator[None]:
    """Within it, transformers is imported without reading the file lists of all installed packages, which takes as
    much processor time as importing it, or torch. It asks them which distribution a module comes from, and finds those
    that are called as their modules are, as torch is, by the names of their folders as well."""
    everything = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _by_folder_names
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = everything


def _by_folder_names() -> dict[str, list[str]]:
    folders = (found.name for path in sys.path if path for found in Path(path).glob("*.dist-info"))
    return {name: [name] for name in (folder.split("-")[0].lower() for folder in folders)}


@contextmanager
def hidden_modules(*names: str) -> Iterator[None]:
    """Within it, modules that have not been imported are as good as not installed: who can do without them is imported
    without them. For programs that have one thread yet."""
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in names if name not in modules]
    modules |= dict.fromkeys(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
