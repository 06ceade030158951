"""Scored rollouts of one turn, as teachers are asked about them."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.rollouts.conversation import single_row
from orchestrator.rollouts.records import Completion, EpisodeResult, Step, Task, TrainingRow
from orchestrator.rollouts.state import StepError
from orchestrator.rollouts.templates import ChatTemplate
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
        ids = [*answer.encode(), END]
        steps.append(
            Step(
                role="policy",
                temperature=1.0,
                completion=Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop"),
                text=answer,
                version=version,
                messages=messages,
                tools=tools,
                error=error,
            )
        )
        prompt = TEMPLATE.renderer.ids_of(TEMPLATE.render([{**messages[-1], "role": "user"}]))
        row = single_row(prompt, steps[-1].completion, opening=TEMPLATE.opening_ids, version=version, temperature=1.0)
        rows.append(replace(row, steps=(len(rows),)))
    task = Task(env="e", split="train", index=0, messages=steps[0].messages)  # type: ignore[arg-type]
    return EpisodeResult(id=name, task=task, steps=tuple(steps), rows=tuple(rows), rewards={"policy": reward})
