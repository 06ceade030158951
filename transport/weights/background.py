"""Publishing beside the next step: in order, from one thread, with errors that come to light at the next call."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from transport.errors import DeadlineError
from transport.folders import Content
from transport.records import PolicySpec
from transport.weights.base import PolicyPublisher, Weight

log = logging.getLogger(__name__)
MAX_WAITING = 2
"""Versions that may wait to be written; with more, `publish` waits too."""
CLOSE_S = 10.0
"""Seconds that the end waits for versions that are still to be written."""

Make = Callable[[], tuple[Mapping[str, Content], Sequence[Weight]]]
"""Gives the files and weights of a version."""


class BackgroundPublisher:
    """Publishes versions in the order in which they were given. After an error nothing more is published."""

    def __init__(self, publisher: PolicyPublisher, *, timeout_s: float = 1200.0) -> None:
        """`publish` and `flush` wait at most `timeout_s` seconds."""
        self._publisher, self._timeout_s = publisher, timeout_s
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self.write_s = 0.0
        """Seconds that the newest version took to be made and written."""
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
        self._thread.start()

    def publish(self, *, version: int, spec: PolicySpec, make: Make) -> None:
        """Publishes soon. `make` is called in the thread: it must not read what is going to change.

        Raises the error of an earlier version, and `DeadlineError` where those take too long.
        """
        self.check()

        def job() -> None:
            files, weights = make()
            self._publisher.publish(version=version, spec=spec, files=files, weights=weights)

        try:
            self._jobs.put(job, timeout=self._timeout_s)
        except queue.Full:
            raise self._too_slow() from None

    def flush(self) -> None:
        """Returns when all that was given is published. Raises the error where one was not, and `DeadlineError`."""
        with self._jobs.all_tasks_done:
            if not self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, self._timeout_s):
                raise self._too_slow()
        self.check()

    def close(self) -> None:
        """Ends the thread when all that was given is published, or has failed. Raises nothing, and after `CLOSE_S`
        waits no longer: what is not published by then is not visible, and never half."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def check(self) -> None:
        """Raises the error of a version that could not be published."""
        if self._error is not None:
            raise self._error

    def _too_slow(self) -> DeadlineError:
        return DeadlineError(
            f"waited {self._timeout_s:g} s for versions to be published; see whether the disk of the run's folder, or "
            "the inference server that receives them, answers, or raise wait_timeout_s"
        )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            since_s = time.perf_counter()
            try:
                if self._error is None:
                    job()
            except Exception as error:  # raised again where the trainer can see it
                log.error("a version could not be published: %s", error)
                self._error = error
            self.write_s = time.perf_counter() - since_s
            self._jobs.task_done()
