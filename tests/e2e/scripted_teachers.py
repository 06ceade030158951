"""The scripted teachers in a process of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import yaml
from grpo.transport.ports import free_port

from tests.e2e.runs import ROOT
from tests.support import until


@contextmanager
def scripted_teachers(preset: str) -> Iterator[list[str]]:
    """Options of `grpo` by which the preset's teachers are asked at a server that runs meanwhile."""
    named = yaml.safe_load((ROOT / "configs" / preset / "run.yaml").read_text())["orch"]["preferences"]["teachers"]
    address = f"http://127.0.0.1:{(port := free_port())}/v1"
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo.configs.preferences.teachers", "--port", str(port)], cwd=ROOT
    )
    try:
        until(lambda: _is_up(address), process)
        teachers = [{**teacher, "base_url": address} for teacher in named]
        yield ["--orch.preferences.teachers", json.dumps(teachers)]
    finally:
        process.terminate()
        process.wait()


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/models", timeout=1).status_code == 200
    except httpx.TransportError:
        return False
