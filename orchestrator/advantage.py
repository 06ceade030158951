"""Advantages of a group, rewards in and advantages out, and credit: which one each step of each rollout gets.

Legend: `G` rollouts of one group in which one role acted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from grpo.configs.orch import OrchSettings
from grpo.configs.rollouts import EpisodicAdvantage, ReinforcePlusPlus, RunningBaseline
from grpo.orchestrator.rollouts.messages import shown
from grpo.orchestrator.rollouts.records import MAX_REWARD, EpisodeResult, levels, walk_all
from grpo.transport.errors import UserError
from grpo.transport.importing import FunctionFailed, called, load_object

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], Sequence[float]]
"""`(rewards [G], numbers of sampled tokens [G]) -> advantages [G]`"""


ROUNDING = 1e-9
"""Relative difference up to which numbers count as equal."""


def are_equal(rewards_G: Sequence[float]) -> bool:
    """Returns whether the rewards, at least one, differ by no more than rounding."""
    lowest, highest = min(rewards_G), max(rewards_G)
    return highest - lowest <= ROUNDING * max(abs(lowest), abs(highest))


def group_relative(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = r_i - mean(r), the baseline of GRPO without the division by the standard deviation.

    Dividing would weigh groups whose rewards hardly differ as much as those that differ most (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3). Equal rewards give advantages of 0. `lengths_G` are not used.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
    if are_equal(rewards_G):  # a mean that is rounded would leave 1e-17 of them
        return [0.0] * len(rewards_G)
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


def length_weighted(rewards_G: Sequence[float], lengths_G: Sequence[int]) -> list[float]:
    """A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), where l are the numbers of sampled tokens.

    The loss is a sum over tokens, each with its rollout's advantage. With this baseline the advantages of the group's
    tokens sum to 0, sum_i(l_i A_i) = 0, where those of its rollouts do with the plain mean. For rollouts of equal
    length both are the same.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
    if (total := sum(lengths_G)) <= 0:
        raise ValueError(f"the rollouts of a group sampled {list(lengths_G)} tokens, expected at least one in all")
    if are_equal(rewards_G):
        return [0.0] * len(rewards_G)
    baseline = sum(length * reward for length, reward in zip(lengths_G, rewards_G, strict=True)) / total
    return [reward - baseline for reward in rewards_G]


def normalised(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r), with the standard deviation of the whole group (divided by G), as in GRPO (Shao
    et al. 2024, "DeepSeekMath"). Equal rewards give advantages of 0. `lengths_G` are not used.
    """
    advantages_G = group_relative(rewards_G, lengths_G)
    std = math.sqrt(sum(advantage * advantage for advantage in advantages_G) / len(advantages_G))
    if std == 0.0:
        return advantages_G
    return [advantage / std for advantage in advantages_G]


def leave_one_out(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = r_i - mean of the other rewards = (r_i - mean(r)) * G / (G - 1), the baseline of RLOO (Ahmadian et al.
    2024, "Back to Basics"). A group of one has no others, hence an advantage of 0. `lengths_G` are not used.
    """
    num = len(rewards_G)
    advantages_G = group_relative(rewards_G, lengths_G)
    return [0.0] if num == 1 else [advantage * num / (num - 1) for advantage in advantages_G]


def custom_advantage(import_path: str, kwargs: Mapping[str, Any]) -> AdvantageFunction:
    """The user's function that `advantage.import_path` names. Raises ValueError where it is no function."""
    function = load_object(import_path, setting="advantage.import_path")
    if not callable(function):
        raise UserError(f"advantage.import_path = {import_path!r} is {function!r}, expected a function")
    return partial(_checked, partial(function, **kwargs), import_path)


def _checked(
    function: AdvantageFunction, name: str, rewards_G: Sequence[float], lengths_G: Sequence[int]
) -> list[float]:
    """Returns the advantages of a user's function. Raises FunctionFailed where it raises, and where it does not return
    as many numbers as there are rewards, each at most MAX_REWARD either way."""
    name = f"advantage.import_path = {name!r}"
    received = called(name, function, list(rewards_G), list(lengths_G))
    advantages_G = called(name, lambda: [float(advantage) for advantage in received])
    if len(advantages_G) != len(rewards_G) or not all(abs(advantage) <= MAX_REWARD for advantage in advantages_G):
        raise FunctionFailed(
            f"{name} returned {shown(received)}, expected {len(rewards_G)} numbers of at most {MAX_REWARD:g} either "
            f"way for the rewards {list(rewards_G)}"
        )
    return advantages_G


# --- credit: which advantage each step of each rollout gets ---

StepKey = tuple[str, int]
"""(rollout id, index of the step)"""
Credit = Callable[[Sequence[EpisodeResult]], Mapping[StepKey, float]]
"""`(results) -> advantages`: one for every step of every rollout of trees that are rollouts of one task. It knows of
tokens only how many there are."""


