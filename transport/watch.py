"""Waiting for something to happen in a folder: inotify, and polling where that does not reach (network filesystems)."""

import time
from pathlib import Path

from inotify_simple import INotify, flags

POLL_S = 0.25
_WITHOUT_INOTIFY_S = 0.02


class FolderWatch:
    """Wakes when an entry of `folder` appears, is replaced or removed; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._inotify: INotify | None
        try:
            self._inotify = INotify()
            self._inotify.add_watch(str(folder), flags.CREATE | flags.MOVED_TO | flags.MOVED_FROM | flags.DELETE)
        except OSError:  # no more watches, or a kernel without inotify: polling serves as well
            self._inotify = None

    def wait(self, timeout_s: float) -> None:
        """Returns when something happened, at the latest after `timeout_s` or `POLL_S` seconds, whichever is less."""
        pause_s = max(0.0, min(timeout_s, POLL_S))
        if self._inotify is None:
            time.sleep(min(pause_s, _WITHOUT_INOTIFY_S))
        else:
            self._inotify.read(timeout=int(pause_s * 1000))

    def close(self) -> None:
        """Ends the watch."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def __enter__(self) -> "FolderWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
