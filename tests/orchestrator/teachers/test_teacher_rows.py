"""What a teacher was asked, counted."""

from collections import Counter

import numpy as np
import pytest

from orchestrator.teachers.rows import TeacherCounts, score_rows
from orchestrator.teachers.scoring import TeacherFailure
from transport.records import Float32, Int32


def ids(*tokens: int) -> Int32:
    return np.array(tokens, np.int32)


async def half(token_ids: Int32, temperature: float) -> Float32 | TeacherFailure:
    """-temperature for each token; rows that begin with 9 fail."""
    if token_ids[0] == 9:
        return TeacherFailure(reason="slow", message="the teacher is asleep")
    return np.full(len(token_ids), -temperature, np.float32)


async def test_each_row_gets_its_own_answer_at_its_own_temperature() -> None:
    counts = TeacherCounts()
    rows = [ids(5, 6), ids(9, 6, 7), ids(5, 6, 7), ids(5, 6), ids(9, 6)]
    found = await score_rows(rows, [1.0, 1.0, 1.0, 0.5, 1.0], counts, half)
    told = [one.message if isinstance(one, TeacherFailure) else one.tolist() for one in found]
    assert told == [[-1, -1], "the teacher is asleep", [-1, -1, -1], [-0.5, -0.5], "the teacher is asleep"]
    assert (counts.num_rows, counts.failed) == (5, Counter(slow=2))


@pytest.mark.parametrize(("row", "temperature"), [((5,), 1.0), ((5, 6), 0.0), ((5, 6), float("nan"))])
async def test_what_cannot_be_scored_by_anyone_is_an_error(row: tuple[int, ...], temperature: float) -> None:
    with pytest.raises(ValueError, match="expected at least 2 and above 0"):
        await score_rows([ids(*row)], [temperature], TeacherCounts(), half)


def test_metrics_are_what_happened_since_the_last_call() -> None:
    counts = TeacherCounts(num_rows=3, num_tokens=30, num_requests=4, num_retries=1)
    counts.failed["down"] += 1
    assert counts.metrics() == {
        "teacher/rows": 3,
        "teacher/tokens": 30,
        "teacher/requests": 4,
        "teacher/retries": 1,
        "teacher/failed": 1,
        "teacher/failed_down": 1,
    }
    counts.num_rows += 2
    counts.failed["slow"] += 2
    assert counts.metrics() == {
        "teacher/rows": 2,
        "teacher/tokens": 0,
        "teacher/requests": 0,
        "teacher/retries": 0,
        "teacher/failed": 2,
        "teacher/failed_down": 0,
        "teacher/failed_slow": 2,
    }
    assert set(counts.metrics().values()) == {0.0}
