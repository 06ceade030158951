"""The table of versions over a fake engine and real folders."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from msgspec import structs

from infer.adapters import BaseModel
from infer.policies import NotLive, PolicyTable, UnknownAdapter
from infer.vllm_api import Adapter, AdapterRejected
from tests.infer.published import adapter_config
from transport.errors import DeadlineError, PolicyRefused
from transport.records import Canary, PolicySpec
from transport.run import RunFolder, create_run
from transport.weights.store import PolicyPublisher

SHAPES = {"model.layers.0.q_proj": (6, 4)}
BASE = BaseModel(identity="base", linear_shapes=SHAPES, max_rank=8, dtype=torch.float32)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPEC = PolicySpec(base_model="base", rank=2, alpha=4, target_modules=TARGETS, sequence_len=64, dtype="float32")
ALL_SHAPES = {f"model.layers.0.{target}": (6, 4) for target in TARGETS}


@dataclass
class FakeEngine:
    """Scores with a policy's log-probabilities where an adapter is given: its version's number below the base's."""

    dtype: str = "float32"
    adapters: dict[int, Adapter] = field(default_factory=dict)
    error: float = 0.0
    """Added to every log-probability."""
    ignores_adapters: bool = False
    rejects: str | None = None
    stuck: bool = False
    num_forgotten: int = 0
    dead: bool = False

    async def score(self, token_ids: Sequence[int], adapter: Adapter | None, *, priority: int = 0) -> list[float]:
        if self.stuck:
            await asyncio.sleep(60)
        applied = 0.0
        if adapter is not None and not self.ignores_adapters:
            version, _, name = adapter.name.removeprefix("policy-v").partition("-")
            applied = float(version) + (0.5 if name else 0.0)
        return [-1.0 - applied + self.error] * (len(token_ids) - 1)

    async def add_adapter(self, adapter: Adapter) -> None:
        if self.rejects:
            raise AdapterRejected(self.rejects)
        self.adapters[adapter.key] = adapter

    async def remove_adapter(self, adapter: Adapter) -> None:
        self.adapters.pop(adapter.key, None)

    async def forget_prefixes(self) -> None:
        self.num_forgotten += 1


@dataclass
class FakeNames:
    """The names that vLLM's own routes know."""

    offered: dict[str, Adapter] = field(default_factory=dict)

    def offer(self, name: str, adapter: Adapter) -> None:
        self.offered[name] = adapter

    def withdraw(self, adapter: Adapter) -> None:
        self.offered = {name: known for name, known in self.offered.items() if known != adapter}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def names() -> FakeNames:
    return FakeNames()


@pytest.fixture
def table(run: RunFolder, engine: FakeEngine, names: FakeNames) -> PolicyTable:
    return PolicyTable(
        engine=engine,
        names=names,
        output_dir=run.path,
        base=replace(BASE, linear_shapes=ALL_SHAPES),
        tolerance=None,
        timeout_s=60.0,
    )


def publish(run: RunFolder, version: int, *, value: float = 0.1, spec: PolicySpec = SPEC) -> Path:
    """A right version whose policy is `version` nats below the base."""
    files = adapter_files(version, value=value, below=version)
    PolicyPublisher(run.broadcasts, run_id=run.run_id).publish(version=version, spec=spec, files=files)
    return run.broadcasts / f"step_{version:06d}"


def adapter_files(version: int, *, value: float = 0.1, below: float) -> dict[str, bytes]:
    """An adapter that is so many nats `below` the base."""
    tensors = {}
    for module, (num_outputs, num_inputs) in ALL_SHAPES.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.full((2, num_inputs), value)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.full((num_outputs, 2), value)
    canary = Canary(
        version=version,
        token_ids=(5, 6, 7),
        logprobs=(-1.0 - below,) * 2,
        base_logprobs=(-1.0, -1.0),
        dtype="float32",
        is_zero=version == 0,
    )
    return {
        "adapter_model.safetensors": safetensors.torch.save(tensors),
        "adapter_config.json": adapter_config(rank=2, alpha=4),
        "canary.json": canary.to_json(),
    }


async def refusal(table: PolicyTable, run_id: str, version: int) -> PolicyRefused:
    with pytest.raises(PolicyRefused) as caught:
        await table.load(run_id=run_id, version=version)
    return caught.value


async def test_a_loaded_version_is_live_under_its_name_and_the_alias(
    run: RunFolder, table: PolicyTable, engine: FakeEngine, names: FakeNames
) -> None:
    publish(run, 3)
    loaded = await table.load(run_id=run.run_id, version=3, alias="policy")
    assert (loaded.name, loaded.canary.max_abs) == ("policy-v3", 0.0)
    assert table.live == [3]
    assert set(names.offered) == {"policy-v3", "policy"}
    async with table.using(3) as adapter:
        assert adapter is not None
        assert adapter.path == str(run.broadcasts.resolve() / "step_000003")


async def test_loading_twice_equals_loading_once(run: RunFolder, table: PolicyTable, engine: FakeEngine) -> None:
    publish(run, 1)
    first = await table.load(run_id=run.run_id, version=1)
    again = await asyncio.gather(*(table.load(run_id=run.run_id, version=1) for _ in range(3)))
    assert again == [first] * 3
    assert len(engine.adapters) == 1


