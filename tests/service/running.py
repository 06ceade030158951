"""A service as a process, and the stock client's side of it."""

import gc
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import tinker

UP_S = 1200.0


class Running:
    """A service that can be killed and started again by the same command."""

    def __init__(self, folder: Path, model: Path | str, *options: str, cwd: Path | None = None) -> None:
        self.folder, self.model = folder, str(model)
        command = [sys.executable, "-m", "grpo.cli", "service", "--model", self.model, "--output_dir", str(folder)]
        self._command = [*command, "--sequence_len", "128", "--num_threads", "1", "--device", "cpu", *options]
        self._cwd, self._process = cwd, cast("subprocess.Popen[bytes] | None", None)
        self.about: dict[str, Any] = {}
        self._clients: list[tinker.ServiceClient] = []

    def start(self) -> None:
        """Returns once it serves."""
        file, log = self.folder / "service.json", self.folder.with_suffix(".log")
        file.unlink(missing_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, cwd=self._cwd)
        deadline_s = time.monotonic() + UP_S
        while not file.exists():
            assert self._process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline_s, f"not up within {UP_S} s: {log.read_text()[-3000:]}"
            time.sleep(0.05)
        self.about = json.loads(file.read_text())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it, and returns its exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self, tenant: str = "default") -> tinker.ServiceClient:
        client = tinker.ServiceClient(base_url=self.about["base_url"], api_key=self.about["api_keys"][tenant])
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        """Closes the connections of all clients, which would warn in other tests."""
        for client in self._clients:
            with suppress(Exception):
                client.close("success").result(timeout=10)
        self._clients.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def training_client(self, tenant: str = "default", *, rank: int = 4, seed: int = 1, **options: Any) -> Any:
        client = self.client(tenant)
        return done(client.create_lora_training_client(base_model=self.model, rank=rank, seed=seed, **options))

    def post(self, route: str, *, tenant: str | None = "default", **options: Any) -> httpx.Response:
        """A request as no client makes it."""
        headers = options.pop("headers", {})
        if tenant is not None:
            headers |= {"X-API-Key": self.about["api_keys"][tenant]}
        return httpx.post(f"{self.about['base_url']}/api/v1/{route}", headers=headers, timeout=60, **options)


def done(given: Any) -> Any:
    """What newer clients return as a future and older ones at once."""
    return given.result() if hasattr(given, "result") else given


@contextmanager
def running(folder: Path, model: Path | str, *options: str, cwd: Path | None = None) -> Iterator[Running]:
    service = Running(folder, model, *options, cwd=cwd)
    service.start()
    try:
        yield service
    finally:
        if service.is_up():
            service.close_clients()
            service.end()
