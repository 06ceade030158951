"""The real server on the tiny model, whose own weights are replaced: merged and full versions against Hugging Face."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from grpo.transport.records import Canary, PolicySpec
from grpo.transport.run import RunFolder, create_run
from grpo.transport.weights.identity import base_identity
from grpo.transport.weights.shards import Weight
from grpo.transport.weights.store import CANARY_FILE, PolicyPublisher
from msgspec import structs
from transformers import AutoModelForCausalLM

from tests.infer.published import CANARY_IDS, TARGETS, logprobs_of
from tests.infer.server_process import Server, running
from tests.support import until

pytestmark = pytest.mark.e2e

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
FULL = PolicySpec(
    base_model=base_identity(MODEL), rank=0, alpha=0, target_modules=(), sequence_len=256, dtype="float32", kind="full"
)
MERGED = structs.replace(FULL, kind="merged", rank=8, alpha=16, target_modules=TARGETS)
ONLY_V = structs.replace(MERGED, target_modules=("v_proj",))
IDS = list(range(30, 62))


def model_of(spec: PolicySpec, seed: int) -> torch.nn.Module:
    """The base with every weight that the kind covers moved, by Hugging Face; with seed 0 the base itself."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if seed else ():
            if spec.kind == "full" or name.split(".")[-2] in spec.target_modules:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.03 * parameter.std()
    return model  # type: ignore[no-any-return]


@dataclass
class Live:
    server: Server
    run: RunFolder

    def publish(self, version: int, spec: PolicySpec, *, seed: int, canary_of: torch.nn.Module | None = None) -> None:
        """A version; with `canary_of`, one whose canary belongs to another model."""
        model = model_of(spec, seed)
        weights = [
            Weight(name=name, dtype="float32", shape=tuple(p.shape), tensor=p.detach)
            for name, p in model.named_parameters()
            if spec.kind == "full" or name.split(".")[-2] in spec.target_modules
        ]
        canary = Canary(
            version=version,
            token_ids=CANARY_IDS,
            logprobs=tuple(logprobs_of(canary_of or model, CANARY_IDS)),
            base_logprobs=tuple(logprobs_of(model_of(FULL, 0), CANARY_IDS)),
            dtype="float32",
            is_zero=seed == 0,
        )
        publisher = PolicyPublisher(self.run.broadcasts, run_id=self.run.run_id, max_shard_bytes=1_000_000)
        publisher.publish(version=version, spec=spec, files={CANARY_FILE: canary.to_json()}, weights=weights)

    def load(self, version: int) -> httpx.Response:
        return self.server.post("/policy/load", {"run_id": self.run.run_id, "version": version, "alias": "default"})

    def score(self, version: int | None) -> list[float]:
        return list(self.server.answer("/policy/score", version=version, token_ids=IDS)["logprobs"])

    def in_flight(self, version: int) -> int:
        return int(self.server.get("/policy/info").json()["in_flight"].get(str(version), 0))


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("in_place")
    run = create_run(folder / "run")
    arguments = {"model": MODEL, "output_dir": run.path, "max_model_len": 256, "enable_lora": False}
    with running(log=folder / "infer.log", **arguments) as server:
        yield Live(server, run)


def test_versions_of_each_kind_replace_each_other_and_score_as_hugging_face_does(live: Live) -> None:
    assert live.server.get("/policy/info").json()["kinds"] == ["merged", "full"]
    assert gap(live.score(None), logprobs_of(model_of(FULL, 0), IDS)) < 1e-4
    # a merged version stands on the base's other weights, which a full one brings back; of the last one only one part
    # of a layer that vLLM has fused travels
    cases = [(FULL, 1), (FULL, 2), (FULL, 0), (MERGED, 3), (MERGED, 4), (FULL, 0), (ONLY_V, 7)]
    for version, (spec, seed) in enumerate(cases):
        live.publish(version, spec, seed=seed)
        response = live.load(version)
        assert response.status_code == 200, response.text
        assert response.json()["canary"]["max_abs"] < 1e-4
        model = model_of(spec, seed)
        # the same prompt for every version: a prefix that is cached must not be used again
        assert gap(live.score(version), logprobs_of(model, IDS)) < 1e-4
        answer = live.server.answer(
            "/policy/generate", version=version, prompt_token_ids=IDS, max_tokens=6, temperature=1.0, seed=3
        )["choices"][0]
        whole = logprobs_of(model, [*IDS, *answer["token_ids"]])
        assert gap(answer["logprobs"], whole[len(IDS) - 1 :]) < 1e-4


