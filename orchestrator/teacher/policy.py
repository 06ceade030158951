"""The policy as it was, as its own teacher: on the run's own servers, where an earlier version costs an adapter and the
base model nothing."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.endpoints import EndpointError
from orchestrator.inference.client import Refused, ServerError, Unreachable
from orchestrator.scheduler import Scheduler
from orchestrator.teacher.scoring import checked
from transport.records import Float32, Int32


class PolicyTeacher:
    """The newest live version that `every` divides; the base model where that is version 0, which is the same. Servers
    keep it, and the one before it as long as anything is being scored under that.

    Example: with ``every=10`` and version 27 live, version 20
    """

    def __init__(
        self,
        score: Callable[[Sequence[int], int | None, float, str | None], Awaitable[Sequence[float]]],
        every: int,
        scheduler: Scheduler,
        *,
        adapters: Sequence[str] = (),
    ) -> None:
        """`score` gives [L - 1] log-probabilities of token ids [L] under a version (None: the base model) at a
        temperature, by one of its `adapters` where it has several, or raises ServerError; tries, turns and deadlines
        are its own. `every` 0: always the base model."""
        self._score, self._every, self._scheduler, self._adapters = score, every, scheduler, adapters
        self._num_using: Counter[int | None] = Counter()
        self.num_requests = 0
        self.version: int | None = None
        """That teaches now; None is the base model."""

    @property
    def name(self) -> str:
        """For people: which version teaches now."""
        return _named(self.version)

    def due(self, version: int) -> int | None:
        """Which version teaches while `version` is the newest live one."""
        return (version // self._every * self._every or None) if self._every else None

    def version_live(self, version: int) -> None:
        """All servers serve `version`, and the one that is due then."""
        before, self.version = self.version, self.due(version)
        if self.version == before:
            return
        if self.version is not None:
            self._scheduler.pin(self.version)
        self._let_go(before)

    def _let_go(self, version: int | None) -> None:
        if version not in (None, self.version) and not self._num_using[version]:
            assert version is not None
            self._scheduler.unpin(version)

    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """What a role's adapter sampled is scored under the same adapter as it was."""
        version = self.version
        name = self._adapters[adapter] if self._adapters and version is not None else None
        self.num_requests += 1
        self._num_using[version] += 1
        try:
            return checked(await self._score(token_ids.tolist(), version, temperature, name), len(token_ids))
        except ServerError as error:
            passing = "unreachable" if isinstance(error, Unreachable) else "error"
            reason = "refused" if isinstance(error, Refused) else passing
            raise EndpointError(reason, f"{_named(version)}: {error}") from error
        finally:
            self._num_using[version] -= 1
            self._let_go(version)


def _named(version: int | None) -> str:
    return "the base model as teacher" if version is None else f"the policy's version {version} as teacher"
