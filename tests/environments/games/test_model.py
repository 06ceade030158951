"""The embedded model of the games: its words are those of prompts and answers."""

from pathlib import Path

import pytest
from grpo.environments.games.game import Game
from grpo.environments.games.judge import Judge
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.templates import ChatTemplate

pytest.importorskip("pyspiel")
MODEL = Path(__file__).parents[3] / "configs/games/model"


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "nim", "tic_tac_toe", "liars_dice(dice_sides=3)"])
def test_every_prompt_is_known_and_every_answer_is_one_token(name: str) -> None:
    renderer = ChatRenderer.of_model(MODEL)
    template = ChatTemplate.of(renderer)
    [unknown] = renderer.ids_of("<unk>")
    for question in Judge(Game(name, with_rules=False)).questions:
        text = template.render([{"role": "user", "content": question.prompt}])
        assert unknown not in renderer.ids_of(text)
        answers = [renderer.ids_behind(text, answer) for answer in question.answers]
        assert [renderer.raw_text(ids) for ids in answers] == list(question.answers)
        assert {len(ids) for ids in answers} == {1}


def test_the_model_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 2e6
