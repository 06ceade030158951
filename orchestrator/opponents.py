"""Opponents: which of a run's snapshots the games of a version meet, and that all servers serve them.

Games that begin under version v meet the snapshots of one draw for each pool and rule. It follows from the run's seed,
from v, from the snapshots before v, and from the games of the batches up to v, which are on disk before v can be: a
process that is killed and started again draws the same. A draw is made before v becomes live, the first of a rule when
a game asks for it. Its snapshots are pinned for as long as v is, and loaded with proof before any game gets its
opponent.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpo.configs.orch import OrchSettings
from grpo.orchestrator.background import in_thread
from grpo.orchestrator.checks import Mismatch
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.ratings import Pairs, fit, pfsp_weights
from grpo.orchestrator.rollouts.players import BASE, NEWEST, PlayerId, Pool
from grpo.orchestrator.rollouts.records import Group
from grpo.orchestrator.rollouts.rollout import Drawn
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.seeds import mixed_seed
from grpo.orchestrator.workers.protocol import Draw
from grpo.transport.errors import DeadlineError
from grpo.transport.weights.store import NOISE_FILE, HeldVersion, PolicyReader

log = logging.getLogger(__name__)

Pools = Mapping[str, Mapping[str, Pool]]
"""By environment and name."""
ONE_VERSION = (
    "weight_broadcast.format is {kind}, so that servers hold one version at a time, in place of the base model; train "
    "adapters (lora: true, weight_broadcast.format: adapter)"
)
RECENT_STEPS = 32
"""Batches whose games say against whom the policy wins now, for `pfsp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slate:
    """A draw: what the games of one version can meet by one rule of one pool."""

    versions: tuple[int, ...]
    """One of these at random, each as likely; one that was drawn twice is here twice. None: the base model."""


@dataclass(kw_only=True)
class Opponents:
    """Draws opponents, and has servers load them."""

    settings: OrchSettings
    pools: Pools
    scheduler: Scheduler
    sync: WeightSync
    ledger: Ledger
    reader: PolicyReader
    base_digest: str
    _slates: dict[tuple[int, str, str, str], asyncio.Task[Slate]] = field(default_factory=dict, init=False)
    """By version, environment, pool and rule."""
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        check_pools(self.settings, self.pools)

    @property
    def num_drawn(self) -> int:
        """Snapshots that one draw has at most."""
        return self.settings.max_opponents // max(1, num_pools(self.pools))

    # --- who plays ---

    def player(self, version: int | None, adapter: str | None) -> PlayerId:
        """Returns the name of a version's adapter, or of the base model."""
        if version is None:
            return PlayerId(name=BASE, digest=self.base_digest)
        name = f"v{version}" if adapter is None else f"v{version}/{adapter}"
        digest = self.sync.snapshots.get(version) or self.reader.snapshot(version) or ""
        return PlayerId(name=name, digest=digest)

    async def draw(self, group: Group, number: int, call: Draw) -> Drawn:
        """Returns the opponent of rollout `number` of a group, once all servers serve it. Raises ValueError for one
        that there is not."""
        if call.pool == BASE:
            if (kind := self.settings.weight_broadcast.format) != "adapter":
                raise ValueError(f"base is no opponent: {ONE_VERSION.format(kind=kind)}")
            return Drawn(id=self.player(None, None), version=None)
        if call.pool == NEWEST:
            adapter = self._adapter(call.adapter, NEWEST)
            return Drawn(id=self.player(group.version, adapter), version=group.version, adapter=adapter, follows=True)
        env, task = group.task.env, group.task
        if (pool := self.pools.get(env, {}).get(call.pool)) is None:
            raise ValueError(f"environment {env} has no pool {call.pool!r}; it has {sorted(self.pools.get(env, {}))}")
        slate = await self._slate(group.version, env, call.pool, call.by)
        if not slate.versions:
            return Drawn(id=self.player(None, None), version=None)
        of_game = (number, call.rollout) if call.per_game else ()
        key = (self.settings.seed, "opponent", env, call.pool, call.by, task.split, task.epoch, task.index, *of_game)
        version = slate.versions[mixed_seed(*key) % len(slate.versions)]
        adapter = self._adapter(pool.adapter, f"pool {call.pool}")
        return Drawn(id=self.player(version, adapter), version=version, adapter=adapter)

    def _adapter(self, name: str | None, who: str) -> str | None:
        """Raises ValueError where the run has no such adapter."""
        names = self.settings.model.lora_adapters
        if name is not None and name not in names:
            raise ValueError(
                f"{who} names the adapter {name!r}, and model.lora_adapters are {', '.join(names) or 'none'}"
            )
        return name or (names[0] if names else None)

    # --- draws ---

    async def prepare(self, version: int) -> None:
        """Makes the draws of a version that is about to become live, for whatever games have drawn from until now."""
        drawn = sorted({key[1:] for key in self._slates})
        await asyncio.gather(*(self._slate(version, *which) for which in drawn), return_exceptions=True)

    async def _slate(self, version: int, env: str, pool: str, by: str) -> Slate:
        key = version, env, pool, by
        if key not in self._slates:
            oldest = version - self.settings.max_off_policy_steps - 1  # an older one that is asked again is drawn again
            self._slates = {one: task for one, task in self._slates.items() if one[0] >= oldest}
            self._slates[key] = asyncio.create_task(self._drawn(*key))
        return await asyncio.shield(self._slates[key])

    async def _drawn(self, version: int, env: str, pool: str, by: str) -> Slate:
        await in_thread(self.ledger.changes())
        members = await in_thread(self.members, self.pools[env][pool], version)
        versions = await in_thread(self._choose, members, version, env, pool, by)
        others = self.scheduler.opponents_of(version)
        if len(chosen := {*versions, *others}) > self.settings.max_opponents:
            raise ValueError(
                f"games of version {version} would meet {len(chosen)} snapshots: {sorted(others)} by other draws and "
                f"{sorted(set(versions))} of {env}'s pool {pool} by {by}, and max_opponents is "
                f"{self.settings.max_opponents}; raise it, or draw from each pool by one rule"
            )
        if versions:
            self.scheduler.meets(version, versions)
            await self._load(sorted(set(versions)))
        return Slate(versions=tuple(versions))

    def members(self, pool: Pool, version: int) -> list[int]:
        """Returns the snapshots of a pool that are older than `version`, ascending, as far as they are there."""
        if pool.members:
            digests = [one for one in pool.members if isinstance(one, str)]
            named = {one for one in pool.members if isinstance(one, int)}
            if digests:
                named |= {one for one in range(version) if self.reader.snapshot(one) in digests}
            wanted = sorted(one for one in named if one < version)
        else:
            wanted = list(range(pool.every, version, pool.every))
            wanted = wanted if pool.keep is None else wanted[-pool.keep :]
        found = [one for one in wanted if self.reader.snapshot(one) is not None]
        if lost := sorted(set(wanted) - set(found)):
            self._warn(f"snapshots {lost[0]} to {lost[-1]} of a pool are not in the run's folder any more")
        return found

    def _choose(self, members: Sequence[int], version: int, env: str, pool: str, by: str) -> list[int]:
        if not members:
            return []
        if by == "newest":
            return [members[-1]]
        rng = random.Random(mixed_seed(self.settings.seed, "slate", env, pool, by, version))
        adapter = self._adapter(self.pools[env][pool].adapter, f"pool {pool}")
        names = [self.player(one, adapter).name for one in members]
        if by == "nearest":
            return self._nearest(members, names, version, env)
        weights = None
        if by == "pfsp":
            games = self.ledger.games(env, first=version - RECENT_STEPS + 1, last=version)
            weights = pfsp_weights([share_won(games, name) for name in names])
        return rng.choices(members, weights, k=self.num_drawn)

    def _nearest(self, members: Sequence[int], names: Sequence[str], version: int, env: str) -> list[int]:
        """Returns the members whose ratings are nearest to that of the newest version that has played; the newest where
        no games were played."""
        games = self.ledger.games(env, last=version)
        ratings = fit(games)
        played = [player for player, _ in games if player in ratings]
        if not played:
            return list(members[-self.num_drawn :])
        own = ratings[max(played, key=version_of)].elo
        known = [ratings[name].elo if name in ratings else own for name in names]
        order = sorted(range(len(members)), key=lambda at: (abs(known[at] - own), -members[at]))
        return sorted(members[at] for at in order[: self.num_drawn])

    # --- on the servers ---

    async def _load(self, versions: Sequence[int]) -> None:
        """Has all servers load and prove these versions, which are pinned."""
        policies = {one: await in_thread(self.reader.poll, one) for one in versions}
        noisy = any(policy is not None and NOISE_FILE in policy.manifest.files for policy in policies.values())
        await make_room(self.sync, self.scheduler, versions, noisy=noisy, limit_s=self.settings.wait_timeout_s)
        for version, policy in policies.items():
            has_noise = policy is not None and NOISE_FILE in policy.manifest.files
            await self.sync.load(version, snapshot=self.reader.snapshot(version), noisy=has_noise)

    def kept(self, version: int, held: Mapping[int, HeldVersion]) -> dict[int, HeldVersion]:
        """Returns which versions must stay on disk while `version` is the newest: those that servers hold, and all
        that pools keep."""
        pins: dict[int, Counter[str]] = {one: Counter(of.pins) for one, of in held.items()}
        for pools in self.pools.values():
            for name, pool in pools.items():
                for one in self.members(pool, version + 1):
                    pins.setdefault(one, Counter())[f"pool {name}"] = 1
        digests = {one: held[one].snapshot if one in held else self.reader.snapshot(one) for one in pins}
        return {one: HeldVersion(snapshot=digests[one], pins=dict(pins[one])) for one in sorted(pins)}

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            log.warning("%s; games meet the others", message)
        self._warned.add(message)


def check_pools(settings: OrchSettings, pools: Pools) -> None:
    """Raises Mismatch where environments have pools that the settings leave no room for."""
    num, allowed, kind = num_pools(pools), settings.max_opponents, settings.weight_broadcast.format
    names = ", ".join(f"{name} of {env}" for env, own in pools.items() for name in own)
    if num and kind != "adapter":
        raise Mismatch(f"there are pools of opponents ({names}), and {ONE_VERSION.format(kind=kind)}")
    if num > allowed:
        raise Mismatch(
            f"there are {num} pools of opponents ({names}), and max_opponents is {allowed}; set orch.max_opponents to "
            f"at least {num}: so many snapshots are on the servers for the games of each version, besides it"
        )


def num_pools(pools: Pools) -> int:
    """Returns how many pools there are, of all environments."""
    return sum(map(len, pools.values()))


def share_won(games: Pairs, name: str) -> float:
    """Returns the share of games that the policy, by whatever version, won against a player, a draw being half, as if
    it had won one game more and lost one."""
    against = [counts for (_, other), counts in games.items() if other == name]
    won, num = sum(one[0] + one[1] / 2 for one in against), sum(map(sum, against))
    return (won + 1) / (num + 2)


def version_of(name: str) -> int:
    """Returns the version in a player's name, `v12` or `v12/main`; -1 where it has none."""
    number = name.removeprefix("v").partition("/")[0]
    return int(number) if name.startswith("v") and number.isdecimal() else -1


async def make_room(
    sync: WeightSync, scheduler: Scheduler, versions: Collection[int], *, noisy: bool, limit_s: float
) -> None:
    """Returns when servers have slots for these versions beside those that somebody needs; versions that nobody needs
    are unloaded. Raises DeadlineError, which says who needs which."""
    try:
        async with asyncio.timeout(limit_s):
            while not sync.has_slots(scheduler.pinned().keys() | set(versions), noisy=noisy):
                await scheduler.changed.wait()
    except TimeoutError:
        needs = "; ".join(f"version {one} by {', '.join(by)}" for one, by in scheduler.pinned().items())
        wanted = ", ".join(f"version {one}" for one in versions)
        raise DeadlineError(
            f"waited wait_timeout_s = {limit_s:g} s for slots for {wanted} on the servers, which hold {needs}; set a "
            "higher max_loras for grpo-infer"
        ) from None
    if not sync.has_slots(sync.snapshots.keys() | set(versions), noisy=noisy):
        await sync.keep_only(scheduler.pinned())
