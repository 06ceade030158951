"""Exported versions: what transformers and PEFT load is what was trained, or nothing appears."""

import base64
import json
import shutil
import traceback
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
import torch
from grpo.transport.records import Canary
from grpo.transport.run import create_run, join_run
from grpo.transport.weights.identity import base_identity
from grpo.transport.weights.shards import Weight
from grpo.transport.weights.store import ADAPTER_FILE, CANARY_FILE, PolicyPublisher
from msgspec import structs
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.commands.chat import side_by_side
from grpo.commands.export import PEFT_PREFIX, export, push
from grpo.policy_version import CannotExport, open_version
from tests.grpo.run_folder import grpo
from tests.infer.published import CANARY_IDS, Publisher, logprobs_of, reference

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Publisher:
    """A run with version 3, an adapter that changes much, and version 4, whose canary is another policy's."""
    run = create_run(tmp_path_factory.mktemp("export") / "run")
    orch = {"env": [{"id": "reverse-text"}], "batch_size": 256, "sampling": {"temperature": 1.0}}
    join_run(run.path, role="orch", record={"settings": orch}, timeout_s=1)
    train = {"model": str(MODEL), "learning_rate": 1e-3}
    join_run(run.path, role="train", record={"settings": train}, timeout_s=1)
    lines = [{"progress/step": step, "reward/mean": step / 10} for step in range(1, 5)]
    lines.append({"progress/step": 3, "eval/accuracy/reverse-text": 0.75, "eval/failed": 0.0})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    publisher = Publisher(run=run, model_dir=MODEL)
    files = publisher.files(version=3, seed=1)
    publisher.publish(3, files)
    canary = Canary.from_json(files[CANARY_FILE])
    wrong = structs.replace(canary, version=4, logprobs=tuple(one - 0.01 for one in canary.logprobs))
    publisher.publish(4, files | {CANARY_FILE: wrong.to_json()})
    return publisher


def trained(published: Publisher) -> Canary:
    return Canary.from_json((published.run.broadcasts / "step_000003" / CANARY_FILE).read_bytes())


def largest(left: Any, right: Any) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


def test_an_adapter_is_loaded_by_peft_with_its_tokenizer_and_says_what_it_is(
    published: Publisher, tmp_path: Path
) -> None:
    folder = export(open_version(published.run.path, 3), output=tmp_path / "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert largest(logprobs_of(model, CANARY_IDS), trained(published).logprobs) < 1e-4
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "ab"}])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\n")
    for line in ("| 3 | 0.300 |", "| learning_rate | 0.001 |", "| 3 | 0.750 |"):
        assert line in card
    assert "0.400" not in card, "what came after the version"
    page = json.loads((folder / "proof.json").read_text())
    assert page["run_id"] == published.run.run_id
    assert page["verdict"] in card


