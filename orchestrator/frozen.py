"""Which of its own earlier versions teaches the policy."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from orchestrator.scheduler import Scheduler


class FrozenVersion:
    """The newest live version that `every` divides; the base model where that is version 0, which is the same. Servers
    keep it, and the one before it as long as anything is being scored under that.

    Example: with ``every=10`` and version 27 live, version 20
    """

    def __init__(self, every: int, scheduler: Scheduler) -> None:
        """`every` 0: always the base model."""
        self._every, self._scheduler = every, scheduler
        self._num_using: Counter[int] = Counter()
        self._entered: ContextVar[tuple[int | None]] = ContextVar("entered")
        self.version: int | None = None
        """None is the base model."""

    @property
    def entered(self) -> int | None:
        """The version that stays for whoever has entered `using`, in the tasks that it has begun too."""
        (version,) = self._entered.get((self.version,))
        return version

    def due(self, version: int) -> int | None:
        """Which version teaches while `version` is the newest live one."""
        found = version // self._every * self._every if self._every else 0
        return found or None

    def version_live(self, version: int) -> None:
        """All servers serve `version`, and the one that is due then."""
        before, self.version = self.version, self.due(version)
        if self.version == before:
            return
        if self.version is not None:
            self._scheduler.pin(self.version)
        if before is not None and not self._num_using[before]:
            self._scheduler.unpin(before)

    @contextmanager
    def using(self) -> Iterator[None]:
        """While it is entered, what teaches now stays on the servers."""
        version, token = self.version, self._entered.set((self.version,))
        if version is not None:
            self._num_using[version] += 1
        try:
            yield
        finally:
            self._entered.reset(token)
            if version is not None:
                self._num_using[version] -= 1
                if version != self.version and not self._num_using[version]:
                    self._scheduler.unpin(version)
