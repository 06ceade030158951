"""TextArena's games by their own `step`."""

import re
from typing import Any

import pytest
from grpo.transport.errors import UserError

from grpo import play

pytest.importorskip("textarena")
from grpo.environments.games.textarena import TextArena


async def test_seats_move_in_turn_and_get_the_games_rewards() -> None:
    environment = TextArena(game="TicTacToe-v0")
    [example] = environment.dataset("train")
    state = await play(environment, example, ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert state.rewards == {"first": 1, "second": -1}
    assert [reply.role for reply in state.trajectory] == ["first", "second"] * 2 + ["first"]
    assert "You are Player 1" in state.trajectory[1].messages[-1]["content"]
    assert state.metrics["num_moves"] == 5


async def test_an_invalid_move_costs_what_the_game_says() -> None:
    environment = TextArena(game="TicTacToe-v0")
    state = await play(environment, environment.dataset("train")[0], lambda role, messages: "[0]")
    assert state.rewards == {"first": 1, "second": -1}
    assert state.metrics["invalid_moves/second"] == 1


async def test_held_out_games_are_against_the_model_before_training() -> None:
    environment = TextArena(game="TicTacToe-v0", num_eval=2)
    for example, reward in zip(environment.dataset("eval"), (1, -1), strict=True):
        lines = {"first": ["[0]", "[1]", "[2]"], "second": ["[3]", "[4]", "[6]"]}
        other = "second" if example["plays"] == "first" else "first"
        state = await play(environment, example, lines[example["plays"]], asked=lines[other], split="eval")
        assert state.rewards == {example["plays"]: reward}
        assert state.accuracy == (reward + 1) / 2


async def test_what_is_drawn_is_of_the_seed_whoever_plays_beside_it() -> None:
    environment = TextArena(game="KuhnPoker-v0")
    [example] = environment.dataset("train")

    async def cards(seed: int) -> list[str]:
        shown: list[str] = []

        def answer(role: str, messages: list[dict[str, Any]]) -> str:
            shown.append(re.sub(r"\s+", " ", messages[-1]["content"])[-200:])
            return "[check]" if "[check]" in messages[-1]["content"].lower() else "[fold]"

        await play(environment, example, answer, seed=seed)
        return shown

    assert await cards(1) == await cards(1)
    assert len({tuple(await cards(seed)) for seed in range(8)}) > 1


def test_games_that_are_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="NoGame"):
        TextArena(game="NoGame-v0")
