"""Programs in sandboxes on this machine: what they get, what comes back, and what ends them."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from grpo.environments.sandbox import local
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import Limits, Result, SandboxMissing

LIMITS = Limits(wall_s=60.0, cpu_s=30.0)


async def test_a_program_reads_its_input_and_its_outputs_and_exit_code_come_back(sandbox: LocalSandbox) -> None:
    program = """
import atexit, sys, threading
print(int(input()) + 1, __name__)
print("careful", file=sys.stderr)
atexit.register(print, "end")
threading.Thread(target=lambda: print("thread")).start()
exit(3)
"""
    result = await sandbox.run(program, stdin=b"41\n", limits=LIMITS)
    assert (result.exit_code, result.limit, result.succeeded) == (3, None, False)
    assert (result.stdout, result.stderr) == (b"42 __main__\nthread\nend\n", b"careful\n")


async def test_no_more_programs_run_at_once_than_asked_for_and_the_wait_is_told_apart(
    needs_bubblewrap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        began = time.monotonic()
        yield
        waits.append(time.monotonic() - began)

    monkeypatch.setattr(local, "waiting", waiting)
    sandbox = LocalSandbox(parallel=1)
    program = "import time\nprint(time.monotonic_ns())\ntime.sleep(0.1)\nprint(time.monotonic_ns())"
    results = await asyncio.gather(*(sandbox.run(program, limits=LIMITS) for _ in range(3)))
    spans = sorted(tuple(map(int, result.stdout.split())) for result in results)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert 0.1 < waits[1] < waits[2]


async def test_a_run_that_is_cancelled_at_any_moment_leaves_no_process_and_frees_its_place(
    needs_bubblewrap: None,
) -> None:
    sandbox = LocalSandbox(parallel=1)
    for moment_s in (0.0, 0.005, 0.02, 0.3):
        run = asyncio.create_task(sandbox.run("import time\ntime.sleep(1000)", limits=Limits(wall_s=1000.0)))
        await asyncio.sleep(moment_s)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # others end while they are listed
                assert child.name() != "bwrap"
    assert (await sandbox.run("print(1)", limits=LIMITS)).stdout == b"1\n"


async def test_without_bubblewrap_nothing_is_run_and_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing):
        await LocalSandbox().run("print(1)")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    with pytest.raises(SandboxMissing, match="max_user_namespaces"):
        await LocalSandbox().run("print(1)")


@pytest.mark.parametrize("limits", [{"memory_bytes": 1024}, {"wall_s": math.nan}, {"cpu_s": -1}, {"wall": 3}])
def test_limits_that_are_none_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)


def test_on_the_workers_event_loop_a_program_ends_when_it_ends(needs_bubblewrap: None) -> None:
    """Two at once, so that each could hold the other's files open."""

    async def both() -> list[Result]:
        sandbox = LocalSandbox(parallel=2)
        return await asyncio.gather(*(sandbox.run(f"print({number})", limits=LIMITS) for number in range(2)))

    assert [(one.stdout, one.limit) for one in uvloop.run(both())] == [(b"0\n", None), (b"1\n", None)]
