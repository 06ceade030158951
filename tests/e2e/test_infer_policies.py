"""The real server on the tiny model: policy versions, with and without noise on their norm weights, against Hugging
Face PEFT with such norms; what it scores as a teacher, and everything it must refuse.

Its steps have few tokens, so that long prompts are read in parts. It has fewer slots than adapters, so that noise has
to follow its adapter from slot to slot.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from grpo.configs.auxiliary import TeacherSettings
from grpo.infer.checks import PEFT_PREFIX
from grpo.orchestrator.auxiliary.teacher.served import ServedTeacher
from grpo.transport.records import Canary, PolicySpec
from grpo.transport.run import create_run
from grpo.transport.weights.store import ADAPTER_FILE, CANARY_FILE, NOISE_FILE
from msgspec import structs
from peft import PeftModel

from tests.infer.published import CANARY_IDS, Publisher, logprobs_of, random_tensors, reference
from tests.infer.server_process import Server, running
from tests.support import until

pytestmark = pytest.mark.e2e

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"
KEY = "a key"
NUM_BATCHED_TOKENS = 64
"""Of a step of the engine."""
EXACT = 1e-4
TEMPERATURES = (0.7, 1.0, 1.3)
Q0 = f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj"
NUM_VERSIONS = 5
NOISY = {1: 0.1, 2: 0.05, 4: 5e-4}
"""Those with noise and their sigma."""
Request = tuple[int | None, bool]
"""A version and whether it is asked for with its noise."""
REQUESTS: list[Request] = list(product((None, *range(NUM_VERSIONS)), (False, True)))
CLEAN: Request = (1, False)


class NoisePublisher(Publisher):
    """Of a run whose versions may have noise."""

    def spec(self) -> PolicySpec:
        return structs.replace(super().spec(), norm_noise=True)


@dataclass(frozen=True, kw_only=True)
class Live:
    """A server on which versions 0 to 4 are live, and what is right for each."""

    server: Server
    publisher: Publisher
    models: dict[Request, PeftModel]

    def publish(self, version: int, *, seed: int | None = None, sigma: float | None = None) -> None:
        """A random version, whose adapter is zero for version 0; with `sigma`, one with noise and a canary of both."""
        seed, publisher = version if seed is None else seed, self.publisher
        files = publisher.files(version=version, seed=seed, scale=0.1 if version else 0.0)
        adapter = publisher.publish(version, files)
        self.models[version, False] = reference(MODEL, adapter)
        if sigma is not None:
            noise, model = norm_noise(sigma, seed=version), reference(MODEL, adapter)
            assert not model.get_base_model().load_state_dict(noise, strict=False).unexpected_keys
            noisy_logprobs = tuple(logprobs_of(model, CANARY_IDS))
            canary = structs.replace(Canary.from_json(files[CANARY_FILE]), noisy_logprobs=noisy_logprobs)
            more = {NOISE_FILE: safetensors.torch.save(noise), CANARY_FILE: canary.to_json()}
            publisher.publish(version, files | more)
            self.models[version, True] = model

    def load(self, version: int) -> httpx.Response:
        run_id = self.publisher.run.run_id
        return self.server.post("/policy/load", {"run_id": run_id, "version": version, "alias": "policy"})

    def sample(self, request: Request, ids: Sequence[int], **more: object) -> list[dict[str, Any]]:
        version, noisy = request
        body = {"version": version, "noisy": noisy, "prompt_token_ids": ids, **more}
        answer = self.server.answer("/policy/generate", **body)
        assert answer["version"] == version
        choices: list[dict[str, Any]] = answer["choices"]
        return choices

    def score(self, request: Request, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        body = {"version": request[0], "noisy": request[1], "token_ids": ids, "temperature": temperature}
        logprobs: list[float] = self.server.answer("/policy/score", **body)["logprobs"]
        return logprobs

    def right(self, request: Request, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        version = request[0] or 0
        return logprobs_of(self.models.get((version, request[1]), self.models[version, False]), ids, temperature)

    def info(self, key: str) -> Any:
        return self.server.get("/policy/info").json()[key]

    def in_flight(self) -> dict[int, int]:
        """How many requests run, by version."""
        return {int(version): num for version, num in self.info("in_flight").items() if num > 0}


def norm_noise(sigma: float, *, seed: int) -> dict[str, torch.Tensor]:
    """Noisy weights of all norms of the hidden state."""
    generator, tensors = torch.Generator().manual_seed(seed), safetensors.torch.load_file(MODEL / "model.safetensors")
    return {
        name: tensor + sigma * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if name.endswith("norm.weight") and tensor.shape == (128,)
    }


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("policies")
    publisher = NoisePublisher(run=create_run(folder / "run"), model_dir=MODEL)
    arguments: dict[str, object] = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8}
    arguments |= {"max_model_len": 512, "norm_noise": "true", "max_loras": 3, "enable_prefix_caching": "true"}
    arguments |= {"vllm": json.dumps({"max_num_batched_tokens": NUM_BATCHED_TOKENS, "max_num_seqs": 64})}
    with running(log=folder / "infer.log", api_key=KEY, **arguments) as server:
        live = Live(server=server, publisher=publisher, models={})
        for version in range(NUM_VERSIONS):
            live.publish(version, sigma=NOISY.get(version))
            response = live.load(version)
            assert response.status_code == 200, response.text
        yield live


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(32, 127, (length,), generator=generator)]


def all_at_once(asked: Sequence[Any], ask: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def test_the_canary_agrees_with_and_without_noise(live: Live) -> None:
    for version in range(NUM_VERSIONS):
        answer = live.load(version).json()
        assert answer["name"] == f"policy-v{version}"
        assert answer["canary"]["max_abs"] < EXACT / 2
        assert (answer["noise"] is not None) == (version in NOISY)
        if version in NOISY:
            assert answer["noise"]["max_abs"] < EXACT / 2


def test_mixed_batches_sample_and_score_as_hugging_face_does_with_each_ones_norms(live: Live) -> None:
    lengths = (5, 40, 3 * NUM_BATCHED_TOKENS + 7)
    drawn = enumerate(product(REQUESTS, TEMPERATURES, lengths))
    cases = [(request, temperature, prompt(seed, length)) for seed, (request, temperature, length) in drawn]
    sampled = all_at_once(cases, lambda case: live.sample(case[0], case[2], temperature=case[1], n=2, max_tokens=24))
    whole = [(*case, case[2] + choices[0]["token_ids"]) for case, choices in zip(cases, sampled, strict=True)]
    scores = all_at_once(whole, lambda case: live.score(case[0], case[3], case[1]))
    for (request, temperature, start), choices, scored in zip(cases, sampled, scores, strict=True):
        rights = [live.right(request, start + choice["token_ids"], temperature) for choice in choices]
        assert len(rights) == 2
        assert largest(scored, rights[0]) < EXACT, request
        for choice, right in zip(choices, rights, strict=True):
            assert largest(choice["logprobs"], right[len(start) - 1 :]) < EXACT, request
    ids = prompt(0, 40)
    for one, other in ((CLEAN, (2, False)), (CLEAN, (None, False)), (CLEAN, (1, True))):
        assert largest(live.right(one, ids), live.right(other, ids)) > 100 * EXACT


def test_a_version_without_noise_answers_bit_for_bit_alike_with_the_flag_and_without(live: Live) -> None:
    ids = prompt(5, 60)
    live.score((1, True), ids)
    for version in (None, 0, 3):
        assert live.score((version, True), ids) == live.score((version, False), ids)


def test_clean_scores_have_the_same_bits_alone_and_after_noise(live: Live) -> None:
    ids = prompt(6, 60)
    before = live.score(CLEAN, ids)
    assert live.score((1, True), ids) != before
    assert live.score(CLEAN, ids) == before


def test_the_prefix_cache_is_not_shared_between_noise_and_none(live: Live) -> None:
    start = prompt(77, 200)  # many whole blocks of the cache
    for request in (CLEAN, (1, True), CLEAN, (2, True), (1, True)):
        [choice] = live.sample(request, start, max_tokens=8, temperature=0.0)
        right = live.right(request, start + choice["token_ids"])
        assert largest(choice["logprobs"], right[len(start) - 1 :]) < EXACT, request


def test_a_stop_token_ends_the_answer_and_is_part_of_it(live: Live) -> None:
    greedy = {"max_tokens": 12, "temperature": 0.0}
    free = live.sample(CLEAN, prompt(5, 8), **greedy)[0]["token_ids"]
    stop = free[2]
    [choice] = live.sample(CLEAN, prompt(5, 8), **greedy, stop_token_ids=[stop])
    assert choice["token_ids"] == free[: free.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_equal_seeds_give_equal_answers_and_no_seed_gives_different_ones(live: Live) -> None:
    def sample(seed: int | None) -> list[list[int]]:
        choices = live.sample((None, False), [65], max_tokens=16, n=4, seed=seed, temperature=2.0)
        return [choice["token_ids"] for choice in choices]

    assert sample(7) == sample(7)
    assert len({tuple(ids) for ids in sample(7)}) > 1
    assert sample(None) != sample(None)


def test_seeds_hold_where_prompts_are_read_in_parts(live: Live) -> None:
    def sample(seed: int) -> list[int]:
        [choice] = live.sample(CLEAN, prompt(seed, 3 * NUM_BATCHED_TOKENS + 7), max_tokens=8, seed=seed)
        ids: list[int] = choice["token_ids"]
        return ids

    assert all_at_once(range(16), sample) == [sample(seed) for seed in range(16)]


async def test_openais_routes_of_a_real_vllm_score_as_ours_do(live: Live) -> None:
    # The base's name in vLLM; asked as our kind, the teacher would be its newest policy.
    [base] = [one["id"] for one in live.server.get("/v1/models").json()["data"] if one["parent"] is None]
    settings = TeacherSettings.model_validate(
        {"model": {"name": base}, "client": {"base_url": [f"{live.server.url}/v1"]}}
    )
    rows = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"Reverse: hello", b"Reverse: word", b"a b")]
    found = []
    for ours in (False, True):
        teacher = ServedTeacher(settings, api_key=KEY, ours=ours)
        try:
            found.append([await teacher.score(row, 1.0) for row in rows])
        finally:
            await teacher.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=EXACT)


def _outlasts_its_version(live: Live, start: Sequence[int], old: int, new: int) -> bool:
    """Whether a request of the old version was in flight when the new one was live and the old one unloaded; it is not
    where the machine was so slow meanwhile that it had ended before. In any case all answers are right."""
    for version in (old, new):
        live.publish(version)
    assert live.load(old).status_code == 200

    def sample(version: int) -> list[dict[str, Any]]:
        return live.sample((version, False), start, max_tokens=400, n=4, temperature=1.5)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sample, old)
        until_in_flight(live, old, first)
        assert live.load(new).status_code == 200
        live.server.answer("/policy/unload", version=old)
        outlasts = not first.done()
        assert old not in live.info("live")
        second = pool.submit(sample, new)
    for version, asked in ((old, first), (new, second)):
        for choice in asked.result():
            right = live.right((version, False), [*start, *choice["token_ids"]], 1.5)[len(start) - 1 :]
            assert largest(choice["logprobs"], right) < EXACT
    assert old not in live.in_flight()
    refused = live.server.post("/policy/score", {"version": old, "token_ids": [1, 2]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_live")
    return outlasts


def until_in_flight(live: Live, version: int, asked: Future[Any]) -> None:
    """Returns when a request runs under the version, or the one that was asked has ended before."""
    while version not in live.in_flight() and not asked.done():
        pass


def test_requests_in_flight_end_on_the_version_they_began_with(live: Live) -> None:
    start = prompt(1, 10)
    assert any(_outlasts_its_version(live, start, old, old + 1) for old in range(100, 160, 2)), (
        "in thirty attempts no request outlasted the load"
    )


def changed(publisher: Publisher, version: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Publish a version whose tensors were changed, with a manifest that fits the bytes."""
    files = publisher.files(version=version, seed=version)
    tensors = random_tensors(MODEL, seed=version, rank=publisher.rank, scale=0.1)
    change(tensors)
    publisher.publish(version, files | {ADAPTER_FILE: safetensors.torch.save(tensors)})


