"""`grpo canary`'s judgement of one way to ask, with the embedded model's own numbers in the server's place."""

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpo.transport.errors import UserError
from grpo.transport.run import create_run

from grpo.commands.canary import Answer, Reference, Route, add_arguments, main, verdict
from tests.infer.published import Publisher

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    publisher = Publisher(run=create_run(folder / "run"), model_dir=MODEL)
    for file, content in publisher.files(version=1, seed=1, scale=0.1).items():
        (folder / file).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def reference(adapter: Path) -> Reference:
    return Reference(adapter, str(MODEL), dtype="float32")


def sampled(reference: Reference, seed: int, *, by_adapter: bool) -> Answer:
    """An answer that is sampled by the adapter or by the base, with the adapter's log-probabilities in any case."""
    draws, ids, logprobs = np.random.default_rng(seed), [40, 41, 42], list[float]()
    for _ in range(24):
        probs = np.exp(reference.distributions([*ids, 0], with_adapter=by_adapter)[-1])
        token = int(draws.choice(len(probs), p=probs / probs.sum()))
        logprobs.append(float(reference.distributions([*ids, 0], with_adapter=True)[-1, token]))
        ids.append(token)
    return Answer(token_ids=ids, logprobs=np.array(logprobs), sampled=True)


@pytest.mark.parametrize("by_adapter", [True, False])
def test_a_server_that_tells_the_adapters_numbers_and_samples_from_the_base_is_seen(
    reference: Reference, by_adapter: bool
) -> None:
    def base(_: str, ids: list[int], *, seed: int | None) -> Answer:
        found = reference.distributions(ids, with_adapter=False)
        return Answer(token_ids=ids, logprobs=found[np.arange(len(ids) - 1), ids[1:]], sampled=False)

    server: Any = SimpleNamespace(url="here", base="base", completion=base)
    route = Route(name="sampled", ask=lambda _, index: sampled(reference, index, by_adapter=by_adapter))
    found = verdict(route, server, reference, "policy", floor=1e-3)
    assert found.to_adapter < 1e-5
    assert (found.problem is None) == by_adapter, found


def test_an_answer_without_what_is_compared_is_told(reference: Reference) -> None:
    def ask(*_: Any) -> Answer:
        raise KeyError("prompt_token_ids")

    server: Any = SimpleNamespace(url="here", base="base")
    with pytest.raises(UserError, match="prompt_token_ids"):
        verdict(Route(name="chat, scored", ask=ask), server, reference, "policy", floor=1e-3)


# --- SGLang's own route, by its documented shape ---


class _Sglang(BaseHTTPRequestHandler):
    """GET /v1/models and POST /generate, as SGLang documents them: log-probabilities are [value, token id, text], that
    of the first input token is null, and an adapter is asked for by `lora_path`."""

    reference: Reference
    applies: bool
    """Whether an adapter that is asked for is applied."""

    def do_GET(self) -> None:
        cards = [{"id": "base", "owned_by": "sglang", "root": "base", "parent": None}]
        self._answer({"data": [*cards, {"id": "mine", "owned_by": "sglang", "root": "x", "parent": "base"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, sampling = body["input_ids"], body["sampling_params"]
        assert (self.path, body["return_logprob"], body["logprob_start_len"]) == ("/generate", True, 0)
        by_adapter = self.applies and body.get("lora_path") == "mine"
        found = self.reference.distributions([*ids, 0], with_adapter=by_adapter)
        scored = [[None, ids[0], None], *([found[n, id], id, None] for n, id in enumerate(ids[1:]))]
        made, draws = [], np.random.default_rng(len(ids) + sum(ids))
        for _ in range(sampling["max_new_tokens"]):
            probs = np.exp(self.reference.distributions([*ids, 0], with_adapter=by_adapter)[-1])
            token = int(draws.choice(len(probs), p=probs / probs.sum()))
            made.append([float(np.log(probs[token])), token, None])
            ids = [*ids, token]
        self._answer({"text": "", "meta_info": {"input_token_logprobs": scored, "output_token_logprobs": made}})

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def sglang(reference: Reference, *, applies: bool) -> Iterator[str]:
    handler = type("Handler", (_Sglang,), {"reference": reference, "applies": applies})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("applies", "code", "says"), [(True, 0, "serves"), (False, 1, "the adapter is not applied")])
def test_an_sglang_server_is_judged_by_its_own_route(
    reference: Reference, adapter: Path, capsys: pytest.CaptureFixture[str], applies: bool, code: int, says: str
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with sglang(reference, applies=applies) as url:
        assert main(parser.parse_args([url, "--adapter", str(adapter), "--base", str(MODEL)])) == code
    *_, last = capsys.readouterr().out.splitlines()
    assert says in last
