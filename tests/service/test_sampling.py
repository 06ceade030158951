"""The stock client samples from tenants' snapshots on a real server, as do the scripts of docs/service.md."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from grpo.transport.ports import free_port
from tinker import types
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo.server_process import ServerProcess, server_process
from grpo.service_proofs import prove
from tests.pages import Page
from tests.service import versions
from tests.service.data import datum
from tests.service.running import Running, done, running
from tests.support import until

MODEL = Path(__file__).parents[2] / "configs" / "tiny" / "model"
KEY_VAR = "GRPO_SERVICE_SERVER_KEY"
PROMPT = list(b"cab ")
PAGE = Page("docs/service.md")
pytestmark = [
    pytest.mark.service,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@dataclass(frozen=True, slots=True)
class Servers:
    """Two servers and what started them; the service beside them has the port that it keeps."""

    folder: Path
    settings: dict[str, Any]
    first: ServerProcess
    second: ServerProcess

    def first_again(self) -> contextlib.AbstractContextManager[ServerProcess]:
        """Starts the first one, which was killed, by the same settings."""
        return server_process(self.settings, self.folder / "again.log", output_dir=self.folder / "run")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("service")
    about: dict[str, Any] = {"model": str(MODEL), "host": "127.0.0.1", "dtype": "float32", "device": "cpu"}
    about |= {"max_model_len": 128, "max_lora_rank": 32, "api_key_var": KEY_VAR}
    settings = [about | {"port": free_port()} for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VAR, "secret")
        with (
            server_process(settings[0], folder / "first.log", output_dir=folder / "run") as first,
            server_process(settings[1], folder / "second.log", output_dir=folder / "run") as second,
        ):
            yield Servers(folder, settings[0], first, second)


@pytest.fixture(scope="module")
def service(servers: Servers) -> Iterator[Running]:
    options = ("--port", str(free_port()), "--tenants", "default,other")
    urls = f"{servers.first.url},{servers.second.url}"
    with running(servers.folder / "run", MODEL, "--server", urls, *options) as service:
        yield service


def sampled(sampler: Any, prompt: list[int] = PROMPT, *, n: int = 1, **params: Any) -> Any:
    asked = types.SamplingParams(**({"max_tokens": 8, "seed": 1} | params))
    return done(sampler.sample(types.ModelInput.from_ints(prompt), num_samples=n, sampling_params=asked)).sequences


def trained_logprobs(client: Any, ids: list[int]) -> Any:
    """The trainer's log-probabilities of all tokens but the first."""
    inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
    one = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    return done(client.forward([one], "cross_entropy")).loss_fn_outputs[0]["logprobs"].to_numpy()


def served_logprobs(sampler: Any, ids: list[int]) -> Any:
    return np.array(done(sampler.compute_logprobs(types.ModelInput.from_ints(ids)))[1:], np.float32)


def newest_version(service: Running) -> int:
    with contextlib.closing(sqlite3.connect(service.folder / "commands.sqlite")) as db:
        return int(db.execute("SELECT max(version) FROM versions").fetchone()[0])


def stepped(client: Any, seed: int) -> None:
    data = datum(12, seed)
    done(client.forward_backward([data], "cross_entropy"))
    done(client.optim_step(types.AdamParams(learning_rate=1e-2)))


def test_a_snapshot_is_what_was_trained_and_stays_what_it_was(service: Running) -> None:
    ids = list(b"cab ride")
    base = done(service.client().create_sampling_client(base_model=service.model))
    client = service.training_client(rank=8)
    taken = []
    for seed in range(3):
        stepped(client, seed)
        taken.append((done(client.save_weights_and_get_sampling_client()), trained_logprobs(client, ids)))
    for sampler, expected in taken:
        np.testing.assert_allclose(served_logprobs(sampler, ids), expected, atol=1e-4)
    assert np.abs(taken[0][1] - taken[2][1]).max() > 1e-2
    assert np.abs(served_logprobs(base, ids) - taken[2][1]).max() > 1e-2


