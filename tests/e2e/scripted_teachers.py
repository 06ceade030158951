"""The scripted teachers in a process of their own."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.infer.server_process import free_port

START_S = 30.0


@contextmanager
def scripted_teachers() -> Iterator[str]:
    """The address of the server, in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "configs.preferences.teachers", "--port", str(port)])
    address, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + START_S
    try:
        while not _is_up(address):
            assert process.poll() is None, "the teachers have ended"
            assert time.monotonic() < deadline, f"no teachers at {address} after {START_S:g} s"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/models", timeout=1).status_code == 200
    except httpx.TransportError:
        return False
