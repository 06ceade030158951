"""Where a hint's text comes from: a template, what the environment said, a sibling that succeeded, a model that is
asked."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from orchestrator.episodes.records import EpisodeResult, Message, Step, TrainingRow, Turn, walk_all
from orchestrator.episodes.state import StepError
from orchestrator.hints.templates import HintTemplates
from orchestrator.renderer import ChatRenderer

OFF_TEMPLATE = "off_template"
"""No template is for the error's key or kind."""
SILENT = "environment_silent"
"""The environment marked the error and said nothing, or nothing of what a template asks for."""
NO_SIBLING = "no_sibling"
"""No other rollout of the group succeeded from the same context with another answer."""
MODEL_LATE, MODEL_FAILED, MODEL_SILENT = "model_late", "model_failed", "model_silent"
"""The model that writes hints did not answer in time, raised something, or said nothing."""

SAID = "The answer that was tried here before went wrong: {message}"
SUCCEEDED = "Another attempt, which succeeded, answered here:\n{answer}"
ASKED = """A model gave an answer that went wrong.

What it was shown:
{context}

What it answered:
{answer}

What was wrong with it ({error_kind}): {message}

Write the hint that would have helped the model before it answered: what to do and what to avoid, in at most three \
sentences. Write nothing but the hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An answer that its environment marked as one that went wrong."""

    rollout: EpisodeResult
    row: TrainingRow
    """That it stands in."""
    turn: Turn
    step: int
    """Its index among the rollout's steps."""
    error: StepError
    group: Sequence[EpisodeResult] = ()
    """All results of the rollout's group."""

    @property
    def answer(self) -> Step:
        """What went wrong."""
        return self.rollout.steps[self.step]


class NoHint(Exception):
    """A source has no hint for an error. Example: ``NoHint(OFF_TEMPLATE)``"""

    def __init__(self, reason: str, problem: str | None = None) -> None:
        """`reason`: of a closed set, to be counted. `problem`: what went wrong, for people; None where nothing did."""
        super().__init__(problem or reason)
        self.reason, self.problem = reason, problem


class HintSource(ABC):
    """Somewhere that hints come from."""

    name: ClassVar[str]

    @abstractmethod
    async def text(self, site: Site) -> str:
        """The hint. Raises NoHint."""


class HintModel(Protocol):
    """Whoever writes hints when asked: the `complete` of an `InferenceClient`, for example."""

    async def __call__(self, messages: Sequence[Message], /) -> str:
        """The answer to chat messages."""


class FromTemplates(HintSource):
    """The text that is written for the error's key, or for its kind."""

    name = "templates"

    def __init__(self, templates: HintTemplates, *, max_chars: int = 1000) -> None:
        """`max_chars`: of what fills one placeholder; the rest of it is cut off."""
        self._templates, self._max_chars = templates, max_chars

    async def text(self, site: Site) -> str:
        if (template := self._templates.of(site.error)) is None:
            raise NoHint(OFF_TEMPLATE)
        if not (text := template.filled(fields_of(site, max_chars=self._max_chars))):
            raise NoHint(SILENT)
        return text


class FromEnvironment(HintSource):
    """What the environment said: a tool's or sandbox's error, a judge's critique."""

    name = "environment"

    def __init__(self, *, max_chars: int = 1000) -> None:
        """`max_chars`: of it; the rest is cut off."""
        self._max_chars = max_chars

    async def text(self, site: Site) -> str:
        if not (message := site.error.message.strip()):
            raise NoHint(SILENT)
        return SAID.format(message=_cut(message, self._max_chars))


class FromSiblings(HintSource):
    """The answer of the best rollout of the group that succeeded, where it was asked exactly the same."""

    name = "sibling"

    def __init__(self, *, min_reward: float, max_chars: int = 4000) -> None:
        """`min_reward`: of who counts as one that succeeded. An answer of more than `max_chars` is none to show."""
        self._min_reward, self._max_chars = min_reward, max_chars

    async def text(self, site: Site) -> str:
        best: tuple[float, str] | None = None
        for result in walk_all(site.group):
            if result.id == site.rollout.id:
                continue
            for index, step in _at_same_point(result, site):
                reward = result.step_reward(index)
                shown = step.text.strip()
                if reward < self._min_reward or not 0 < len(shown) <= self._max_chars or not _better(step, site):
                    continue
                if best is None or reward > best[0]:
                    best = reward, shown
        if best is None:
            raise NoHint(NO_SIBLING)
        return SUCCEEDED.format(answer=best[1])