def with_nan(publisher: Publisher, version: int) -> None:
    changed(publisher, version, lambda tensors: tensors[f"{Q0}.lora_B.weight"][0].fill_(float("nan")))


def truncated(publisher: Publisher, version: int) -> None:
    file = publisher.publish(version, publisher.files(version=version, seed=version)) / ADAPTER_FILE
    file.write_bytes(file.read_bytes()[:-100])


def other_weights(publisher: Publisher, version: int) -> None:
    """The canary of one adapter with the weights of another."""
    changed(publisher, version, lambda t: t.update(random_tensors(MODEL, seed=99, rank=publisher.rank, scale=0.1)))


def test_the_server_says_what_runs_and_what_waits_and_how_full_its_cache_is(live: Live) -> None:
    def load() -> tuple[int, int, float]:
        found = live.info("load")
        return found["num_running"], found["num_waiting"], found["kv_use"]

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(live.sample, CLEAN, [1, 2, 3], n=48, max_tokens=200, min_tokens=200) for _ in range(2)]
        # 96 sequences on a server that decodes up to 64.
        while (crowded := load())[:2] != (64, 32):
            assert not any(answer.done() for answer in answers), "they have ended without ever having waited"
            time.sleep(0.01)
        assert 0 < crowded[2] <= 1
        for answer in answers:
            assert len(answer.result()) == 48
    until(lambda: load() == (0, 0, 0), live.server.process)


