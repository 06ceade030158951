"""Rollouts whose conversations are real and whose answers are scripted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo.orchestrator.auxiliary.hints.sources import Site
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.conversation import Conversation
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.rollouts.state import StepError
from grpo.orchestrator.rollouts.templates import ChatTemplate
from msgspec.structs import replace

from tests.orchestrator import made

TINY = ChatTemplate.of(ChatRenderer.of_model(Path(__file__).parents[4] / "configs/tiny/model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the policy's, and what it was told afterwards."""

    text: str
    error: StepError | None = None
    told: str = "go on"
    whole: bool = True


def wrong(text: str, message: str = "There is no tool ad.", *, kind: str = "unknown_tool", key: str = "") -> Answer:
    """One that is marked."""
    return Answer(text=text, error=StepError(error_kind=kind, hint_template_key=key or kind, message=message))


def played(
    name: str,
    answers: Sequence[Answer],
    *,
    reward: float = 0.0,
    template: ChatTemplate = TINY,
    children: Sequence[EpisodeResult] = (),
) -> EpisodeResult:
    """A rollout of one conversation."""
    conversation = Conversation(template, [{"role": "user", "content": "q"}])
    steps = []
    for answer in answers:
        ids = template.renderer.ids_of(answer.text)
        if answer.whole and template.end_id is not None:
            ids.append(template.end_id)
        sampled = made.completion(ids, logprob=-1.0, stop=answer.whole)
        text = conversation.answer(sampled, version=1, temperature=1.0)
        conversation.add({"role": "user", "content": answer.told})
        steps.append(made.step(completion=sampled, text=text, version=1, error=answer.error))
    rows = [replace(row, steps=tuple(turn.index for turn in row.turns)) for row in conversation.rows()]
    return made.result(name, *steps, rows=tuple(rows), rewards=reward, children=tuple(children))


def site(result: EpisodeResult, *others: EpisodeResult) -> Site:
    """The first of its first row, in a group with `others`."""
    row = result.rows[0]
    return next(
        Site(rollout=result, row=row, turn=turn, step=step, group=[result, *others])
        for turn, step in zip(row.turns, row.steps, strict=True)
        if result.steps[step].error is not None
    )
