"""Rollouts of a batch for trackers, where the user asks for them: some of them as texts, and histograms."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from grpo.configs.reporting import ReportSettings
from grpo.orchestrator.samples import ScoredGroup

COLUMNS = ("step", "env", "prompt", "answer", "reward", "advantage", "num_tokens", "stop_reason", "version")
SAMPLES = "rollout/samples"
Cell = str | float | int | None
_SHORTEST_SECRET = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Rollouts of one step as trackers show them."""

    step: int
    samples: Sequence[Sequence[Cell]]
    """Rows of COLUMNS."""
    distributions: Mapping[str, Sequence[float]]
    """Values by the name of their histogram."""


def rollouts_of(
    step: int, groups: Sequence[ScoredGroup], settings: ReportSettings, *, key_names: set[str]
) -> Rollouts | None:
    """Returns the rollouts that are reported at this step; None where none are due. The values of the environment
    variables `key_names` are hidden in texts."""
    if step % settings.interval or not (settings.samples or settings.distributions):
        return None
    advantages, results = _advantages(groups), [result for group in groups for result in group.results]
    secrets = [value for name in key_names if len(value := os.environ.get(name, "")) >= _SHORTEST_SECRET]

    def shown(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return text

    rows, num = list[list[Cell]](), min(settings.samples or 0, len(results))
    for result in (results[number * len(results) // num] for number in range(num)):
        steps = [one for part in result.walk() for one in part.steps]
        prompt = "\n\n".join(f"{message['role']}: {message.get('content')}" for message in result.task.messages)
        row: list[Cell] = [step, result.task.env, shown(prompt), shown("\n\n".join(one.text for one in steps))]
        row += [result.reward, advantages.get(result.id), result.num_tokens]
        row += [steps[-1].completion.finish_reason, steps[-1].version] if steps else ["", None]
        rows.append(row)
    values = {
        "reward/distribution": [result.reward for result in results],
        "reward/advantage_distribution": list(advantages.values()),
        "rollout/num_tokens_distribution": [float(result.num_tokens) for result in results],
    }
    return Rollouts(step=step, samples=rows, distributions=values if settings.distributions else {})


def _advantages(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns the advantage of each rollout that is trained; the mean where its tokens have different ones."""
    of_tokens: dict[str, list[float]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        mask = sample.loss_mask
        of_tokens.setdefault(sample.rollout_id, []).extend(np.broadcast_to(sample.advantages, mask.shape)[mask])
    return {rollout_id: float(np.mean(values or 0.0)) for rollout_id, values in of_tokens.items()}
