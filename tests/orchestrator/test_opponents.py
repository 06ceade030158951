"""Snapshots as opponents: drawn, loaded, recorded, and the same again after a restart."""

import asyncio
import json
import multiprocessing
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.checks import Mismatch
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.opponents import Opponents
from grpo.orchestrator.rollouts.players import Pool
from grpo.orchestrator.rollouts.records import Group, SamplingParams, Task
from grpo.orchestrator.run import orchestrate
from grpo.orchestrator.scheduler import Scheduler
from grpo.orchestrator.workers.protocol import Draw
from grpo.transport.traces import trace_path
from grpo.transport.weights.store import IN_USE_FILE

from grpo import play
from tests.grpo.test_ratings import write_games
from tests.orchestrator.fakes import MODEL, FakeServer, FakeTrainer, settings_for, until
from tests.orchestrator.rps import Rps
from tests.orchestrator.running import rows_of, run

GAMES = (
    "SELECT rollouts.version, example, games.number, player, other, score, state FROM games JOIN rollouts USING "
    "(group_id, number) ORDER BY 1, 2, 3"
)


def of_rps(**args: Any) -> list[dict[str, Any]]:
    return [{"id": f"{Path(__file__).with_name('rps.py')}:Rps", "name": "rps", "args": args}]


def strong(prompt: str, version: int | None) -> str:
    """Odd versions say rock, even ones paper, and the base scissors."""
    return "s" if version is None else "rp"[version % 2 == 0]


SETTINGS: dict[str, Any] = {"max_steps": 6, "max_opponents": 2, "eval": {"num_examples": 0}, "seed": 3}


@pytest.fixture
def players(server: FakeServer) -> FakeServer:
    server.answer = strong  # type: ignore[assignment]
    server.info["num_slots"] = 60
    return server


async def test_games_meet_the_pools_snapshots_and_only_the_own_side_is_trained(
    tmp_path: Path, players: FakeServer
) -> None:
    made = await run(tmp_path, players, env=of_rps(every=2, keep=2), **SETTINGS)
    games = rows_of(tmp_path, GAMES)
    assert len(games) == 6 * 16
    met = {version: {other for v, *_, other, _, _ in games if v == version} for version in range(6)}
    assert met[0] == met[1] == met[2] == {"base"}  # before there is a snapshot
    assert met[3] == met[4] == {"v2"}
    assert met[5] <= {"v2", "v4"}
    for version, _, _, player, other, score, state in games:
        assert player == f"v{version}"
        assert state == "trained"
        own, against = strong("", version), strong("", None if other == "base" else int(other[1:]))
        assert score == {"rs": 1, "sr": 0, "pr": 1, "rp": 0, "sp": 1, "ps": 0}.get(own + against, 0.5)
    [(digest,)] = set(rows_of(tmp_path, "SELECT DISTINCT other_digest FROM games WHERE other != 'base'"))
    assert digest.startswith("xxh3_128:")
    samples = [ids for batches in made.batches.values() for batch in batches for ids in batch.rollout_ids]
    assert Counter(samples).most_common(1)[0][1] == 1
    assert len(samples) == 6 * 16
    rows = pq.read_table(trace_path(tmp_path, 4)).to_pylist()
    assert {(row["role"], row["trained"]) for row in rows} == {("a", True), ("b", False)}
    assert len(rows) == 32
    for row in rows:
        assert {role: one["name"] for role, one in json.loads(row["players"]).items()} == {"a": "v3", "b": "v2"}
    assert {tuple(set(row["versions"])) for row in rows if row["role"] == "b"} == {(2,)}


async def test_opponents_are_proved_before_use_stay_on_disk_and_are_unloaded_afterwards(
    tmp_path: Path, players: FakeServer
) -> None:
    await run(tmp_path, players, env=of_rps(every=1, keep=1), **SETTINGS)
    loaded = [load["version"] for load in players.loads]
    assert loaded == [0, 1, 2, 3, 4, 5, 6]  # the version before is there already, and stays for its successor's games
    assert 3 in players.unloads
    assert 6 not in players.unloads
    in_use = json.loads((tmp_path / "broadcasts" / IN_USE_FILE).read_text())["versions"]
    assert in_use["6"]["pins"]["pool past"] == 1
    proved = rows_of(tmp_path, "SELECT DISTINCT version FROM proofs ORDER BY 1")
    assert [version for (version,) in proved] == [0, 1, 2, 3, 4, 5, 6]


def orchestrator(settings: dict[str, Any]) -> None:
    """A process of its own."""
    asyncio.run(orchestrate(OrchSettings.model_validate(settings)))


