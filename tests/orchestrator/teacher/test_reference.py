"""The model before training as a teacher."""

from typing import Any

import numpy as np
import pytest

from orchestrator.endpoints import EndpointError
from orchestrator.inference.client import Refused, ServerError, Unreachable
from orchestrator.teacher.scoring import ReferenceTeacher

IDS = np.array([5, 6, 7], np.int32)


async def test_the_base_model_scores_at_the_temperature_of_the_sampling() -> None:
    asked: list[Any] = []

    async def score(*question: Any) -> list[float]:
        asked.append(question)
        return [-1.0, -2.0]

    assert (await ReferenceTeacher(score).score(IDS, 1.5)).tolist() == [0, -1, -2]
    assert asked == [([5, 6, 7], None, 1.5)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Unreachable("gone"), "unreachable"), (Refused(400, "x", "no"), "refused"), (ServerError("oops"), "error")],
)
async def test_what_the_runs_own_servers_cannot_do_is_a_failure(error: ServerError, expected: str) -> None:
    async def score(*question: Any) -> list[float]:
        raise error

    with pytest.raises(EndpointError) as raised:
        await ReferenceTeacher(score).score(IDS, 1.0)
    assert raised.value.reason == expected
