"""The real server scores what it sampled at the temperature of the sampling: base and versions, several temperatures
in one step, prompts that are read in parts; and as a teacher over OpenAI's routes."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from configs.auxiliary import TeacherSettings
from orchestrator.teacher.served import ServedTeacher
from tests.e2e.plain_server import MODEL, Live
from tests.infer.published import Publisher, logprobs_of, reference
from tests.infer.server_process import Server, running
from transport.run import create_run

pytestmark = pytest.mark.e2e

EXACT = 1e-4
TEMPERATURES = (0.7, 1.0, 1.3)
NUM_BATCHED_TOKENS = 64


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Steps of at most NUM_BATCHED_TOKENS tokens, and version 1."""
    folder = tmp_path_factory.mktemp("scores")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    publisher.publish(1, publisher.files(version=1, seed=1, scale=0.1))
    arguments: dict[str, Any] = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8}
    vllm = {"max_num_batched_tokens": NUM_BATCHED_TOKENS, "max_num_seqs": 16}
    arguments |= {"max_model_len": 512, "vllm": json.dumps(vllm)}
    with running(log=folder / "infer.log", **arguments) as server:
        live = Live(server=server, publisher=publisher)
        assert live.load(1).status_code == 200
        yield live


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(32, 127, (length,), generator=generator)]


def score(server: Server, version: int | None, token_ids: Sequence[int], temperature: float) -> list[float]:
    body = {"version": version, "token_ids": list(token_ids), "temperature": temperature}
    logprobs: list[float] = server.answer("/policy/score", **body)["logprobs"]
    return logprobs


def largest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


def test_what_was_sampled_scores_as_it_was_sampled_and_as_hugging_face_does(live: Live) -> None:
    cases = list(product((None, 1), TEMPERATURES, (5, 40, 3 * NUM_BATCHED_TOKENS + 7)))
    starts = [prompt(index, length) for index, (_, _, length) in enumerate(cases)]

    def sample(index: int) -> Any:
        version, temperature, _ = cases[index]
        body = {"version": version, "prompt_token_ids": starts[index], "temperature": temperature, "max_tokens": 24}
        return live.server.answer("/policy/generate", **body)["choices"][0]

    def scored(index: int) -> list[float]:
        version, temperature, _ = cases[index]
        return score(live.server, version, starts[index] + sampled[index]["token_ids"], temperature)

    with ThreadPoolExecutor(len(cases)) as pool:
        sampled = list(pool.map(sample, range(len(cases))))
        scores = list(pool.map(scored, range(len(cases))))
    policy = reference(MODEL, live.publisher.run.broadcasts / "step_000001")
    for (version, temperature, length), start, choice, found in zip(cases, starts, sampled, scores, strict=True):
        assert largest(found[length - 1 :], choice["logprobs"]) < EXACT, (version, temperature, length)
        sequence = start + choice["token_ids"]
        if version is None:
            with policy.disable_adapter():
                right = logprobs_of(policy, sequence, temperature)
        else:
            right = logprobs_of(policy, sequence, temperature)
        assert largest(found, right) < EXACT, (version, temperature, length)


def test_other_temperatures_give_other_numbers(live: Live) -> None:
    ids = prompt(1, 50)
    at = {temperature: score(live.server, None, ids, temperature) for temperature in TEMPERATURES}
    assert largest(at[0.7], at[1.0]) > 100 * EXACT
    assert largest(at[1.3], at[1.0]) > 100 * EXACT


async def test_openais_routes_of_a_real_vllm_score_as_ours_do(live: Live) -> None:
    # The base's name in vLLM; asked as our kind, the teacher would be its newest policy.
    [base] = [one["id"] for one in live.server.get("/v1/models").json()["data"] if one["parent"] is None]
    settings = TeacherSettings.model_validate(
        {"model": {"name": base}, "client": {"base_url": [f"{live.server.url}/v1"]}}
    )
    rows = [np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"Reverse: hello", b"Reverse: word", b"a b")]
    found = []
    for ours in (False, True):
        teacher = ServedTeacher(settings, api_key=None, seq_len=512, ours=ours)
        try:
            found.append([await teacher.score(row, 1.0) for row in rows])
        finally:
            await teacher.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=EXACT)
