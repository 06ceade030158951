"""The real `grpo-infer` as a child process, for tests and benchmarks."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from grpo.transport.ports import free_port

from tests.support import END_S, options, until, until_gone

GONE_S = 120.0
"""Long, because the machine may be busy."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    headers: Mapping[str, str]

    def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        """POST as JSON."""
        return httpx.post(self.url + path, json=body, headers=self.headers, timeout=END_S)

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return httpx.get(self.url + path, headers=self.headers, timeout=END_S)

    def answer(self, path: str, **body: object) -> Any:
        """The body of a POST that must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def engine_pids(self) -> list[int]:
        """Processes below the server: vLLM's engine, and multiprocessing's helper."""
        return children_of(self.process.pid)


def children_of(pid: int) -> list[int]:
    """All descendants that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def start(arguments: Mapping[str, object], *, log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """`grpo-infer --key value …` with its output in `log`."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "grpo.infer.cli", *options(arguments)], stdout=file, stderr=file, env=environment
        )


@contextlib.contextmanager
def running(*, log: Path, api_key: str | None = None, **arguments: object) -> Iterator[Server]:
    """A server with these settings on a port of its own, up. Afterwards SIGTERM ends it, and nothing of it is left."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    temporary = Path(tempfile.mkdtemp(prefix="server-"))
    environment = {"VLLM_API_KEY": api_key or "", "TMPDIR": str(temporary)}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    process = start({"port": port, **arguments}, log=log, environment=environment)

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        return False

    try:
        until(answers, process, log=lambda: log.read_text()[-3000:], poll_s=0.1)
        yield Server(url=url, process=process, log=log, headers=headers)
    finally:
        pids = children_of(process.pid)
        if process.poll() is None:
            process.terminate()
            try:
                assert process.wait(GONE_S) == 128 + signal.SIGTERM
            finally:
                process.kill()
            assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
        until_gone(pids)
        shutil.rmtree(temporary)
