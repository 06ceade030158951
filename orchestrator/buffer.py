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
from typing import Any

import numpy as np
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.advantage import are_equal
from grpo.orchestrator.resuming import Progress
from numpy.typing import NDArray

log = logging.getLogger(__name__)

STATE_VERSION = 5
NORMAL, EASY, HARD = POOLS = ("normal", "easy", "hard")
ALL_ZERO, ALL_ONE, ALL_EQUAL = "all_rewards_0", "all_rewards_1", "all_rewards_equal"
"""Reasons why a group is not trained."""
MAX_REFILLS = 8
"""How many groups without spread may be dropped for each one with spread."""


_ROUNDS = 4
_FEW = 3072
"""So many normal examples, or one in so many, are few: they are looked for by the place of each."""


class NothingToAsk(ValueError):
    """All examples are easy or hard."""


class Order:
    """A seeded order of the numbers below `num`, which is computed where it is asked for: an epoch of a billion
    examples begins at once, and takes no memory.

    It is a Feistel network over the smallest power of two that holds them all. Numbers from `num` on are permuted again
    until they are below it (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    def __init__(self, seed: str, num: int) -> None:
        bits = max(2, (num - 1).bit_length())
        self._num, self._shift = num, np.uint64(bits // 2)
        self._low, self._high = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
        digest = hashlib.blake2b(seed.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = list(enumerate(np.frombuffer(digest, np.uint64)))

    def numbers(self, begin: int, end: int) -> NDArray[np.int64]:
        """Returns the numbers at the places from `begin` to before `end`."""
        return self._walk(np.arange(begin, end, dtype=np.uint64), self._keys)

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the places of these numbers."""
        return self._walk(numbers.astype(np.uint64), self._keys[::-1])

    def _walk(self, values: NDArray[np.uint64], keys: Sequence[tuple[int, np.uint64]]) -> NDArray[np.int64]:
        values = self._permuted(values, keys)
        while len(beyond := np.flatnonzero(values >= self._num)):
            values[beyond] = self._permuted(values[beyond], keys)
        return values.astype(np.int64)

    def _permuted(self, values: NDArray[np.uint64], keys: Sequence[tuple[int, np.uint64]]) -> NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._low
        for number, key in keys:
            if number % 2:
                right = right ^ (_mixed(left, key) & self._low)
            else:
                left = left ^ (_mixed(right, key) & self._high)
        return (left << self._shift) | right


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Returns 64 bits that follow from the key and each value, by the finalizer of SplitMix64."""
    values = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Environment:
    """The examples of one environment and where its order stands. Examples are known by their number among those that
    are no duplicates, in the dataset's order."""

    def __init__(
        self, label: str, keys: NDArray[np.bytes_], others: "Sequence[_Environment]", *, ratio: float, seed: str
    ) -> None:
        """`keys`: the identity of each example. What `others` have, or it has before, is left out. `seed`: of the
        orders of all epochs."""
        by_key, first = np.unique(keys, return_index=True)
        for other in others:
            new = other.find(by_key) < 0
            by_key, first = by_key[new], first[new]
        self.label, self.ratio, self.seed = label, ratio, seed
        self.indices: NDArray[np.int64] = np.sort(first)
        """Indices in the dataset."""
        self._sorted, self._by_key = by_key, np.searchsorted(self.indices, first)
        """Keys in their own order, and the examples that they are of."""
        self.keys = keys[self.indices]
        digest = hashlib.sha256(f"{seed}\0".encode())
        digest.update(np.ascontiguousarray(self.keys).data)
        self.digest = digest.hexdigest()
        """A digest of what the orders follow from: the seed and the keys."""
        self.epoch = self.position = 0
        """The next example's epoch, and its place in the epoch's order."""
        self.credit = 0.0
        """The share of turns that it has waited for."""
        self.pools: NDArray[np.int8] = np.zeros(len(self.keys), np.int8)
        """The pool of each example, by its index in POOLS."""
        self.sizes = Counter({NORMAL: len(self.keys)})
        """Examples by pool."""
        self._order: tuple[int, Order] | None = None
        """An epoch and its order."""
        self._ahead = deque[tuple[int, int]]()
        """The next examples that were normal when they were looked for: (place, number)."""
        self._looked = 0
        """The place up to which they were looked for."""
        self._normal: set[int] | None = None
        """The normal examples, where they are few among many."""

    def find(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Returns the number of each example by its key; -1 where it has none."""
        if not len(self._sorted):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[at] == keys, self._by_key[at], -1)

    def key(self, number: int) -> str:
        """Returns the identity of an example."""
        return bytes(self.keys[number]).decode()

    def next(self) -> tuple[int, int]:
        """Returns the next normal example and the epoch. There must be one."""
        while True:
            while self._ahead:
                place, number = self._ahead.popleft()
                if self.pools[number] == 0:
                    self.position = place + 1
                    return number, self.epoch
            if max(self._looked, self.position) >= len(self.keys):
                self.epoch, self.position, self._looked = self.epoch + 1, 0, 0
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Looks for normal examples further on in the epoch: where they are few, by the place of each, and otherwise
        place by place."""
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, Order(f"{self.seed}/{self.epoch}", len(self.keys))
        order, begin = self._order[1], max(self._looked, self.position)
        num, num_normal = len(self.keys), self.sizes[NORMAL]
        if num_normal <= max(_FEW, num // 1024):
            if self._normal is None:
                self._normal = {*np.flatnonzero(self.pools == 0).tolist()}
            numbers = np.fromiter(self._normal, np.int64, len(self._normal))
            places = order.places(numbers)
            by_place = np.argsort(places)
            by_place = by_place[places[by_place] >= begin]
            places, numbers, self._looked = places[by_place], numbers[by_place], num
        else:
            self._looked = min(num, begin + max(64, 2 * num // num_normal))
            places, numbers = np.arange(begin, self._looked), order.numbers(begin, self._looked)
        self._ahead.extend(zip(places.tolist(), numbers.tolist(), strict=True))

    def put(self, number: int, pool: str) -> bool:
        """Puts an example into a pool. Returns whether it was in another one."""
        if (old := POOLS[self.pools[number]]) == pool:
            return False
        self.sizes[old] -= 1
        self.sizes[pool] += 1
        self.pools[number] = POOLS.index(pool)
        if pool == NORMAL:  # it may stand in what was looked through
            self._ahead.clear()
            self._looked = 0
        if self._normal is not None:
            (self._normal.add if pool == NORMAL else self._normal.discard)(number)
            if len(self._normal) > 2 * max(_FEW, len(self.keys) // 1024):
                self._normal = None
        return True


class Buffer:
    """Examples of all environments. Groups are known by their number: `issue`, `returned` once they have rewards, and
    `closed` once nothing is owed for them any more."""

    def __init__(
        self,
        keys: Mapping[str, Sequence[str] | NDArray[np.bytes_]],
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
        self.num_duplicates: Counter[str] = Counter()
        """Examples that were left out, by environment."""
        for (label, known), ratio in zip(keys.items(), env_ratios or [1.0] * len(keys), strict=True):
            known = _as_keys(known)
            others = list(self._environments.values())
            env = _Environment(label, known, others, ratio=ratio, seed=f"{seed}/{label}")
            if not len(env.keys):
                raise ValueError(f"environment {label}: all {len(known)} examples are duplicates; see hash_keys")
            self.num_duplicates += Counter({label: len(known) - len(env.keys)})
            self._environments[label] = env
        self._open: dict[int, tuple[_Environment, int, int]] = {}
        """The example of each open group, as its environment and its number there, and the epoch that it was drawn
        in."""
        self._again: deque[tuple[_Environment, int, int]] = deque()
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
        if self._again:
            chosen = self._again.popleft()
        else:
            env = self._turn()
            chosen = env, *env.next()
        self._open[group] = env, number, epoch = chosen
        return env.label, int(env.indices[number]), epoch

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
        env, number, _ = self._open[group]
        self._put(env, number, pool)
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

    def _put(self, env: _Environment, number: int, pool: str) -> None:
        if env.put(number, pool):
            self._moved[env.key(number)] = pool

    def _find(self, keys: Sequence[str]) -> list[tuple[_Environment, int] | None]:
        """Returns the environment of each key, and the number of its example; None where it is nobody's."""
        found: list[tuple[_Environment, int] | None] = [None] * len(keys)
        for env in self._environments.values() if keys else ():
            for place, number in enumerate(env.find(_as_keys(keys)).tolist()):
                if number >= 0:
                    found[place] = env, number
        return found

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
            "open": [(env.key(number), epoch) for env, number, epoch in (*self._open.values(), *self._again)],
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
        num_lost, chosen = 0, [key for key, pool in pools.items() if pool != NORMAL]
        for key, found in zip(chosen, self._find(chosen), strict=True):
            if found is None:
                num_lost += 1
            elif thresholds[pools[key]] is None:
                self._moved[key] = NORMAL
            else:
                found[0].put(found[1], pools[key])
        known = self._find([key for key, _ in state["open"]])
        again = [(*one, epoch) for one, (_, epoch) in zip(known, state["open"], strict=True) if one is not None]
        self._again.extend(again)
        self._num_refills = min(state["num_refills"], self._most_refills)
        return num_lost + len(state["open"]) - len(again)

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
                numbers = np.flatnonzero(one.pools == POOLS.index(pool))
                numbers = numbers[np.argsort(one.keys[numbers])].tolist()  # whatever the dataset's order
                for number in draw.sample(numbers, round(fraction * len(numbers))):
                    self._put(one, number, NORMAL)
                    promoted += 1
        return promoted


def _as_keys(keys: Sequence[str] | NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    """Returns identities as an array of bytes."""
    return keys if isinstance(keys, np.ndarray) else np.array([key.encode() for key in keys], np.bytes_)


def without_spread(rewards_G: Sequence[float]) -> str | None:
    """Returns why nothing is learned from comparing a group's rollouts; None where their rewards differ by more than
    rounding. A single rollout is compared with none; it teaches nothing where its reward is 0 or 1."""
    if not are_equal(rewards_G):
        return None
    reason = {0.0: ALL_ZERO, 1.0: ALL_ONE}.get(min(rewards_G))
    return reason or (ALL_EQUAL if len(rewards_G) > 1 else None)


def make_buffer(
    settings: OrchSettings, keys: Mapping[str, Sequence[str] | NDArray[np.bytes_]], progress: Progress
) -> Buffer:
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
