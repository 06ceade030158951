"""Decides when a run is over, whose fault that is, and ends what is left."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType

from deploy.kept import Kept

POLL_S = 0.1
SETTLE_S = 1.0
"""After the first failure, how long to look whether another program fails by itself: one death often brings the
next within moments, and the first one noticed need not be the cause."""
TRAINER_END_S = 60.0
"""How long the trainer may take to end once the orchestrator is done."""
GRACE_S = 10.0
"""How long programs may take to end once they are told to."""
KILL_S = 5.0
"""How long the kernel may take to end what was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A program that failed, and how."""

    child: Kept
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. Without failures and signal: well."""

    failures: tuple[Failure, ...] = ()
    """Programs that failed by themselves, the likeliest cause first."""
    stopped_by: signal.Signals | None = None
    """What the launcher was told to end by."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """How often each program was started again, or was to be, by role; without those that never were."""

    @property
    def exit_code(self) -> int:
        """0 done, 1 a program failed, 130 SIGINT, 143 SIGTERM."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 1 if self.failures else 0


class Signals:
    """Collects SIGINT and SIGTERM while it is entered, so that they are acted upon between two looks."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Replaces the process's handlers for a while."""
        with _handled_by(self._note):
            yield

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end this process, and the command that it waits for, with the exit code of a run that they
    have ended: for what is done before there are programs."""
    try:
        with _handled_by(_end):
            yield
    except _Ended as ended:
        print(f"ended by {ended.by.name}", file=sys.stderr, flush=True)
        raise


class _Ended(SystemExit):
    def __init__(self, by: signal.Signals) -> None:
        self.by = by
        super().__init__(128 + by)


def _end(number: int, _: FrameType | None) -> None:
    raise _Ended(signal.Signals(number))


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def supervise(
    children: Mapping[str, Kept],
    *,
    signals: Signals,
    tick: Callable[[], None],
    trainer_is_done: Callable[[], bool],
) -> Outcome:
    """Waits until the orchestrator and then the trainer are done, a program fails for good, or a signal comes. Then
    ends what still runs: with the same signal, or SIGTERM, and by force after `GRACE_S` or at another signal.

    `tick` is called all the while. `trainer_is_done` tells whether a trainer that ended with 0 had done its steps.
    """
    outcome = _watch(children, signals, tick, trainer_is_done)
    if outcome.stopped_by is not None:
        print(f"{outcome.stopped_by.name}: ending the programs; once more kills them", file=sys.stderr, flush=True)
    end_all(children, number=outcome.stopped_by or signal.SIGTERM, signals=signals, tick=tick)
    return outcome


def _watch(
    children: Mapping[str, Kept], signals: Signals, tick: Callable[[], None], trainer_is_done: Callable[[], bool]
) -> Outcome:
    orch, train = children["orch"], children["train"]
    failed_at: float | None = None
    while not signals.received:
        for child in children.values():
            child.poll()
        now = time.monotonic()
        if failures := _failures(children, trainer_is_done):
            for child in children.values():
                child.hold()
            failed_at = failed_at or now
            if now - failed_at >= SETTLE_S:
                return Outcome(failures=tuple(failures))
        elif orch.exit is not None and train.exit is not None:
            return Outcome()
        elif orch.exit is not None and now - orch.exit.at_s > TRAINER_END_S:
            how = f"did not end within {TRAINER_END_S:g} s after the orchestrator was done"
            return Outcome(failures=(Failure(child=train, how=how),))
        for child in children.values():
            child.go_on()
        tick()
        time.sleep(POLL_S)
    return Outcome(stopped_by=signals.received[0])


def _failures(children: Mapping[str, Kept], trainer_is_done: Callable[[], bool]) -> list[Failure]:
    """Who has failed by now: killed ones first, since nobody here has killed them, then in the order of their ends.
    Beside one that has failed for good, those that wait to be started again count: their ends may be the cause."""
    orch, train = children["orch"], children["train"]
    servers = [child for role, child in children.items() if role in ("infer", "teacher")]
    done = orch.exit is not None and orch.exit.status == 0
    ends = [(child.exit or child.away, child) for child in children.values()]
    ended = [(exit_, child) for exit_, child in ends if exit_ is not None]
    failures = []
    for exit_, child in sorted(ended, key=lambda pair: (pair[0].status >= 0, pair[0].at_s)):
        if child in servers and (done and exit_.at_s >= _end_of(orch)):
            continue
        if child in servers or exit_.status != 0:
            failures.append(Failure(child=child, how=str(exit_)))
        elif child is train and not done and not trainer_is_done():
            failures.append(Failure(child=child, how=f"{exit_} before its last step"))
    return failures if any(failure.child.exit is not None for failure in failures) else []


def _end_of(child: Kept) -> float:
    return child.exit.at_s if child.exit is not None else float("inf")


def end_all(
    children: Mapping[str, Kept], *, number: signal.Signals, signals: Signals, tick: Callable[[], None]
) -> None:
    """Ends every program that still runs: `number`, then force after `GRACE_S` or when one more signal comes."""
    received = len(signals.received)
    for child in children.values():
        child.send(number)
    give_up_at = time.monotonic() + GRACE_S
    while not _all_gone(children) and time.monotonic() < give_up_at and len(signals.received) == received:
        tick()
        time.sleep(POLL_S)
    for child in children.values():
        if not child.poll():
            child.kill()
    give_up_at = time.monotonic() + KILL_S
    while not _all_gone(children) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)


def _all_gone(children: Mapping[str, Kept]) -> bool:
    return all(child.poll() for child in children.values())