@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (with_nan, "not_finite", "not finite"),
        (truncated, "corrupt", "the manifest says"),
        (other_weights, "canary_mismatch", "differ from the trainer's"),
    ],
)
def test_a_bad_version_is_refused_with_its_reason_and_the_server_goes_on(
    live: Live, spoil: Callable[[Publisher, int], None], reason: str, words: str
) -> None:
    ids, before = prompt(2, 24), live.info("live")
    spoil(live.publisher, 30)
    try:
        response = live.load(30)
    finally:
        folder = live.publisher.run.broadcasts / "step_000030"
        if folder.exists() or folder.is_symlink():
            folder.rename(folder.with_name(f"spoiled_{spoil.__name__}"))
    assert response.status_code == 409
    assert response.json()["error"]["type"] == reason
    assert words in response.json()["error"]["message"]
    assert live.info("live") == before
    for request in ((None, False), CLEAN, (2, True)):
        assert largest(live.score(request, ids), live.right(request, ids)) < EXACT


def test_a_new_version_is_proved_before_a_long_queue(live: Live) -> None:
    live.publish(20)
    with ThreadPoolExecutor(4) as pool:
        # 256 sequences where 64 run at once, four times as long as a request takes alone.
        more = {"n": 64, "max_tokens": 100, "min_tokens": 100}
        queue = [pool.submit(live.sample, CLEAN, prompt(0, 8), **more) for _ in range(4)]
        until(lambda: live.in_flight().get(1) == 4, live.server.process)
        assert live.load(20).status_code == 200
        assert sum(not one.done() for one in queue) >= 2


