"""Who did what when: `timeline.jsonl`, Chrome trace events on the wall clock, which Perfetto (ui.perfetto.dev) opens.

The file is a list without its end, one event a line, as the format allows: programs may add to it, and be killed. Spans
are kept in memory and written together once a step, so that telling one costs microseconds.
"""

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.transport.folders import writing

TIMELINE_FILE = "timeline.jsonl"
MAX_PENDING = 10_000
"""Spans that are kept before they are written, should no step come."""
MIN_BREAK_S = 0.02
"""Shorter breaks between busy times are left out, so that there are few spans."""
ORCHESTRATOR = "grpo-orch"
TRAINER = "grpo-train"
SERVERS = "grpo-infer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that one program did.
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
    """The writer. Only the orchestrator's event loop uses it.

    Of generation it tells three things: for each batch the time from the start of its first group to the end of its
    last (batches overlap); the times in which any group was sampled or scored; and of each server those in which it had
    anything to answer.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's."""
        self._path = folder / TIMELINE_FILE
        self._pending: list[str] = []
        self._groups: dict[int, tuple[float, float]] = {}
        """When each group that waits for its batch was started, and when it was complete."""
        self._busy: defaultdict[str, BusySpans] = defaultdict(BusySpans)
        """Of all servers together, by `SERVERS`, and of each."""
        self._lanes: dict[str, int] = {}

    def add(self, who: str, what: str, *, start_s: float, end_s: float, step: int | None = None) -> None:
        """Tells a span that is over. A clock that was set back meanwhile gives one of no length."""
        if who not in self._lanes:
            self._lanes[who] = zlib.crc32(who.encode()) & 0x7FFFFFFF
            self._tell({"name": "process_name", "ph": "M", "pid": self._lanes[who], "args": {"name": who}})
        times = {"ts": round(1e6 * start_s), "dur": round(1e6 * max(0.0, end_s - start_s))}
        self._tell(
            {"name": what, "ph": "X", **times, "pid": self._lanes[who], "tid": 1, "args": {"who": who, "step": step}}
        )
        if len(self._pending) >= MAX_PENDING:
            self.flush()

    def _tell(self, event: Mapping[str, Any]) -> None:
        self._pending.append(json.dumps(event) + ",\n")

    @contextmanager
    def span(self, who: str, what: str, *, step: int | None = None) -> Iterator[None]:
        """Tells of what is done within it, however it ends."""
        start_s = time.time()
        try:
            yield
        finally:
            self.add(who, what, start_s=start_s, end_s=time.time(), step=step)

    @contextmanager
    def group(self, group: int) -> Iterator[None]:
        """A group is sampled and scored within it."""
        start_s = time.time()
        with self._busy[SERVERS]:
            yield
        self._groups[group] = (start_s, time.time())

    def came_to_nothing(self, group: int) -> None:
        """A group will be in no batch."""
        self._groups.pop(group, None)

    def generated(self, step: int, groups: Iterable[int]) -> float:
        """All groups of batch `step` are complete. Returns for how many seconds any group was sampled or scored since
        the last call."""
        seconds = 0.0
        times = [self._groups.pop(group) for group in groups if group in self._groups]
        if times:
            starts_s, ends_s = zip(*times, strict=True)
            self.add(SERVERS, "generate", start_s=min(starts_s), end_s=max(ends_s), step=step)
        for who, busy in self._busy.items():
            for start_s, end_s in busy.take():
                self.add(who, "busy", start_s=start_s, end_s=end_s)
                seconds += end_s - start_s if who == SERVERS else 0.0
        return seconds

    def busy(self, server: str) -> AbstractContextManager[None]:
        """A server has a request for an answer within it."""
        return self._busy[f"{SERVERS} {server}"]

    def loading(self, server: str, version: int) -> AbstractContextManager[None]:
        """A server loads and proves a version within it."""
        return self.span(f"{SERVERS} {server}", "load", step=version)

    def slept(self, server: str, start_s: float, end_s: float, step: int) -> None:
        """A server has slept while the trainer made `step`."""
        self.add(f"{SERVERS} {server}", "sleep", start_s=start_s, end_s=end_s, step=step)

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells what the trainer did in a step, from the metrics that came with its version: each `time/NAME_s` with a
        beginning `time/NAME_at_s`. Publishing is that of the version before."""
        for name, what, version in (
            ("wait_batch", "wait", step),
            ("train", "train", step),
            ("publish", "publish", step - 1),
        ):
            start_s, seconds = metrics.get(f"time/{name}_at_s"), metrics.get(f"time/{name}_s")
            if start_s and seconds is not None:
                self.add(TRAINER, what, start_s=start_s, end_s=start_s + seconds, step=version)

    def flush(self) -> None:
        """Writes what was told since the last time."""
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write("[\n")
            file.write("".join(self._pending))
        self._pending.clear()

    def close(self) -> None:
        """Writes the rest."""
        self.flush()


@dataclass(slots=True)
class BusySpans:
    """When at least one of many overlapping things was going on."""

    _num: int = 0
    _over: list[tuple[float, float]] = field(default_factory=list)
    """Start and end; of the last one, which may go on, the end so far."""

    def __enter__(self) -> None:
        now_s = time.time()
        if self._num == 0 and not (self._over and now_s - self._over[-1][1] < MIN_BREAK_S):
            self._over.append((now_s, now_s))
        self._num += 1

    def __exit__(self, *_: object) -> None:
        self._num -= 1
        if self._num == 0:
            self._over[-1] = (self._over[-1][0], max(self._over[-1][1], time.time()))

    def take(self) -> list[tuple[float, float]]:
        """Start and end of the spans since the last call; one that goes on is cut here."""
        taken, self._over = self._over, []
        if self._num:
            now_s = time.time()
            taken[-1] = (taken[-1][0], now_s)
            self._over = [(now_s, now_s)]
        return [(start_s, end_s) for start_s, end_s in taken if end_s > start_s]


def read_timeline(folder: Path) -> list[Span]:
    """Returns the spans of a run, in the order of their start. A torn or foreign line is left out."""
    try:
        lines = (folder / TIMELINE_FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return sorted((span for line in lines if (span := _parsed(line)) is not None), key=lambda span: span.start_s)


def _parsed(line: bytes) -> Span | None:
    try:
        event = json.loads(line.rstrip(b","))
        who, step = event["args"]["who"], event["args"]["step"]
        start_s = event["ts"] / 1e6
        return Span(who=who, what=event["name"], step=step, start_s=start_s, end_s=start_s + event["dur"] / 1e6)
    except (ValueError, KeyError, TypeError):
        return None


def covered_s(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans went on."""
    total, end_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda one: one.start_s):
        total += max(0.0, span.end_s - max(span.start_s, end_s))
        end_s = max(end_s, span.end_s)
    return total
