"""What was played, as the trees that credit is given on."""

from orchestrator.episodes.records import EpisodeResult
from orchestrator.episodes.records import Completion, EpisodeResult, Step, Task

from orchestrator.episodes.state import Outcome

_TASK = Task(env="test", split="train", index=0, messages=())


def tree_of(outcome: Outcome, name: str) -> EpisodeResult:
    """An outcome and all that it spawned; the children of `0/1` are called `0/1.0`, `0/1.1` and so on."""
    steps = tuple(
        Step(
            role=reply.role,
            temperature=1.0,
            prompt_token_ids=[1],
            completion=Completion(token_ids=[2], logprobs=[0.0], finish_reason="stop"),
            text=reply.text,
            version=0,
        )
        for reply in outcome.state.trajectory
    )
    children = tuple(tree_of(child, f"{name}.{number}") for number, child in enumerate(outcome.children))
    rollout = Rollout(id=name, task=_TASK, steps=steps)
    return EpisodeResult(rollout=rollout, rewards=outcome.rewards, children=children)
