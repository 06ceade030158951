"""Versions with noise in the table: two adapters, two proofs, and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from fastapi import FastAPI
from msgspec import structs

from configs.infer import InferSettings
from infer.adapters import BaseModel
from infer.noise import check_noise, check_noise_effect
from infer.policies import PolicyTable
from infer.routes import PolicyRoutes
from infer.vllm_api import Adapter, AdapterRejected, SamplingRequest
from infer.weights import check_weights
from tests.infer.test_policies import ALL_SHAPES, BASE, SPEC, FakeEngine, FakeNames, publish, refusal
from transport.errors import PolicyRefused
from transport.http import Choice
from transport.records import Canary, PolicyManifest, PolicySpec
from transport.run import RunFolder, create_run
from transport.weights.store import NOISE_FILE, PolicyPublisher

NORMS = {"model.layers.0.input_layernorm.weight": 4, "model.norm.weight": 4}
NOISY_SPEC = structs.replace(SPEC, norm_noise=True)
NOISY_BASE = replace(BASE, linear_shapes=ALL_SHAPES, noisy_norms=NORMS)
EFFECT = 0.25
"""Nats that the noise takes from every log-probability."""


@dataclass
class NoisyEngine(FakeEngine):
    """As FakeEngine; an adapter with noise is `effect` nats lower still."""

    effect: float = EFFECT
    rejects_noise: bool = False
    noisy_norms: dict[str, int] = field(default_factory=lambda: dict(NORMS))
    device = "cpu"
    vocab_size, max_model_len = 100, 64

    async def score(
        self, token_ids: Sequence[int], adapter: Adapter | None, *, temperature: float = 1.0, priority: int = 0
    ) -> list[float]:
        noisy = adapter is not None and adapter.noisy
        plain = replace(adapter, name=adapter.name.removesuffix("+noise")) if adapter else None
        return [one - self.effect * noisy for one in await super().score(token_ids, plain, priority=priority)]

    async def generate(self, request: SamplingRequest, adapter: Adapter | None) -> list[Choice]:
        name = "base" if adapter is None else adapter.name
        return [Choice(token_ids=[len(name)], logprobs=[-0.5], finish_reason="length", stop_reason=None)]

    async def add_adapter(self, adapter: Adapter) -> None:
        if self.rejects_noise and adapter.noisy:
            raise AdapterRejected("no such norm")
        await super().add_adapter(adapter)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


@pytest.fixture
def engine() -> NoisyEngine:
    return NoisyEngine()


@pytest.fixture
def names() -> FakeNames:
    return FakeNames()


def table_of(run: RunFolder, engine: FakeEngine, names: FakeNames, base: BaseModel = NOISY_BASE) -> PolicyTable:
    return PolicyTable(engine=engine, names=names, output_dir=run.path, base=base, tolerance=None, timeout_s=60.0)


@pytest.fixture
def table(run: RunFolder, engine: NoisyEngine, names: FakeNames) -> PolicyTable:
    return table_of(run, engine, names)


def noise_data(value: float = 1.1, **changes: torch.Tensor) -> bytes:
    tensors = {name: torch.full((size,), value) for name, size in NORMS.items()} | changes
    return safetensors.torch.save({name: tensor for name, tensor in tensors.items() if tensor.numel()})


def publish_noisy(run: RunFolder, version: int, *, value: float = 1.1, spec: PolicySpec = NOISY_SPEC) -> Path:
    """A right version whose noise takes EFFECT nats."""
    folder = publish(run, version, spec=spec)
    canary = Canary.from_json((folder / "canary.json").read_bytes())
    noisy = structs.replace(canary, noisy_logprobs=tuple(one - EFFECT for one in canary.logprobs))
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("adapter")}
    files |= {NOISE_FILE: noise_data(value), "canary.json": noisy.to_json()}
    PolicyPublisher(run.broadcasts, run_id=run.run_id).publish(version=version, spec=spec, files=files)
    return folder


# --- the table ---


async def test_a_version_with_noise_is_live_with_and_without_it(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine, names: FakeNames
) -> None:
    folder = publish_noisy(run, 3)
    loaded = await table.load(run_id=run.run_id, version=3, alias="policy")
    assert loaded.noise is not None
    assert (loaded.canary.max_abs, loaded.noise.max_abs) == (0.0, 0.0)
    async with table.using(3) as clean, table.using(3, noisy=True) as noisy:
        assert clean is not None
        assert noisy is not None
        assert (clean.name, clean.noisy) == ("policy-v3", False)
        assert (noisy.name, noisy.noisy) == ("policy-v3+noise", True)
        assert clean.key != noisy.key
        assert clean.path == noisy.path == str(folder.resolve())
    assert set(names.offered) == {"policy-v3", "policy"}
    assert not any(adapter.noisy for adapter in names.offered.values())


async def test_of_a_version_without_noise_and_of_the_base_the_noisy_one_is_the_clean_one(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine
) -> None:
    publish(run, 1, spec=NOISY_SPEC)
    loaded = await table.load(run_id=run.run_id, version=1)
    assert loaded.noise is None
    async with table.using(1, noisy=True) as adapter, table.using(None, noisy=True) as base:
        assert adapter is not None
        assert (adapter.name, adapter.noisy, base) == ("policy-v1", False, None)
    assert len(engine.adapters) == 1


async def test_loading_again_changes_nothing_unless_the_noise_is_another(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine
) -> None:
    publish_noisy(run, 3)
    await table.load(run_id=run.run_id, version=3)
    await table.load(run_id=run.run_id, version=3)
    assert sorted(engine.adapters) == [1, 2]
    publish_noisy(run, 3, value=1.2)
    await table.load(run_id=run.run_id, version=3)
    assert sorted(engine.adapters) == [3, 4]
    publish(run, 3, spec=NOISY_SPEC)
    await table.load(run_id=run.run_id, version=3)
    assert [adapter.name for adapter in engine.adapters.values()] == ["policy-v3"]


# --- what is refused ---


async def test_a_server_that_was_not_started_for_noise_refuses_the_run_from_its_first_version_on(
    run: RunFolder, engine: NoisyEngine, names: FakeNames
) -> None:
    table = table_of(run, engine, names, replace(NOISY_BASE, noisy_norms={}))
    publish(run, 0, spec=NOISY_SPEC)
    refused = await refusal(table, run.run_id, 0)
    assert refused.reason == "norm_noise"
    assert "norm_noise" in str(refused)
    assert not engine.adapters


async def test_a_server_that_ignores_the_noise_or_applies_another_is_found_out(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine
) -> None:
    publish_noisy(run, 3)
    for effect, reason in ((0.0, "noise_not_applied"), (0.9 * EFFECT, "noise_mismatch"), (-EFFECT, "noise_mismatch")):
        engine.effect = effect
        assert (await refusal(table, run.run_id, 3)).reason == reason
        assert not engine.adapters
    engine.effect = EFFECT
    await table.load(run_id=run.run_id, version=3)
    assert table.live == [3]


async def test_noise_that_the_engine_does_not_take_is_refused_with_its_words(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine
) -> None:
    publish_noisy(run, 3)
    engine.rejects_noise = True
    assert "no such norm" in str(await refusal(table, run.run_id, 3))
    assert not engine.adapters


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model.norm.weight": torch.zeros(0)}, "partial"),
        ({"model.other.weight": torch.ones(4)}, "shape"),
        ({"model.norm.weight": torch.ones(5)}, "shape"),
        ({"model.norm.weight": torch.ones(4).half()}, "corrupt"),
        ({"model.norm.weight": torch.tensor([1, 1, 1, float("nan")])}, "not_finite"),
    ],
)
def test_bad_noise_is_refused_before_the_engine_gets_it(changes: dict[str, torch.Tensor], reason: str) -> None:
    with pytest.raises(PolicyRefused) as caught:
        check_noise(noise_data(**changes), NOISY_BASE)
    assert caught.value.reason == reason


def test_a_file_that_is_no_safetensors_is_refused() -> None:
    with pytest.raises(PolicyRefused) as caught:
        check_noise(noise_data()[:-3], NOISY_BASE)
    assert caught.value.reason == "corrupt"
    check_noise(noise_data(), NOISY_BASE)


async def test_noise_without_its_proof_and_proof_without_noise_are_refused(run: RunFolder, table: PolicyTable) -> None:
    folder, publisher = publish_noisy(run, 3), PolicyPublisher(run.broadcasts, run_id=run.run_id)
    whole = {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ("manifest.json", "STABLE")}
    without_proof = structs.replace(Canary.from_json(whole["canary.json"]), noisy_logprobs=None).to_json()
    without_noise = {name: data for name, data in whole.items() if name != NOISE_FILE}
    for files in (whole | {"canary.json": without_proof}, without_noise):
        publisher.publish(version=3, spec=NOISY_SPEC, files=files)
        assert (await refusal(table, run.run_id, 3)).reason == "partial"


async def test_noise_in_a_run_whose_versions_have_none_is_refused(run: RunFolder, table: PolicyTable) -> None:
    publish_noisy(run, 3, spec=SPEC)
    assert (await refusal(table, run.run_id, 3)).reason == "corrupt"


def test_a_server_whose_versions_replace_its_weights_refuses_a_run_with_noise() -> None:
    spec = structs.replace(NOISY_SPEC, kind="merged")
    manifest = PolicyManifest(run_id="run", version=0, spec=spec, files={})
    with pytest.raises(PolicyRefused) as caught:
        check_weights(manifest, Path("nowhere"), {}, replace(NOISY_BASE, noisy_norms={}), {})
    assert caught.value.reason == "norm_noise"


# --- the effect ---


def canary(noisy: tuple[float, float], dtype: str = "float32") -> Canary:
    ids, logprobs = (1, 2, 3), (-1.0, -2.0)
    more: dict[str, Any] = {"base_logprobs": (-1.0, -2.5), "is_zero": False, "dtype": dtype}
    return Canary(version=3, token_ids=ids, logprobs=logprobs, noisy_logprobs=noisy, **more)


def effect(noisy: Sequence[float], trained: tuple[float, float], dtype: str = "float32") -> Any:
    return check_noise_effect(
        canary(trained, dtype), noisy=noisy, clean=[-1.0, -2.0], server_dtype=dtype, tolerance=None
    )


def test_noise_too_small_to_tell_in_16_bits_is_not_taken_for_noise_that_is_not_applied() -> None:
    # A change of 0.04 nats is within what bfloat16 leaves open; one of 0.4 that the server does not have is not.
    assert effect([-1.0, -2.0], (-1.04, -2.0), "bfloat16").agrees
    with pytest.raises(PolicyRefused) as caught:
        effect([-1.0, -2.0], (-1.4, -2.0), "bfloat16")
    assert caught.value.reason == "noise_not_applied"
    with pytest.raises(PolicyRefused) as caught:
        effect([-1.0, -2.0], (-1.00002, -2.0))  # told in float32 from 1e-5 on
    assert caught.value.reason == "noise_not_applied"


# --- the routes ---


async def test_a_request_asks_for_noise_by_a_flag_and_gets_none_without_it(
    run: RunFolder, table: PolicyTable, engine: NoisyEngine
) -> None:
    publish_noisy(run, 3)
    await table.load(run_id=run.run_id, version=3)
    app = FastAPI()
    PolicyRoutes(settings=InferSettings(model="m"), engine=engine, table=table).attach(app)  # type: ignore[arg-type]
    generate = {"version": 3, "prompt_token_ids": [1, 2], "max_tokens": 4}
    score = {"version": 3, "token_ids": [5, 6]}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        for flag, name in (({}, "policy-v3"), ({"noisy": False}, "policy-v3"), ({"noisy": True}, "policy-v3+noise")):
            answer = (await http.post("/policy/generate", json=generate | flag)).json()
            assert answer["choices"][0]["token_ids"] == [len(name)]
            scores = (await http.post("/policy/score", json=score | flag)).json()["logprobs"]
            assert scores == [-4.0 - EFFECT * name.endswith("noise")]
        refused = await http.post("/policy/generate", json=generate | {"noisy": 1})
        assert refused.status_code == 400