def test_samples_have_their_log_probabilities_seeds_and_ends(service: Running) -> None:
    client = service.training_client()
    stepped(client, 1)
    path = done(client.save_weights_for_sampler("named")).path
    sampler = done(service.client().create_sampling_client(model_path=path))
    first, again = (sampled(sampler, n=3) for _ in range(2))
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert len({tuple(one.tokens) for one in first}) > 1
    assert len({one.sequence_id for one in first + again}) == 6
    for one in first:
        expected = trained_logprobs(client, PROMPT + one.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
    token = first[0].tokens[2]
    stopped = sampled(sampler, n=3, stop=[token])[0]
    assert stopped.tokens == first[0].tokens[: first[0].tokens.index(token) + 1]
    assert stopped.stop_reason == "stop"
    greedy = sampled(sampler, n=2, temperature=0)
    assert greedy[0].tokens == greedy[1].tokens


def test_an_answer_ends_at_its_stops(service: Running) -> None:
    """Texts of several tokens, tokens, and nothing at all; the last token is the one that completes a stop."""
    base = done(service.client().create_sampling_client(base_model=service.model))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    free = sampled(base, n=4, max_tokens=24)
    text = tokenizer.decode(free[0].tokens)
    stop = text[6:9]
    assert len(tokenizer.encode(stop, add_special_tokens=False)) == 3
    for given in (stop, [stop], ["never in it", stop]):
        found = sampled(base, n=4, max_tokens=24, stop=given)
        for whole, one in zip(free, found, strict=True):
            assert one.tokens == whole.tokens[: len(one.tokens)]
            np.testing.assert_allclose(one.logprobs, whole.logprobs[: len(one.tokens)], atol=1e-4)
            assert (one.stop_reason == "stop") == (
                stop in tokenizer.decode(whole.tokens)
            ) or whole.stop_reason == "stop"
        assert tokenizer.decode(found[0].tokens) == text[: text.index(stop) + 3]


def test_without_any_stop_the_end_token_is_one_like_others(service: Running) -> None:
    end = AutoConfig.from_pretrained(MODEL).eos_token_id
    client = service.training_client(rank=8)
    weights = np.array([0, 0, 0, 1], np.float32)
    inputs = {"target_tokens": np.array([*PROMPT[1:], end]), "weights": weights}
    ending = types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs=inputs)
    for _ in range(10):
        client.forward_backward([ending], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2))
    sampler = done(client.save_weights_and_get_sampling_client())
    (ended,) = sampled(sampler, temperature=0)
    assert (ended.stop_reason, ended.tokens) == ("stop", [end])
    (on,) = sampled(sampler, temperature=0, stop=[])
    assert (on.stop_reason, on.tokens[0], len(on.tokens)) == ("length", end, 8)


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.5}])
def test_restricted_tokens_have_the_log_probabilities_of_the_whole_distribution(
    service: Running, params: dict[str, Any]
) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    client = service.training_client()  # its adapter is nothing yet
    asked = types.SamplingParams(max_tokens=8, seed=1, **params)
    prompt = types.ModelInput.from_ints(PROMPT)
    answer = done(base.sample(prompt, num_samples=6, sampling_params=asked, topk_sample_logprobs=5))
    for one in answer.sequences:
        expected = trained_logprobs(client, PROMPT + one.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
        for token, top in zip(one.tokens, one.topk_logprobs, strict=True):
            allowed = [found for found, _ in top][: params.get("top_k", 5)]
            mass = np.cumsum([0.0] + [np.exp(logprob) for _, logprob in top])[:-1]
            inside = [found for found, before in zip(allowed, mass, strict=False) if before < params.get("top_p", 1.0)]
            assert token in inside or len(inside) == 5
    assert len({tuple(one.tokens) for one in answer.sequences}) > 1


def test_prompts_have_log_probabilities_of_their_tokens_and_of_the_likeliest(service: Running) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    ids = list(b"cab ride")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(MODEL)(torch.tensor([ids])).logits[0]
    expected = logits.float().log_softmax(-1)[:-1]
    asked = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1), "include_prompt_logprobs": True}
    answer = done(base.sample(types.ModelInput.from_ints(ids), topk_prompt_logprobs=3, **asked))
    own = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    assert answer.prompt_logprobs[0] is answer.topk_prompt_logprobs[0] is None
    np.testing.assert_allclose(answer.prompt_logprobs[1:], own.numpy(), atol=1e-4)
    for found, row in zip(answer.topk_prompt_logprobs[1:], expected, strict=True):
        np.testing.assert_allclose([logprob for _, logprob in found], row.topk(3).values.numpy(), atol=1e-4)
        np.testing.assert_allclose([row[token] for token, _ in found], row.topk(3).values.numpy(), atol=1e-4)
    last = done(base.sample(types.ModelInput.from_ints(ids), topk_prompt_logprobs=3, prompt_logprobs_last_n=2, **asked))
    assert last.prompt_logprobs == [None] * 6 + answer.prompt_logprobs[6:]
    assert last.topk_prompt_logprobs == [None] * 6 + answer.topk_prompt_logprobs[6:]


