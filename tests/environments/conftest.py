"""Sandboxes for tests. Where this machine cannot make any, tests that need one are skipped and say why."""

import functools
import shutil
import subprocess

import pytest
from grpo.environments.sandbox.local import LocalSandbox


@functools.cache
def why_no_sandbox() -> str | None:
    """Asked of bubblewrap itself, so that a fault of ours fails tests and skips none."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    command = [bubblewrap, "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return f"bubblewrap cannot make a sandbox here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture
def needs_bubblewrap() -> None:
    reason = why_no_sandbox()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def sandbox(needs_bubblewrap: None) -> LocalSandbox:
    return LocalSandbox(parallel=2)
