"""The real server on the tiny model: versions with noise on their norm weights, against Hugging Face with such norms.

More adapters than slots, so that noise has to follow its adapter from slot to slot. The last test is on answers that go
on under a new version, with noise and without.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from grpo.transport.records import Canary
from grpo.transport.run import create_run
from grpo.transport.weights.store import CANARY_FILE, NOISE_FILE
from msgspec import structs
from peft import PeftModel

from tests.e2e.plain_server import MODEL
from tests.e2e.test_infer_policies import EXACT, largest, prompt
from tests.infer.published import CANARY_IDS, Publisher, logprobs_of, reference
from tests.infer.server_process import Server, running

pytestmark = pytest.mark.e2e

NOISY = {1: 0.1, 2: 0.05, 4: 5e-4}
"""Versions with noise and their sigma; 0 and 3 have none."""
Request = tuple[int | None, bool]
"""A version and whether it is asked for with its noise."""


def norm_noise(sigma: float, *, seed: int) -> dict[str, torch.Tensor]:
    """Noisy weights of all norms of the hidden state."""
    generator, tensors = torch.Generator().manual_seed(seed), safetensors.torch.load_file(MODEL / "model.safetensors")
    return {
        name: tensor + sigma * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if name.endswith("norm.weight") and tensor.shape == (128,)
    }


def with_norms(model: PeftModel, weights: dict[str, torch.Tensor]) -> PeftModel:
    assert not model.get_base_model().load_state_dict(weights, strict=False).unexpected_keys
    return model


@dataclass(frozen=True, kw_only=True)
class Live:
    """A server on which versions 0 to 4 are live, and what is right for each."""

    server: Server
    publisher: Publisher
    models: dict[Request, PeftModel]

    def load(self, version: int) -> Any:
        return self.server.post("/policy/load", {"run_id": self.publisher.run.run_id, "version": version})

    def score(self, request: Request, ids: Sequence[int]) -> list[float]:
        answer = self.server.answer("/policy/score", version=request[0], noisy=request[1], token_ids=list(ids))
        logprobs: list[float] = answer["logprobs"]
        return logprobs

    def right(self, request: Request, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        version, noisy = request
        known = (version or 0, noisy and version in NOISY)
        return logprobs_of(self.models[known], ids, temperature)


def publish(
    publisher: Publisher,
    version: int,
    noise: dict[str, torch.Tensor] | None = None,
    model: PeftModel | None = None,
    seed: int | None = None,
) -> None:
    """A version whose noise `model` has, with a canary of both. `seed` of its weights: the version, where None."""
    seed = version if seed is None else seed
    files = publisher.files(version=version, seed=seed, scale=0.0 if version == 0 else 0.1)
    if noise is not None and model is not None:
        noisy_logprobs = tuple(logprobs_of(model, CANARY_IDS))
        files[NOISE_FILE] = safetensors.torch.save(noise)
        files[CANARY_FILE] = structs.replace(
            Canary.from_json(files[CANARY_FILE]), noisy_logprobs=noisy_logprobs
        ).to_json()
    publisher.publish(version, files, structs.replace(publisher.spec(), norm_noise=True))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("noise")
    publisher, models = Publisher(run=create_run(folder / "run"), model_dir=MODEL), dict[Request, PeftModel]()
    for version in range(5):
        publish(publisher, version)
        adapter = publisher.run.broadcasts / f"step_{version:06d}"
        models[version, False] = reference(MODEL, adapter)
        if version in NOISY:
            noise = norm_noise(NOISY[version], seed=version)
            models[version, True] = with_norms(reference(MODEL, adapter), noise)
            publish(publisher, version, noise, models[version, True])
    arguments = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8, "max_model_len": 512}
    arguments |= {"norm_noise": "true", "max_loras": 12, "enable_prefix_caching": "true"}
    with running(log=folder / "infer.log", **arguments) as server:
        live = Live(server=server, publisher=publisher, models=models)
        for version in range(5):
            response = live.load(version)
            assert response.status_code == 200, response.text
        yield live


def all_at_once(requests: Sequence[Any], ask: Any) -> list[Any]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


MIXED: list[Request] = [
    *((None, False), (1, True), (1, False), (2, True), (2, False), (3, True), (0, True), (4, True)),
    *((1, True), (None, True), (2, True), (1, False), (3, False), (4, False), (2, True), (1, True)),
]


def test_the_canary_agrees_with_and_without_noise(live: Live) -> None:
    for version in range(5):
        answer = live.load(version).json()
        assert answer["canary"]["max_abs"] < EXACT / 2
        assert (answer["noise"] is not None) == (version in NOISY)
        if version in NOISY:
            assert answer["noise"]["max_abs"] < EXACT / 2


def test_mixed_batches_score_as_hugging_face_with_each_ones_norms(live: Live) -> None:
    asked = [(request, prompt(seed, 5 + 7 * seed)) for seed, request in enumerate(MIXED)]
    for _ in range(2):  # the second time adapters come from the slots of others
        scores = all_at_once(asked, lambda one: live.score(*one))
        for (request, ids), scored in zip(asked, scores, strict=True):
            assert largest(scored, live.right(request, ids)) < EXACT, request


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mixed_batches_sample_with_hugging_faces_logprobs(live: Live, temperature: float) -> None:
    def sample(numbered: tuple[int, Request]) -> Any:
        index, (version, noisy) = numbered
        start, sampling = prompt(index, 6 + index), {"n": 3, "max_tokens": 32, "temperature": temperature}
        return live.server.answer("/policy/generate", version=version, noisy=noisy, prompt_token_ids=start, **sampling)

    answers = all_at_once(list(enumerate(MIXED)), sample)
    for index, (request, answer) in enumerate(zip(MIXED, answers, strict=True)):
        assert answer["version"] == request[0]
        start = prompt(index, 6 + index)
        for choice in answer["choices"]:
            right = live.right(request, start + choice["token_ids"], temperature)[len(start) - 1 :]
            assert largest(choice["logprobs"], right) < EXACT, request


def test_the_prefix_cache_is_not_shared_between_noise_and_none(live: Live) -> None:
    start = prompt(77, 200)  # many whole blocks of the cache
    for request in ((1, False), (1, True), (1, False), (2, True), (1, True)):
        version, noisy = request
        answer = live.server.answer(
            "/policy/generate", version=version, noisy=noisy, prompt_token_ids=start, max_tokens=8, temperature=0.0
        )
        ids, logprobs = answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]
        assert largest(logprobs, live.right(request, start + ids)[len(start) - 1 :]) < EXACT, request


def test_a_version_without_noise_answers_bit_for_bit_alike_with_the_flag_and_without(live: Live) -> None:
    ids = prompt(5, 60)
    live.score((1, True), ids)
    for version in (None, 0, 3):
        assert live.score((version, True), ids) == live.score((version, False), ids)


def test_clean_scores_have_the_same_bits_alone_and_after_noise(live: Live) -> None:
    ids = prompt(6, 60)
    before = live.score((1, False), ids)
    assert live.score((1, True), ids) != before
    assert live.score((1, False), ids) == before


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
    models: dict[Request, PeftModel] = {}
    for version, seed in FOLLOWED.items():
        publish(live.publisher, version, seed=seed)
        adapter = live.publisher.run.broadcasts / f"step_{version:06d}"
        models[version, False] = reference(MODEL, adapter)
        if version in FOLLOWED_SIGMAS:
            noise = norm_noise(FOLLOWED_SIGMAS[version], seed=version)
            models[version, True] = with_norms(reference(MODEL, adapter), noise)
            publish(live.publisher, version, noise, models[version, True], seed)
    return models


def in_flight(live: Live) -> set[int]:
    """Versions under which requests run now."""
    counts = live.server.get("/policy/info").json()["in_flight"]
    return {int(version) for version, num in counts.items() if num > 0}


def until_in_flight(live: Live, version: int, asked: Future[Any]) -> None:
    """Returns when a request runs under the version, or the one that was asked has ended before."""
    while version not in in_flight(live) and not asked.done():
        pass


def _followed_all(live: Live, noisy: bool) -> list[dict[str, Any]]:
    """Answers that were begun under the first version, while the others became live one after the other; none where
    the machine was so quick or so slow that no answer met all of them."""
    first, second, third = FOLLOWED
    body = {"version": first, "follow": True, "noisy": noisy, "n": 32}
    body |= {"prompt_token_ids": PROMPT, "max_tokens": MAX_TOKENS}
    assert live.load(first).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.server.answer, "/policy/generate", **body)
        until_in_flight(live, first, asked)
        assert live.load(second).status_code == 200
        until_in_flight(live, second, asked)
        live.server.answer("/policy/unload", version=first)
        assert first not in in_flight(live), "the first must be free as soon as its requests have moved"
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
    for _ in range(30):
        if choices := _followed_all(live, noisy):
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