def test_any_tokens_have_their_log_probabilities_in_a_prompts_places(service: Running) -> None:
    client = service.training_client()
    done(client.forward_backward([datum(9, 4)], "cross_entropy"))
    done(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    sampler, ids = done(client.save_weights_and_get_sampling_client()), list(b"cab ride")
    wanted = {(0, 0): 97, (3, 1): 200, (6, 0): 101, (6, 1): 7}
    expected = {key: trained_logprobs(client, [*ids[: key[0] + 1], token])[-1] for key, token in wanted.items()}

    def answered(target: types.TensorData) -> Any:
        asked: Any = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1)}
        prompt = types.ModelInput.from_ints(ids)
        answer = done(sampler.sample(prompt, target_prompt_logprobs=target, **asked))
        return answer.target_prompt_logprobs

    for width, sparse in ((2, False), (40, True)):
        asked, right = torch.full((7, width), -1), torch.zeros((7, width))
        for key, token in wanted.items():
            asked[key], right[key] = token, float(expected[key])
        target = types.TensorData.from_torch_sparse(asked, pad_value=-1)
        found = answered(target)
        assert (found.sparse_col_indices is not None) == sparse
        assert found.sparse_col_indices == target.sparse_col_indices
        torch.testing.assert_close(found.to_torch(), right, atol=1e-4, rtol=0)
    for wrong, named in ((asked[1:], r"expected \[7, K\]"), (torch.full((7, 1), 10**6), "1000000")):
        with pytest.raises(tinker.RequestFailedError, match=named):
            answered(types.TensorData.from_torch(wrong))


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": [999]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_servers_do_not_sample_is_refused_on_that_future_alone(
    service: Running, params: dict[str, Any], named: str
) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    with pytest.raises(tinker.RequestFailedError, match=named):
        sampled(base, **params)
    assert sampled(base)


def test_fields_that_are_not_served_are_refused_by_name(service: Running) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    asked = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1)}
    for field in ({"prompt_alt_tokens_k": 2}, {"topk_sample_logprobs": 21}):
        with pytest.raises(tinker.TinkerError, match=next(iter(field))):
            done(base.sample(types.ModelInput.from_ints(PROMPT), **asked, **field))


