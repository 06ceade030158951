"""The rows of one call to a teacher: asked about once each, and counted.

Legend: `L` tokens of one row.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.teachers.alignment import plan
from orchestrator.teachers.scoring import FailureReason, Scored, TeacherFailure
from transport.records import Float32, Int32


@dataclass(slots=True)
class TeacherCounts:
    """What a teacher was asked, and what came of it, since the run began."""

    num_rows: int = 0
    """Rows that were to be scored."""
    num_tokens: int = 0
    """Tokens of the rows that the teacher was asked about: without those that another row's answer answers."""
    num_requests: int = 0
    """Tries included."""
    num_retries: int = 0
    failed: Counter[FailureReason] = field(default_factory=Counter)
    """Rows without log-probabilities, by reason."""
    _told: dict[str, int] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The counts since the last call, by the names of metrics; a reason once it has occurred."""
        totals = {
            "teacher/rows": self.num_rows,
            "teacher/tokens": self.num_tokens,
            "teacher/requests": self.num_requests,
            "teacher/retries": self.num_retries,
            "teacher/failed": self.failed.total(),
        } | {f"teacher/failed_{reason}": num for reason, num in self.failed.items()}
        told, self._told = self._told, totals
        return {name: float(total - told.get(name, 0)) for name, total in totals.items()}


async def score_rows(
    rows: Sequence[Int32],
    temperatures: Sequence[float],
    counts: TeacherCounts,
    ask: Callable[[Int32, float], Awaitable[Float32 | TeacherFailure]],
) -> list[Scored]:
    """Each row as `ask` scores it at its temperature, all at once; equal rows are asked about once, and rows that begin
    others not at all. Raises ValueError for what nobody can score: fewer than two tokens, a temperature that is not
    above 0."""
    for row, temperature in zip(rows, temperatures, strict=True):
        if len(row) < 2 or not temperature > 0:
            raise ValueError(
                f"a row has {len(row)} tokens and temperature {temperature:g}, expected at least 2 and above 0"
            )
    asked = plan(rows, temperatures)
    counts.num_rows += len(rows)
    answers = await asyncio.gather(*(ask(rows[one.row], temperatures[one.row]) for one in asked))
    scored: dict[int, Scored] = {}
    for one, answer in zip(asked, answers, strict=True):
        for index in one.covers:
            scored[index] = answer if isinstance(answer, TeacherFailure) else answer[: len(rows[index])]
        if isinstance(answer, TeacherFailure):
            counts.failed[answer.reason] += len(one.covers)
    return [scored[index] for index in range(len(rows))]
