"""The policy as it was, as its own teacher: on the run's own servers, where an earlier version costs an adapter and the
base model nothing."""

from collections.abc import Awaitable, Callable, Sequence

from orchestrator.client import Refused, ServerError, Unreachable
from orchestrator.teachers.endpoints import checked, knows_no_temperature
from orchestrator.teachers.rows import TeacherCounts, score_rows
from orchestrator.teachers.scoring import FailureReason, Scored, TeacherFailure, TeacherRefused
from transport.records import Float32, Int32


class PolicyTeacher:
    """A TeacherClient over whoever scores under the policy's versions."""

    def __init__(
        self,
        score: Callable[[Sequence[int], int | None, float, str | None], Awaitable[Sequence[float]]],
        version_of: Callable[[], int | None],
        *,
        adapters: Sequence[str] = (),
    ) -> None:
        """`score` gives [L - 1] log-probabilities of token ids [L] under a version (None: the base model) at a
        temperature, by one of its `adapters` where it has several, or raises ServerError; tries, turns and deadlines
        are its own. `version_of` tells which version teaches now; all rows of one call are scored under the same."""
        self._score, self._version_of, self._adapters = score, version_of, adapters
        self.counts = TeacherCounts()

    @property
    def name(self) -> str:
        """Which version teaches now."""
        return _name(self._version_of())

    def metrics(self) -> dict[str, float]:
        """See TeacherClient."""
        return self.counts.metrics()

    async def close(self) -> None:
        """Nothing is its own."""

    async def score(self, rows: Sequence[Int32], temperatures: Sequence[float], *, adapter: int = 0) -> list[Scored]:
        """See TeacherClient. What a role's adapter sampled is scored under the same adapter as it was."""
        version = self._version_of()
        name = self._adapters[adapter] if self._adapters and version is not None else None

        async def ask(token_ids: Int32, temperature: float) -> Float32 | TeacherFailure:
            return await self._row(token_ids, temperature, version, name)

        return await score_rows(rows, temperatures, self.counts, ask)

    async def _row(
        self, token_ids: Int32, temperature: float, version: int | None, adapter: str | None
    ) -> Float32 | TeacherFailure:
        self.counts.num_tokens += len(token_ids)
        self.counts.num_requests += 1
        try:
            ids: list[int] = token_ids.tolist()
            return checked(await self._score(ids, version, temperature, adapter), token_ids)
        except TeacherRefused as error:
            return _failure(error.reason, version, error)
        except ServerError as error:
            return _failure(_reason(error), version, error)


def _name(version: int | None) -> str:
    return "the teacher, which is the " + ("base model" if version is None else f"policy's version {version}")


def _failure(reason: FailureReason, version: int | None, error: Exception) -> TeacherFailure:
    return TeacherFailure(reason=reason, message=f"{_name(version)}: {error}")


def _reason(error: ServerError) -> FailureReason:
    if isinstance(error, Unreachable):
        return "down"
    if isinstance(error, Refused):
        return "temperature" if knows_no_temperature(str(error)) else "refused"
    return "error"
