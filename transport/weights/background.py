"""Publishing beside the next step: in order, from one thread, with errors that come to light at the next call."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from transport.files import Content
from transport.types import PolicySpec
from transport.weights.base import PolicyPublisher, Weight

log = logging.getLogger(__name__)
MAX_WAITING = 2
"""Versions that may wait to be written; with more, `publish` waits too."""

CLOSE_S = 10.0
"""Seconds that the end waits for versions that are still to be written."""

Make = Callable[[], tuple[Mapping[str, Content], Sequence[Weight]]]
"""Gives the files and weights of a version."""
Job = tuple[int, PolicySpec, Make]


class BackgroundPublisher:
    """Publishes versions in the order in which they were given. After an error nothing more is published."""

    def __init__(self, publisher: PolicyPublisher) -> None:
        self._publisher = publisher
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self.write_s = 0.0
        """Seconds that the newest version took to be made and written."""
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)
        self._thread.start()

    def publish(self, *, version: int, spec: PolicySpec, make: Make) -> None:
        """Publishes soon. `make` is called in the thread: it must not read what is going to change.

        Raises the error of an earlier version.
        """
        self.check()
        self._jobs.put((version, spec, make))

    def flush(self) -> None:
        """Returns when all that was given is published. Raises the error where one was not."""
        self._jobs.join()
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

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None:
                self._publish(*job)
            self._jobs.task_done()

    def _publish(self, version: int, spec: PolicySpec, make: Make) -> None:
        since_s = time.perf_counter()
        try:
            files, weights = make()
            self._publisher.publish(version=version, spec=spec, files=files, weights=weights)
        except Exception as error:  # raised again where the trainer can see it
            log.error("version %d could not be published: %s", version, error)
            self._error = error
        self.write_s = time.perf_counter() - since_s
