"""The buffer decides which example is next, and which groups are worth training. It has neither clock nor I/O.

Each environment's examples come in a seeded order, which changes with every epoch; environments take turns by their
ratios. The mean reward of its groups makes an example normal, easy or hard, and only normal ones are sampled. All
decisions follow from the seed and the order of calls. `state` and the pools are what a later process needs to go on;
`moved` returns the pools' changes. Neither grows with the number of examples.
"""

import hashlib
import logging
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.advantage import are_equal
from grpo.orchestrator.resuming import Progress
from numpy.typing import NDArray

log = logging.getLogger(__name__)

STATE_VERSION = 4
NORMAL, EASY, HARD = POOLS = ("normal", "easy", "hard")
ALL_ZERO, ALL_ONE, ALL_EQUAL = "all_rewards_0", "all_rewards_1", "all_rewards_equal"
"""Reasons why a group is not trained."""
MAX_REFILLS = 8
"""How many groups without spread may be dropped for each one with spread."""


class NothingToAsk(ValueError):
    """All examples are easy or hard."""


@dataclass(slots=True, kw_only=True)
class _Environment:
    """The examples of one environment and where its order stands."""

    label: str
    ratio: float
    seed: str
    """The seed of the orders of all epochs."""
    examples: dict[str, int]
    """Indices in the dataset by key, without duplicates, in the dataset's order."""
    keys: list[str] = field(init=False)
    digest: str = field(init=False)
    """A digest of what the orders follow from: the seed and the keys."""
    epoch: int = 0
    position: int = 0
    """The next example's index in the epoch's order."""
    credit: float = 0.0
    """The share of turns that it has waited for."""
    pools: dict[str, str] = field(default_factory=dict)
    """The pools of examples that are not normal, by key."""
    sizes: Counter[str] = field(init=False)
    """Examples by pool."""
    _order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))
    """An epoch and its order."""

    def __post_init__(self) -> None:
        self.keys, self.sizes = list(self.examples), Counter({NORMAL: len(self.examples)})
        self.digest = hashlib.sha256("\0".join((self.seed, *self.keys)).encode()).hexdigest()

    def next(self) -> tuple[str, int]:
        """Returns the next normal example, by its key, and the epoch. There must be one."""
        while True:
            if self.position == len(self.keys):
                self.epoch, self.position = self.epoch + 1, 0
            if self._order[0] != self.epoch:
                draws = np.random.default_rng([*f"{self.seed}/{self.epoch}".encode()])
                self._order = self.epoch, draws.permutation(len(self.keys))
            key = self.keys[self._order[1][self.position]]
            self.position += 1
            if key not in self.pools:
                return key, self.epoch

    def put(self, key: str, pool: str) -> bool:
        """Puts an example into a pool. Returns whether it was in another one."""
        if (old := self.pools.get(key, NORMAL)) == pool:
            return False
        self.sizes[old] -= 1
        self.sizes[pool] += 1
        self.pools[key] = pool
        if pool == NORMAL:
            del self.pools[key]
        return True


