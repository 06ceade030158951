"""The real server on the tiny model: policy versions against Hugging Face PEFT, what it scores as a teacher, and
everything it must refuse. Its steps have few tokens, so that long prompts are read in parts. More versions in a batch:
test_infer_noise.py."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from grpo.configs.auxiliary import TeacherSettings
from grpo.infer.checks import PEFT_PREFIX
from grpo.orchestrator.auxiliary.teacher.served import ServedTeacher
from grpo.transport.weights.store import ADAPTER_FILE
from peft import PeftModel

from tests.e2e.plain_server import KEY, MODEL, NUM_BATCHED_TOKENS, SCALES, Live, plain_server
from tests.infer.published import Publisher, logprobs_of, random_tensors, reference
from tests.support import until

pytestmark = pytest.mark.e2e

EXACT = 1e-4
TEMPERATURES = (0.7, 1.0, 1.3)
Q0 = f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with plain_server(tmp_path_factory.mktemp("plain")) as live:
        yield live


@pytest.fixture(scope="module")
def truth(live: Live) -> Callable[[int | None, Sequence[int], float], list[float]]:
    """Log-probabilities by Hugging Face in float32."""
    models: dict[int | None, Any] = {
        version: reference(MODEL, live.publisher.run.broadcasts / f"step_{version:06d}") for version in SCALES
    }

    def logprobs(version: int | None, ids: Sequence[int], temperature: float) -> list[float]:
        model: PeftModel = models[version or 0]
        return logprobs_of(model, ids, temperature)

    return logprobs


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(32, 127, (length,), generator=generator)]


def test_the_versions_differ_by_far_more_than_the_accuracy(truth: Any) -> None:
    ids = prompt(0, 40)
    assert largest(truth(1, ids, 1.0), truth(2, ids, 1.0)) > 100 * EXACT
    assert largest(truth(None, ids, 1.0), truth(1, ids, 1.0)) > 100 * EXACT


def test_a_stop_token_ends_the_answer_and_is_part_of_it(live: Live) -> None:
    free = live.server.answer(
        "/policy/generate", version=1, prompt_token_ids=prompt(5, 8), max_tokens=12, temperature=0.0
    )["choices"][0]["token_ids"]
    stop = free[2]
    answer = live.server.answer(
        "/policy/generate",
        version=1,
        prompt_token_ids=prompt(5, 8),
        max_tokens=12,
        temperature=0.0,
        stop_token_ids=[stop],
    )["choices"][0]
    assert answer["token_ids"] == free[: free.index(stop) + 1]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


def test_equal_seeds_give_equal_answers_and_no_seed_gives_different_ones(live: Live) -> None:
    def sample(seed: int | None) -> list[list[int]]:
        answer = live.server.answer(
            "/policy/generate", version=None, prompt_token_ids=[65], max_tokens=16, n=4, seed=seed, temperature=2.0
        )
        return [choice["token_ids"] for choice in answer["choices"]]

    assert sample(7) == sample(7)
    assert len({tuple(ids) for ids in sample(7)}) > 1
    assert sample(None) != sample(None)


def test_seeds_hold_where_prompts_are_read_in_parts(live: Live) -> None:
    def sample(seed: int) -> list[int]:
        start = prompt(seed, 3 * NUM_BATCHED_TOKENS + 7)
        body = {"version": 1, "prompt_token_ids": start, "max_tokens": 8, "seed": seed}
        ids: list[int] = live.server.answer("/policy/generate", **body)["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(sample, range(16)))
    assert together == [sample(seed) for seed in range(16)]


def score(live: Live, version: int | None, token_ids: Sequence[int], temperature: float) -> list[float]:
    body = {"version": version, "token_ids": list(token_ids), "temperature": temperature}
    logprobs: list[float] = live.server.answer("/policy/score", **body)["logprobs"]
    return logprobs


def test_answers_score_together_as_each_does_alone(live: Live) -> None:
    prompts = [prompt(seed, 4 + seed) for seed in range(24)]
    ones = [[[(seed * 7 + place) % 250] for place in range(1 + seed % 5)] for seed in range(24)]
    longer = [[[seed, 9], [seed]] for seed in range(24)]
    sampling = ThreadPoolExecutor(8)
    for version, temperature, answers in ((None, 0.5, ones), (1, 1.0, longer), (2, 1.0, ones), (2, 0.5, longer)):
        body = {"version": version, "prompts": prompts, "answers": answers, "temperature": temperature}
        generate = {"version": version, "max_tokens": 4, "n": 2, "seed": 1}
        beside = [
            sampling.submit(live.server.answer, "/policy/generate", **generate, prompt_token_ids=one) for one in prompts
        ]
        together = live.server.answer("/policy/score_answers", **body)["logprobs"]
        for one, own, logprobs in list(zip(prompts, answers, together, strict=True))[::5]:
            alone = [sum(score(live, version, one + answer, temperature)[len(one) - 1 :]) for answer in own]
            assert logprobs == pytest.approx(alone, abs=1e-3)
        for start, sampled in list(zip(prompts, beside, strict=True))[::5]:  # what is sampled meanwhile keeps its own
            for choice in sampled.result()["choices"]:
                alone = score(live, version, start + choice["token_ids"], 1.0)[len(start) - 1 :]
                assert choice["logprobs"] == pytest.approx(alone, abs=1e-3)
    sampling.shutdown()


def test_what_was_sampled_scores_as_it_was_sampled_and_as_hugging_face_does(live: Live, truth: Any) -> None:
    cases = list(product((None, 1, 2), TEMPERATURES, (5, 40, 3 * NUM_BATCHED_TOKENS + 7)))
    starts = [prompt(index, length) for index, (_, _, length) in enumerate(cases)]

    def sample(index: int) -> Any:
        version, temperature, _ = cases[index]
        body = {"version": version, "prompt_token_ids": starts[index], "temperature": temperature, "max_tokens": 24}
        return live.server.answer("/policy/generate", **body)["choices"][0]

    def scored(index: int) -> list[float]:
        version, temperature, _ = cases[index]
        return score(live, version, starts[index] + sampled[index]["token_ids"], temperature)

    with ThreadPoolExecutor(len(cases)) as pool:
        sampled = list(pool.map(sample, range(len(cases))))
        scores = list(pool.map(scored, range(len(cases))))
    for case, start, choice, found in zip(cases, starts, sampled, scores, strict=True):
        version, temperature, length = case
        assert largest(found[length - 1 :], choice["logprobs"]) < EXACT, case
        assert largest(found, truth(version, start + choice["token_ids"], temperature)) < EXACT, case


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
    publisher = live.publisher
    for version in (old, new):
        publisher.publish(version, publisher.files(version=version, seed=version))
    assert live.load(old).status_code == 200

    def sample(version: int) -> list[dict[str, Any]]:
        body = {"version": version, "prompt_token_ids": start, "max_tokens": 400, "n": 4, "temperature": 1.5}
        choices: list[dict[str, Any]] = live.server.answer("/policy/generate", **body)["choices"]
        return choices

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sample, old)
        while live.server.get("/policy/info").json()["in_flight"].get(str(old)) != 1 and not first.done():
            pass
        assert live.load(new, alias="policy").status_code == 200
        live.server.answer("/policy/unload", version=old)
        outlasts = not first.done()
        assert str(old) not in live.server.get("/policy/info").json()["live"]
        second = pool.submit(sample, new)
    live.server.answer("/policy/unload", version=new)
    for version, asked in ((old, first), (new, second)):
        model = reference(MODEL, publisher.run.broadcasts / f"step_{version:06d}")
        for choice in asked.result():
            right = logprobs_of(model, [*start, *choice["token_ids"]], 1.5)[len(start) - 1 :]
            assert largest(choice["logprobs"], right) < EXACT
    assert str(old) not in live.server.get("/policy/info").json()["in_flight"]
    refused = live.server.post("/policy/score", {"version": old, "token_ids": [1, 2]})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_live")
    return outlasts


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
    body = {"version": 1, "prompt_token_ids": [1, 2, 3], "n": 48, "max_tokens": 200, "min_tokens": 200}

    def load() -> tuple[int, int, float]:
        found = live.server.get("/policy/info").json()["load"]
        return found["num_running"], found["num_waiting"], found["kv_use"]

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(live.server.answer, "/policy/generate", **body) for _ in range(2)]
        # 96 sequences on a server that decodes up to 64.
        while (crowded := load())[:2] != (64, 32):
            assert not any(answer.done() for answer in answers), "they have ended without ever having waited"
            time.sleep(0.01)
        assert 0 < crowded[2] <= 1
        for answer in answers:
            assert len(answer.result()["choices"]) == 48
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
    live: Live, truth: Any, spoil: Callable[[Publisher, int], None], reason: str, words: str
) -> None:
    ids = prompt(2, 24)
    before = live.server.get("/policy/info").json()["live"]
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
    assert live.server.get("/policy/info").json()["live"] == before
    for version in (None, 1, 2):
        scored = live.server.answer("/policy/score", version=version, token_ids=ids)["logprobs"]
        assert largest(scored, truth(version, ids, 1.0)) < EXACT


def test_a_new_version_is_proved_before_a_long_queue(live: Live) -> None:
    publisher = live.publisher
    publisher.publish(20, publisher.files(version=20, seed=20))

    body = {"version": 1, "prompt_token_ids": prompt(0, 8), "n": 64, "max_tokens": 200, "min_tokens": 200}
    with ThreadPoolExecutor(4) as pool:
        # 256 sequences where 64 run at once, four times as long as a request takes alone.
        queue = [pool.submit(live.server.answer, "/policy/generate", **body) for _ in range(4)]
        until(lambda: live.server.get("/policy/info").json()["in_flight"]["1"] == 4, live.server.process, poll_s=0)
        assert live.load(20).status_code == 200
        assert sum(not one.done() for one in queue) >= 2


def test_chat_completions_serve_the_base_the_versions_and_the_alias(live: Live) -> None:
    def chat(model: str) -> httpx.Response:
        message = {"role": "user", "content": "Reverse: abc"}
        return live.server.post(
            "/v1/chat/completions", {"model": model, "messages": [message], "max_tokens": 8, "temperature": 0}
        )

    assert live.load(1, alias="policy").status_code == 200
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
    for path in (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/collective_rpc",
        "/sleep",
        "/reset_prefix_cache",
    ):
        assert live.server.post(path, {"lora_name": "x", "lora_path": "/tmp"}).status_code in (404, 405), path
