"""What was played, as the trees that credit is given on."""

from orchestrator.rollouts.records import Completion, EpisodeResult, Step, Task
from orchestrator.rollouts.state import EpisodeState

_TASK = Task(env="test", split="train", index=0, messages=())


def tree_of(outcome: EpisodeState, name: str) -> EpisodeResult:
    """An outcome and all that it spawned; the children of `0/1` are called `0/1.0`, `0/1.1` and so on."""
    steps = tuple(
        Step(
            role=reply.role,
            temperature=1.0,
            completion=Completion(token_ids=[2], logprobs=[0.0], finish_reason="stop"),
            text=reply.text,
            version=0,
        )
        for reply in outcome.trajectory
    )
    children = tuple(tree_of(child, f"{name}.{number}") for number, child in enumerate(outcome.children))
    return EpisodeResult(id=name, task=_TASK, steps=steps, rewards=outcome.rewards, children=children)