def test_chat_completions_serve_the_base_the_versions_and_the_alias(live: Live) -> None:
    def chat(model: str) -> httpx.Response:
        message = {"role": "user", "content": "Reverse: abc"}
        return live.server.post(
            "/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 8, "temperature": 0}
        )

    for model in (str(MODEL), "policy-v1", "policy"):
        response = chat(model)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["role"] == "assistant"
    assert chat("policy-v999").status_code == 404


def test_the_key_guards_vllms_routes_and_ours(live: Live) -> None:
    assert httpx.get(f"{live.server.url}/health").status_code == 200
    for path in ("/v1/models", "/policy/info", "/metrics", "/version", "/docs", "/tokenize", "/openapi.json"):
        assert httpx.get(live.server.url + path).status_code == 401, path
    wrong = {"Authorization": "Bearer wrong"}
    assert httpx.post(f"{live.server.url}/policy/generate", json={}, headers=wrong).status_code == 401
    assert live.server.get("/v1/models").status_code == 200


def test_vllms_own_ways_to_load_adapters_and_its_development_routes_are_closed(live: Live) -> None:
    adapters = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    for path in (*adapters, "/collective_rpc", "/sleep", "/reset_prefix_cache"):
        assert live.server.post(path, {"lora_name": "x", "lora_path": "/tmp"}).status_code in (404, 405), path


