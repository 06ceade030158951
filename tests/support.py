"""Helpers of tests of all packages: waiting for a condition, looking at processes, words of a command line."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
END_S = 500.0
"""How long any run, server or step may take: long, since machines may be slow and busy."""


def until(
    reached: Callable[[], T],
    *processes: "subprocess.Popen[Any] | BaseProcess",
    log: Callable[[], object] = str,
    poll_s: float | None = None,
    limit_s: float = END_S,
) -> T:
    """Returns what `reached` returns once that is true. Fails with the log after `limit_s`, or when a process ends.
    Asks again after `poll_s`; by default the later the longer asking takes, so that the cores are for what it waits
    for."""
    deadline_s, asked_s = time.monotonic() + limit_s, time.monotonic()
    while not (found := reached()):
        assert not any(map(_has_ended, processes)), f"a program has ended: {log()}"
        assert time.monotonic() < deadline_s, f"it did not get that far within {limit_s:g} s: {log()}"
        took_s = time.monotonic() - asked_s
        time.sleep(min(max(0.02, 9 * took_s), 1.0) if poll_s is None else poll_s)
        asked_s = time.monotonic()
    return found


def _has_ended(process: "subprocess.Popen[Any] | BaseProcess") -> bool:
    return not process.is_alive() if isinstance(process, BaseProcess) else process.poll() is not None


def runs(pid: int) -> bool:
    """Returns whether there is such a process; a zombie is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def until_gone(pids: Collection[int]) -> None:
    """Returns when none of these processes runs any more."""
    until(lambda: not any(map(runs, pids)), log=lambda: [pid for pid in pids if runs(pid)])


def options(settings: Mapping[str, object]) -> list[str]:
    """Returns settings as words of a command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]
