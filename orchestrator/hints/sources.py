"""Where a hint's text comes from: a template, what the environment said, a sibling that succeeded, a model that is
asked, the task's own solution."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.endpoints import EndpointError
from orchestrator.hints.templates import HintTemplates
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.records import EpisodeResult, Message, Step, TrainingRow, Turn, walk_all
from orchestrator.rollouts.state import StepError

OFF_TEMPLATE = "off_template"
"""No template is for the error's key or kind."""
SILENT = "environment_silent"
"""The environment marked the error and said nothing, or nothing of what a template asks for."""
NO_SIBLING = "no_sibling"
"""No other rollout of the group succeeded from the same context with another answer."""
MODEL_FAILED, MODEL_SILENT = "model_failed", "model_silent"
"""The model that writes hints did not answer, or said nothing."""
NOT_MARKED = "not_marked"
"""The environment marked no error."""
NO_SOLUTION = "no_solution"
"""The example has no `solution`."""

SAID = "The answer that was tried here before went wrong: {message}"
SUCCEEDED = "Another attempt, which succeeded, answered here:\n{answer}"
SOLVED = "The solution is:\n{solution}"
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
    """An answer that a hint may be for."""

    rollout: EpisodeResult
    row: TrainingRow
    """That it stands in."""
    turn: Turn
    step: int
    """Its index among the rollout's steps."""
    error: StepError | None
    """That its environment marked; None: nothing went wrong that it knows of, and only the solution helps."""
    group: Sequence[EpisodeResult] = ()
    """All results of the rollout's group."""

    @property
    def answer(self) -> Step:
        """What was answered."""
        return self.rollout.steps[self.step]


class NoHint(Exception):
    """A source has no hint for an answer. Example: ``NoHint(OFF_TEMPLATE)``"""

    def __init__(self, reason: str, problem: str | None = None) -> None:
        """`reason`: of a closed set, to be counted. `problem`: what went wrong, for people; None where nothing did."""
        super().__init__(problem or reason)
        self.reason, self.problem = reason, problem


Source = Callable[[Site], Awaitable[str]]
"""Gives the hint for an answer. Raises NoHint."""
ErrorSource = Callable[[Site, StepError], str]
"""Gives the hint for an answer that was marked. Raises NoHint."""
HintModel = Callable[[Sequence[Message]], Awaitable[str]]
"""Whoever writes hints when asked. Raises EndpointError."""


def of_errors(source: ErrorSource) -> Source:
    """A source that has hints for marked answers alone."""

    async def text(site: Site) -> str:
        if site.error is None:
            raise NoHint(NOT_MARKED)
        return source(site, site.error)

    return text


def from_templates(templates: HintTemplates, *, max_chars: int) -> ErrorSource:
    """The text that is written for the error's key, or for its kind. `max_chars`: of what fills one placeholder; the
    rest of it is cut off."""

    def text(site: Site, error: StepError) -> str:
        if (template := templates.of(error)) is None:
            raise NoHint(OFF_TEMPLATE)
        if not (filled := template.format_map(fields_of(site, error, max_chars=max_chars)).strip()):
            raise NoHint(SILENT)
        return filled

    return text


def from_environment(*, max_chars: int) -> ErrorSource:
    """What the environment said: a tool's or sandbox's error, a judge's critique."""

    def text(site: Site, error: StepError) -> str:
        if not (message := error.message.strip()):
            raise NoHint(SILENT)
        return SAID.format(message=_cut(message, max_chars))

    return text


def from_siblings(*, min_reward: float, max_chars: int = 4000) -> ErrorSource:
    """The answer of the best rollout of the group that succeeded, where it was asked exactly the same. `min_reward`: of
    who counts as one that succeeded. An answer of more than `max_chars` is none to show."""

    def text(site: Site, error: StepError) -> str:
        succeeded = [
            (result.step_reward(index), step.text.strip())
            for result in walk_all(site.group)
            if result.id != site.rollout.id
            for index, step in _at_same_point(result, site)
            if result.step_reward(index) >= min_reward and _is_better(step, site)
        ]
        shown = [(reward, answer) for reward, answer in succeeded if 0 < len(answer) <= max_chars]
        if not shown:
            raise NoHint(NO_SIBLING)
        return SUCCEEDED.format(answer=max(shown, key=lambda one: one[0])[1])

    return text


async def from_solution(site: Site) -> str:
    """The solution of the rollout's example."""
    if not (solution := site.rollout.task.solution.strip()):
        raise NoHint(NO_SOLUTION)
    return SOLVED.format(solution=solution)


def from_model(
    ask: HintModel,
    renderer: ChatRenderer,
    *,
    max_concurrent: int = 8,
    max_chars: int = 1000,
    max_context_chars: int = 8000,
) -> Source:
    """A hint that a model writes, who is shown what the policy was, what it answered, and what was wrong with it. What
    the model does wrong costs its hint and nothing else.

    `renderer`: of the policy. `max_chars`: of the hint, of the answer and of what was wrong with it, each;
    `max_context_chars`: of what the policy was shown, the newest.
    """
    turns = asyncio.Semaphore(max_concurrent)

    async def text(site: Site) -> str:
        if site.error is None:
            raise NoHint(NOT_MARKED)
        context = renderer.raw_text(site.row.token_ids[: site.turn.opens].tolist())
        fields = fields_of(site, site.error, max_chars=max_chars) | {"context": context[-max_context_chars:]}
        async with turns:
            try:
                written = await ask([renderer.without_control({"role": "user", "content": ASKED.format_map(fields)})])
            except EndpointError as error:
                raise NoHint(MODEL_FAILED, f"the model that writes hints did not answer: {error}") from error
        if not written.strip():
            raise NoHint(MODEL_SILENT, "the model that writes hints answered nothing, expected a text")
        return _cut(written.strip(), max_chars)

    return text


# --- what is known of a site ---


def sites_of(result: EpisodeResult, one: TrainingRow, group: Sequence[EpisodeResult], *, marked: bool) -> list[Site]:
    """The answers of a row, in order: those that are `marked` alone, or all."""
    steps = result.steps
    return [
        Site(rollout=result, row=one, turn=turn, step=step, error=steps[step].error, group=group)
        for turn, step in zip(one.turns, one.steps, strict=True)
        if steps[step].error is not None or not marked
    ]


def fields_of(site: Site, error: StepError, *, max_chars: int) -> dict[str, str]:
    """What fills a template's placeholders, each cut to `max_chars`."""
    answer = site.answer
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


def _is_better(step: Step, site: Site) -> bool:
    """Whether an answer is a whole one, another than the site's, and none that went wrong itself."""
    whole = step.error is None and step.completion.finish_reason == "stop"
    return whole and step.completion.token_ids != site.answer.completion.token_ids
