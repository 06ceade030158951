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
Given = Mapping[tuple[str, int], GivenHint]
"""By rollout and the index of its step."""


def is_due(settings: ConversationSettings, step: int) -> bool:
    """Whether the conversations of batch `step` are kept."""
    return settings.interval is not None and (step == 1 or step % settings.interval == 0)


def write_conversations(folder: Path, step: int, groups: Sequence[FinishedGroup]) -> None:
    """`conversations/step_N.jsonl` in a run's folder, a line for each rollout; those that it has spawned are in it."""
    lines = []
    for group in groups:
        hints = {(one.rollout_id, one.step): one for one in group.hints}
        for result in group.results:
            about = {"step": step, "env": result.task.env, "example": result.task.index}
            told = about | {"trained": result.id not in group.withheld} | _told(result, hints)
            lines.append(json.dumps(told, ensure_ascii=False, default=str) + "\n")
    (folder / FOLDER).mkdir(exist_ok=True)
    write_atomic(folder / FOLDER / f"step_{step:06d}.jsonl", "".join(lines).encode(), durable=False)


def _told(result: EpisodeResult, hints: Given) -> dict[str, Any]:
    steps = [_step(step, hints.get((result.id, index))) for index, step in enumerate(result.steps)]
    if steps and not steps[0]["messages"]:
        steps[0]["messages"] = result.task.messages
    return {
        "rollout": result.id,
        "rewards": result.rewards,
        "accuracy": result.accuracy,
        "metrics": result.metrics,
        "steps": steps,
        "context_full": result.context_full,
        "extras": result.extras,
        "children": [_told(child, hints) for child in result.children],
    }


def _step(step: Step, hint: GivenHint | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "role": step.role,
        "messages": step.messages,
        "answer": step.text,
        "finish_reason": step.completion.finish_reason,
        "num_tokens": len(step.completion.token_ids),
        "versions": step.versions,
    }
    if step.error is not None:
        told["error"] = {name: getattr(step.error, name) for name in ("error_kind", "hint_template_key", "message")}
    if hint is not None:
        told["hint"] = {"source": hint.source, "text": hint.text}
    return told