FOLLOWED = {11: 1, 12: 4, 13: 21}
"""Versions that follow each other under requests, and the seeds of their weights: these rarely end an answer."""
FOLLOWED_SIGMAS = {11: 0.1, 12: 0.05}
"""Version 13 has no noise."""
FOLLOWED_EXACT = 1e-3
"""Nats."""
PROMPT = [66, 101, 103, 105, 110, 58, 32]
MAX_TOKENS = 440


@pytest.fixture(scope="module")
def followed(live: Live) -> dict[Request, PeftModel]:
    """The model of each of these versions, which are published, without and with its noise."""
    for version, seed in FOLLOWED.items():
        live.publish(version, seed=seed, sigma=FOLLOWED_SIGMAS.get(version))
    return {request: model for request, model in live.models.items() if request[0] in FOLLOWED}


def _followed_all(live: Live, noisy: bool, pause_s: float) -> list[dict[str, Any]]:
    """Answers that were begun under the first version, while the others became live one after the other; none where
    the machine was so quick or so slow that no answer met all of them."""
    first, second, third = FOLLOWED
    body = {"version": first, "follow": True, "noisy": noisy, "n": 16}
    body |= {"prompt_token_ids": PROMPT, "max_tokens": MAX_TOKENS}
    assert live.load(first).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.server.answer, "/policy/generate", **body)
        until_in_flight(live, first, asked)
        assert live.load(second).status_code == 200
        until_in_flight(live, second, asked)
        live.server.answer("/policy/unload", version=first)
        assert first not in live.in_flight(), "the first must be free as soon as its requests have moved"
        time.sleep(pause_s)  # prompt and answer so far are read again, in parts
        assert live.load(third).status_code == 200
        until_in_flight(live, third, asked)
    for version in (second, third):
        live.server.answer("/policy/unload", version=version)
    choices: list[dict[str, Any]] = asked.result()["choices"]
    met = any([version for version, _ in choice["versions"]] == list(FOLLOWED) for choice in choices)
    return choices if met else []


@pytest.mark.parametrize("noisy", [False, True])
def test_a_request_in_flight_goes_on_under_each_new_version_with_its_logprobs(
    live: Live, followed: dict[Request, PeftModel], noisy: bool
) -> None:
    for attempt in range(1, 31):
        if choices := _followed_all(live, noisy, pause_s=0.2 * attempt):
            break
    assert choices, "in thirty attempts no answer met all versions"
    apart = defaultdict[tuple[int, Request], float](float)
    for choice in choices:
        ids, runs = choice["token_ids"], choice["versions"]
        assert sum(num for _, num in runs) == len(ids) == len(choice["logprobs"])
        assert len(ids) == MAX_TOKENS or (choice["finish_reason"] == "stop" and len(ids) < MAX_TOKENS)
        right = {key: logprobs_of(model, PROMPT + ids)[len(PROMPT) - 1 :] for key, model in followed.items()}
        begin = 0
        for version, num in runs:
            part = slice(begin, begin := begin + num)
            gaps = {key: largest(choice["logprobs"][part], logprobs[part]) for key, logprobs in right.items()}
            assert gaps.pop((version, noisy and version in FOLLOWED_SIGMAS)) < FOLLOWED_EXACT
            for key, gap in gaps.items():
                apart[version, key] = max(apart[version, key], gap)
    assert len(apart) == 3 * 4
    assert min(apart.values()) > 5 * FOLLOWED_EXACT, "under another version they would be others"
