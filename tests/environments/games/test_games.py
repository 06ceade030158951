"""Games as environments: what a seat is shown, what its answers do, and who is judged."""

import random
from collections import defaultdict
from typing import Any

import pytest
from grpo.environments.games.credit import by_position
from grpo.environments.games.environment import Games
from grpo.environments.games.game import Game
from grpo.environments.games.search import Minimax
from grpo.orchestrator.rollouts.records import EpisodeResult, Step
from grpo.transport.errors import UserError

from grpo import CallFailed, play

pytest.importorskip("pyspiel")
NAMES = ["kuhn_poker", "leduc_poker", "liars_dice(dice_sides=3)", "tic_tac_toe", "connect_four", "nim"]


def walked(game: Game, num: int) -> list[Any]:
    """States in which somebody is to move, of `num` games at random."""
    states, rng = [], random.Random(0)
    for _ in range(num):
        state = game.begin(rng)
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(rng.choice([move for move, _ in state.chance_outcomes()]))
                continue
            states.append(state.clone())
            state.apply_action(rng.choice(state.legal_actions()))
    return states


@pytest.mark.parametrize("name", [*NAMES, "breakthrough(rows=4,columns=4)"])
@pytest.mark.parametrize("rules", [True, False])
def test_a_prompt_has_what_the_player_may_know_and_nothing_else(name: str, rules: bool) -> None:
    game, prompts = Game(name, with_rules=rules), defaultdict(set)
    for state in walked(game, 300):
        known = str(state) if name.startswith("breakthrough") else state.information_state_string()
        prompts[state.current_player(), known].add(game.prompt(state))
    assert all(len(shown) == 1 for shown in prompts.values())
    assert len(prompts) > 10


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "liars_dice(dice_sides=3)"])
def test_states_in_which_a_player_knows_different_things_are_told_apart(name: str) -> None:
    game = Game(name, with_rules=False)
    known = defaultdict(set)
    for state in walked(game, 1000):
        known[game.prompt(state), tuple(game.moves(state))].add(state.information_state_string())
    largest = max(map(len, known.values()))
    assert largest == 1 if name != "leduc_poker" else 1 < largest <= 4  # suits, of two cards, make no difference


@pytest.mark.parametrize("name", NAMES)
def test_every_move_has_an_answer_of_its_own(name: str) -> None:
    game = Game(name)
    for state in walked(game, 20):
        moves = game.moves(state)
        assert sorted(moves.values()) == sorted(state.legal_actions())
        assert all(game.move(state, f" {text.upper()}\n") == move for text, move in moves.items())
        assert game.move(state, "nonsense") is None


async def test_seats_get_the_games_rewards_and_chance_is_of_the_seed() -> None:
    environment = Games(game="kuhn_poker", rules=False)
    [example] = environment.dataset("train")
    asked: dict[int, list[str]] = defaultdict(list)

    def answers(seed: int) -> Any:
        def answer(role: str, messages: list[dict[str, Any]]) -> str:
            asked[seed].append(f"{role} {messages[-1]['content']}")
            return "b"

        return answer

    for seed in range(20):
        state = await play(environment, example, answers(seed), seed=seed)
        assert sorted(state.rewards.values()) == [-2, 2]
        cards = {text.split()[0]: "JQK".index(text.split()[2]) for text in asked[seed]}
        assert (state.rewards["first"] > 0) == (cards["first"] > cards["second"])
    again = asked[3]
    asked[3] = []
    await play(environment, example, answers(3), seed=3)
    assert asked[3] == again
    assert len({tuple(deal) for deal in asked.values()}) == 6  # all deals of two of three cards


async def test_an_illegal_answer_ends_the_game_and_costs_more_than_any_loss() -> None:
    environment = Games(game="tic_tac_toe")
    [example] = environment.dataset("train")
    state = await play(environment, example, ["5", "5"])
    assert state.rewards == {"first": 0, "second": -2}
    assert state.metrics["illegal_answers/second"] == 1
    assert state.metrics["illegal_answers/first"] == 0
    assert state.trajectory[1].error is not None
    state = await play(Games(game="tic_tac_toe", illegal_reward=-5), example, ["x"])
    assert state.rewards["first"] == -5


async def test_a_game_that_is_too_large_to_be_judged_is_played_against_random_moves() -> None:
    environment = Games(game="connect_four", rules=False, max_states=50, num_eval=4)
    examples = environment.dataset("eval")
    assert [example["plays"] for example in examples] == ["first", "second", "first", "second"]
    for example in examples:
        columns = [str(1 + number % 7) for number in range(21)]
        state = await play(environment, example, columns, split="eval")
        assert set(state.rewards) == {example["plays"]}
        assert state.accuracy == (state.reward + 1) / 2 or state.rewards[example["plays"]] == environment.illegal_reward


async def test_the_judge_asks_for_probabilities_and_written_answers_have_none() -> None:
    environment = Games(game="kuhn_poker")
    [example] = environment.dataset("eval")
    with pytest.raises(CallFailed, match="probabilities"):
        await play(environment, example, ["p"] * 3, split="eval")