async def test_a_run_that_is_killed_and_started_again_draws_the_same_and_counts_games_once(
    tmp_path: Path, players: FakeServer
) -> None:
    env, num_asked = of_rps(every=1, by="pfsp", per="game"), 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    seeded = {**SETTINGS, "max_opponents": 4, "env": env, "sampling": {"max_tokens": 16, "seed": 5}}
    await run(whole, players, **seeded)
    asked, players.requests = {(one["seed"], one["version"]) for one in players.requests}, []

    async def stuck(body: dict[str, Any]) -> None:
        """Answers the first moves of the fifth batch alone."""
        nonlocal num_asked
        num_asked += body["version"] == 4
        if num_asked > 12:
            await asyncio.sleep(3600)

    players.sampling = stuck  # type: ignore[method-assign]
    settings = settings_for(parts, players, **seeded).model_dump(mode="json", exclude_unset=True)
    trainer, context = FakeTrainer(parts), multiprocessing.get_context("spawn")
    trainer.start()
    try:
        first = context.Process(target=orchestrator, args=(settings,))
        first.start()
        await until(lambda: num_asked > 12)
        first.kill()
        await asyncio.to_thread(first.join, 60)
        num_asked = -(10**6)
        second = context.Process(target=orchestrator, args=(settings,))
        second.start()
        await asyncio.to_thread(second.join, 120)
        assert second.exitcode == 0
    finally:
        trainer.end()

    def counted(folder: Path) -> list[Any]:
        return [row for row in rows_of(folder, GAMES) if row[-1] == "trained"]

    assert counted(parts) == counted(whole)
    assert len(counted(parts)) == 6 * 16
    assert {(one["seed"], one["version"]) for one in players.requests} == asked  # also by the one that was killed
    assert len({row[4] for row in counted(whole)}) > 3


async def test_what_pools_there_cannot_be_is_said_at_the_start(tmp_path: Path, players: FakeServer) -> None:
    with pytest.raises(Mismatch, match=r"1 pools of opponents \(past of rps\), and max_opponents is 0"):
        await run(tmp_path / "a", players, env=of_rps(every=1), **SETTINGS | {"max_opponents": 0})
    players.info["num_slots"] = 29
    with pytest.raises(Mismatch, match=r"max_loras = 29 adapters, expected at least 30"):
        await run(tmp_path / "b", players, env=of_rps(every=1), **SETTINGS)


def test_opponents_need_adapters(tmp_path: Path) -> None:
    broadcast = {"type": "filesystem", "format": "full"}
    settings = settings_for(
        tmp_path, max_opponents=2, weight_broadcast=broadcast, client={"base_url": ["http://127.0.0.1:1/v1"]}
    )
    assert "max_opponents" in {key for key, _ in settings.conflicts()}


async def test_a_script_plays_and_is_named(tmp_path: Path, players: FakeServer) -> None:
    await run(tmp_path, players, env=of_rps(opponent="script"), **SETTINGS)
    games = rows_of(tmp_path, "SELECT DISTINCT other, other_digest != '' FROM games")
    assert games == [("script:rock", 1)]
    assert {score for *_, score, _ in rows_of(tmp_path, GAMES)} == {0.5, 1.0}


async def test_the_newest_version_plays_without_being_trained(tmp_path: Path, players: FakeServer) -> None:
    made = await run(tmp_path, players, env=of_rps(opponent="newest"), **SETTINGS)
    assert {(player, other) for _, _, _, player, other, *_ in rows_of(tmp_path, GAMES)} == {
        (f"v{version}", f"v{version}") for version in range(6)
    }
    assert made.summary.rollouts_trained == 6 * 16


async def test_an_exploiter_meets_the_newest_main(tmp_path: Path, players: FakeServer) -> None:
    names = ["main", "exploiter"]
    players.adapters = ("exploiter",)
    main, exploiter = of_rps(opponent="base"), of_rps(opponent="newest", of="main")
    exploiter[0] |= {"name": "exploit", "adapters": {"a": "exploiter"}}
    model = {"name": str(MODEL), "lora_adapters": names}
    trainer = {"settings": {"lora_adapters": names}, "adapters": tuple(names)}
    await run(tmp_path, players, trainer=trainer, env=[*main, *exploiter], **SETTINGS | {"model": model})
    games = rows_of(tmp_path, "SELECT DISTINCT env, player, other FROM games")
    assert {game for game in games if game[0] == "exploit"} == {
        ("exploit", f"v{version}/exploiter", f"v{version}/main") for version in range(6)
    }
    assert {game[2] for game in games if game[0] == "rps"} == {"base"}
    asked = {(one["version"], one["adapter"]) for one in players.requests}
    assert asked == {(None, None)} | {(version, name) for version in range(6) for name in names}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"opponent": "future"}, "there is no pool 'future'; opponents are base, newest"),
        ({"by": "luck", "every": 2}, "drawn by 'luck', expected one of uniform, pfsp, nearest, newest"),
        ({"per": "week", "every": 2}, "drawn per 'week', expected group or game"),
    ],
)
async def test_unknown_opponents_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await play(Rps(**args), {"prompt": "1"}, ["r", "s"])