def test_a_request_for_samples_that_is_cancelled_ends(service: Running) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    asked = {"num_samples": 64, "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}}
    asked |= {"sampling_session_id": base._sampling_session_id, "seq_id": 7, "sampling_params": {"stop": []}}
    future = service.post("asample", json=asked).json()
    assert len(future["sample_sequence_ids"]) == 64
    assert service.post("cancel_future", json=future, tenant="other").status_code == 404
    assert service.post("cancel_future", json=future).status_code == 200
    assert "cancelled" in service.post("retrieve_future", json=future).json()["error"]
    target = {"sampling_session_id": base._sampling_session_id, "cloned_sampler_id": 0}
    ends = service.post("retrieve_futures", json={"target": target}).json()
    assert ends["completions"] == [{"state": "failed", "request_id": future["request_id"]}]
    later = service.post(
        "retrieve_futures", json={"target": target, "prev_cursor": ends["cursor"], "timeout": 0}
    ).json()
    assert later == {"completions": [], "cursor": ends["cursor"]}


def test_copies_of_a_sampling_client_count_for_themselves(service: Running) -> None:
    base = done(service.client().create_sampling_client(base_model=service.model))
    handle = base.get_sampler_handle()
    copies = [tinker.SamplingClient.from_sampler_handle(handle, api_key=service.about["api_key"]) for _ in range(2)]
    tokens = [[one.tokens for one in sampled(client, n=2)] for client in (base, *copies)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert sorted(copy._cloned_sampler_id for copy in copies) == [1, 2]


def test_a_training_checkpoint_can_be_sampled_from(service: Running) -> None:
    ids = list(b"cab ride")
    client = service.training_client(rank=8)
    stepped(client, 5)
    path, expected = done(client.save_state("state")).path, trained_logprobs(client, ids)
    stepped(client, 6)
    made = newest_version(service)
    for _ in range(2):
        sampler = done(service.client().create_sampling_client(model_path=path))
        np.testing.assert_allclose(served_logprobs(sampler, ids), expected, atol=1e-4)
    assert newest_version(service) == made + 1
    rest = service.client().create_rest_client()
    assert [one.tinker_path for one in done(rest.list_checkpoints(client.model_id)).checkpoints] == [path]
    done(client.save_state("state", overwrite=True))
    sampler = done(service.client().create_sampling_client(model_path=path))
    np.testing.assert_allclose(served_logprobs(sampler, ids), trained_logprobs(client, ids), atol=1e-4)
    with pytest.raises(tinker.NotFoundError):
        done(service.client("other").create_sampling_client(model_path=path))


def test_while_one_saves_others_are_answered(service: Running) -> None:
    """More snapshots are made than the server holds; the one that somebody samples from stays."""
    theirs = service.training_client("other")
    sampler = done(theirs.save_weights_and_get_sampling_client())
    answers: list[tuple[float, float]] = []
    ending = threading.Event()

    def sample() -> None:
        while not ending.is_set():
            began_s = time.monotonic()
            sampled(sampler, max_tokens=2, seed=None)
            answers.append((began_s, time.monotonic()))

    client, num_saves, num_met = service.training_client(rank=8), 0, 0
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        while (num_saves < 6 or num_met < 3) and num_saves < 40:
            stepped(client, num_saves)
            began_s = time.monotonic()
            done(client.save_weights_and_get_sampling_client())
            ended_s, num_saves = time.monotonic(), num_saves + 1
            num_met += any(began_s < first and last < ended_s for first, last in list(answers))
        ending.set()
        sampling.result()
    assert num_met >= 3, f"of {num_saves} saves {num_met} met an answer from its beginning to its end"


def test_inflight_clients_have_the_newest_weights_that_were_saved_so(service: Running) -> None:
    client = service.training_client()
    stepped(client, 1)
    first = done(client.save_weights_and_get_sampling_client(kind="inflight"))
    snapshot = done(client.save_weights_and_get_sampling_client())
    ids = list(PROMPT * 3)
    before = trained_logprobs(client, ids)
    assert np.allclose(served_logprobs(first, ids), before, atol=1e-3)
    stepped(client, 2)
    after = trained_logprobs(client, ids)
    assert not np.allclose(before, after, atol=1e-2)
    assert np.allclose(served_logprobs(first, ids), before, atol=1e-3), "what is not saved is not sampled from"
    second = done(client.save_weights_and_get_sampling_client(kind="inflight"))
    for sampler, expected in ((first, after), (second, after), (snapshot, before)):
        assert np.allclose(served_logprobs(sampler, ids), expected, atol=1e-3)


def test_a_snapshot_is_its_tenants_alone(service: Running) -> None:
    client = service.training_client()
    path = done(client.save_weights_for_sampler("mine")).path
    with pytest.raises(tinker.NotFoundError):
        done(service.client("other").create_sampling_client(model_path=path))


# --- scripts as people run them, with other clients and those of docs/service.md ---


def run_script(service: Running, folder: Path, *words: str, **variables: str) -> str:
    about = service.about
    where = {"TINKER_BASE_URL": about["base_url"], "TINKER_API_KEY": about["api_key"], **variables}
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | where, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def output(service: Running, folder: Path, name: str, *words: str) -> str:
    (folder / name).write_text(PAGE.files[name].replace("Qwen/Qwen3-0.6B", str(MODEL)))
    return run_script(service, folder, name, *words)


@pytest.mark.parametrize("version", ["0.35.0", "0.36.0"])
def test_earlier_clients_are_told_what_the_newest_is(service: Running, tmp_path: Path, version: str) -> None:
    package = Path(sys.prefix, f"tinker-{version}")
    if not package.is_dir():
        pytest.skip(f"needs tinker {version} in {package}, where `make` installs it")
    script = Path(versions.__file__)
    found = json.loads(run_script(service, tmp_path, str(script), service.model, PYTHONPATH=str(package)))
    assert found.pop("version") == version
    # Tuples are lists, as in what the script writes.
    assert found == json.loads(json.dumps(versions.told(service.client(), service.model)))


def test_the_first_script_learns_and_samples(service: Running, tmp_path: Path) -> None:
    told = output(service, tmp_path, "first.py")
    losses = [float(line.split()[0]) for line in told.splitlines() if re.match(r"[\d.]+ ", line)]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    assert told.count("stop_reason") == 4


def test_the_loop_trains_on_what_it_samples(service: Running, tmp_path: Path) -> None:
    """That such loops raise their rewards is below and in test_recipes.py."""
    told = output(service, tmp_path, "sums.py", str(MODEL), "2")
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", told)]
    assert len(rewards) == 2
    assert "tinker://" in told


def trained_sample(one: Any, advantage: float) -> types.Datum:
    """The datum that trains an answer to the prompt."""
    ids, before = PROMPT + list(one.tokens), len(PROMPT) - 1
    inputs = {
        "target_tokens": np.array(ids[1:]),
        "logprobs": np.array([0.0] * before + list(one.logprobs), np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(one.tokens), np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def proofs_of(service: Running, client: Any, *, steps: int) -> Any:
    """What is proved of a model, as soon as the recorder, which the loop does not wait for, has written its steps."""
    session, number = client.model_id.split(":train:")
    folder = service.folder / "models" / f"default-{session[:8]}-{number}"
    lines = folder / "metrics.jsonl"
    until(lambda: lines.exists() and lines.read_text().count("\n") >= steps)
    return prove(folder)


def test_an_answer_that_two_models_have_given_is_proved_for_each(service: Running) -> None:
    """Before they learn they are one model, and say the same."""
    clients = [service.training_client() for _ in range(2)]
    samplers = [done(client.save_weights_and_get_sampling_client()) for client in clients]
    answers = [sampled(sampler, max_tokens=2)[0] for sampler in samplers]
    assert answers[0].tokens == answers[1].tokens
    for client, answer in zip(clients, answers, strict=True):
        forward = client.forward_backward([trained_sample(answer, 1.0)], "importance_sampling")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        done(forward), done(step)
        [tokens] = [part for part in proofs_of(service, client, steps=1).parts if part.name == "tokens"]
        assert tokens.facts["proved_at_lag_0"] == len(answer.tokens)


# --- what ends ---


def test_importance_sampling_raises_the_reward_and_survives_kill_9(service: Running) -> None:
    """The reward is the share of the letters a to h. Killed with the second half of the steps to go; the servers are
    other programs, and go on."""

    def reward(tokens: list[int]) -> float:
        return sum(ord("a") <= token <= ord("h") for token in tokens) / 8

    def rollouts(client: Any) -> tuple[list[types.Datum], float]:
        sampler = done(client.save_weights_and_get_sampling_client())
        sequences = sampled(sampler, n=32, seed=None)
        rewards = np.array([reward(one.tokens) for one in sequences])
        advantages = rewards - rewards.mean()
        data = [trained_sample(one, advantage) for one, advantage in zip(sequences, advantages, strict=True)]
        return data, float(rewards.mean())

    curve, client = [], service.training_client(rank=8)
    for number in range(12):
        if number == 6:
            service.end(signal.SIGKILL)
            service.start()
        data, mean = rollouts(client)
        curve.append(mean)
        forward = client.forward_backward(data, "importance_sampling")
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        done(forward), done(step)
    assert np.mean(curve[-2:]) > curve[0] + 0.1, curve
    page = proofs_of(service, client, steps=12)
    parts = {part.name: part for part in page.parts}
    assert page.broken == []
    assert parts["datums"].facts["states"] == {"trained": 12 * 32}
    assert parts["gradients"].facts["steps"] == 12
    assert parts["tokens"].facts["proved_at_lag_0"] == parts["tokens"].facts["trained"] > 0
    assert len(parts["versions"].facts["proved"]) == 12


def test_of_two_servers_one_is_killed_and_comes_back(service: Running, servers: Servers) -> None:
    first, second = servers.first, servers.second

    def live(url: str) -> Any:
        return httpx.get(f"{url}/policy/info", headers={"Authorization": "Bearer secret"}, timeout=60).json()["live"]

    def left_out() -> str:
        return json.loads((service.folder / "status" / "service.json").read_text())["message"] or ""

    client = service.training_client(rank=8)
    stepped(client, 1)
    sampler = done(client.save_weights_and_get_sampling_client())
    version = str(newest_version(service))
    assert all(version in live(one.url) for one in (first, second))
    params = types.SamplingParams(max_tokens=100)
    asked = [sampler.sample(types.ModelInput.from_ints(PROMPT), 2, params) for _ in range(24)]
    first.process.kill()
    assert all(len(done(one).sequences) == 2 for one in asked)
    until(lambda: first.url in left_out())
    stepped(client, 2)
    sampler = done(client.save_weights_and_get_sampling_client())
    ids = PROMPT + list(sampled(sampler)[0].tokens)
    assert np.allclose(served_logprobs(sampler, ids), trained_logprobs(client, ids), atol=1e-3)
    with servers.first_again() as again:
        until(lambda: not left_out())
        assert not live(again.url)
        done(sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params))
        until(lambda: live(again.url))
