"""Sources of hints' texts: templates, built in or the user's own, the environment's message, a sibling that did better,
a model that is asked, the task's own solution."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from grpo.configs.loading import read_yaml
from grpo.orchestrator.endpoints import ApiModel, EndpointError
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, TrainingRow, Turn, walk_all
from grpo.orchestrator.rollouts.state import StepError
from pydantic import TypeAdapter

MAX_CHARS, MAX_CONTEXT_CHARS = 1000, 8000
"""Longest text of a hint and of what fills a placeholder; longest end of the conversation that a model is shown."""
MAX_SHOWN_CHARS = 4000
"""A sibling's answer that is longer is none to show."""

OFF_TEMPLATE = "off_template"
"""No template is for the error's key or kind."""
SILENT = "environment_silent"
"""The environment marked the error and said nothing, or nothing of what a template asks for."""
NO_SIBLING = "no_sibling"
"""No other rollout of the group did better from the same context with another answer."""
MODEL_FAILED, MODEL_SILENT = "model_failed", "model_silent"
"""The model that writes hints did not answer, or said nothing."""
NO_SOLUTION = "no_solution"

SAID = "The answer that was tried here before went wrong: {message}"
SUCCEEDED = "Another attempt, which succeeded, answered here:\n{answer}"
SOLVED = "The solution is:\n{solution}"
QUESTION = """A model gave an answer that went wrong.

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
    """The row that it stands in."""
    turn: Turn
    step: int
    """Its index among the rollout's steps."""
    group: Sequence[EpisodeResult] = ()
    """All results of the rollout's group."""

    @property
    def answer(self) -> Step:
        """Returns the answer."""
        return self.rollout.steps[self.step]

    @property
    def error(self) -> StepError:
        """Returns the mark of its environment; without kind, key and message where it marked nothing."""
        return self.answer.error or StepError(error_kind="", hint_template_key="")


class NoHint(Exception):
    """A source has no hint for an answer. Example: ``NoHint(OFF_TEMPLATE)``"""

    def __init__(self, reason: str, problem: str | None = None) -> None:
        """`reason`: of a closed set, to be counted. `problem`: what went wrong, for people; None where nothing did."""
        super().__init__(problem or reason)
        self.reason, self.problem = reason, problem


Source = Callable[[Site], Awaitable[str]]
"""Returns the hint for an answer. Raises NoHint."""


# --- templates ---

Texts = Mapping[str, str]
"""Texts by `hint_template_key` or `error_kind`, with PLACEHOLDERS in braces.
Example: ``{"unknown_fruit": "There is fruit in {message}"}``"""

BUILT_IN: Texts = {
    "unclosed_call": "Close every tool call that you open. {message}",
    "malformed_json": "A tool call must be valid JSON. {message}",
    "malformed_call": "A tool call must have the form that was asked for. {message}",
    "unknown_tool": "Call only tools that there are, by their exact names. {message}",
    "wrong_arguments": "Give a tool exactly the arguments that it takes. {message}",
    "tool_timeout": "Ask the tool for less at a time. {message}",
    "tool_error": "Mind what the tool can do. Called as before, it fails: {message}",
    "unknown_word": "Look up only words that stand in the question, spelled as there. {message}",
    "malformed_action": "Answer with an action in the form that was asked for. {message}",
    "refused_action": "Choose an action that is allowed here. {message}",
}
"""Texts for the kinds of errors that built-in environments mark."""

PLACEHOLDERS = ("message", "error_kind", "hint_template_key", "answer")
"""The environment's message, the kind and the key that it marked, and the policy's answer."""


def load_templates(location: str | None) -> Texts:
    """Returns the built-in texts, replaced and extended by those of a YAML or JSON file of texts by key; null takes a
    built-in one away. Raises ValueError."""
    if location is None:
        return BUILT_IN
    try:
        own = TypeAdapter(dict[str, str | None]).validate_python(read_yaml(Path(location)))  # JSON is YAML
        if unknown := [key for key, text in own.items() if text is None and key not in BUILT_IN]:
            raise ValueError(f"{unknown[0]!r} is null, and none of the built-in hints {', '.join(BUILT_IN)}")
        texts = {key: text for key, text in {**BUILT_IN, **own}.items() if text is not None}
        for key, text in texts.items():
            if not text.format_map(dict.fromkeys(PLACEHOLDERS, "x")).strip():
                raise ValueError(f"the hint for {key!r} is empty; give a text, or null for no hint")
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
        raise ValueError(
            f"hints.templates = {location!r}: {error}; a text may have {known}, and {{{{ and }}}} for braces"
        ) from error
    return texts


