"""Whole conversations of rollouts, for people to read: one JSON object a line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.reporting import ConversationSettings
from orchestrator.hints.hinting import GivenHint
from orchestrator.rollouts.records import EpisodeResult, Step
from orchestrator.samples import FinishedGroup
from transport.folders import write_atomic

FOLDER = "conversations"


def is_due(settings: ConversationSettings, step: int) -> bool:
    """Whether the conversations of batch `step` are kept."""
    return settings.interval is not None and (step == 1 or step % settings.interval == 0)


def lines_of(step: int, groups: Sequence[FinishedGroup]) -> bytes:
    """The rollouts of `groups`, a line each; rollouts that one has spawned are in it."""
    lines = []
    for group in groups:
        hints = {(one.rollout_id, one.step): one for one in group.hints}
        for result in group.results:
            told = {
                "step": step,
                "env": result.task.env,
                "example": result.task.index,
                "trained": result.id not in group.withheld,
                **_told(result, hints),
            }
            lines.append(json.dumps(told, ensure_ascii=False, default=str))
    return "".join(f"{line}\n" for line in lines).encode()


def write_conversations(folder: Path, step: int, groups: Sequence[FinishedGroup]) -> None:
    """`conversations/step_N.jsonl` in a run's folder."""
    (folder / FOLDER).mkdir(exist_ok=True)
    write_atomic(folder / FOLDER / f"step_{step:06d}.jsonl", lines_of(step, groups), durable=False)


Given = Mapping[tuple[str, int], GivenHint]
"""By rollout and the index of its step."""


def _told(result: EpisodeResult, hints: Given) -> dict[str, Any]:
    told: dict[str, Any] = {
        "rollout": result.id,
        "rewards": dict(result.rewards),
        "accuracy": result.accuracy,
        "metrics": dict(result.metrics),
        "steps": [
            _step(step, result.task.messages if index == 0 and not step.messages else step.messages)
            | _hint(hints.get((result.id, index)))
            for index, step in enumerate(result.steps)
        ],
    }
    if result.context_full:
        told["context_full"] = True
    if result.extras:
        told["extras"] = dict(result.extras)
    if result.children:
        told["children"] = [_told(child, hints) for child in result.children]
    return told


def _hint(given: GivenHint | None) -> dict[str, Any]:
    return {} if given is None else {"hint": {"source": given.source, "text": given.text}}


def _step(step: Step, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "role": step.role,
        "messages": [dict(message) for message in messages],
        "answer": step.text,
        "finish_reason": step.completion.finish_reason,
        "num_tokens": len(step.completion.token_ids),
        "versions": step.versions,
    }
    if step.error is not None:
        told["error"] = {
            "error_kind": step.error.error_kind,
            "hint_template_key": step.error.hint_template_key,
            "message": step.error.message,
        }
    return told
