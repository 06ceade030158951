"""Warns of how self-play fails: one side wins every game, answers become illegal, entropy falls. The mean reward shows
none of it, because what one side wins the other loses."""

import logging
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from grpo.orchestrator.rollouts.records import EpisodeResult

log = logging.getLogger(__name__)

MIN_GAMES = 16
"""Of an environment in a batch, to say that one side wins them all."""
WINDOW = 8
"""Steps of a mean."""
MORE_ILLEGAL = 0.05
"""Warned is where the share of illegal answers is above its lowest mean by so much."""
ENTROPY_LEFT = 0.2
"""Warned is where entropy is below so much of its first mean."""
_ILLEGAL, _ENTROPY = "reward/measure/illegal_answers/", "policy/entropy/"


class CollapseWatch:
    """Sees each batch and each step's metrics. Says each thing once, and again when it has ended and comes back."""

    def __init__(self) -> None:
        self._games: set[str] = set()
        """Environments in which two sides played."""
        self._said: set[tuple[str, str]] = set()
        self._recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._reference: dict[str, float] = {}
        """By metric: the lowest mean of illegal answers, and the first of entropy."""

    def batch(self, step: int, results: Iterable[EpisodeResult]) -> None:
        """A batch leaves."""
        winners: defaultdict[str, list[str]] = defaultdict(list)
        for result in results:
            for one in result.walk():
                if (winner := winner_of(one)) is not None:
                    winners[one.task.env].append(winner)
        for env, names in winners.items():
            self._games.add(env)
            [side, *others] = set(names)
            self._say(
                "one side",
                env,
                not others and side != "" and len(names) >= MIN_GAMES,
                f"{side} won all {len(names)} games of {env} in batch {step}: such games teach little; give stronger "
                "or more opponents (`grpo docs league`), or look whether the game or its judge favours that side",
            )

    def step(self, metrics: Mapping[str, float]) -> None:
        """A step's metrics are complete."""
        for key, value in metrics.items():
            env = key.rpartition("/")[2]
            if env in self._games and key.startswith((_ILLEGAL, _ENTROPY)):
                self._recent[key].append(value)
                if len(self._recent[key]) == WINDOW:
                    self._compare(key, env, statistics.fmean(self._recent[key]))

    def _compare(self, key: str, env: str, mean: float) -> None:
        reference = self._reference.setdefault(key, mean)
        if key.startswith(_ILLEGAL):
            self._reference[key] = min(reference, mean)
            self._say(
                "illegal",
                key,
                mean > reference + MORE_ILLEGAL,
                f"{mean:.0%} of the games of {env} end by an illegal answer ({key}), and {reference:.0%} did before: "
                "the policy forgets the rules; lower the learning rate, or hold it to its start by loss.teacher_tau",
            )
        else:
            self._say(
                "entropy",
                key,
                mean < ENTROPY_LEFT * reference,
                f"the entropy of {env} has fallen to {mean:.3g} nats from {reference:.3g}: the policy tries nothing "
                "new, and its games tell nothing of other play; raise loss.entropy_tau or the temperature, or lower "
                "the learning rate",
            )

    def _say(self, what: str, of: str, holds: bool, message: str) -> None:
        if holds and (what, of) not in self._said:
            log.warning("%s", message)
        (self._said.add if holds else self._said.discard)((what, of))


def winner_of(result: EpisodeResult) -> str | None:
    """Returns which side won a game of two: `the policy` or `the opponent` where it had one, else the role; empty after
    a draw. None for what is no game of two sides, of which one wins what the other loses."""
    sides: Sequence[str] = list(result.players or result.rewards)
    if len(sides) != 2:
        return None
    own = [role for role in sides if role in result.roles]
    if not own:
        return None
    first, second = (result.rewards.get(role, -result.rewards[own[0]]) for role in sides)
    if first == second:
        return "" if result.players or first == 0 else None
    if not result.players and first != -second:
        return None
    winner = sides[0] if first > second else sides[1]
    return winner if not result.players else "the policy" if winner in own else "the opponent"
