"""More adapters than vLLM has slots for, with the real server on the tiny model."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from grpo.transport.run import create_run

from tests.e2e.plain_server import MODEL, Live
from tests.infer.published import Publisher
from tests.infer.server_process import running

pytestmark = pytest.mark.e2e

PROMPT = list(range(40, 60))
SHORT, LONG = 150, 480
"""Numbers of tokens of the two requests."""
Tokens = list[tuple[object, float]]
"""Tokens and log-probabilities of an answer."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two slots, and two versions in them."""
    folder = tmp_path_factory.mktemp("slots")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    for version in (1, 2, 3):
        publisher.publish(version, publisher.files(version=version, seed=version))
    arguments: dict[str, object] = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8}
    arguments |= {"max_loras": 2, "max_cpu_loras": 2, "max_model_len": 512, "vllm": json.dumps({"max_num_seqs": 64})}
    with running(log=folder / "infer.log", **arguments) as server:
        live = Live(server=server, publisher=publisher)
        for version in (1, 2):
            assert live.load(version).status_code == 200
        yield live


def by_vllms_route(live: Live) -> Tokens:
    """A short answer by version 1."""
    body = {"model": "policy-v1", "prompt": PROMPT, "max_tokens": SHORT, "ignore_eos": True, "logprobs": 0, "seed": 7}
    logprobs = live.server.answer("/v1/completions", **body)["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


def by_our_route(live: Live) -> Tokens:
    """A long answer by version 2."""
    body = {"version": 2, "prompt_token_ids": PROMPT, "max_tokens": LONG, "min_tokens": LONG, "seed": 7}
    [choice] = live.server.answer("/policy/generate", **body)["choices"]
    return list(zip(choice["token_ids"], choice["logprobs"], strict=True))


def both(pool: ThreadPoolExecutor, live: Live) -> tuple[Future[Tokens], Future[Tokens]]:
    """Both answers, on their way; asked for again where one has come before the other was on its way."""
    while True:
        answers = pool.submit(by_vllms_route, live), pool.submit(by_our_route, live)
        while not any(one.done() for one in answers):
            if live.server.get("/policy/info").json()["in_flight"] == {"1": 1, "2": 1}:
                return answers
        for one in answers:
            one.result()


def test_a_third_version_waits_for_a_slot_and_answers_that_run_stay_what_they_are_bit_by_bit(live: Live) -> None:
    refused = live.load(3)
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "slots")
    assert "version 2 (1 slot, 0 requests in flight, live)" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(3) as pool:
        alone = [answer.result() for answer in both(pool, live)]
        short, long = both(pool, live)
        live.server.answer("/policy/unload", version=1)
        loading = pool.submit(live.load, 3)
        assert short.result() == alone[0]
        assert loading.result().status_code == 200
        assert not long.done()
        assert long.result() == alone[1]
    info = live.server.get("/policy/info").json()
    assert (list(info["live"]), info["num_slots"]) == (["2", "3"], 2)
    assert live.load(1).json()["error"]["type"] == "slots"
