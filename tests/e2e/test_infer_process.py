"""The real server as a process that ends before it serves, and that it leaves nothing behind.

How one that serves ends: by SIGTERM in `running`, by `kill -9` in test_two_servers.py; how one ends that is killed or
interrupted while it starts: tests/chaos.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from grpo.transport.errors import START_AGAIN
from grpo.transport.ports import free_port

from tests.infer.server_process import children_of, start
from tests.support import END_S, until, until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.chaos]

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Kills at the end what still runs."""
    with ExitStack() as stack:
        yield stack


def children_with_engine(process: subprocess.Popen[bytes]) -> list[int]:
    """A server's children as soon as its engine's process is among them."""
    until(lambda: any(map(is_engine, children_of(process.pid))), process)
    return children_of(process.pid)


def is_engine(pid: int) -> bool:
    """Whether a server's child is its engine: it has the name that vLLM gives it, or, forked, the server's own words
    for longer than a program that is about to be started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(pid)
        server, words, age_s = child.parent(), child.cmdline(), time.time() - child.create_time()
        forked = server is not None and words == server.cmdline() and age_s > 0.3
        return forked or "EngineCore" in " ".join(words)
    return False


def test_a_server_that_loses_its_engine_or_cannot_make_one_ends_soon_and_leaves_no_process(
    tmp_path: Path, stack: ExitStack
) -> None:
    """At once, as each waits for imports: one loses its engine while that starts, and one has settings that vLLM cannot
    honour."""

    def launch(name: str, **more: object) -> subprocess.Popen[bytes]:
        arguments = {"model": MODEL, "output_dir": tmp_path / name, "port": free_port(), **more}
        process = start(arguments, log=tmp_path / f"{name}.log", environment={})
        stack.callback(process.kill)
        return process

    without_engine, refused = launch("without_engine"), launch("refused", vllm='{"kv_cache_memory_bytes": 1000}')
    # Both are known before one is killed: the other may end meanwhile.
    pids, children = children_with_engine(refused), children_with_engine(without_engine)
    time.sleep(0.2)  # vLLM then waits for its handshake, and looks before the kernel has the exit code
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert without_engine.wait(END_S) == START_AGAIN
    assert refused.wait(END_S) == 1
    assert (tmp_path / "refused.log").read_text().splitlines()[-1].startswith("error: ")
    until_gone(pids)
