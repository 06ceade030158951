"""What people's own files import: `from grpo import Environment, Rubric, Episode`.

The names are those of `grpo.api`, which is imported with the first of them; `import grpo` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name == "api":  # the import below asks for it
        raise AttributeError(name)
    return getattr(importlib.import_module("grpo.api"), name)