async def test_a_version_published_again_with_other_weights_replaces_the_old_one(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1)
    publish(run, 1, value=0.2)
    await table.load(run_id=run.run_id, version=1)
    assert table.live == [1]
    assert list(engine.adapters) == [2]
    assert engine.num_forgotten == 2  # once for the run, once because name and path come again


async def test_a_refused_version_leaves_the_server_on_what_it_had(
    run: RunFolder, table: PolicyTable, engine: FakeEngine, names: FakeNames
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1, alias="policy")
    publish(run, 2)
    engine.error = 0.01
    assert (await refusal(table, run.run_id, 2)).reason == "canary_mismatch"
    assert table.live == [1]
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v1"]
    assert names.offered["policy"].name == "policy-v1"


async def test_an_engine_that_ignores_the_adapter_is_found_out(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 2)
    engine.ignores_adapters = True
    assert (await refusal(table, run.run_id, 2)).reason == "not_applied"
    assert not engine.adapters


async def test_what_vllm_refuses_is_refused_with_its_words(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 2)
    engine.rejects = "no such tensor"
    assert "no such tensor" in str(await refusal(table, run.run_id, 2))


async def test_a_bad_adapter_never_reaches_the_engine(run: RunFolder, table: PolicyTable, engine: FakeEngine) -> None:
    publish(run, 2, value=float("nan"))
    assert (await refusal(table, run.run_id, 2)).reason == "not_finite"
    publish(run, 3, spec=structs.replace(SPEC, base_model="other"))
    assert (await refusal(table, run.run_id, 3)).reason == "foreign_base"
    file = publish(run, 4) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert (await refusal(table, run.run_id, 4)).reason == "corrupt"
    (publish(run, 5) / "STABLE").unlink()
    assert (await refusal(table, run.run_id, 5)).reason == "corrupt"
    assert (await refusal(table, run.run_id, 6)).reason == "missing"
    assert not engine.adapters


async def test_folders_and_files_that_lead_out_of_the_broadcasts_are_refused(
    run: RunFolder, table: PolicyTable, tmp_path: Path
) -> None:
    elsewhere = publish(run, 1).rename(tmp_path / "elsewhere")
    (run.broadcasts / "step_000001").symlink_to(elsewhere)
    assert (await refusal(table, run.run_id, 1)).reason == "outside"
    folder = publish(run, 2)
    (folder / "adapter_model.safetensors").rename(tmp_path / "weights")
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "weights")
    assert (await refusal(table, run.run_id, 2)).reason == "outside"


async def test_another_run_than_the_folders_is_stale(run: RunFolder, table: PolicyTable) -> None:
    publish(run, 1)
    assert (await refusal(table, "another", 1)).reason == "stale_run"
    stranger = RunFolder(path=run.path, run_id="stranger")
    publish(stranger, 2)
    assert (await refusal(table, run.run_id, 2)).reason == "stale_run"


async def test_a_new_run_in_the_folder_retires_the_old_ones_versions(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1)
    second = create_run(run.path, overwrite=True)
    publish(second, 2)
    await table.load(run_id=second.run_id, version=2)
    assert table.live == [2]
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v2"]


async def test_an_unloaded_version_serves_its_requests_to_the_end(
    run: RunFolder, table: PolicyTable, engine: FakeEngine, names: FakeNames
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1)
    async with table.using(1):
        await table.unload(1)
        assert table.live == []
        assert table.in_flight == {1: 1}
        assert engine.adapters
        assert not names.offered
        with pytest.raises(NotLive):
            async with table.using(1):
                pass
    assert not engine.adapters
    assert table.in_flight == {}
    with pytest.raises(NotLive):
        await table.unload(1)


