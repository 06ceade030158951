"""A run's evaluations judge its games."""

import math
from pathlib import Path

import pytest

from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.running import run

pytest.importorskip("pyspiel")


GAME = {"id": "game", "name": "kuhn", "args": {"game": "kuhn_poker", "rules": False}}


async def test_a_game_is_judged_at_each_evaluation_by_the_answers_of_its_version(tmp_path: Path) -> None:
    async with FakeServer() as server:
        server.answer = lambda prompt, version: "p"
        made = await run(tmp_path, server, env=[GAME], eval={"interval": 2}, sampling={"max_tokens": 1})
        lines = {line["progress/step"]: line for line in made.lines if "eval/failed" in line}
        assert sorted(lines) == [0, 2, 3]
        for line in lines.values():  # all answers are as likely as each other
            assert line["eval/measure/nash_conv/kuhn"] == pytest.approx(11 / 12)
            assert line["eval/measure/illegal/kuhn"] == pytest.approx(1 - 2 * math.exp(server.scored))
            assert line["eval/accuracy/kuhn"] == pytest.approx(0)
        assert [(one["version"], len(one["prompts"])) for one in server.scores] == [(0, 12), (2, 12), (3, 12)]
        # An answer that fills the limit has no end; a shorter one does.
        assert {len(answer) for one in server.scores for own in one["answers"] for answer in own} == {1}
        server.scores.clear()
        await run(tmp_path / "longer", server, env=[GAME], sampling={"max_tokens": 4}, max_steps=1)
        assert {len(answer) for one in server.scores for own in one["answers"] for answer in own} == {2}
