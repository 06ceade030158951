"""Reinforcement learning for language models from Python, and what people's own files import.

`from grpo import Environment, Rubric, Episode` for environments, `grpo.train`, `grpo.evaluate` and `grpo.Run` for
scripts and notebooks. Each name is imported when it is asked for; `import grpo` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.api import *  # noqa: F403
    from grpo.commands.evaluate import evaluate as evaluate
    from grpo.orchestrator.arena.arena import Arena as Arena
    from grpo.orchestrator.arena.arena import EpisodeRequest as EpisodeRequest
    from grpo.orchestrator.arena.arena import TrainingBatch as TrainingBatch
    from grpo.orchestrator.arena.verbose import VerboseLogger as VerboseLogger
    from grpo.run import Run as Run
    from grpo.run import RunFailed as RunFailed
    from grpo.start import train as train

_ELSEWHERE = {"train": "grpo.start", "evaluate": "grpo.commands.evaluate", "Run": "grpo.run", "RunFailed": "grpo.run"}
_ELSEWHERE |= dict.fromkeys(("Arena", "EpisodeRequest", "TrainingBatch"), "grpo.orchestrator.arena.arena")
_ELSEWHERE["VerboseLogger"] = "grpo.orchestrator.arena.verbose"
"""Names that are not those of `grpo.api`, and their modules."""


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name == "api":  # the import below asks for it
        raise AttributeError(name)
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "grpo.api")), name)
