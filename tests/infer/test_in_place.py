"""Versions in the place of the model's own weights, over a fake engine and real folders."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from infer.adapters import BaseModel
from infer.in_place import InPlaceTable
from infer.versions import NotLive
from infer.vllm_api import EngineError
from transport.errors import DeadlineError, PolicyRefused
from transport.folders import Content
from transport.records import Canary, PolicySpec
from transport.run import RunFolder, create_run
from transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement, Rendezvous
from transport.weights.shards import INDEX_FILE, Weight, shard_files
from transport.weights.store import CANARY_FILE, PolicyPublisher

SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.0.q_proj.weight": (6, 4),
    "model.layers.0.k_proj.weight": (2, 4),
    "model.norm.weight": (4,),
}
BASE = BaseModel(identity="base", linear_shapes={}, max_rank=16, dtype=torch.float32)
FULL = PolicySpec(base_model="base", rank=0, alpha=0, target_modules=(), sequence_len=64, dtype="float32", kind="full")
MERGED = structs.replace(FULL, kind="merged", rank=2, alpha=4, target_modules=("q_proj",))
TOKENS = (5, 6, 7)


@dataclass
class FakeEngine:
    """Scores the number of the version below the base's log-probabilities, whose folder it has loaded last."""

    dtype: str = "float32"
    loads: list[int | None] = field(default_factory=list)
    refuses: set[int | None] = field(default_factory=set)
    """Loading one of these ends in an error, with the weights half replaced."""
    shows: float | None = None
    """What it serves whatever was loaded."""
    at_load: list[int] = field(default_factory=list)
    received: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    table: InPlaceTable | None = None

    async def score(self, token_ids: Sequence[int], adapter: object, *, priority: int = 0) -> list[float]:
        applied = float((self.loads or [None])[-1] or 0) if self.shows is None else self.shows
        return [-1.0 - applied] * (len(token_ids) - 1)

    async def receive_weights(self, announcement: Announcement, *, rank_offset: int) -> None:
        self.received.append((announcement.names, rank_offset))
        self.loads.append(-1 if len(self.received) in self.refuses else len(self.received) - 1)
        if len(self.received) in self.refuses:
            raise EngineError("vLLM could not load the weights: NCCL timed out")

    async def load_weights(self, folder: Path | None) -> None:
        version = None if folder is None else int(folder.name.removeprefix("step_"))
        self.loads.append(-1 if version in self.refuses else version)
        if self.table is not None:
            self.at_load.append(self.table._num_in_flight)
        if version in self.refuses:
            raise EngineError("vLLM could not load the weights: out of memory")


@dataclass
class FakeNames:
    names: list[str] = field(default_factory=list)

    def rename(self, names: Sequence[str]) -> None:
        self.names = list(names)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def table(run: RunFolder, engine: FakeEngine) -> InPlaceTable:
    made = InPlaceTable(
        engine=engine,
        names=FakeNames(),
        output_dir=run.path,
        base=BASE,
        shapes=SHAPES,
        tolerance=None,
        timeout_s=60,
    )
    engine.table = made
    return made


def tensors(spec: PolicySpec) -> dict[str, np.ndarray]:
    names = [name for name in SHAPES if spec.kind == "full" or name.split(".")[-2] in spec.target_modules]
    return {name: np.full(SHAPES[name], 0.5, np.float32) for name in names}


def publish(
    run: RunFolder,
    version: int,
    *,
    spec: PolicySpec = FULL,
    content: dict[str, np.ndarray] | None = None,
    tokens: tuple[int, ...] = TOKENS,
    run_id: str | None = None,
    without: str = "",
) -> None:
    """A right version whose policy is `version` nats below the base, or one with other content."""
    held = tensors(spec) if content is None else content
    weights = [
        Weight(
            name=name,
            dtype=array.dtype.name,
            shape=array.shape,
            tensor=lambda array=array: torch.from_numpy(array),  # type: ignore[misc]
        )
        for name, array in held.items()
    ]
    num = len(tokens) - 1
    canary = Canary(
        version=version,
        token_ids=tokens,
        logprobs=(-1.0 - version,) * num,
        base_logprobs=(-1.0,) * num,
        dtype="float32",
        is_zero=version == 0,
    )
    files: dict[str, Content] = {**shard_files(weights, max_shard_bytes=100), CANARY_FILE: canary.to_json()}
    files.pop(without, None)
    publisher = PolicyPublisher(run.broadcasts, run_id=run_id or run.run_id)
    publisher.publish(version=version, spec=spec, files=files)


async def load(table: InPlaceTable, run: RunFolder, version: int) -> float:
    return (await table.load(run_id=run.run_id, version=version, alias="default")).canary.max_abs


async def use(table: InPlaceTable, version: int | None) -> None:
    async with table.using(version):
        pass


