"""Credit for games whose moves are answers to prompts of their own: a move is compared with others in its position."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from grpo import EpisodeResult

StepKey = tuple[str, int]
"""(rollout id, index of the step)"""


def by_position(results: Sequence[EpisodeResult], *, prior: float = 8.0) -> dict[StepKey, float]:
    """Returns the advantage of every step: its reward minus a baseline of its position. Good cards are no merit of a
    bet, so the baseline is the mean reward in the same position, hidden cards included: whatever a baseline knows, the
    gradient's mean stays the same as long as it does not know the move. Where few games have been in a position, it is
    drawn to the mean of its prompt (anchor states; Feng et al. 2025, arXiv:2505.10978), and that to the role's. With
    a_i the reward minus the coarser baseline, each level subtracts

        Σ_j a_j / (n + prior), over the n steps j with the prompt, or position, of i

    The game tells positions as `extras["positions"]`, one for each step.
    """
    everyone = [one for root in results for one in root.walk()]
    left = {(one.id, index): one.step_reward(index) for one in everyone for index in range(len(one.steps))}
    role, prompt, position = dict[StepKey, Hashable](), dict[StepKey, Hashable](), dict[StepKey, Hashable]()
    for one in everyone:
        for index, step in enumerate(one.steps):
            key = one.id, index
            role[key] = step.role
            prompt[key] = step.role, tuple(message["content"] for message in step.messages)
            position[key] = step.role, one.extras["positions"][index]
    for level, weight in ((role, 0.0), (prompt, prior), (position, prior)):
        left = _less_mean(left, level, weight)
    return left


def _less_mean(
    values: Mapping[StepKey, float], level: Mapping[StepKey, Hashable], prior: float
) -> dict[StepKey, float]:
    """Returns the values minus the mean of those that are alike, which counts `prior` zeros beside them."""
    alike: dict[Hashable, list[float]] = defaultdict(list)
    for key, value in values.items():
        alike[level[key]].append(value)
    means = {one: sum(some) / (len(some) + prior) for one, some in alike.items()}
    return {key: value - means[level[key]] for key, value in values.items()}
