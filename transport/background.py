"""Background work: jobs in order, in one thread, whose errors are raised by the next call."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from grpo.transport.errors import DeadlineError

log = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Seconds that the end waits for jobs that are still to be done."""


class Background:
    """A thread that does jobs in the order in which they were given. After an error it does no more."""

    def __init__(self, name: str, *, timeout_s: float, waits_for: str, max_waiting: int = 2) -> None:
        """`submit` and `flush` wait at most `timeout_s` seconds; `waits_for` names the cause. `max_waiting` jobs may
        wait beside the one at work; with more, `submit` waits too."""
        self._timeout_s, self._waits_for = timeout_s, waits_for
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(max_waiting)
        self._error: BaseException | None = None
        self.last_s = 0.0
        """Seconds that the newest job took."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Queues a job. Raises the error of an earlier job, and `DeadlineError` where those take too long."""
        self.check()
        try:
            self._jobs.put(job, timeout=self._timeout_s)
        except queue.Full:
            raise self._too_slow() from None

    def flush(self) -> None:
        """Returns when all jobs are done. Raises the error of one that failed, and `DeadlineError`."""
        with self._jobs.all_tasks_done:
            if not self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, self._timeout_s):
                raise self._too_slow()
        self.check()

    def check(self) -> None:
        """Raises the error of a job that failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread when all jobs are done, or one has failed. Raises nothing, and after `CLOSE_S` waits no
        longer."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _too_slow(self) -> DeadlineError:
        return DeadlineError(f"waited {self._timeout_s:g} s for {self._waits_for}")

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            since_s = time.perf_counter()
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # raised again where the caller can see it
                log.error("%s: %s", self._thread.name, error)
                self._error = error
            self.last_s = time.perf_counter() - since_s
            self._jobs.task_done()