class FromModel(HintSource):
    """A hint that a model writes, who is shown what the policy was, what it answered, and what was wrong with it.

    Consumes sites, of which it asks about `max_concurrent` at a time; waits at most `timeout_s` for each answer. What
    the model does wrong costs its hint and nothing else.
    """

    name = "model"

    def __init__(
        self,
        ask: HintModel,
        renderer: ChatRenderer,
        *,
        timeout_s: float = 60.0,
        max_concurrent: int = 8,
        max_chars: int = 1000,
        max_context_chars: int = 8000,
    ) -> None:
        """`renderer`: of the policy. `max_chars`: of the hint, of the answer and of what was wrong with it, each;
        `max_context_chars`: of what the policy was shown, the newest."""
        self._ask, self._renderer, self._timeout_s = ask, renderer, timeout_s
        self._max_chars, self._max_context_chars = max_chars, max_context_chars
        self._free = asyncio.Semaphore(max_concurrent)

    async def text(self, site: Site) -> str:
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    written = await self._ask(self.messages(site))
            except Exception as error:  # whoever writes hints is no part of the run
                if deadline.expired():
                    late = f"the model that writes hints has not answered within {self._timeout_s:g} s"
                    raise NoHint(MODEL_LATE, late) from error
                failed = f"the model that writes hints failed: {type(error).__name__}: {error}"
                raise NoHint(MODEL_FAILED, failed) from error
        if not isinstance(written, str) or not written.strip():
            raise NoHint(MODEL_SILENT, f"the model that writes hints answered {written!r}, expected a text")
        return _cut(written.strip(), self._max_chars)

    def messages(self, site: Site) -> list[Message]:
        """What the model is asked."""
        context = self._renderer.raw_text(site.row.token_ids[: site.turn.opens].tolist())
        fields = fields_of(site, max_chars=self._max_chars) | {"context": context[-self._max_context_chars :]}
        return [self._renderer.without_control({"role": "user", "content": ASKED.format_map(fields)})]


# --- what is known of a site ---


def sites_of(result: EpisodeResult, one: TrainingRow, group: Sequence[EpisodeResult]) -> list[Site]:
    """Of a row, in order."""
    steps = result.steps
    return [
        Site(rollout=result, row=one, turn=turn, step=step, error=error, group=group)
        for turn, step in zip(one.turns, one.steps, strict=True)
        if (error := steps[step].error) is not None
    ]


def fields_of(site: Site, *, max_chars: int) -> dict[str, str]:
    """What fills a template's placeholders, each cut to `max_chars`."""
    error, answer = site.error, site.answer
    fields = {
        "message": error.message.strip(),
        "error_kind": error.error_kind,
        "hint_template_key": error.hint_template_key,
        "tool": called_tool(answer.text, error.message),
        "answer": answer.text.strip(),
        "role": answer.role,
        "env": site.rollout.task.env,
        "turn": str(site.turn.index + 1),
    }
    return {name: _cut(value, max_chars) for name, value in fields.items()}


_CALLED = re.compile(r'"name"\s*:\s*"([\w.-]{1,40})"|(?<!\w)([A-Za-z_]\w{0,39})\[')


def called_tool(answer: str, message: str) -> str:
    """The tool that an answer calls, as it is written there: the one that `message` speaks of, or the only one; where
    that does not tell, `the tool`."""
    names = list(dict.fromkeys(found[1] or found[2] for found in _CALLED.finditer(answer)))
    told = {word.lower() for word in re.findall(r"\w+(?:[.-]+\w+)*", message)}
    spoken = [name for name in names if name.lower() in told]
    if spoken:
        return spoken[0]
    return names[0] if len(names) == 1 else "the tool"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[:max_chars].rstrip() + " ..."


def _at_same_point(rollout: EpisodeResult, site: Site) -> list[tuple[int, Step]]:
    """(index, step) of a rollout's answers to exactly what the site's answer answered to."""
    context = site.row.token_ids[: site.turn.begins]
    return [
        (step, rollout.steps[step])
        for one in rollout.rows
        for turn, step in zip(one.turns, one.steps, strict=True)
        if np.array_equal(one.token_ids[: turn.begins], context)
    ]


def _better(step: Step, site: Site) -> bool:
    """Whether an answer is a whole one, another than the site's, and none that went wrong itself."""
    whole = step.error is None and step.completion.finish_reason == "stop"
    return whole and step.completion.token_ids != site.answer.completion.token_ids
