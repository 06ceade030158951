"""Scored rollouts to training samples: ids and log-probabilities as the server gave them."""

from collections.abc import Sequence

import numpy as np

from orchestrator.episodes.credit import CreditAssigner
from orchestrator.episodes.episode import GenerateResult
from orchestrator.episodes.types import Step
from transport.types import TrainingSample


def training_samples(results: Sequence[GenerateResult], credit: CreditAssigner, *, group: str) -> list[TrainingSample]:
    """One sample for each step of a group's rollouts."""
    advantages = credit.compute(results)
    return [
        _sample(result, step, advantages[result.rollout.id, index], group=group)
        for result in results
        for index, step in enumerate(result.rollout.steps)
    ]


def _sample(result: GenerateResult, step: Step, advantage: float, *, group: str) -> TrainingSample:
    num_prompt, completion = len(step.prompt_token_ids), step.completion
    length = num_prompt + len(completion.token_ids)
    token_ids = np.empty(length, np.int32)
    token_ids[:num_prompt], token_ids[num_prompt:] = step.prompt_token_ids, completion.token_ids
    loss_mask = np.zeros(length, np.bool_)
    loss_mask[num_prompt:] = True
    logprobs = np.zeros(length, np.float32)
    logprobs[num_prompt:] = completion.logprobs
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        inference_logprobs=logprobs,
        advantages=advantage,
        temperatures=step.role.temperature,
        policy_versions=((step.version, length),),
        env=result.rollout.task.env,
        group_id=group,
        rollout_id=result.rollout.id,
        reward=result.score.reward,
        stop_reason=completion.finish_reason,
    )