class Buffer:
    """Examples of all environments. Groups are known by their number: `issue`, `returned` once they have rewards, and
    `closed` once nothing is owed for them any more."""

    def __init__(
        self,
        keys: Mapping[str, Sequence[str]],
        *,
        seed: int,
        env_ratios: Sequence[float] | None = None,
        easy_threshold: float | None = None,
        hard_threshold: float | None = None,
        online_difficulty_filtering: bool = False,
        groups_per_batch: int = 1,
    ) -> None:
        """`keys`: the identity of each example of each environment, by label; one that occurs again is left out.
        `online_difficulty_filtering`: groups without spread are dropped, so that others are sampled in their place, as
        long as groups with spread come: without any, MAX_REFILLS batches of `groups_per_batch`.

        Raises ValueError for an environment that has no example of its own.
        """
        self._easy_threshold, self._hard_threshold = easy_threshold, hard_threshold
        self._filters_online = online_difficulty_filtering
        self._environments: dict[str, _Environment] = {}
        self._env_of: dict[str, _Environment] = {}
        """Environments by the keys of their examples."""
        self.num_duplicates: Counter[str] = Counter()
        """Examples that were left out, by environment."""
        for (label, known), ratio in zip(keys.items(), env_ratios or [1.0] * len(keys), strict=True):
            own: dict[str, int] = {}
            for index, key in enumerate(known):
                if key not in self._env_of:
                    own.setdefault(key, index)
            if not own:
                raise ValueError(f"environment {label}: all {len(known)} examples are duplicates; see hash_keys")
            self.num_duplicates += Counter({label: len(known) - len(own)})
            env = _Environment(label=label, ratio=ratio, seed=f"{seed}/{label}", examples=own)
            self._environments[label] = env
            self._env_of |= dict.fromkeys(own, env)
        self._open: dict[int, tuple[str, int]] = {}
        """The key of the example of each open group, and the epoch that it was drawn in. A key is an example's
        identity, which outlives a restart and a change of the dataset's order."""
        self._again: deque[tuple[str, int]] = deque()
        self._moved: dict[str, str] = {}
        self._most_refills = self._num_refills = MAX_REFILLS * groups_per_batch
        """Groups that may still be dropped."""

    # --- groups ---

    def issue(self, group: int) -> tuple[str, int, int]:
        """Returns the example of `group`: the label of its environment, its index in that one's dataset, and the epoch,
        the pass over the environment's examples, from 0. Examples that were open when the state was saved come first,
        in their order, and so do those that were withdrawn.

        Raises NothingToAsk where all examples are easy or hard.
        """
        key, epoch = self._open[group] = self._again.popleft() if self._again else self._turn().next()
        env = self._env_of[key]
        return env.label, env.examples[key], epoch

    def _turn(self) -> _Environment:
        """Returns the environment whose turn it is: over time each gets its share, never off by more than a turn."""
        askable = [one for one in self._environments.values() if one.sizes[NORMAL] and one.ratio]
        if not askable:
            sizes = ", ".join(f"{num} {pool}" for pool, num in self.num_examples().items())
            raise NothingToAsk(
                f"no example is left to ask: {sizes}; resume the run with buffer.easy_fraction or hard_fraction above "
                "0, so that this share of them is asked again (another threshold alone holds for what is asked later), "
                "or with buffer.easy_threshold or hard_threshold set to null, so that all of them are"
            )
        for one in askable:
            one.credit += one.ratio
        chosen = max(askable, key=lambda one: one.credit)
        chosen.credit -= sum(one.ratio for one in askable)
        return chosen

    def returned(
        self, group: int, rewards_G: Sequence[float], *, of_roles: Sequence[Sequence[float]] = ()
    ) -> str | None:
        """Notes what an open group's rollouts are worth. Returns the reason why it is not to be trained, or None.
        `of_roles`: the rewards of each role, where several act, of which any may differ."""
        mean = sum(rewards_G) / len(rewards_G)
        pool = NORMAL
        if self._easy_threshold is not None and mean >= self._easy_threshold:
            pool = EASY
        elif self._hard_threshold is not None and mean <= self._hard_threshold:
            pool = HARD
        self._put(self._open[group][0], pool)
        reason = None
        if self._filters_online and all(map(without_spread, of_roles)):
            reason = without_spread(rewards_G)
        if reason is None:
            self._num_refills = min(self._num_refills + MAX_REFILLS, self._most_refills)
        elif self._num_refills == 0:
            return None  # nothing better comes: the batch is filled, and the trainer sees how little is in it
        else:
            self._num_refills -= 1
        return reason

    def closed(self, group: int) -> None:
        """The group is shipped or dropped; a later process does not sample its example again first."""
        self._open.pop(group, None)  # groups of an arena are not known here

    def withdrawn(self, group: int) -> None:
        """The group was cancelled before it had rewards; its example comes again before any other."""
        self._again.append(self._open.pop(group))

    def _put(self, key: str, pool: str) -> None:
        if self._env_of[key].put(key, pool):
            self._moved[key] = pool

    # --- what others ask ---

    def num_examples(self, label: str | None = None) -> dict[str, int]:
        """Returns how many examples there are by pool, in one environment or in all."""
        chosen = [one for name, one in self._environments.items() if label in (None, name)]
        return {pool: sum(one.sizes[pool] for one in chosen) for pool in POOLS}

    def metrics(self) -> dict[str, float]:
        """Returns how many examples there are by pool, and how many were left out as duplicates."""
        sizes = {f"progress/examples_{pool}": float(num) for pool, num in self.num_examples().items()}
        return sizes | {"progress/examples_duplicate": float(self.num_duplicates.total())}

    # --- restarts ---

    def state(self) -> dict[str, Any]:
        """Returns as plain JSON what decides, with the pools, which examples come from here on."""
        fields = ("digest", "epoch", "position", "credit")
        return {
            "version": STATE_VERSION,
            "environments": {
                label: {name: getattr(one, name) for name in fields} for label, one in self._environments.items()
            },
            "open": [*self._open.values(), *self._again],
            "num_refills": self._num_refills,
        }

    def moved(self) -> dict[str, str]:
        """Returns the pools of examples that have changed theirs since the last call, by key."""
        moved, self._moved = self._moved, {}
        return moved

    def restore(self, state: Mapping[str, Any], pools: Mapping[str, str]) -> int:
        """Goes on from where `state` was taken, with the `pools` of examples by key. Examples that were open then come
        first, in their own epoch. An environment with other examples or another seed begins a new epoch, and examples
        that a threshold made easy or hard are normal again where it is null now. Returns how many of the examples in
        both are no longer there. Raises ValueError for a state of another release, and after anything was issued."""
        if (version := state.get("version")) != STATE_VERSION:
            raise ValueError(f"the buffer's state has version {version!r}, this program reads {STATE_VERSION}")
        if self._open or self._again:
            raise ValueError("a buffer that has issued groups cannot be restored; make a new one")
        for label in state["environments"].keys() & self._environments.keys():
            one, saved = self._environments[label], state["environments"][label]
            same = saved["digest"] == one.digest
            one.epoch, one.position = (saved["epoch"], saved["position"]) if same else (saved["epoch"] + 1, 0)
            one.credit = saved["credit"]
        thresholds = {EASY: self._easy_threshold, HARD: self._hard_threshold}
        num_lost = 0
        for key, pool in pools.items():
            if pool != NORMAL and key not in self._env_of:
                num_lost += 1
            elif pool != NORMAL and thresholds[pool] is None:
                self._moved[key] = NORMAL
            elif pool != NORMAL:
                self._env_of[key].put(key, pool)
        known = [(key, epoch) for key, epoch in state["open"] if key in self._env_of]
        self._again.extend(known)
        self._num_refills = min(state["num_refills"], self._most_refills)
        return num_lost + len(state["open"]) - len(known)

    def forget(self, pools: Mapping[str, str]) -> None:
        """Makes the examples in `pools` normal that an earlier process has found easy or hard."""
        self._moved |= {key: NORMAL for key, pool in pools.items() if pool != NORMAL}

    def promote(self, *, easy_fraction: float, hard_fraction: float) -> int:
        """Makes a share of the easy and of the hard examples of each environment normal again, drawn by the seed.
        Returns how many."""
        promoted = 0
        for one in self._environments.values():
            draw = random.Random(f"{one.seed}/{one.epoch}/{one.position}/promote")
            for pool, fraction in ((EASY, easy_fraction), (HARD, hard_fraction)):
                keys = sorted(key for key, of in one.pools.items() if of == pool)
                for key in draw.sample(keys, round(fraction * len(keys))):
                    self._put(key, NORMAL)
                    promoted += 1
        return promoted


