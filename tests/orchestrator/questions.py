"""Scored rollouts whose answers are to one question each."""

from collections.abc import Sequence
from typing import Any

from grpo.orchestrator.rollouts.records import EpisodeResult, Step, TrainingRow, single_row
from grpo.orchestrator.rollouts.state import StepError
from grpo.orchestrator.rollouts.templates import ChatTemplate
from msgspec.structs import replace

from tests.orchestrator import made
from tests.orchestrator.chat_templates import renderer

TEMPLATE = ChatTemplate.of(renderer(None))
END = 258


def result(
    name: str,
    question: str,
    *answers: str,
    reward: float = 0.0,
    version: int = 7,
    tools: Any = None,
    before: Sequence[dict[str, str]] = (),
    error: StepError | None = None,
) -> EpisodeResult:
    """A rollout whose `answers` are answers to one question each, the first `question`, then `question 1`, ..."""
    steps, rows = list[Step](), list[TrainingRow]()
    for number, answer in enumerate(answers):
        messages = (*before, {"role": "user", "content": f"{question} {number}" if number else question})
        told = {"version": version, "messages": messages, "tools": tools, "error": error}
        steps.append(made.step(ids=[*answer.encode(), END], text=answer, **told))
        prompt = TEMPLATE.renderer.ids_of(TEMPLATE.render([{**messages[-1], "role": "user"}]))
        row = single_row(prompt, steps[-1].completion, opening=TEMPLATE.opening_ids, version=version, temperature=1.0)
        rows.append(replace(row, steps=(len(rows),)))
    task = replace(made.TASK, messages=tuple(steps[0].messages))
    return made.result(name, *steps, rows=tuple(rows), rewards=reward, task=task)
