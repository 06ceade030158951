"""The warnings of a run: what its programs report stays in the run's folder, for all who look at it."""

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from grpo.transport.folders import write_atomic
from grpo.transport.logs import printable
from grpo.transport.run import RUN_FILE

WARNINGS_FOLDER = "warnings"
"""In the run's folder: a file for each program that has warned."""
MAX_KINDS = 50
"""Warnings of different kinds that are kept of one program."""
MAX_CHARS = 1000
"""Longest text of a warning that is kept."""
_WRITE_S = 0.5


class RunWarning(msgspec.Struct, frozen=True, kw_only=True):
    """A warning as it came first. Example: ``RunWarning(program="grpo-orch", kind="…", message="in 100 % of the groups
    of batch 1 all rewards are equal, …", step=1, times=3)``"""

    program: str
    kind: str
    """The message without its figures, which warnings of one kind share."""
    message: str
    step: int | None
    """The step that the program was at when it came first."""
    times: int


def run_warnings(folder: Path) -> list[RunWarning]:
    """Returns the warnings of all programs of the run in `folder`, those of the first step first."""
    found: list[RunWarning] = []
    for path in sorted((folder / WARNINGS_FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
            found += msgspec.json.decode(path.read_bytes(), type=list[RunWarning])
    return sorted(found, key=lambda one: -1 if one.step is None else one.step)


def as_line(warning: RunWarning) -> str:
    """Returns a warning in one line, for people."""
    at = "" if warning.step is None else f", step {warning.step}"
    often = "" if warning.times == 1 else f", {warning.times} times"
    return printable(f"{warning.program}{at}{often}: {warning.message}".replace("\n", " "))


@contextlib.contextmanager
def kept_warnings(
    folder: Path, name: str, *, step: Callable[[], int | None] = lambda: None, program: str | None = None
) -> Iterator[None]:
    """Keeps the warnings and errors of this process's own loggers in the run's folder, each kind once with how often it
    came, beside those of earlier starts. `name` is the file's, without `.json`; `step` returns the step that the
    program is at; `program` is its name, None for `grpo-NAME`."""
    handler = _Keeper(folder, name, step, program or f"grpo-{name}")
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def without_traceback(message: str) -> str:
    """Returns a message with the error of its traceback and where it was raised, for people; the log has all of it."""
    head, _, traceback = message.partition("Traceback (most recent call last):\n")
    before, frame, last = traceback.rpartition('  File "')
    place, *lines = last.splitlines() or [""]
    errors = [*itertools.dropwhile(lambda line: line.startswith(" "), lines)]
    grouped = before.endswith("|")
    return head + "\n".join(errors) + f' ("{place})' if frame and errors and not grouped else message


def _shortened(message: str) -> str:
    """Returns a message with its beginning and its end."""
    return message if len(message) <= MAX_CHARS else f"{message[: MAX_CHARS // 4]} … {message[-3 * MAX_CHARS // 4 :]}"


class _Keeper(logging.Handler):
    def __init__(self, folder: Path, name: str, step: Callable[[], int | None], program: str) -> None:
        super().__init__(logging.WARNING)
        self._folder, self._step, self._program = folder, step, program
        self._path = folder / WARNINGS_FOLDER / f"{name}.json"
        self._next_s, self._written = 0.0, True
        self._kept: dict[str, RunWarning] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
            earlier = msgspec.json.decode(self._path.read_bytes(), type=list[RunWarning])
            self._kept = {one.kind: one for one in earlier}

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] != "grpo":  # other libraries speak of themselves
            return
        try:
            self._keep(printable(_shortened(without_traceback(record.getMessage()))))
        except Exception:  # as logging does: a warning never ends a program
            self.handleError(record)

    def _keep(self, message: str) -> None:
        kind = re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "#", message)
        known = self._kept.get(kind)
        if known is None and len(self._kept) >= MAX_KINDS:
            kind, message = "others", "further warnings of other kinds; the log has them"
            known = self._kept.get(kind)
        if known is None:
            self._kept[kind] = RunWarning(program=self._program, kind=kind, message=message, step=self._step(), times=1)
        else:
            self._kept[kind] = msgspec.structs.replace(known, times=known.times + 1)
        self._written = False
        if known is None or time.monotonic() >= self._next_s:
            self._write()

    def _write(self) -> None:
        if not (self._folder / RUN_FILE).is_file():  # a server may come up before its run is founded
            return
        with contextlib.suppress(OSError):  # a full disk, of which others complain
            self._path.parent.mkdir(exist_ok=True)
            write_atomic(self._path, msgspec.json.encode(list(self._kept.values())), durable=False)
            self._written = True
        self._next_s = time.monotonic() + _WRITE_S

    def close(self) -> None:
        if not self._written:
            self._write()
        super().close()
