"""One model behind an API, whose answer is a text: a judge of agreement, or who writes hints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.disagreement.actions import Action, write_tagged
from orchestrator.disagreement.asking import Asker
from orchestrator.disagreement.budget import Budget
from orchestrator.disagreement.normalising import normalised
from orchestrator.disagreement.teachers import NotAnswered

HINTS = "hints"
"""Who pays for the questions of whoever writes hints, which are no rollout's."""
QUESTION = """\
Two answers to the same request follow. Would both have the same effect: do they say the same, or call the same tools \
with the same arguments, whatever their wording?

<answer number="1">
{one}
</answer>

<answer number="2">
{other}
</answer>

Reply with one word: yes or no."""


class NoAnswer(RuntimeError):
    """A model that was asked has not answered, or with nothing that was asked for."""


async def _text(asker: Asker, messages: Sequence[Mapping[str, Any]], trace: str) -> str:
    """Raises NoAnswer."""
    [(name, answer)] = (await asker.ask(messages, trace=trace)).by_teacher.items()
    if isinstance(answer, NotAnswered):
        raise NoAnswer(f"{name} did not answer: {answer.reason}: {answer.message}")
    return answer.action.text


class AskedJudge:
    """Asks a model whether two actions are the same."""

    def __init__(self, asker: Asker) -> None:
        """`asker` of one model."""
        self._asker = asker

    async def __call__(self, one: Action, other: Action, /, *, trace: str) -> bool:
        """By the only one of the words yes and no that it answers. Raises NoAnswer."""
        asked = QUESTION.format(one=write_tagged(one), other=write_tagged(other))
        text = await _text(self._asker, [{"role": "user", "content": asked}], trace)
        said = {"yes", "no"}.intersection(normalised(text).split())
        if len(said) != 1:
            raise NoAnswer(f"{self._asker.names[0]} was asked for yes or no, and said {text[:200]!r}")
        return said == {"yes"}


class AskedForHints:
    """Asks a model for texts. Example: ``FromModel(open_hint_model(settings, ...), renderer)``"""

    def __init__(self, asker: Asker, budget: Budget) -> None:
        """`asker` of one model, which `budget` has the price of."""
        self._asker, self._budget = asker, budget
        self._told: Counter[str] = Counter()

    async def __call__(self, messages: Sequence[Mapping[str, Any]], /) -> str:
        """Its answer. Raises NoAnswer."""
        return await _text(self._asker, messages, HINTS)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, all as `hints/model_NAME`: questions that were `asked`, `answered`, known before
        (`cached`), or not answered, by `teachers.Reason`; `requests` with those that were tried again; and the `cost`
        since this process began."""
        now = Counter({key: num for key, num in self._asker.num.items() if "/" not in key})
        now.update(asked=0, answered=0, cached=0, requests=self._asker.num_requests)
        counts = {f"hints/model_{key}": float(num - self._told[key]) for key, num in now.items()}
        self._told = now
        return counts | {"hints/model_cost": self._budget.total}

    async def close(self) -> None:
        """Questions under way are given up."""
        await self._asker.close()