def without_spread(rewards_G: Sequence[float]) -> str | None:
    """Returns why nothing is learned from comparing a group's rollouts; None where their rewards differ by more than
    rounding. A single rollout is compared with none; it teaches nothing where its reward is 0 or 1."""
    if not are_equal(rewards_G):
        return None
    reason = {0.0: ALL_ZERO, 1.0: ALL_ONE}.get(min(rewards_G))
    return reason or (ALL_EQUAL if len(rewards_G) > 1 else None)


def make_buffer(settings: OrchSettings, keys: Mapping[str, Sequence[str]], progress: Progress) -> Buffer:
    """Returns the buffer of a run, which goes on where an earlier process stood; a share of the easy and of the hard
    examples is normal again. `keys`: the identities of each environment's examples."""
    chosen = settings.buffer
    buffer = Buffer(
        keys,
        seed=settings.seed if chosen.seed is None else chosen.seed,
        env_ratios=chosen.env_ratios,
        easy_threshold=chosen.easy_threshold,
        hard_threshold=chosen.hard_threshold,
        online_difficulty_filtering=chosen.online_difficulty_filtering,
        groups_per_batch=settings.batch_size // settings.rollouts_per_example,
    )
    for env, num in buffer.num_duplicates.items():
        log.info("environment %s: left out %d examples that are there already, by buffer.hash_keys", env, num)
    if progress.state is None or settings.ckpt.skip_buffer:
        buffer.forget(progress.pools)
    else:
        if num_lost := buffer.restore(progress.state, progress.pools):
            log.warning("%d examples that the run knew are no longer in its environments", num_lost)
        buffer.promote(easy_fraction=chosen.easy_fraction, hard_fraction=chosen.hard_fraction)
    return buffer
