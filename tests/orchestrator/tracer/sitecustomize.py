"""Records which of the product's files a rollout crosses, and which records are made on its way.

Python imports this file in each process that has its folder in PYTHONPATH: the orchestrator and its workers. The way
begins where BEGINS says, and goes on in all tasks and callbacks that are started there. Each process appends lines of
JSON to a file of its own in GRPO_WAY: `{"time": 1.5, "file": "orchestrator/buffer.py", "call": "issue"}` and
`{"time": 1.6, "record": "Task"}` for a record.
"""

import contextvars
import functools
import json
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec

ROOT = f"{Path(__file__).parents[3]}/"
PARTS = ("orchestrator/", "transport/", "configs/")
BEGINS = {("orchestrator/scheduler.py", "start"), ("orchestrator/workers/worker.py", "_roll_out")}
is_on_way: contextvars.ContextVar[bool] = contextvars.ContextVar("is_on_way", default=False)


@functools.cache
def lines_of(pid: int) -> IO[str]:
    return Path(os.environ["GRPO_WAY"], f"{pid}.jsonl").open("w", buffering=1)


def write(**what: str) -> None:
    lines_of(os.getpid()).write(json.dumps({"time": time.monotonic(), **what}) + "\n")


def made(kind: type) -> None:
    if is_on_way.get() and kind.__module__.startswith("grpo."):
        write(record=kind.__qualname__)


class Recorded(msgspec.Struct):
    """Stands for `msgspec.Struct`: its classes tell when one of them is made, decoded ones included."""

    def __post_init__(self) -> None:
        made(type(self))


def profile(frame: FrameType, event: str, _: Any) -> None:
    """Sees each call of a Python function."""
    code = frame.f_code
    if event != "call":
        return
    if code.co_filename == "<string>" and code.co_name == "__init__":  # of a dataclass
        made(type(frame.f_locals["self"]))
    elif code.co_filename.startswith(ROOT):
        file, call = code.co_filename.removeprefix(ROOT), code.co_name
        if (file, call) in BEGINS:
            is_on_way.set(True)
        if is_on_way.get() and file.startswith(PARTS):
            write(file=file, call=call)
            if call == "__post_init__":
                made(type(frame.f_locals["self"]))


if "GRPO_WAY" in os.environ:
    msgspec.Struct = Recorded  # type: ignore[misc]
    sys.setprofile(profile)
