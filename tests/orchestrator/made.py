"""Parts of rollouts and training samples, in few words."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from grpo.orchestrator.rollouts.records import EpisodeResult, Step, Task
from grpo.transport.http import Choice
from grpo.transport.records import TrainingSample

TASK = Task(env="e", split="train", index=0, messages=({"role": "user", "content": "hi"},))


def completion(ids: Sequence[int], *, logprob: float = -0.5, stop: bool = True, versions: Any = ()) -> Choice:
    """Tokens of that log-probability each."""
    reason = "stop" if stop else "length"
    return Choice(token_ids=[*ids], logprobs=[logprob] * len(ids), finish_reason=reason, versions=versions)


def step(role: str = "policy", ids: Sequence[int] = (2,), **more: Any) -> Step:
    """A call that sampled `ids`."""
    return Step(**({"role": role, "completion": completion(ids)} | more))


def result(
    name: str, *steps: Step, rewards: Mapping[str, float] | float = 0.0, task: Task = TASK, **more: Any
) -> EpisodeResult:
    """A rollout; a number for `rewards` is that of the role `policy`."""
    told = rewards if isinstance(rewards, Mapping) else {"policy": rewards}
    return EpisodeResult(id=name, task=task, steps=steps, rewards=told, **more)


def sample(rollout: str, ids: Sequence[int], **changes: Any) -> TrainingSample:
    """Every token but the first was sampled, under version 0 with a log-probability of -1."""
    mask = np.arange(len(ids)) > 0
    fields: dict[str, Any] = {
        "token_ids": np.array(ids, np.int32),
        "loss_mask": mask,
        "inference_logprobs": np.where(mask, -1, 0).astype(np.float32),
        "advantages": 0.0,
        "temperatures": 1.0,
        "policy_versions": ((0, len(ids)),),
        "env": "e",
        "group_id": "0",
        "rollout_id": rollout,
        "reward": 0.0,
        "stop_reason": "stop",
    }
    return TrainingSample(**fields | changes)