@pytest.mark.parametrize("spec", [FULL, MERGED], ids=["full", "merged"])
async def test_one_version_at_a_time_is_live_and_replaces_the_base_model(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine, spec: PolicySpec
) -> None:
    await use(table, None)
    for version in (0, 1, 2):
        publish(run, version, spec=spec)
        assert await load(table, run, version) == 0
        assert table.live == [version]
        assert table.names.names == [f"policy-v{version}", "default"]  # type: ignore[attr-defined]
    await use(table, 2)
    with pytest.raises(NotLive, match=r"1.*\[2\]"):
        await use(table, 1)
    with pytest.raises(NotLive, match=r"\[2\]"):
        await use(table, None)
    assert engine.loads == [0, 1, 2]


async def test_loading_the_live_version_again_does_nothing(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 1)
    await load(table, run, 1)
    await load(table, run, 1)
    assert engine.loads == [1]
    publish(run, 1, content={name: array + 1 for name, array in tensors(FULL).items()})
    await load(table, run, 1)
    assert engine.loads == [1, 1]


async def test_a_switch_waits_for_requests_that_run_and_new_ones_wait_for_it(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        publish(run, version)
    await load(table, run, 0)
    async with table.using(0):
        switching = asyncio.create_task(load(table, run, 1))
        while table._open.is_set():  # noqa: ASYNC110 - the table tells nobody
            await asyncio.sleep(0.001)
        early, late = asyncio.create_task(use(table, 0)), asyncio.create_task(use(table, 1))
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in (switching, early, late))
        assert table.in_flight == {0: 1}
    await switching
    await late
    with pytest.raises(NotLive):
        await early
    assert engine.at_load == [0, 0]


async def test_requests_that_follow_end_for_the_switch_and_go_on_after_it_with_whatever_is_live(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1, 2):
        publish(run, version)
    await load(table, run, 0)
    served: list[int] = []

    async def follow() -> None:
        while served[-1:] != [1]:
            async with table.following(0) as serving:
                assert serving.adapter is None
                served.append(serving.version)
                if serving.version == 0:
                    await serving.superseded.wait()

    following = asyncio.create_task(follow())
    while not served:  # noqa: ASYNC110 - the table tells nobody
        await asyncio.sleep(0)
    engine.refuses = {2}
    with pytest.raises(EngineError):
        await load(table, run, 2)
    await load(table, run, 1)
    await following
    assert served == [0, 0, 1], "the failed switch put version 0 back, and the request went on under it"
    assert set(engine.at_load) == {0}
    with pytest.raises(NotLive, match=r"2.*\[1\]"):
        async with table.following(2):
            pass


async def test_requests_that_never_end_make_the_switch_fail_at_the_deadline_and_change_nothing(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        publish(run, version)
    await load(table, run, 0)
    table.timeout_s = 0.1
    async with table.using(0):
        with pytest.raises(DeadlineError, match="1"):
            await load(table, run, 1)
    await use(table, 0)
    assert engine.loads == [0]


@pytest.mark.parametrize("earlier", [None, 3])
async def test_after_a_failed_load_the_weights_of_before_are_back(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine, earlier: int | None
) -> None:
    if earlier is not None:
        publish(run, earlier)
        await load(table, run, earlier)
    publish(run, 4)
    engine.refuses = {4}
    with pytest.raises(EngineError):
        await load(table, run, 4)
    assert engine.loads[-1] == earlier
    await use(table, earlier)
    engine.refuses = set()
    assert await load(table, run, 4) == 0


async def test_after_a_canary_that_disagrees_the_weights_of_before_are_back(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 3)
    await load(table, run, 3)
    publish(run, 4)
    engine.refuses, load_weights = set(), engine.load_weights

    async def load_another(folder: Path | None) -> None:
        await load_weights(folder)
        if engine.loads[-1] == 4:
            engine.loads[-1] = 5

    engine.load_weights = load_another  # type: ignore[method-assign]
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 4)
    assert refused.value.reason == "canary_mismatch"
    assert (engine.loads, table.live) == ([3, 5, 3], [3])


async def test_a_server_whose_earlier_weights_cannot_be_put_back_says_that_it_must_be_restarted(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (3, 4):
        publish(run, version)
    await load(table, run, 3)
    engine.refuses = {3, 4}
    with pytest.raises(EngineError):
        await load(table, run, 4)
    engine.refuses = set()
    for attempt in (use(table, 3), load(table, run, 3)):
        with pytest.raises(EngineError, match="version 3"):
            await attempt


async def test_weights_that_change_nothing_are_found_out(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 0)
    await load(table, run, 0)
    publish(run, 2)
    engine.shows = 0.0
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 2)
    assert refused.value.reason == "not_applied"