async def test_training_games_begin_with_moves_at_random_and_held_out_games_do_not() -> None:
    environment = Games(game="tic_tac_toe", rules=False, random_moves=4)
    [example] = environment.dataset("train")
    begins = set()
    for seed in range(20):
        asked: list[str] = []

        def answer(role: str, messages: list[dict[str, Any]], asked: list[str] = asked) -> str:
            asked.append(messages[-1]["content"])
            return "none"

        state = await play(environment, example, answer, seed=seed)
        moves = state.data["moves"]
        assert [move.endswith("(at random)") for move in moves] == [True] * (len(moves) - 1) + [False]
        assert asked[0].count(".") == 9 - (len(moves) - 1)
        begins.add(len(moves) - 1)
    assert begins == {0, 1, 2, 3, 4}


def test_a_move_is_compared_with_those_of_the_same_position() -> None:
    def game(name: str, reward: float, *moves: tuple[str, str]) -> EpisodeResult:
        steps = tuple(Step(role="first", messages=({"role": "user", "content": prompt},)) for prompt, _ in moves)
        extras = {"positions": [position for _, position in moves]}
        return EpisodeResult(id=name, steps=steps, rewards={"first": reward}, extras=extras)

    results = [
        game("a", 2.0, ("K", "K against J")),
        game("b", 4.0, ("K", "K against Q")),
        game("c", -3.0, ("J", "J against K"), ("J b", "J against K, b")),
    ]
    # The role's mean over its 4 steps is 0. By prompt, K's baseline is (2 + 4) / (2 + 1) = 2, that of J and of J b is
    # -3 / (1 + 1). This leaves 0, 2, -1.5 and -1.5, of which the position takes half: each was met once, prior is 1.
    assert by_position(results, prior=1) == {("a", 0): 0.0, ("b", 0): 1.0, ("c", 0): -0.75, ("c", 1): -0.75}


async def test_positions_tell_all_that_is_hidden_one_for_each_own_move() -> None:
    environment = Games(game="kuhn_poker", rules=False)
    [example] = environment.dataset("train")
    state = await play(environment, example, ["p", "b", "p"], seed=1)
    positions = state.data["positions"]
    assert len(positions) == 3
    assert [len(one.split()) for one in positions] == [2, 3, 4]  # both cards, then a move more each time


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_game", "no game 'no_such_game'"),
        ("matrix_rps", "at the same time"),
        ("kuhn_poker(players=3)", "3 players, expected 2"),
    ],
)
def test_games_that_cannot_be_played_are_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Game(name)


async def test_an_opponent_has_one_seat_and_its_illegal_answers_become_moves() -> None:
    game, seats = Games(game="kuhn_poker", opponent="past", every=2, keep=4), set()
    [example] = game.dataset("train")
    for seed in range(12):
        roles: list[str] = []

        def answer(role: str, messages: object, roles: list[str] = roles) -> str:
            roles.append(role)
            return "p"

        state = await play(game, example, answer, seed=seed)
        [bound] = state.players
        [own] = state.roles
        seats.add(own)
        assert {own, bound} == set(roles) == {"first", "second"}
        assert set(state.rewards) == {own}
    assert seats == {"first", "second"}
    [bound] = (await play(game, example, lambda role, _: "p", seed=1)).players
    state = await play(game, example, lambda role, _: "nonsense" if role == bound else "p", seed=1)
    assert "illegal" not in state.data


@pytest.mark.parametrize(("name", "depth"), [("tic_tac_toe", 9), ("nim", 16)])
async def test_minimax_of_full_depth_never_loses_what_it_can_hold(name: str, depth: int) -> None:
    game, rng, seats = Games(game=name, opponent=f"minimax-{depth}"), random.Random(0), set()
    [example] = game.dataset("train")

    def answer(role: str, messages: list[dict[str, Any]]) -> str:
        return rng.choice(messages[-1]["content"].rpartition(": ")[2].split())

    for seed in range(30):
        state = await play(game, example, answer, seed=seed)
        [(bound, player)] = state.players.items()
        assert player.name == f"script:minimax-{depth}"
        seats.add(bound)
        if name == "tic_tac_toe" or bound == "second":  # 1 3 5 7 is lost for who begins
            assert state.reward <= (0 if name == "tic_tac_toe" else -1)
    assert seats == {"first", "second"}


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([2, 2, 3, 3, 4, 4], {"2", "6"}),  # three at the bottom: a win on either side, which need not wait
        ([0, 1, 0, 2, 0], {"1"}),
        ([0, 1, 0, 1, 2, 1], {"2"}),
    ],
)
def test_minimax_takes_a_win_at_once_and_blocks_a_loss_at_once(moves: list[int], expected: set[str]) -> None:
    game, rng = Game("connect_four"), random.Random(0)
    position = game.begin(rng)
    for move in moves:
        position.apply_action(move)
    for depth in (2, 4):
        search = Minimax(game, depth)
        assert {search.answer(position, rng) for _ in range(20)} == expected


@pytest.mark.parametrize(
    ("name", "opponent", "said"),
    [
        ("kuhn_poker", "minimax-2", "minimax cannot play kuhn_poker, where something is hidden"),
        ("nim", "minimax", "'minimax', expected minimax- and how many moves"),
        ("nim", "minimax-0", "looks 0 moves ahead, expected at least 1"),
    ],
)
def test_searches_that_there_cannot_be_are_refused(name: str, opponent: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Games(game=name, opponent=opponent)
