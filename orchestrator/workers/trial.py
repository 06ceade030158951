"""One example is scored with an empty answer before a run begins: a misspelt field or name is told at once, and not
after a server has been waited for.

Many a reward raises on an empty answer and works on others. So only what no answer can be the reason for is refused.
"""

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from grpo.orchestrator.rollouts.context import CallFailed, RolloutContext
from grpo.orchestrator.rollouts.state import EpisodeState

BROKEN, AWAY = "env_broken", "env_away"
"""Reasons of a trial's failure: no answer can be scored; who was asked is not there yet, which tells nothing."""
MAX_LOOKED_AT = 1000
"""Examples, whether any has a field."""
_WRONG_CALL = re.compile(
    r"missing \d+ required|positional arguments? but|unexpected keyword argument|multiple values for"
)


class Watched(dict[str, Any]):
    """An example that notes which fields it was asked for in vain."""

    def __init__(self, example: Mapping[str, Any]) -> None:
        super().__init__(example)
        self.missed: list[str] = []

    def __missing__(self, key: str) -> Any:
        self.missed.append(key)
        raise KeyError(key)


Watched.__name__ = "dict"  # as messages call it


def reason_of_trial(error: BaseException, example: Any, examples: Sequence[Mapping[str, Any]]) -> str | None:
    """BROKEN, AWAY, or None where another answer may do better. `examples`: all of the split."""
    match error:
        case CallFailed() | OSError():
            return AWAY
        case UnboundLocalError():
            return None
        case NameError() | ImportError():
            return BROKEN
        case KeyError() if isinstance(example, Watched) and error.args and error.args[0] in example.missed:
            return None if any(error.args[0] in one for one in examples[:MAX_LOOKED_AT]) else BROKEN
        case AttributeError() if isinstance(error.obj, Watched | EpisodeState | RolloutContext | ModuleType | str):
            return BROKEN
        case TypeError() if _WRONG_CALL.search(str(error)):
            return BROKEN
    return None
