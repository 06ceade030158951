"""The thread in which a sender serves its receivers, and the errors that it meets."""

import logging
import threading
import time
from collections.abc import Callable

from transport.batches.base import nothing
from transport.errors import TransportError

logger = logging.getLogger(__name__)
PAUSE_S = 0.2


class Serving:
    """Does round after round of a sender's work. An error of the file system, which may pass, costs a round; anything
    else, or one that does not pass, ends the thread, and the sender's next call raises it."""

    def __init__(
        self,
        do_round: Callable[[], None],
        *,
        name: str,
        patience_s: float,
        changed: threading.Condition,
        wake: Callable[[], None] = nothing,
    ) -> None:
        """`patience_s`: for so long rounds may fail one after the other. Who waits for `changed` is woken when the
        thread ends. `wake` ends the wait of a round."""
        self._do_round, self._patience_s, self._changed, self._wake = do_round, patience_s, changed, wake
        self._closing = threading.Event()
        self.error: BaseException | None = None
        """What has ended the thread before its time."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins with the first round."""
        self._thread.start()

    def close(self) -> None:
        """Returns when the round that is being done has ended."""
        self._closing.set()
        self._wake()
        self._thread.join()

    def check(self) -> None:
        """Raises `TransportError` where an error has ended the thread."""
        if (error := self.error) is not None:
            raise TransportError(
                f"the sender of batches serves the trainer no more, by {type(error).__name__}: {error}; mend that, end "
                "both programs and resume them"
            ) from error

    def _run(self) -> None:
        """Consumes and waits for what its rounds do; ends with `close`."""
        try:
            self._do_rounds()
        except BaseException as error:  # nobody is above a thread: the sender's next call says it
            logger.error("the sender of batches serves the trainer no more: %s: %s", type(error).__name__, error)
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _do_rounds(self) -> None:
        failing_since_s: float | None = None
        while not self._closing.is_set():
            try:
                self._do_round()
            except OSError as error:
                now_s = time.monotonic()
                if failing_since_s is None:
                    failing_since_s = now_s
                    logger.error(
                        "cannot serve the trainer's requests now, will try again for %g s: %s", self._patience_s, error
                    )
                elif now_s - failing_since_s >= self._patience_s:
                    raise
                self._closing.wait(PAUSE_S)
            else:
                failing_since_s = None