async def test_play_answers_for_both_sides() -> None:
    state = await play(Rps(every=2), {"prompt": "1"}, ["r", "s"])
    assert state.rewards == {"a": 1.0, "b": -1.0}
    assert state.reward == 1.0
    assert state.players["b"].name == "past"
    assert state.roles == ("a",)


class Served:
    """Servers that hold whatever is asked for, and snapshots that are there."""

    def __init__(self) -> None:
        self.snapshots: dict[int, str | None] = {}

    def has_slots(self, versions: Collection[int], *, noisy: bool) -> bool:
        return True

    async def load(self, version: int, **_: Any) -> None:
        self.snapshots[version] = f"digest {version}"

    def snapshot(self, version: int) -> str:
        return f"digest {version}"

    def poll(self, version: int) -> None:
        return None


async def drawn(folder: Path, by: str, *, versions: range, members: tuple[int, ...]) -> Counter[str]:
    """How often games of these versions meet whom."""
    settings = settings_for(
        folder, max_opponents=4, env=of_rps(every=1), client={"base_url": ["http://127.0.0.1:1/v1"]}
    )
    scheduler = Scheduler(
        groups_per_batch=1, max_async_level=0, max_off_policy_steps=0, max_in_flight=4, max_steps=None
    )
    served, met = Served(), Counter[str]()
    with closing(Ledger(folder / "ledger.sqlite")) as ledger:
        opponents = Opponents(
            settings=settings,
            pools={"nim": {"past": Pool(members=members)}},
            scheduler=scheduler,
            sync=cast(Any, served),
            ledger=ledger,
            reader=cast(Any, served),
            base_digest="sha256:base",
        )
        for version in versions:
            for index in range(8):
                task = Task(env="nim", split="train", index=index, messages=())
                params = SamplingParams(temperature=1.0, max_tokens=4)
                group = Group(task=task, id="0", num=1, version=version, params=params)
                draw = Draw(pool="past", by=by, per_game=False)
                player = await opponents.draw(group, 0, draw)
                assert player.id.digest == f"digest {player.version}"
                assert player.version in served.snapshots
                met[player.id.name] += 1
    return met


async def test_each_rule_meets_whom_it_says(tmp_path: Path) -> None:
    results = {("v9", "v1"): "w" * 40, ("v9", "v2"): "wl" * 20, ("v9", "v3"): "l" * 40}
    write_games(tmp_path, results)  # batches 1 to 3
    some = range(20, 34)
    num = len(some) * 8
    uniform = await drawn(tmp_path, "uniform", versions=some, members=(1, 2, 3))
    assert uniform.keys() == {"v1", "v2", "v3"}
    pfsp = await drawn(tmp_path, "pfsp", versions=some, members=(1, 2, 3))
    assert pfsp["v3"] > 0.6 * num  # 0.79 by (1 - x)²
    assert pfsp["v1"] < 0.05 * num
    assert await drawn(tmp_path, "newest", versions=some, members=(1, 2, 3)) == {"v3": num}
    nearest = await drawn(tmp_path, "nearest", versions=some, members=(1, 2, 3, 4, 5, 6))
    assert "v2" in nearest  # as strong as v9
    assert not nearest.keys() & {"v1", "v3"}


def test_snapshots_are_pinned_as_long_as_the_version_whose_games_meet_them() -> None:
    scheduler = Scheduler(
        groups_per_batch=1, max_async_level=1, max_off_policy_steps=1, max_in_flight=4, max_steps=None, shipped=4
    )
    scheduler.version_live(4)
    group = scheduler.start()
    scheduler.meets(4, [1, 2])
    assert scheduler.pinned()[1] == {"opponents": 1}
    scheduler.version_live(5)
    assert scheduler.pinned().keys() == {1, 2, 4, 5}  # a group in flight
    assert group is not None
    scheduler.failed(group)
    scheduler.meets(5, [2])
    assert scheduler.pinned().keys() == {2, 5}