def test_a_tokenizers_other_chat_templates_are_exported_too(tmp_path: Path) -> None:
    model, run = tmp_path / "model", create_run(tmp_path / "run")
    shutil.copytree(MODEL, model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ messages[0].content }}")
    join_run(run.path, role="orch", record={"settings": {"env": [{"id": "a"}], "batch_size": 8}}, timeout_s=1)
    join_run(run.path, role="train", record={"settings": {"model": str(model)}}, timeout_s=1)
    publisher = Publisher(run=run, model_dir=model)
    publisher.publish(1, publisher.files(version=1, seed=1))
    tokenizer = AutoTokenizer.from_pretrained(export(open_version(run.path, 1), output=tmp_path / "adapter"))
    question = [{"role": "user", "content": "2 + 3?"}]
    assert tokenizer.apply_chat_template(question, chat_template="tool_use", tokenize=False) == "2 + 3?"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_merged_model_is_loaded_by_transformers(published: Publisher, tmp_path: Path, dtype: str | None) -> None:
    folder = export(open_version(published.run.path, 3), kind="merged", dtype=dtype, output=tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == (torch.float32 if dtype is None else torch.bfloat16)
    assert largest(logprobs_of(model, CANARY_IDS), trained(published).logprobs) < (1e-4 if dtype is None else 0.5)
    peft = reference(MODEL, published.run.broadcasts / "step_000003").merge_and_unload()
    name = "model.layers.1.mlp.down_proj.weight"
    atol = 1e-6 if dtype is None else 0.01
    torch.testing.assert_close(model.get_parameter(name).float(), peft.get_parameter(name), atol=atol, rtol=0)
    assert (folder / "chat_template.jinja").read_bytes() == (MODEL / "chat_template.jinja").read_bytes()


def test_of_several_adapters_the_named_one_is_merged(published: Publisher, tmp_path: Path) -> None:
    solver, proposer = published.files(version=6, seed=1), published.files(version=6, seed=2)
    files = solver | {f"adapters/proposer/{name}": data for name, data in proposer.items()}
    spec = structs.replace(published.spec(), adapters=("solver", "proposer"))
    published.publish(6, files, spec)
    for name, of in ((None, solver), ("solver", solver), ("proposer", proposer)):
        version = open_version(published.run.path, 6, lora=name)
        folder = export(version, kind="merged", output=tmp_path / f"merged-{name}")
        logprobs = logprobs_of(AutoModelForCausalLM.from_pretrained(folder), CANARY_IDS)
        assert largest(logprobs, Canary.from_json(of[CANARY_FILE]).logprobs) < 1e-4
    shutil.rmtree(published.run.broadcasts / "step_000006")


def test_an_adapter_of_a_layer_that_the_base_lacks_is_not_merged(published: Publisher, tmp_path: Path) -> None:
    files = published.files(version=3, seed=1)
    layer = f"{PEFT_PREFIX}model.layers.99.mlp.down_proj"
    more = {f"{layer}.lora_A.weight": torch.zeros(8, 4), f"{layer}.lora_B.weight": torch.zeros(4, 8)}
    version = open_version(published.run.path, 3)
    adapter = save(load(files[ADAPTER_FILE]) | more)
    with pytest.raises(CannotExport, match=r"layers\.99"):
        export(replace(version, files=files | {ADAPTER_FILE: adapter}), kind="merged", output=tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_no_adapter_are_exported_whole(published: Publisher, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.1
    named = model.named_parameters()
    weights = [Weight(name=name, dtype="float32", shape=tuple(p.shape), tensor=p.detach) for name, p in named]
    logprobs = tuple(logprobs_of(model, CANARY_IDS))
    canary = structs.replace(trained(published), version=5, logprobs=logprobs)
    spec = structs.replace(published.spec(), kind="full", rank=0, alpha=0, target_modules=())
    publisher = PolicyPublisher(published.run.broadcasts, run_id=published.run.run_id)
    publisher.publish(version=5, spec=spec, files={CANARY_FILE: canary.to_json()}, weights=weights)
    folder = export(open_version(published.run.path, 5), output=tmp_path / "full")
    assert largest(logprobs_of(AutoModelForCausalLM.from_pretrained(folder), CANARY_IDS), logprobs) < 1e-5
    with pytest.raises(CannotExport, match="--merged"):
        export(open_version(published.run.path, 5), kind="adapter", output=tmp_path / "other")


def test_what_does_not_agree_with_the_canary_does_not_appear(published: Publisher, tmp_path: Path) -> None:
    done = grpo("export", published.run.path, "--step", "4", "--output", tmp_path / "wrong")
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert "canary" in done.stderr


def test_a_version_that_is_not_there_and_a_folder_that_is_are_refused(published: Publisher, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=r"\[3, 4"):
        open_version(published.run.path, 7)
    with pytest.raises(CannotExport, match="tmp"):
        export(open_version(published.run.path, 3), output=tmp_path)
    with pytest.raises(CannotExport, match="judge"):
        open_version(published.run.path, 3, lora="judge")


def test_a_quantized_base_is_the_one_whose_values_lie_beside_the_run(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    join_run(run.path, role="train", record={"settings": {"model": str(MODEL)}}, timeout_s=1)
    publisher = Publisher(run=run, model_dir=MODEL)
    spec = structs.replace(publisher.spec(), quantization="nf4")
    publisher.publish(0, publisher.files(version=0, seed=1), spec)
    assert open_version(run.path, None).base == run.path / "dequantized"
    assert spec.base_model == base_identity(MODEL)


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks to upload a folder of small files."""

    said: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        address = f"http://127.0.0.1:{self.server.server_address[1]}/me/a"
        self.said.append((self.path, body := self._body()))
        answer: dict[str, Any] = {"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1"}
        if "preupload" in self.path:
            told = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": one["path"], **told} for one in json.loads(body)["files"]]}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({})

    def _body(self) -> bytes:
        if (length := self.headers.get("Content-Length")) is not None:
            return self.rfile.read(int(length))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _answer(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_an_export_is_pushed_to_a_private_repository(
    published: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["export", str(published.run.path), "--step", "3", "--push-to", "me/a"]
    monkeypatch.setenv("HF_TOKEN", "hf_a")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        done = grpo(*words, "--output", str(tmp_path / "a"))
        assert done.stdout.splitlines() == [str(tmp_path / "a"), f"{endpoint}/me/a"]
        server.shutdown()
    said = dict(Hub.said)
    assert json.loads(said["/api/repos/create"]) == {"name": "a", "organization": "me", "visibility": "private"}
    commits = [body for path, body in Hub.said if path == "/api/models/me/a/commit/main"]
    values = [json.loads(line)["value"] for body in commits for line in body.splitlines()]
    pushed = {value["path"]: base64.b64decode(value["content"]) for value in values if "path" in value}
    assert set(pushed) == {path.name for path in (tmp_path / "a").iterdir()}
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == "model"
    assert not any(str(MODEL.parent).encode() in content for content in pushed.values())
    done = grpo(*words, "--output", str(tmp_path / "b"))  # nobody answers there any more
    assert done.returncode == 1
    assert str(tmp_path / "b") in done.stderr


class Echo(Hub):
    """A hub that refuses, and repeats what it was asked with."""

    def do_POST(self) -> None:
        self._body()
        told = f"no, {self.headers['Authorization']}"
        self.send_response(400, told)
        self.send_header("X-Error-Message", told)
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_a_hub_that_repeats_the_token_does_not_bring_it_onto_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(CannotExport) as caught:
            push(tmp_path, "me/a")
        server.shutdown()
    assert "Bearer" in str(caught.value)
    assert "hf_a_secret" not in "".join(traceback.format_exception(caught.value))


def test_two_texts_stand_side_by_side() -> None:
    assert side_by_side("abc def", "x\ny", width=15) == "abc    |  x\ndef    |  y"
    assert side_by_side("", "x", width=15) == "       |  x"
