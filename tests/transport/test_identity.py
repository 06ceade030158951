"""A base model by its name: found, fetched from the hub, identified."""

import json
import os
import subprocess
import sys
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest
from grpo.transport.weights.identity import base_identity, resolve_model

from tests.support import END_S


def test_the_identity_of_a_base_model_follows_configuration_and_weights(tmp_path: Path) -> None:
    def make(name: str, config: dict[str, object], weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(weights)
        return base_identity(resolve_model(str(folder)))

    same = make("a", {"hidden_size": 8, "torch_dtype": "float32"}, b"0" * 9)
    assert same == make("b", {"torch_dtype": "bfloat16", "hidden_size": 8}, b"0" * 9)
    assert same != make("c", {"hidden_size": 9}, b"0" * 9)
    assert same != make("d", {"hidden_size": 8}, b"0" * 8 + b"1")


def test_a_missing_model_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="none"):
        resolve_model(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        resolve_model("nobody/nothing")


class Hub(BaseHTTPRequestHandler):
    """The hub's routes for one repository, `someone/tiny`, whose files are names; notes which of them are fetched."""

    commit: ClassVar = "0123456789abcdef0123456789abcdef01234567"
    files: ClassVar[dict[str, bytes]] = {}
    fetched: ClassVar[set[str]] = set()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, own = unquote(self.path.partition("?")[0]), f"/someone/tiny/resolve/{self.commit}/"
        if path.startswith("/api/models/someone/tiny/tree/"):
            body = [
                {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self._send(json.dumps(body).encode())
        elif path.startswith("/api/models/someone/tiny"):
            self._send(json.dumps({"id": "someone/tiny", "sha": self.commit, "siblings": []}).encode())
        elif path.startswith(own) and (name := path.removeprefix(own)) in self.files:
            if self.command == "GET":
                self.fetched.add(name)
            self._send(self.files[name])
        else:
            self.send_error(404)

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        for key, value in {"ETag": f'"{sha1(data).hexdigest()}"', "X-Repo-Commit": self.commit}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


NEEDED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model", "additional_chat_templates/tool_use.jinja"),
)
NOT_NEEDED = (
    *("consolidated.safetensors", "consolidated.00.pth", "original/params.json", "original/consolidated.00.pth"),
    *("original/tokenizer.model", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json", "model-q4.gguf"),
    *("README.md", "figures/curve.png", ".gitattributes", "model.fp16.safetensors", "tf_model.h5"),
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("weights", [("model.safetensors",), SHARDS], ids=["one file", "shards"])
def test_of_a_model_of_the_hub_the_files_that_are_needed_are_fetched(tmp_path: Path, weights: tuple[str, ...]) -> None:
    files = {name: name.encode() for name in (*NEEDED, *NOT_NEEDED, *weights)} | {"config.json": b"{}"}
    if len(weights) > 1:
        shards = {f"layer.{number}": shard for number, shard in enumerate(weights)}
        files |= {INDEX: json.dumps({"weight_map": shards}).encode(), "model.safetensors": b"the same once more"}
    code = "from grpo.transport.weights.identity import resolve_model; print(resolve_model('someone/tiny'))"
    fetched: set[str] = set()
    hub = type("ThisHub", (Hub,), {"files": files, "fetched": fetched})
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

        def resolved(**more: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", code], env=environment | more, capture_output=True, text=True, timeout=END_S
            )

        first = resolved()
        assert first.returncode == 0, first.stderr
        folder = Path(first.stdout.strip())
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        assert there == fetched == {*NEEDED, *weights} | ({INDEX} if len(weights) > 1 else set())
        fetched.clear()
        assert resolved(HF_HUB_OFFLINE="1").stdout == first.stdout
        (folder / weights[-1]).unlink()
        missing = resolved(HF_HUB_OFFLINE="1")
        assert missing.returncode
        assert "FileNotFoundError" in missing.stderr
        assert not fetched
        assert resolved().stdout == first.stdout
        assert (folder / weights[-1]).exists()
        server.shutdown()
