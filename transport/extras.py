"""Libraries that only some runs need: extras of the package, looked for before anything is started."""

import importlib.util
from typing import Literal

from grpo.transport.errors import UserError

Extra = Literal["wandb", "tensorboard", "plots", "math", "openenv", "bitsandbytes", "games", "textarena", "telemetry"]
MODULES: dict[Extra, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "tensorboard": ("tensorboardX",),
    "plots": ("pandas", "matplotlib"),
    "math": ("math_verify",),
    "openenv": ("websockets",),
    "bitsandbytes": ("bitsandbytes",),
    "games": ("pyspiel",),
    "textarena": ("textarena",),
    "telemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "prometheus_client"),
}
"""What an extra of pyproject.toml brings, as it is imported."""


def is_installed(extra: Extra) -> bool:
    """Tells whether all libraries of an extra are here. Imports none of them."""
    return all(map(_is_there, MODULES[extra]))


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent of it
        return False


def check_installed(extra: Extra, what: str) -> None:
    """Raises UserError where a library of an extra is missing; `what` says what needs it."""
    missing = [name.partition(".")[0] for name in MODULES[extra] if not _is_there(name)]
    if missing:
        raise UserError(f"{what} needs {missing[0]}, which is not installed: pip install 'grpo-pipeline[{extra}]'")
