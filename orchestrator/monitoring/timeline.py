"""`timeline.jsonl`: who did what when, as Chrome trace events on the wall clock, for Perfetto (ui.perfetto.dev).

The file is a list without its end, one event a line, as the format allows: programs may add to it, and be killed. Spans
are kept in memory and written together once a step.
"""

import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.transport.folders import writing

TIMELINE_FILE = "timeline.jsonl"
MIN_BREAK_S = 0.02
"""Shorter breaks between the times in which servers are busy are left out, so that there are few spans."""
ORCHESTRATOR = "grpo-orch"
TRAINER = "grpo-train"
SERVERS = "grpo-infer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one program did for a while.
    Example: ``Span(who="grpo-train", what="train", step=12, start_s=1.5, end_s=2.5)``"""

    who: str
    """A program; `grpo-infer` stands for all servers together, `grpo-infer http://…` for one."""
    what: str
    """generate, busy, load, sleep, pack, ship, evaluate, wait, train or publish."""
    start_s: float
    """Wall clock, seconds since 1970."""
    end_s: float
    """Wall clock, seconds since 1970; not before `start_s`."""
    step: int | None = None
    """The batch, or of loading, publishing and evaluating the policy version; None where it belongs to none."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


class Timeline:
    """Writes the timeline of a run. Only the orchestrator's event loop uses it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's."""
        self._path = folder / TIMELINE_FILE
        self._pending: list[str] = []
        self._lanes: dict[str, int] = {}

    def add(self, who: str, what: str, *, start_s: float, end_s: float, step: int | None = None) -> None:
        """Adds a span that is over. A clock that was set back meanwhile gives one of no length."""
        if who not in self._lanes:
            self._lanes[who] = zlib.crc32(who.encode()) & 0x7FFFFFFF
            self._event({"name": "process_name", "ph": "M", "pid": self._lanes[who], "args": {"name": who}})
        times = {"ts": round(1e6 * start_s), "dur": round(1e6 * max(0.0, end_s - start_s))}
        self._event(
            {"name": what, "ph": "X", **times, "pid": self._lanes[who], "tid": 1, "args": {"who": who, "step": step}}
        )

    def _event(self, event: Mapping[str, Any]) -> None:
        self._pending.append(json.dumps(event) + ",\n")

    @contextmanager
    def span(self, who: str, what: str, *, step: int | None = None) -> Iterator[None]:
        """Adds what is done within it, however it ends."""
        start_s = time.time()
        try:
            yield
        finally:
            self.add(who, what, start_s=start_s, end_s=time.time(), step=step)

    def generated(self, step: int, of_batch_s: tuple[float, float], rollouts_s: Iterable[tuple[float, float]]) -> float:
        """Adds when the rollouts of batch `step` were sampled and scored (`of_batch_s`; batches overlap), and when any
        were since the batch before (`rollouts_s`). Returns the seconds of the latter. The ledger knows both."""
        self.add(SERVERS, "generate", start_s=of_batch_s[0], end_s=of_batch_s[1], step=step)
        busy_s = merged(rollouts_s, min_break_s=MIN_BREAK_S)
        for start_s, end_s in busy_s:
            self.add(SERVERS, "busy", start_s=start_s, end_s=end_s)
        return sum(end_s - start_s for start_s, end_s in busy_s)

    def loading(self, server: str, version: int) -> AbstractContextManager[None]:
        """Adds that a server loads and proves a version within it."""
        return self.span(f"{SERVERS} {server}", "load", step=version)

    def slept(self, server: str, start_s: float, end_s: float, step: int) -> None:
        """Adds that a server has slept while the trainer made `step`."""
        self.add(f"{SERVERS} {server}", "sleep", start_s=start_s, end_s=end_s, step=step)

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what the trainer did in a step, from the metrics that came with its version: each `time/NAME_s` begins
        at `time/NAME_at_s`. Publishing is that of the version before."""
        for name, what, version in (
            ("wait_batch", "wait", step),
            ("train", "train", step),
            ("publish", "publish", step - 1),
        ):
            start_s, seconds = metrics.get(f"time/{name}_at_s"), metrics.get(f"time/{name}_s")
            if start_s and seconds is not None:
                self.add(TRAINER, what, start_s=start_s, end_s=start_s + seconds, step=version)

    def flush(self) -> None:
        """Writes what was added since the last time."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write("[\n")
            file.write("".join(self._pending))
        self._pending.clear()

    def close(self) -> None:
        """Writes the rest."""
        self.flush()


def read_timeline(folder: Path) -> list[Span]:
    """Returns the spans of a run, in the order of their start. A torn or foreign line is left out."""
    try:
        lines = (folder / TIMELINE_FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return sorted((span for line in lines if (span := parsed(line)) is not None), key=lambda span: span.start_s)


def parsed(line: bytes) -> Span | None:
    """Returns the span in a line of the file; None for a line that holds none."""
    try:
        event = json.loads(line.rstrip(b","))
        who, step = event["args"]["who"], event["args"]["step"]
        start_s = event["ts"] / 1e6
        return Span(who=who, what=event["name"], step=step, start_s=start_s, end_s=start_s + event["dur"] / 1e6)
    except (ValueError, KeyError, TypeError):
        return None


def merged(spans_s: Iterable[tuple[float, float]], *, min_break_s: float = 0.0) -> list[tuple[float, float]]:
    """Returns the times in which at least one of the spans went on; shorter breaks are left out."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans_s):
        if found and start_s - found[-1][1] <= min_break_s:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found


def covered_s(spans: Sequence[Span]) -> float:
    """Returns the seconds in which at least one of the spans went on."""
    return sum(end_s - start_s for start_s, end_s in merged((span.start_s, span.end_s) for span in spans))
