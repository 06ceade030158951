"""Answers that go on under a new version: at the real server on the tiny model, token by token against Hugging Face,
and through the whole pipeline."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.e2e.test_infer_noise import norm_noise, with_norms
from tests.e2e.test_pipeline import ROOT, grpo, metrics
from tests.infer.published import CANARY_IDS, Publisher, logprobs_of, reference
from tests.infer.server_process import Server, running
from transport.run import found_run
from transport.types import Canary
from transport.weights.base import CANARY_FILE, NOISE_FILE

pytestmark = pytest.mark.e2e

MODEL = ROOT / "configs/quickstart/model"
EXACT = 1e-3
"""Nats."""
PROMPT = [66, 101, 103, 105, 110, 58, 32]
MAX_TOKENS = 440
SEEDS = {1: 1, 2: 4, 3: 21}
"""Of the random weights of each version: these rarely end an answer."""
SIGMAS = {1: 0.1, 2: 0.05}
"""Of the noise on the norms; version 3 has none."""


@dataclass(frozen=True, kw_only=True)
class Live:
    """A server, its published versions, and the model of each, without and with its noise."""

    server: Server
    run_id: str
    models: dict[tuple[int, bool], torch.nn.Module]

    def load(self, version: int) -> None:
        """Makes a version live."""
        self.server.answer("/policy/load", run_id=self.run_id, version=version)

    def in_flight(self) -> set[int]:
        """Versions under which requests run now."""
        counts = self.server.get("/policy/info").json()["in_flight"]
        return {int(version) for version, num in counts.items() if num > 0}

    def sample(self, noisy: bool) -> list[dict[str, Any]]:
        """The choices of a long request that follows from version 1 on."""
        answer = self.server.answer(
            "/policy/generate",
            version=1,
            follow=True,
            noisy=noisy,
            prompt_token_ids=PROMPT,
            max_tokens=MAX_TOKENS,
            n=32,
        )
        choices: list[dict[str, Any]] = answer["choices"]
        return choices


def publish(publisher: Publisher, version: int) -> dict[tuple[int, bool], torch.nn.Module]:
    """A version of random weights, with its noise."""
    files = publisher.files(version=version, seed=SEEDS[version])
    spec, folder = replace(publisher.spec(), norm_noise=True), publisher.publish(version, files)
    clean, noisy = reference(MODEL, folder), reference(MODEL, folder)
    if version in SIGMAS:
        noise = norm_noise(SIGMAS[version], seed=version)
        noisy_logprobs = tuple(logprobs_of(with_norms(noisy, noise), CANARY_IDS))
        files[NOISE_FILE] = safetensors.torch.save(noise)
        files[CANARY_FILE] = replace(Canary.from_json(files[CANARY_FILE]), noisy_logprobs=noisy_logprobs).to_json()
    publisher.publish(version, files, spec)
    return {(version, False): clean, (version, True): noisy}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("infer")
    publisher = Publisher(run=found_run(folder / "run"), model_dir=MODEL)
    models = publish(publisher, 1) | publish(publisher, 2) | publish(publisher, 3)
    arguments = {"model": MODEL, "output_dir": publisher.run.path, "max_lora_rank": 8, "max_model_len": 512}
    with running(log=folder / "infer.log", norm_noise=True, max_loras=6, **arguments) as server:
        yield Live(server=server, run_id=publisher.run.run_id, models=models)


def until_in_flight(live: Live, version: int, asked: Future[Any]) -> None:
    """Returns when a request runs under the version."""
    while version not in live.in_flight():
        assert not asked.done(), "the request must still run for this test to tell anything"


def largest_gap(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("noisy", [False, True])
def test_a_request_in_flight_goes_on_under_each_new_version_with_its_logprobs(live: Live, noisy: bool) -> None:
    live.load(1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.sample, noisy)
        until_in_flight(live, 1, asked)
        live.load(2)
        until_in_flight(live, 2, asked)
        live.server.answer("/policy/unload", version=1)
        assert live.in_flight() == {2}, "version 1 must be free as soon as its requests have moved"
        live.load(3)
        until_in_flight(live, 3, asked)
    num_moved = 0
    for choice in asked.result():
        ids, runs = choice["token_ids"], choice["versions"]
        assert sum(num for _, num in runs) == len(ids) == len(choice["logprobs"])
        assert (choice["finish_reason"] == "length") == (len(ids) == MAX_TOKENS)
        right = {key: logprobs_of(model, PROMPT + ids)[len(PROMPT) - 1 :] for key, model in live.models.items()}
        begin = 0
        for version, num in runs:
            part = slice(begin, begin := begin + num)
            gaps = {key: largest_gap(choice["logprobs"][part], logprobs[part]) for key, logprobs in right.items()}
            assert gaps.pop((version, noisy and version in SIGMAS)) < EXACT
            if version not in SIGMAS:
                del gaps[version, True]
            assert num < 4 or min(gaps.values()) > 5 * EXACT, "under another version they would be others"
        num_moved += [version for version, _ in runs] == [1, 2, 3]
    assert num_moved >= 1
    for version in (2, 3):
        live.server.answer("/policy/unload", version=version)


@pytest.mark.parametrize("layout", ["adapter", "full"])
def test_a_run_trains_every_token_with_the_version_that_sampled_it(tmp_path: Path, layout: str) -> None:
    page = (ROOT / "docs" / "inflight.md").read_text()
    [command] = [line.split() for line in page.splitlines() if line.startswith("    grpo ")]
    words = [*("--orch.eval.num_examples", "0", "--max_steps", "5")]
    words += [*("--infer.max_num_seqs", "16")]  # so few that the server is at work when most versions come
    if layout == "full":
        words += [*("--train.lora", "false", "--train.learning_rate", "1e-4", "--infer.enable_lora", "false")]
        words += [*("--train.weight_broadcast.format", "full", "--orch.weight_broadcast.format", "full")]
        words += [*("--infer.max_lora_rank", "null")]
    done = grpo(*command[1:], "--output_dir", str(tmp_path / "run"), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["rollouts_trained"] == summary["rollouts_issued"] == 5 * 256
    assert summary["versions_served"] == [0, 1, 2, 3, 4, 5]
    assert summary["canary_max_abs"] < 1e-4
    lines = [line for line in metrics(tmp_path / "run") if "policy/lag_max" in line]
    assert max(line["policy/lag_max"] for line in lines) >= 1
    assert max(line["policy/lag_max"] for line in lines) <= 8
    assert all(
        0 <= line["rollout/several_versions"] <= 1 for line in lines
    )  # above 0 where generation is the slower half
    # a token that were trained with another version than its own would differ where its lag is 0
    assert max(line["policy/mismatch_max_lag0"] for line in lines if "policy/mismatch_max_lag0" in line) < 1e-4
    assert max(line["policy/mismatch_max_lag1"] for line in lines if "policy/mismatch_max_lag1" in line) > 1e-2