async def test_a_request_that_follows_gets_the_newest_version_and_is_told_when_a_newer_one_is_proved(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    for version in (1, 2, 3):
        publish(run, version)
    await table.load(run_id=run.run_id, version=1)
    async with table.following(0) as serving:
        assert serving.adapter is not None
        assert (serving.version, serving.adapter.name) == (1, "policy-v1")
        assert table.in_flight == {1: 1}
        engine.error = 0.01
        await refusal(table, run.run_id, 2)
        assert not serving.superseded.is_set(), "version 2 has not been proved"
        engine.error = 0.0
        await table.load(run_id=run.run_id, version=2)
        assert serving.superseded.is_set()
        await table.unload(1)
        assert table.in_flight == {1: 1, 2: 0}
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v2"]
    async with table.following(1) as serving:
        assert (serving.version, serving.superseded.is_set()) == (2, False)
        publish(run, 1, value=0.2)
        await table.load(run_id=run.run_id, version=1)
        assert not serving.superseded.is_set(), "nobody goes back to an earlier version"
    with pytest.raises(NotLive, match=r"3.*\[1, 2\]"):
        async with table.following(3):
            pass


async def test_a_request_that_follows_moves_to_its_version_with_other_weights_but_not_to_another_run(
    run: RunFolder, table: PolicyTable
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1)
    async with table.following(1) as first:
        publish(run, 1, value=0.2)
        await table.load(run_id=run.run_id, version=1)
        assert first.superseded.is_set()
        async with table.following(1) as second:
            again = create_run(run.path, overwrite=True)
            publish(again, 2)
            await table.load(run_id=again.run_id, version=2)
            assert not second.superseded.is_set()


async def test_an_engine_that_does_not_get_to_the_canary_ends_at_the_deadline(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 1)
    table.timeout_s, engine.stuck = 0.2, True
    with pytest.raises(DeadlineError, match="canary_timeout_s"):
        await table.load(run_id=run.run_id, version=1)
    assert not engine.adapters
    assert table.live == []
    engine.stuck, table.timeout_s = False, 60.0
    await table.load(run_id=run.run_id, version=1)
    assert table.live == [1]


SEVERAL = structs.replace(SPEC, adapters=("solver", "proposer"))
FOLDERS = ("", "adapters/proposer/")


def publish_several(
    run: RunFolder, version: int, *, values: tuple[float, float] = (0.1, 0.1), **changes: bytes
) -> Path:
    """The solver is `version` nats below the base, the proposer half a nat more. `changes`: files of the proposer."""
    files: dict[str, bytes] = {}
    for folder, value, more in zip(FOLDERS, values, (0.0, 0.5), strict=True):
        own = adapter_files(version, value=value, below=version + more)
        files |= {f"{folder}{name}": data for name, data in own.items()}
    files |= {f"adapters/proposer/{name.replace('__', '.')}": data for name, data in changes.items()}
    PolicyPublisher(run.broadcasts, run_id=run.run_id).publish(version=version, spec=SEVERAL, files=files)
    return run.broadcasts / f"step_{version:06d}"


async def test_a_version_with_several_adapters_is_live_once_each_is_proved(
    run: RunFolder, table: PolicyTable, engine: FakeEngine, names: FakeNames
) -> None:
    folder = publish_several(run, 3).resolve()
    loaded = await table.load(run_id=run.run_id, version=3, alias="policy")
    assert (loaded.name, loaded.canary.max_abs, loaded.adapters["proposer"].max_abs) == ("policy-v3", 0.0, 0.0)
    assert {name: adapter.name for name, adapter in names.offered.items()} == {
        "policy-v3": "policy-v3",
        "policy": "policy-v3",
        "policy-v3-proposer": "policy-v3-proposer",
        "policy-proposer": "policy-v3-proposer",
    }
    paths = {}
    for name in (None, "solver", "proposer"):
        async with table.using(3, adapter=name) as adapter, table.following(2, adapter=name) as serving:
            assert adapter is not None
            assert serving.adapter == adapter
            assert table.in_flight == {3: 2}
            paths[name] = adapter.path
    assert paths == {None: str(folder), "solver": str(folder), "proposer": str(folder / "adapters/proposer")}
    await table.unload(3)
    assert not engine.adapters
    assert not names.offered


async def test_a_version_one_of_whose_adapters_is_not_proved_is_not_live(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    wrong = adapter_files(3, below=3.0)["canary.json"]  # the server finds 3.5
    publish_several(run, 3, canary__json=wrong)
    assert (await refusal(table, run.run_id, 3)).reason == "canary_mismatch"
    publish_several(run, 4, values=(0.1, float("nan")))
    assert (await refusal(table, run.run_id, 4)).reason == "not_finite"
    (publish_several(run, 5) / "adapters/proposer/adapter_config.json").unlink()
    assert (await refusal(table, run.run_id, 5)).reason == "corrupt"
    assert not engine.adapters


async def test_an_adapter_that_the_version_has_not_is_named_with_those_it_has(
    run: RunFolder, table: PolicyTable
) -> None:
    publish_several(run, 1)
    publish(run, 2)
    for version in (1, 2):
        await table.load(run_id=run.run_id, version=version)
    with pytest.raises(UnknownAdapter, match=r"judge.*solver, proposer"):
        async with table.using(1, adapter="judge"):
            pass
    with pytest.raises(UnknownAdapter, match="solver"):
        async with table.using(2, adapter="solver"):
            pass
    assert table.in_flight == {1: 0, 2: 0}


async def test_a_version_that_is_published_again_is_served_while_the_old_one_is_removed(
    run: RunFolder, table: PolicyTable, engine: FakeEngine
) -> None:
    publish(run, 1)
    await table.load(run_id=run.run_id, version=1)
    publish(run, 1, value=0.2)
    removed, removing = asyncio.Event(), asyncio.Event()

    async def remove(adapter: Adapter) -> None:
        removing.set()
        await removed.wait()
        engine.adapters.pop(adapter.key, None)

    engine.remove_adapter = remove  # type: ignore[method-assign]
    loading = asyncio.create_task(table.load(run_id=run.run_id, version=1))
    async with asyncio.timeout(60):
        await removing.wait()
        async with table.using(1) as adapter:
            assert adapter is not None
        removed.set()
        await loading
    assert table.live == [1]