def template_of(texts: Texts, error: StepError) -> str | None:
    """Returns the text for an error, by its key or else by its kind; None where there is none."""
    return texts.get(error.hint_template_key) or texts.get(error.error_kind)


def from_templates(texts: Texts) -> Source:
    """Returns a source of the texts that are written for an error's key, or for its kind."""

    async def text(site: Site) -> str:
        if (template := template_of(texts, site.error)) is None:
            raise NoHint(OFF_TEMPLATE)
        return _not_silent(template.format_map(_fields_of(site)))

    return text


async def from_environment(site: Site) -> str:
    """Returns the environment's message: a tool's or sandbox's error, a judge's critique."""
    return SAID.format(message=_not_silent(_fields_of(site)["message"]))


async def from_siblings(site: Site) -> str:
    """Returns the answer of the best rollout of the group that did better, where it was asked exactly the same."""
    own, best = site.rollout.step_reward(site.step), None
    for result in walk_all(site.group):
        for index in _at_same_point(result, site) if result.id != site.rollout.id else ():
            answer, reward = result.steps[index].text.strip(), result.step_reward(index)
            if reward > own and 0 < len(answer) <= MAX_SHOWN_CHARS:
                own, best = reward, answer
    if best is None:
        raise NoHint(NO_SIBLING)
    return SUCCEEDED.format(answer=best)


async def from_solution(site: Site) -> str:
    """Returns the solution of the rollout's example."""
    if not (solution := site.rollout.task.solution.strip()):
        raise NoHint(NO_SOLUTION)
    return SOLVED.format(solution=solution)


def from_model(model: ApiModel, renderer: ChatRenderer) -> Source:
    """Returns a source of hints that a model writes: it is shown what the policy was shown, what it answered, and what
    was wrong with that. A failure of the model costs its hint and nothing else. `renderer`: of the policy."""

    async def text(site: Site) -> str:
        context = renderer.raw_text(site.row.token_ids[: site.turn.opens].tolist())[-MAX_CONTEXT_CHARS:]
        question = QUESTION.format_map(_fields_of(site) | {"context": context})
        try:
            written = (await model.ask([renderer.without_control({"role": "user", "content": question})])).text.strip()
        except EndpointError as error:
            raise NoHint(MODEL_FAILED, f"the model that writes hints did not answer: {error}") from error
        if not written:
            raise NoHint(MODEL_SILENT, "the model that writes hints answered nothing, expected a text")
        return _cut(written)

    return text


def _not_silent(text: str) -> str:
    """Raises NoHint for an empty text."""
    if not (plain := text.strip()):
        raise NoHint(SILENT)
    return plain


def _fields_of(site: Site) -> dict[str, str]:
    """Returns what fills a template's placeholders."""
    error = site.error
    values = (error.message.strip(), error.error_kind, error.hint_template_key, site.answer.text.strip())
    return {name: _cut(value) for name, value in zip(PLACEHOLDERS, values, strict=True)}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS].rstrip() + " ..."


def _at_same_point(rollout: EpisodeResult, site: Site) -> Iterator[int]:
    """Yields a rollout's whole, other and unmarked answers to exactly what the site's answer answered to."""
    context = site.row.token_ids[: site.turn.begins]
    for row in rollout.rows:
        for turn, index in zip(row.turns, row.steps, strict=True):
            step = rollout.steps[index]
            whole = step.error is None and step.completion.finish_reason == "stop"
            is_other = not np.array_equal(step.completion.token_ids, site.answer.completion.token_ids)
            if whole and is_other and np.array_equal(row.token_ids[: turn.begins], context):
                yield index
