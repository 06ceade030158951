"""`grpo view` as a process, and requests to it."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    address: str
    """As printed, with the token."""
    pid: int

    @property
    def port(self) -> int:
        return int(urlsplit(self.address).port or 0)

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def get(self, path: str, *, headers: Mapping[str, str] | None = None, method: str = "GET") -> tuple[int, bytes]:
        """Status and body, with the cookie that the address gives unless other `headers` are given."""
        given = {"Cookie": f"grpo-view-{self.port}={self.token}"} if headers is None else headers
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=dict(given), method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def json(self, path: str) -> Any:
        """The answer of the API."""
        status, body = self.get(f"/api/{path}")
        assert status == 200, body
        return msgspec.json.decode(body)


@contextmanager
def served(*folders: Path) -> Iterator[Served]:
    """The command for these folders, until the block ends."""
    command = [Path(sys.executable).with_name("grpo"), "view", *folders]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Served(process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()
