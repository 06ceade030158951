"""Who may start, what ships when: a state machine over groups, batches and policy versions, without clock or I/O.

Step n trains batch n and yields version n. A group that is started under version v and ships in batch n has the lag
n - 1 - v. Batch n ships when version n - 1 - max_async_level is live on all servers and enough groups are complete.

Pacing instead of dropping: a complete group ships only if afterwards every other group can still ship before its lag
exceeds max_off_policy_steps. So long answers are waited for and never age out, and with max_off_policy_steps equal to
max_async_level batches ship in the order in which their groups were started.
"""

import math
from collections import Counter
from dataclasses import dataclass

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import Bell
from grpo.orchestrator.resuming import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Leave to sample one group. Example: ``Ticket(group=17, version=3)``"""

    group: int
    """Number of the group, from 0 in the order of starting."""
    version: int
    """Policy version to sample under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipment:
    """The groups of one batch."""

    step: int
    """The batch's number, from 1."""
    tickets: tuple[Ticket, ...]
    """Oldest versions first, in the order of starting; each with the version by which its lag is counted."""

    def lag(self, ticket: Ticket) -> int:
        """Lag of a group of this batch."""
        return self.step - 1 - ticket.version


class Scheduler:
    """Stepped by events (`version_live`, `completed`, `failed`), asked by `start` and `ship`."""

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
        self._in_flight: dict[int, Ticket] = {}
        self._parked: dict[int, Ticket] = {}
        self._complete: dict[int, Ticket] = {}
        self._num_unshipped: Counter[int] = Counter()
        """Groups in flight and complete ones, by version."""
        self._num_complete: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._num_started = num_started
        self._held = False
        self._num_pauses = 0
        self.shipped = shipped
        """Number of the newest batch that has left."""
        self.live: int | None = None
        """Newest version that all servers serve."""
        self.num_claims = 0
        """Evaluations that are due or going on, and versions that are being loaded: who wants the servers awake."""
        self.changed = Bell()
        """Rings at every event."""

    # --- events ---

    def version_live(self, version: int) -> None:
        """All servers serve `version`, the one after the newest; the first may be any that a batch has given."""
        expected = range(self.shipped + 1) if self.live is None else range(self.live + 1, self.live + 2)
        if version not in expected:
            raise ValueError(f"version {version} became live, expected {expected[-1]}: versions come in order")
        self.live, self._held = version, False
        self._num_unshipped, self._num_complete = +self._num_unshipped, +self._num_complete
        self.changed.ring()

    def completed(self, group: int, *, oldest: int | None = None) -> None:
        """A group has been sampled and scored. `oldest`: the oldest version that sampled any of it, by which its lag is
        counted (None: the one it was started under)."""
        ticket = self._in_flight.pop(group)
        if oldest is not None and oldest != ticket.version:
            self._num_unshipped[ticket.version] -= 1
            self._num_unshipped[oldest] += 1
            ticket = Ticket(group=group, version=oldest)
        self._complete[group] = ticket
        self._num_complete[ticket.version] += 1
        self.changed.ring()

    def failed(self, group: int) -> None:
        """A group has come to nothing; another one may start in its place."""
        self._num_unshipped[self._in_flight.pop(group).version] -= 1
        self.changed.ring()

    def park(self, group: int) -> None:
        """A group in flight waits for rewards that come later: it holds no slot, and nobody waits for it."""
        ticket = self._parked[group] = self._in_flight.pop(group)
        self._num_unshipped[ticket.version] -= 1
        self.changed.ring()

    def unpark(self, group: int) -> bool:
        """A group that was parked is in flight again. Returns whether it can be completed: not where it has become too
        old, would make others too old, or others have taken its place in the last batches."""
        ticket = self._in_flight[group] = self._parked.pop(group)
        self._num_unshipped[ticket.version] += 1
        num_due = 0
        for version in sorted(self._num_unshipped):
            num_due += self._num_unshipped[version]
            if num_due > (self._last_batch(version) - self.shipped) * self._groups_per_batch:
                return False
        return True

    def pin(self, version: int) -> None:
        """Somebody outside, an evaluation, needs `version` to stay."""
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """Takes back one `pin`."""
        self._pins[version] -= 1
        self.changed.ring()

    def claim(self) -> None:
        """Somebody besides rollouts wants the servers awake."""
        self.num_claims += 1

    def unclaim(self) -> None:
        """Takes back one `claim`."""
        self.num_claims -= 1
        self.changed.ring()

    def hold(self) -> None:
        """Starts nothing until the next version is live: servers that hold one version must drain first. Groups that
        follow wait at the servers instead."""
        self._held = not self._follows

    def pause(self) -> None:
        """Starts nothing until `unpause`: somebody outside, an evaluation, wants the servers for itself."""
        self._num_pauses += 1

    def unpause(self) -> None:
        """Takes back one `pause`."""
        self._num_pauses -= 1
        self.changed.ring()

    # --- decisions ---

    def start(self) -> Ticket | None:
        """Leave to start one more group under the newest version, or None where it must wait: where the batches up to
        the newest reachable one lack no more, oversampled, and within concurrency."""
        if self.live is None or self._held or self._num_pauses or len(self._in_flight) >= self.max_in_flight:
            return None
        if len(self._complete) + len(self._in_flight) >= self._num_wanted(self.live):
            return None
        ticket = Ticket(group=self._num_started, version=self.live)
        self._num_started += 1
        self._in_flight[ticket.group] = ticket
        self._num_unshipped[ticket.version] += 1
        return ticket

    def _num_wanted(self, live: int) -> int:
        """Groups that may be on their way: never so many that one could not ship before it is too old, or at all."""
        reachable = live + 1 + self._max_async_level - self.shipped
        wanted = math.ceil(self._oversampling_factor * reachable * self._groups_per_batch)
        return min(wanted, (self._last_batch(live) - self.shipped) * self._groups_per_batch)

    def _last_batch(self, version: int) -> int:
        """The newest batch that may have a group of this version."""
        newest = version + 1 + self._max_off_policy_steps
        return newest if self._max_steps is None else min(newest, self._max_steps)

    def ship(self) -> Shipment | None:
        """The next batch, oldest groups first, or None where it must wait."""
        step = self.shipped + 1
        if self.live is None or self.live < step - 1 - self._max_async_level:
            return None
        if len(self._complete) < self._groups_per_batch:
            return None
        if not self._others_can_wait(step):
            return None
        self.shipped = step
        oldest_first = sorted(self._complete.values(), key=lambda ticket: (ticket.version, ticket.group))
        tickets = tuple(oldest_first[: self._groups_per_batch])
        for ticket in tickets:
            del self._complete[ticket.group]
        for counts in (self._num_unshipped, self._num_complete):
            counts.subtract(ticket.version for ticket in tickets)
        self.changed.ring()
        return Shipment(step=step, tickets=tickets)

    def _others_can_wait(self, step: int) -> bool:
        """Whether all groups but the oldest complete ones can ship in the batches after `step` without exceeding the
        lag. Counts by version only: it is asked whenever a group completes, however many there are."""
        num_to_choose, num_due = self._groups_per_batch, 0
        for version in sorted(self._num_unshipped):
            num_chosen = min(self._num_complete[version], num_to_choose)
            num_to_choose -= num_chosen
            if (num_others := self._num_unshipped[version] - num_chosen) == 0:
                continue
            num_due += num_others
            if num_due > (self._last_batch(version) - step) * self._groups_per_batch:
                return False
        return True

    # --- what others ask ---

    @property
    def finished(self) -> bool:
        """All batches have left."""
        return self._max_steps is not None and self.shipped >= self._max_steps

    @property
    def paused(self) -> bool:
        """Somebody outside, an evaluation, has the servers for itself."""
        return self._num_pauses > 0

    @property
    def num_in_flight(self) -> int:
        """Groups that are being sampled or scored."""
        return len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Nothing in flight, or what is goes on under any version; and nobody outside needs one."""
        return (self._follows or not self._in_flight) and not any(self._pins.values())

    def needed_versions(self) -> set[int]:
        """Versions that servers must keep: the newest, and those that something in flight began with and does not
        leave."""
        pinned = {version for version, count in self._pins.items() if count > 0}
        newest = set() if self.live is None else {self.live}
        began = set() if self._follows else {ticket.version for ticket in self._in_flight.values()}
        return newest | pinned | began


def make_scheduler(settings: OrchSettings, progress: Progress) -> Scheduler:
    """Goes on after what an earlier process had shipped and started."""
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