class CreditAssigner(ABC):
    """Base class for credit of your own, as an alternative to a function."""

    @abstractmethod
    def compute(self, results: Sequence[EpisodeResult]) -> Mapping[StepKey, float]:
        """Returns the advantage of every step of every rollout in `results`, trees that are rollouts of one task."""


def group_credit(
    results: Sequence[EpisodeResult], *, advantage: AdvantageFunction = group_relative, positive_only: bool = False
) -> dict[StepKey, float]:
    """Compares each role's reward with those of the same role in its group. The trees' roots form one group; each
    parent's children form a group of their own, however deep. All steps of a role in one rollout have the same
    advantage. `positive_only`: negative advantages count as 0, so that only what beat the baseline is learned."""
    found: dict[StepKey, float] = {}
    for group in levels(results):
        by_role: dict[str, list[EpisodeResult]] = {}
        for result in group:
            for role in result.roles:
                by_role.setdefault(role, []).append(result)
        for role, members in by_role.items():
            rewards_G = [result.rewards[role] for result in members]
            advantages_G = advantage(rewards_G, [result.num_sampled_tokens(role) for result in members])
            for result, value in zip(members, advantages_G, strict=True):
                found.update(dict.fromkeys(_steps_of(result, role), max(0.0, value) if positive_only else value))
    return found


def constant_credit(results: Sequence[EpisodeResult], *, value: float = 1.0) -> dict[StepKey, float]:
    """Gives every step the advantage `value`: with 1, all that was sampled is learned, whatever its reward."""
    return {key: value for result in walk_all(results) for key in _steps_of(result)}


def episodic_credit(results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
    """Gives every step its role's reward for the rollout: REINFORCE without a baseline."""
    return {key: result.step_reward(key[1]) for result in walk_all(results) for key in _steps_of(result)}


def custom_credit(import_path: str, kwargs: Mapping[str, Any], *, setting: str) -> Credit:
    """The credit that `import_path` names: a CreditAssigner that is made of `kwargs`, or a function that is given
    `kwargs` as well. `setting` is the key that names it. Raises UserError where it is neither."""
    found, name = load_object(import_path, setting=setting), f"{setting} = {import_path!r}"
    if isinstance(found, type) and issubclass(found, CreditAssigner):
        return partial(checked_credit, found(**kwargs).compute, name)
    if not callable(found):
        raise UserError(f"{name} is {found!r}, expected a function or a CreditAssigner")
    return partial(checked_credit, partial(found, **kwargs), name)


def checked_credit(credit: Credit, name: str, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
    """Returns the advantages of a user's `credit`. Raises FunctionFailed where it raises, forgets a step, invents one,
    or returns anything but numbers of at most MAX_REWARD either way."""
    received = called(name, credit, results)
    expected = {key for result in walk_all(results) for key in _steps_of(result)}
    if not isinstance(received, Mapping):
        raise FunctionFailed(
            f"{name} returned {type(received).__name__}, expected a mapping from (rollout id, index of the step) to an "
            "advantage"
        )
    if different := sorted(map(shown, received.keys() ^ expected)):
        raise FunctionFailed(
            f"{name} gave advantages to {len(received)} steps of {len(expected)}, and not the same: "
            f"{', '.join(different[:3])}; expected one for every step"
        )
    return {key: _number(value, f"{name} gave step {key[1]} of rollout {key[0]}") for key, value in received.items()}


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except Exception:
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise FunctionFailed(f"{what} {shown(value)}, expected a number of at most {MAX_REWARD:g} either way")
    return number


def _steps_of(result: EpisodeResult, role: str | None = None) -> Iterator[StepKey]:
    for index, step in enumerate(result.steps):
        if role is None or step.role == role:
            yield result.id, index


def make_credit(settings: OrchSettings) -> Credit:
    """Returns the credit that the settings' `advantage` asks for. Raises ValueError where its `import_path` leads to
    nothing that can be called."""
    chosen = settings.advantage
    if chosen.type == "constant":
        return partial(constant_credit, value=chosen.value)
    if chosen.type == "reinforce_plus_plus" and chosen.group_baseline:
        return group_credit
    if isinstance(chosen, EpisodicAdvantage | RunningBaseline | ReinforcePlusPlus):  # the batch makes the rest
        return episodic_credit
    if chosen.type == "custom_credit":
        return custom_credit(chosen.import_path, chosen.kwargs, setting="advantage.import_path")
    if chosen.type == "custom":
        function = custom_advantage(chosen.import_path, chosen.kwargs)
    elif chosen.type == "default":
        function = length_weighted if chosen.length_weighted_mean else group_relative
    else:
        function = normalised if chosen.type == "normalized" else leave_one_out
    return partial(group_credit, advantage=function, positive_only=chosen.positive_only)
