"""The model before training as a teacher: the run's own servers have it as their base."""

from collections.abc import Awaitable, Callable, Sequence

from orchestrator.endpoints import EndpointError
from orchestrator.inference.client import Refused, ServerError, Unreachable
from orchestrator.teacher.scoring import checked
from transport.records import Float32, Int32


class ReferenceTeacher:
    """Scores under the base model."""

    name = "the model before training, as a teacher"

    def __init__(self, score: Callable[[Sequence[int], int | None, float], Awaitable[Sequence[float]]]) -> None:
        """`score` gives [L - 1] log-probabilities of token ids [L] under a version (None: the base model) at a
        temperature, or raises ServerError; tries, turns and deadlines are its own."""
        self._score = score
        self.num_requests = 0

    async def score(self, token_ids: Int32, temperature: float) -> Float32:
        """By the least loaded server."""
        self.num_requests += 1
        try:
            return checked(await self._score(token_ids.tolist(), None, temperature), len(token_ids))
        except ServerError as error:
            passing = "unreachable" if isinstance(error, Unreachable) else "error"
            reason = "refused" if isinstance(error, Refused) else passing
            raise EndpointError(reason, f"{self.name}: {error}") from error
