"""The policy as it was, as its own teacher: on the run's own servers, where an earlier version costs an adapter and the
base model nothing."""

from collections.abc import Awaitable, Callable, Sequence

from orchestrator.inference.client import Refused, ServerError, Unreachable
from orchestrator.teacher.scoring import FailureReason, TeacherFailure, checked
from transport.records import Float32, Int32


class PolicyTeacher:
    """Whoever scores under the policy's versions."""

    def __init__(
        self,
        score: Callable[[Sequence[int], int | None, float, str | None], Awaitable[Sequence[float]]],
        version_of: Callable[[], int | None],
        *,
        adapters: Sequence[str] = (),
    ) -> None:
        """`score` gives [L - 1] log-probabilities of token ids [L] under a version (None: the base model) at a
        temperature, by one of its `adapters` where it has several, or raises ServerError; tries, turns and deadlines
        are its own. `version_of` tells which version teaches now."""
        self._score, self._version_of, self._adapters = score, version_of, adapters
        self.num_requests = 0

    @property
    def name(self) -> str:
        """Which version teaches now."""
        version = self._version_of()
        return "the teacher, which is the " + ("base model" if version is None else f"policy's version {version}")

    async def score(self, token_ids: Int32, temperature: float, *, adapter: int = 0) -> Float32:
        """What a role's adapter sampled is scored under the same adapter as it was."""
        version = self._version_of()
        name = self._adapters[adapter] if self._adapters and version is not None else None
        self.num_requests += 1
        try:
            return checked(await self._score(token_ids.tolist(), version, temperature, name), token_ids)
        except TeacherFailure as error:
            raise TeacherFailure(error.reason, f"{self.name}: {error}") from error
        except ServerError as error:
            unreachable, refused = isinstance(error, Unreachable), isinstance(error, Refused)
            reason: FailureReason = "unreachable" if unreachable else "refused" if refused else "error"
            raise TeacherFailure(reason, f"{self.name}: {error}") from error