async def test_another_run_begins_with_the_base_models_weights(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    publish(run, 5)
    await load(table, run, 5)
    other = create_run(run.path, overwrite=True)
    publish(other, 0, tokens=(1, 2, 3, 4))
    await load(table, other, 0)
    assert engine.loads == [5, None, 0]
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 5)
    assert refused.value.reason == "stale_run"


def changed(spec: PolicySpec, name: str, array: np.ndarray | None) -> dict[str, np.ndarray]:
    content = tensors(spec)
    if array is None:
        del content[name]
    else:
        content[name] = array
    return content


Q, NORM = "model.layers.0.q_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("spec", "content", "reason"),
    [
        (structs.replace(FULL, base_model="other"), None, "foreign_base"),
        (structs.replace(MERGED, kind="adapter"), {}, "kind"),
        (FULL, changed(FULL, NORM, None), "partial"),
        (FULL, changed(FULL, "lm_head.weight", np.ones((3, 4), np.float32)), "shape"),
        (FULL, changed(FULL, Q, np.ones((4, 6), np.float32)), "shape"),
        (FULL, changed(FULL, Q, np.full((6, 4), np.nan, np.float32)), "not_finite"),
        (FULL, changed(FULL, NORM, np.array([1, 2, np.inf, 3], np.float32)), "not_finite"),
        (MERGED, changed(MERGED, Q, None), "partial"),
        (MERGED, changed(MERGED, NORM, np.ones(4, np.float32)), "shape"),
        (structs.replace(MERGED, target_modules=("q_proj", "k_proj")), tensors(MERGED), "partial"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_before_the_engine_sees_them(
    table: InPlaceTable,
    run: RunFolder,
    engine: FakeEngine,
    spec: PolicySpec,
    content: dict[str, np.ndarray] | None,
    reason: str,
) -> None:
    publish(run, 1, spec=spec, content=content)
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 1)
    assert refused.value.reason == reason
    assert engine.loads == []


@pytest.mark.parametrize("name", [INDEX_FILE, CANARY_FILE])
async def test_a_version_without_its_small_files_is_partial(table: InPlaceTable, run: RunFolder, name: str) -> None:
    publish(run, 1, without=name)
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 1)
    assert refused.value.reason == "partial"


async def test_merged_weights_of_a_float32_trainer_are_not_rounded_silently(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    table.base = replace(BASE, dtype=torch.bfloat16)
    publish(run, 1, spec=MERGED)
    with pytest.raises(PolicyRefused, match="float32"):
        await load(table, run, 1)
    publish(run, 1, spec=structs.replace(MERGED, dtype="bfloat16"))
    assert await load(table, run, 1) == 0


async def test_a_bit_that_flipped_in_a_shard_is_found(table: InPlaceTable, run: RunFolder) -> None:
    publish(run, 1)
    shard = next((run.broadcasts / "step_000001").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(PolicyRefused):
        await load(table, run, 1)


def announce(run: RunFolder, version: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
    """A version whose weights are broadcast."""
    announcement = Announcement(
        rendezvous=Rendezvous(host="localhost", port=29501, world_size=3),
        names=tuple(shapes),
        dtypes=("float32",) * len(shapes),
        shapes=tuple(shapes.values()),
    )
    publish(run, version, content={})
    canary = (run.broadcasts / f"step_{version:06d}" / CANARY_FILE).read_bytes()
    files = {CANARY_FILE: canary, ANNOUNCEMENT_FILE: announcement.to_json()}
    publisher = PolicyPublisher(run.broadcasts, run_id=run.run_id)
    publisher.publish(version=version, spec=FULL, files=files)


async def test_announced_weights_are_received_and_proved_like_others(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        announce(run, version)
        await table.load(run_id=run.run_id, version=version, rank_offset=2)
    assert engine.received == [(tuple(SHAPES), 2)] * 2
    assert table.live == [1]


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [(SHAPES | {Q: (4, 6)}, "shape"), ({Q: (6, 4)}, "partial"), (SHAPES | {"other": (1,)}, "shape")],
)
async def test_announced_weights_that_do_not_fit_are_refused_before_anything_is_received(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine, shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    announce(run, 1, shapes)
    with pytest.raises(PolicyRefused) as refused:
        await load(table, run, 1)
    assert refused.value.reason == reason
    assert engine.received == []


async def test_after_a_broadcast_that_failed_there_is_no_way_back(
    table: InPlaceTable, run: RunFolder, engine: FakeEngine
) -> None:
    for version in (0, 1):
        announce(run, version)
    await load(table, run, 0)
    engine.refuses = {2}
    with pytest.raises(EngineError):
        await load(table, run, 1)
    with pytest.raises(EngineError, match="version 0"):
        await use(table, 0)
