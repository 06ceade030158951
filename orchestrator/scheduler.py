"""The scheduler decides which groups may start, and when batches ship. It has neither clock nor I/O.

Step n trains batch n and yields version n. A group that is started under version v and ships in batch n has the lag
n - 1 - v. Batch n ships when version n - 1 - max_async_level is live on all servers and enough groups are complete.

Pacing instead of dropping: a complete group ships only if afterwards every other group can still ship before its lag
exceeds max_off_policy_steps. So long answers are waited for and never age out, and with max_off_policy_steps equal to
max_async_level batches ship in the order in which their groups were started.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.resuming import Progress

NEWEST, GROUPS, OPPONENTS = "newest", "groups in flight", "opponents"
"""Who needs a version, besides those that pin it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The groups of one batch."""

    step: int
    """The batch's number, from 1."""
    versions: dict[int, int]
    """The version by which each group's lag is counted, by the group's number: oldest versions first, then in the order
    of starting."""

    def lag(self, group: int) -> int:
        """Returns the lag of a group of this batch."""
        return self.step - 1 - self.versions[group]


class Scheduler:
    """A state machine over groups, batches and policy versions: events change it, `start` and `ship` decide."""

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_async_level: int,
        max_off_policy_steps: int,
        max_in_flight: int,
        max_steps: int | None,
        oversampling_factor: float = 1.0,
        shipped: int = 0,
        num_started: int = 0,
        follows: bool = False,
    ) -> None:
        """`oversampling_factor`: how many times as many groups may be on their way as the batches up to the newest
        reachable one lack, so that slow ones need not be waited for; they ship later, within `max_off_policy_steps`.
        `shipped` and `num_started`: the newest batch and the groups of an earlier process of the run. `follows`: groups
        in flight go on under each new version, so that none needs the one it was started under."""
        if max_off_policy_steps < max_async_level:
            raise ValueError(
                f"max_off_policy_steps is {max_off_policy_steps}, expected at least max_async_level = {max_async_level}"
            )
        self._groups_per_batch = groups_per_batch
        self._max_async_level = max_async_level
        self._max_off_policy_steps = max_off_policy_steps
        self.max_in_flight = max_in_flight
        """Groups that may be sampled or scored at once."""
        self._max_steps = max_steps
        self._oversampling_factor = oversampling_factor
        self._follows = follows
        self._in_flight: dict[int, int] = {}
        """Versions that groups were started under, by group."""
        self._delayed: set[int] = set()
        """Groups in flight that wait for a reward: they hold no slot and no version, and no batch waits for them."""
        self._complete: dict[int, int] = {}
        """Versions by which the lag of complete groups is counted, by group."""
        self._num_unshipped: Counter[int] = Counter()
        """Groups in flight that are not delayed and complete ones, by version."""
        self._num_complete: Counter[int] = Counter()
        self._pins: Counter[tuple[int, str]] = Counter()
        """By version and who has pinned it."""
        self._opponents: dict[int, frozenset[int]] = {}
        """Snapshots that the games of each version meet."""
        self._num_started = num_started
        self.blocks: Counter[str] = Counter()
        """How many block the start of groups now, by reason."""
        self.shipped = shipped
        """Number of the newest batch that has left."""
        self.live: int | None = None
        """Newest version that all servers serve."""
        self.changed = asyncio.Event()
        """Wakes all who wait for it at every event. Whoever asks and then waits, without awaiting in between, misses
        none."""

    # --- events ---

    def _notify(self) -> None:
        self.changed.set()
        self.changed.clear()

    def version_live(self, version: int) -> None:
        """All servers serve `version`, the one after the newest; the first may be any that a batch has given."""
        expected = range(self.shipped + 1) if self.live is None else range(self.live + 1, self.live + 2)
        if version not in expected:
            raise ValueError(f"version {version} became live, expected {expected[-1]}: versions come in order")
        self.live = version
        self._num_unshipped, self._num_complete = +self._num_unshipped, +self._num_complete
        self._notify()

    def completed(self, group: int, *, oldest: int | None = None) -> bool:
        """A group has been sampled and scored. `oldest`: the oldest version that sampled any of it, by which its lag is
        counted (None: the one it was started under). Returns whether it will ship: a delayed one does not where it has
        become too old, would make others too old, or others have taken its place in the last batches."""
        was_delayed, version = group in self._delayed, self._in_flight[group] if oldest is None else oldest
        self._leave(group)
        self._num_unshipped[version] += 1
        if ships := not was_delayed or self._rest_can_ship(after=self.shipped):
            self._complete[group] = version
            self._num_complete[version] += 1
        else:
            self._num_unshipped[version] -= 1
        self._notify()
        return ships

    def failed(self, group: int) -> None:
        """A group in flight is dropped; another one may start in its place."""
        self._leave(group)
        self._notify()

    def _leave(self, group: int) -> None:
        self._num_unshipped[self._in_flight.pop(group)] -= group not in self._delayed
        self._delayed.discard(group)

    def delay(self, group: int) -> None:
        """A group in flight waits for rewards that come later."""
        if group not in self._delayed:
            self._delayed.add(group)
            self._num_unshipped[self._in_flight[group]] -= 1
            self._notify()

    def meets(self, version: int, opponents: Iterable[int]) -> None:
        """Games that begin under `version`, which may be about to become live, meet these versions, which servers keep
        for as long as it is needed."""
        needed = self._with_opponents()
        self._opponents = {one: some for one, some in self._opponents.items() if one in needed}
        self._opponents[version] = self.opponents_of(version) | frozenset(opponents)
        self._notify()

    @contextmanager
    def pin(self, version: int, *, by: str) -> Iterator[None]:
        """Within it servers keep `version`, and stay awake. `by`: who needs it, for people."""
        self._pins[version, by] += 1
        try:
            yield
        finally:
            self._pins[version, by] -= 1
            self._pins = +self._pins
            self._notify()

    @contextmanager
    def block(self, reason: str) -> Iterator[None]:
        """Within it no group starts, and servers stay awake."""
        self.blocks[reason] += 1
        try:
            yield
        finally:
            self.blocks[reason] -= 1
            self._notify()

    # --- decisions ---

    def start(self) -> int | None:
        """Returns the number of a group that may start under the newest version, `live`: numbers count from 0 in the
        order of starting. None where it must wait: where the batches up to the newest reachable one lack no more,
        oversampled, and within concurrency."""
        if self.live is None or self.blocked or self.num_in_flight >= self.max_in_flight:
            return None
        if len(self._complete) + self.num_in_flight >= self._num_wanted(self.live):
            return None
        group = self._num_started
        self._num_started += 1
        self._in_flight[group] = self.live
        self._num_unshipped[self.live] += 1
        return group

    def _num_wanted(self, live: int) -> int:
        """Returns how many groups may be on their way: never so many that one could not ship, or not before it is too
        old."""
        reachable = live + 1 + self._max_async_level - self.shipped
        wanted = math.ceil(self._oversampling_factor * reachable * self._groups_per_batch)
        return min(wanted, (self._last_batch(live) - self.shipped) * self._groups_per_batch)

    def _last_batch(self, version: int) -> int:
        """Returns the newest batch that may have a group of this version."""
        newest = version + 1 + self._max_off_policy_steps
        return newest if self._max_steps is None else min(newest, self._max_steps)

    def ship(self) -> Shipment | None:
        """Returns the next batch, oldest groups first, or None where it must wait."""
        step = self.shipped + 1
        if self.live is None or self.live < step - 1 - self._max_async_level:
            return None
        if len(self._complete) < self._groups_per_batch:
            return None
        if not self._rest_can_ship(after=step, num_leaving=self._groups_per_batch):
            return None
        self.shipped = step
        oldest_first = sorted(self._complete, key=lambda group: (self._complete[group], group))
        versions = {group: self._complete.pop(group) for group in oldest_first[: self._groups_per_batch]}
        for counts in (self._num_unshipped, self._num_complete):
            counts.subtract(versions.values())
        self._notify()
        return Shipment(step=step, versions=versions)

    def _rest_can_ship(self, *, after: int, num_leaving: int = 0) -> bool:
        """Whether all groups but the `num_leaving` oldest complete ones can ship in the batches after number `after`
        without exceeding the lag. Counts by version only: it is asked whenever a group completes."""
        num_due = 0
        for version in sorted(self._num_unshipped):
            num_chosen = min(self._num_complete[version], num_leaving)
            num_leaving -= num_chosen
            if (num_others := self._num_unshipped[version] - num_chosen) == 0:
                continue
            num_due += num_others
            if num_due > (self._last_batch(version) - after) * self._groups_per_batch:
                return False
        return True

    # --- what others ask ---

    @property
    def finished(self) -> bool:
        """All batches have left."""
        return self._max_steps is not None and self.shipped >= self._max_steps

    @property
    def blocked(self) -> bool:
        """Somebody lets no group start."""
        return any(self.blocks.values())

    @property
    def servers_wanted(self) -> bool:
        """An evaluation is due or goes on, or somebody blocks the start of groups: servers stay awake."""
        return self.blocked or bool(self._pins)

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled or scored; those that wait for rewards are left out."""
        return len(self._in_flight) - len(self._delayed)

    @property
    def drained(self) -> bool:
        """Nothing in flight, or what is goes on under any version; and nobody outside needs one."""
        return (self._follows or not self.num_in_flight) and not self._pins

    def opponents_of(self, version: int) -> frozenset[int]:
        """Returns the versions that games of `version` meet."""
        return self._opponents.get(version, frozenset())

    def _needs(self) -> Counter[tuple[int, str]]:
        """Returns who needs which versions, opponents left out."""
        needs = Counter(self._pins)
        if self.live is not None:
            needs[self.live, NEWEST] += 1
        if not self._follows:
            needs.update((version, GROUPS) for group, version in self._in_flight.items() if group not in self._delayed)
        return needs

    def _with_opponents(self) -> set[int]:
        """Returns the versions whose games go on, or may begin."""
        of_groups = {version for group, version in self._in_flight.items() if group not in self._delayed}
        newest = -1 if self.live is None else self.live
        return {one for one, _ in self._needs()} | of_groups | {one for one in self._opponents if one > newest}

    def pinned(self) -> dict[int, dict[str, int]]:
        """Returns the versions that servers must keep, and who needs each how many times: the newest for what starts
        next, those that groups in flight began with and do not leave, those that somebody has pinned, and those that
        games of any of these meet, or of those that groups in flight began with and have left."""
        needs = self._needs()
        for version in self._with_opponents():
            needs.update((opponent, OPPONENTS) for opponent in self.opponents_of(version))
        by_version: dict[int, dict[str, int]] = {}
        for (version, by), num in sorted(needs.items()):
            by_version.setdefault(version, {})[by] = num
        return by_version


def make_scheduler(settings: OrchSettings, progress: Progress) -> Scheduler:
    """Returns a scheduler that goes on after what an earlier process had shipped and started."""
    return Scheduler(
        groups_per_batch=settings.groups_per_batch,
        max_async_level=settings.max_async_level,
        max_off_policy_steps=settings.max_off_policy_steps,
        max_in_flight=settings.most_concurrent_groups,
        max_steps=settings.max_steps,
        oversampling_factor=settings.oversampling_factor,
        shipped=progress.step,
        num_started=progress.num_groups,
        follows=settings.inflight_weight_updates,
    )