def _in_flight_at_the_switch(live: Live, old: int, new: int) -> list[dict[str, Any]]:
    """Answers to requests of which some had not ended when the next version was to become live; none where the machine
    was so slow meanwhile that all had."""
    for version, seed in ((old, 1), (new, 2)):
        live.publish(version, FULL, seed=seed)
    assert live.load(old).status_code == 200
    body = {"version": old, "prompt_token_ids": IDS, "max_tokens": 200, "n": 16}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(live.server.answer, "/policy/generate", **body, seed=seed) for seed in range(3)]
        until(lambda: live.in_flight(old) + num_ended(asked) >= len(asked), poll_s=0)
        met = num_ended(asked) < len(asked)
        assert live.load(new).status_code == 200
    return [choice for one in asked for choice in one.result()["choices"]] if met else []


def num_ended(asked: Sequence[Future[Any]]) -> int:
    return sum(one.done() for one in asked)


def test_requests_in_flight_end_on_their_version_before_the_switch(live: Live) -> None:
    for old in range(100, 160, 2):
        if answers := _in_flight_at_the_switch(live, old, old + 1):
            break
    assert len(answers) == 48, "in thirty attempts no request was in flight at the switch"
    for answer in answers[::5]:
        whole = logprobs_of(model_of(FULL, 1), [*IDS, *map(int, answer["token_ids"])])
        assert gap(answer["logprobs"], whole[len(IDS) - 1 :]) < 1e-4


def _moved_on(live: Live, old: int, new: int) -> list[dict[str, Any]]:
    """Answers that were begun under one version and ended under the next, which became live meanwhile; none where the
    machine was so quick or so slow that no answer met the switch. A request in flight may not have a token yet: what
    runs in the engine has."""
    for version, seed in ((old, 1), (new, 2)):
        live.publish(version, FULL, seed=seed)
    assert live.load(old).status_code == 200
    body = {"version": old, "follow": True, "prompt_token_ids": IDS, "max_tokens": 200, "n": 64}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.server.answer, "/policy/generate", **body)
        while live.server.get("/policy/info").json()["load"]["num_running"] < 32 and not asked.done():
            pass
        assert live.load(new).status_code == 200
    choices = asked.result()["choices"]
    return [choice for choice in choices if [version for version, _ in choice["versions"]] == [old, new]]


def test_requests_that_follow_go_on_after_the_switch_under_the_new_version(live: Live) -> None:
    """A switch that waited for them would leave no answer with two versions."""
    for old in range(200, 260, 2):
        if moved := _moved_on(live, old, old + 1):
            break
    assert moved, "in thirty attempts no answer met the switch"
    models = {old: model_of(FULL, 1), old + 1: model_of(FULL, 2)}
    apart = []
    for choice in moved[:8]:
        right = {v: logprobs_of(model, [*IDS, *choice["token_ids"]])[len(IDS) - 1 :] for v, model in models.items()}
        num = choice["versions"][0][1]
        for version, part in ((old, slice(0, num)), (old + 1, slice(num, None))):
            assert gap(choice["logprobs"][part], right[version][part]) < 1e-4
        apart.append(gap(choice["logprobs"], right[old]))
    assert max(apart) > 1e-3, "under one version they would be others"


def test_chat_users_get_the_live_version_by_its_names(live: Live) -> None:
    live.publish(300, FULL, seed=3)
    assert live.load(300).status_code == 200
    for name in ("default", "policy-v300", str(MODEL)):
        body = {"model": name, "prompt": IDS, "max_tokens": 2, "temperature": 0}
        assert live.server.post("/v1/completions", body).status_code == 200, name
    gone = live.server.post("/v1/completions", {"model": "policy-v100", "prompt": IDS, "max_tokens": 2})
    assert gone.status_code == 404


def test_a_version_that_fails_its_proof_leaves_the_one_before(live: Live) -> None:
    live.publish(305, FULL, seed=5)
    assert live.load(305).status_code == 200
    before = live.score(305)
    live.publish(307, FULL, seed=6, canary_of=model_of(FULL, 8))
    response = live.load(307)
    assert (response.status_code, response.json()["error"]["type"]) == (409, "canary_mismatch")
    assert gap(live.score(305), before) < 1e-5
