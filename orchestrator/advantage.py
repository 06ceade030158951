"""Advantages of a group, rewards in and advantages out, and credit: which one each step of each rollout gets.

Legend: `G` rollouts of one group in which one role acted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.importing import NotFound, find
from orchestrator.rollouts.records import EpisodeResult, levels, walk_all

AdvantageFunction = Callable[[Sequence[float], Sequence[int]], Sequence[float]]
"""`(rewards [G], numbers of sampled tokens [G]) -> advantages [G]`"""


def group_relative(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = r_i - mean(r), the baseline of GRPO without the division by the standard deviation.

    Dividing would weigh groups whose rewards hardly differ as much as those that differ most (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", section 3). Equal rewards give advantages of 0. `lengths_G` are not used.
    """
    if not rewards_G:
        raise ValueError("a group without rewards has no advantages; give at least one")
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
    baseline = sum(length * reward for length, reward in zip(lengths_G, rewards_G, strict=True)) / total
    return [reward - baseline for reward in rewards_G]


def normalised(rewards_G: Sequence[float], lengths_G: Sequence[int] = ()) -> list[float]:
    """A_i = (r_i - mean(r)) / std(r), with the standard deviation of the whole group (divided by G), as in GRPO (Shao
    et al. 2024, "DeepSeekMath"). Equal rewards give advantages of 0. `lengths_G` are not used.
    """
    advantages_G = group_relative(rewards_G, lengths_G)
    std = math.sqrt(sum(advantage * advantage for advantage in advantages_G) / len(advantages_G))
    if std <= 1e-9 * max(map(abs, rewards_G)):  # what rounding leaves of equal rewards
        return [0.0] * len(advantages_G)
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
    function = find(import_path, setting="advantage.import_path")
    if not callable(function):
        raise NotFound(f"advantage.import_path = {import_path!r} is {function!r}, expected a function")
    return partial(_checked, partial(function, **kwargs), import_path)


def _checked(
    function: AdvantageFunction, name: str, rewards_G: Sequence[float], lengths_G: Sequence[int]
) -> list[float]:
    """What a user's function says, as numbers. Raises ValueError where they are too many, too few, or not finite."""
    received = function(list(rewards_G), list(lengths_G))
    try:
        advantages_G = [float(advantage) for advantage in received]
    except TypeError:
        advantages_G = []
    if len(advantages_G) != len(rewards_G) or not all(map(math.isfinite, advantages_G)):
        raise ValueError(
            f"advantage.import_path = {name!r} returned {received!r}, expected {len(rewards_G)} finite numbers for "
            f"the rewards {list(rewards_G)}"
        )
    return advantages_G


# --- credit: which advantage each step of each rollout gets ---

StepKey = tuple[str, int]
"""(rollout id, index of the step)"""


class CreditAssigner(ABC):
    """Advantages from rewards; knows of tokens only how many there are."""

    @abstractmethod
    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        """The advantage of every step of every rollout of trees that are rollouts of one task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredit(CreditAssigner):
    """Each role's reward against those of the same role in its group. The trees' roots form one group; each parent's
    children form one of their own, however deep. All steps of a role in one rollout have the same advantage.

    Example: ``GroupCredit()`` is GRPO without normalisation, ``GroupCredit(advantage=leave_one_out)`` is RLOO.
    """

    advantage: AdvantageFunction = group_relative
    positive_only: bool = False
    """Negative advantages count as 0: only what was better than the baseline is learned from."""

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        """Raises ValueError where two rollouts have one id."""
        found: dict[StepKey, float] = {}
        for group in levels(_distinct(results)):
            for role in dict.fromkeys(role for result in group for role in result.roles):
                members = [result for result in group if role in result.roles]
                for result, advantage in zip(members, self._advantages(members, role), strict=True):
                    found.update(dict.fromkeys(_steps_of(result, role), advantage))
        return found

    def _advantages(self, members: Sequence[EpisodeResult], role: str) -> list[float]:
        rewards_G = [result.rewards[role] for result in members]
        advantages_G = self.advantage(rewards_G, [result.num_sampled_tokens(role) for result in members])
        return [max(0.0, advantage) if self.positive_only else advantage for advantage in advantages_G]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantCredit(CreditAssigner):
    """The same advantage for every step: with 1, training on all that was sampled, whatever its reward."""

    value: float = 1.0

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        """Raises ValueError where two rollouts have one id."""
        return {key: self.value for result in walk_all(_distinct(results)) for key in _steps_of(result)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodicCredit(CreditAssigner):
    """Every step has its role's reward for its rollout: REINFORCE without a baseline."""

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        """Raises ValueError where two rollouts have one id."""
        return {key: result.step_reward(key[1]) for result in walk_all(_distinct(results)) for key in _steps_of(result)}


CreditFunction = Callable[[Sequence[EpisodeResult]], Mapping[StepKey, float]]
"""`(results) -> advantages by (rollout id, index of the step)`, one for every step of every tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCredit(CreditAssigner):
    """What a user's function says."""

    function: CreditFunction
    name: str
    """What errors call it."""

    def compute(self, results: Sequence[EpisodeResult]) -> dict[StepKey, float]:
        """Raises ValueError where the function forgets a step, invents one, or returns what is no finite number, and
        what the function itself raises."""
        expected = {key for result in walk_all(_distinct(results)) for key in _steps_of(result)}
        received = self.function(results)
        if not isinstance(received, Mapping):
            raise ValueError(
                f"{self.name} returned {type(received).__name__}, expected a mapping from (rollout id, index of the "
                "step) to an advantage"
            )
        if different := sorted(map(str, received.keys() ^ expected)):
            raise ValueError(
                f"{self.name} gave advantages to {len(received)} steps of {len(expected)}, and not the same: "
                f"{', '.join(different[:3])}; expected one for every step"
            )
        return {key: self._number(key, value) for key, value in received.items()}

    def _number(self, key: StepKey, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{self.name} gave step {key[1]} of rollout {key[0]} {value!r}, expected a finite number")
        return number


def custom_credit(import_path: str, kwargs: Mapping[str, Any], *, setting: str) -> CreditAssigner:
    """The credit that `import_path` names: a CreditAssigner, or something that makes one of `kwargs`, or a
    `CreditFunction` that is given `kwargs` as well. `setting` is the key that names it. Raises NotFound where it is
    none of these."""
    found = find(import_path, setting=setting)
    if isinstance(found, type) and issubclass(found, CreditAssigner):
        return found(**kwargs)
    if isinstance(found, CreditAssigner) and not kwargs:
        return found
    if not callable(found):
        raise NotFound(f"{setting} = {import_path!r} is {found!r}, expected a function or a CreditAssigner")
    return CustomCredit(function=partial(found, **kwargs), name=f"{setting} = {import_path!r}")


def _distinct(results: Sequence[EpisodeResult]) -> Sequence[EpisodeResult]:
    seen: set[str] = set()
    for result in walk_all(results):
        if result.id in seen:
            raise ValueError(f"two rollouts are called {result.id}; every rollout needs an id of its own")
        seen.add(result.id)
    return results


def _steps_of(result: EpisodeResult, role: str | None = None) -> Iterator[StepKey]:
    for index, step in enumerate(result.steps):
        if role is None or step.role == role:
            yield result.id, index
