"""Looks at what is asked and sampled for what chance and the order of examples do not give: an example that comes again
in its epoch, an answer that is there twice, a seed that serves two groups, a reward of another rollout, and more equal
answers than their probabilities give (docs/proofs.md)."""

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from grpo.orchestrator.rollouts.records import EpisodeResult, walk_all

log = logging.getLogger(__name__)
KEPT = 50_000
"""The newest answers, among whose marks and seeds a new one's are looked for."""
FORGET = 0.95
"""What a batch leaves of the sums of equal answers."""
SURPRISE = 20.0
"""Nats: equal answers are warned of where chance gives so many with less than exp(-20)."""
MARGIN, FLOOR = 1.5, 0.1
"""So many times what chance gives, and so many more, is taken to be chance: probabilities are those of the version that
sampled an answer, and others of the group may be of the next one."""

Example = tuple[str, int, int]
"""An environment, the number of its example, the epoch."""


class Doubles:
    """What was asked and sampled so far; warns once of each kind of double."""

    def __init__(self, asked: Iterable[Example] = (), *, step: int = 0) -> None:
        """`asked`: the examples that earlier processes had in batches, of which `step` is the newest."""
        self._asked, self._step = frozenset(asked), step
        self._group_of = OrderedDict[int, str]()
        """The group by seed, of the newest ones."""
        self._rollout_of = OrderedDict[int, str]()
        """The rollout by mark, of the newest answers."""
        self._equal, self._by_chance = 0.0, 0.0
        """Answers that another one of their group equals, and how many chance gives."""
        self._warned: set[str] = set()

    def asked(self, example: Example) -> None:
        """An example is about to be sampled."""
        if example in self._asked:
            env, index, epoch = example
            self._warn(
                "example",
                f"example {index} of {env} is asked again in epoch {epoch}, in which an earlier process has had it in "
                "a batch: the order of examples has begun anew",
            )

    def scored(self, result: EpisodeResult) -> None:
        """A rollout has its rewards."""
        group = result.id.partition("/")[0]
        for one in result.walk():
            if one.seal not in (None, one.sealed()):
                self._warn("reward", f"rollout {one.id} has rewards that its environment gave to another one")
            for step in one.steps:
                mark, seed = step.completion.mark, step.completion.seed if step.temperature else None
                if mark is not None and (rollout := self._rollout_of.setdefault(mark, result.id)) != result.id:
                    self._warn("answer", f"rollouts {rollout} and {result.id} have one and the same answer of a server")
                if seed is not None and (other := self._group_of.setdefault(seed, group)) != group:
                    text = f"groups {other} and {group} were sampled with the same seed, {seed}: they share randomness"
                    self._warn("seed", text)
        for known in (self._group_of, self._rollout_of):
            while len(known) > KEPT:
                known.popitem(last=False)

    def batch(self, step: int, groups: Iterable[Sequence[EpisodeResult]]) -> None:
        """Groups leave in a batch."""
        self._step = step - 1
        self._equal, self._by_chance = FORGET * self._equal, FORGET * self._by_chance
        for results in groups:
            equal, by_chance = equal_answers(results)
            self._equal, self._by_chance = self._equal + equal, self._by_chance + by_chance
        if surprise(self._equal, self._by_chance) > SURPRISE:
            self._warn(
                "equal answers",
                f"{self._equal:.0f} answers equal another one of their group, where chance gives "
                f"{self._by_chance:.2g}: answers were repeated, or sampled with one seed",
            )
        self._step = step

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("step %d: %s; see `grpo docs proofs`", self._step + 1, message)


def equal_answers(results: Sequence[EpisodeResult]) -> tuple[int, float]:
    """Returns how many rollouts of a group have, token for token, the answers of an earlier one, and how many that
    would be on average if each were sampled for itself: Σ over rollouts of the probability, by the server's numbers,
    of any of the earlier ones' answers. An environment that answers at random makes it fewer. Greedy ones do not
    count."""
    earlier: dict[tuple[bytes, ...], float] = {}
    equal, by_chance = 0, 0.0
    for result in results:
        steps = [step for one in walk_all([result]) for step in one.steps]
        if not steps or any(step.temperature == 0 for step in steps):
            continue
        answers = tuple(step.completion.token_ids.tobytes() for step in steps)
        by_chance += min(1.0, sum(earlier.values()))
        equal += answers in earlier
        earlier[answers] = math.exp(min(0.0, sum(float(step.completion.logprobs.sum(dtype="f8")) for step in steps)))
    return equal, by_chance


def surprise(num: float, mean: float) -> float:
    """Returns Chernoff's bound of Poisson's upper tail, n log(n / m) - n + m in nats, for m a little above the mean."""
    most = MARGIN * mean + FLOOR
    return num * math.log(num / most) - num + most if num > most else 0.0
