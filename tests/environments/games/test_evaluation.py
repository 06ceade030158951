"""A run's evaluations judge its games."""

import math
from pathlib import Path

import numpy as np
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
        # Both always pass, so that cards alone say who wins, and no move is better than another in its position.
        server.scores.clear()
        credit = {"type": "custom_credit", "import_path": "grpo.environments.games.credit:by_position"}
        changes = {"advantage": credit | {"kwargs": {"prior": 0}}, "rollouts_per_example": 8, "batch_size": 8}
        # This game counts as too large for the judge: a response learns, and accuracy is from games.
        large = {**GAME, "args": {**GAME["args"], "max_states": 5, "num_eval": 4, "response_games": 300}}
        made = await run(tmp_path / "longer", server, env=[large], sampling={"max_tokens": 4}, max_steps=1, **changes)
        [batches] = made.batches.values()
        assert sum(len(batch.rollout_ids) for batch in batches) == 16  # two moves a game
        assert max(abs(float(np.max(np.abs(batch.advantages)))) for batch in batches) < 1e-6
        assert made.steps[0]["reward/std"] > 0
        assert {len(answer) for one in server.scores for own in one["answers"] for answer in own} == {2}
        lines = [line for line in made.lines if "eval/failed" in line]
        assert lines
        for line in lines:
            assert 0 < line["eval/measure/exploitability_at_least/kuhn"] < 1.3  # about 0.65, with an error of 0.13
            assert line["eval/measure/response_games/kuhn"] == 300
            assert "eval/measure/nash_conv/kuhn" not in line
            assert "eval/accuracy/kuhn" in line
