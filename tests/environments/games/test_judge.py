"""The judge against OpenSpiel's own figures, and against games whose best play is known."""

import functools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from grpo.environments.games.game import Game
from grpo.environments.games.judge import Judge, Question, TooLarge, judge
from grpo.environments.games.response import exploit

pytest.importorskip("pyspiel")
from open_spiel.python import policy as spiel_policy
from open_spiel.python.algorithms import best_response, exploitability

Weights = Callable[[str, Sequence[str]], list[float]]


def policy_of(judge: Judge, weights: Weights) -> dict[str, list[float]]:
    return {one.prompt: weights(one.prompt, one.answers) for one in judge.questions}


def uniform(prompt: str, answers: Sequence[str]) -> list[float]:
    return [1 / len(answers)] * len(answers)


def drawn(prompt: str, answers: Sequence[str]) -> list[float]:
    rng = random.Random(prompt)
    weights = [rng.random() for _ in answers]
    return [weight / sum(weights) for weight in weights]


def table_of(game: Game, policy: Mapping[str, Sequence[float]]) -> Any:
    """The policy as OpenSpiel's table."""
    table = spiel_policy.TabularPolicy(game.spiel)
    for place, state in enumerate(table.states):
        row = table.action_probability_array[place]
        row[:] = 0
        for move, chance in zip(game.moves(state).values(), policy[game.prompt(state)], strict=True):
            row[move] = chance
    return table


@functools.cache
def judge_of(name: str) -> Judge:
    return Judge(Game(name, with_rules=False))


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "nim(pile_sizes=1;2;2)"])
@pytest.mark.parametrize("weights", [uniform, drawn])
def test_nash_conv_is_that_of_open_spiel(name: str, weights: Weights) -> None:
    own = judge_of(name)
    policy = policy_of(own, weights)
    expected = exploitability.nash_conv(own.game.spiel, table_of(own.game, policy))
    assert own.judge(policy).nash_conv == pytest.approx(expected, abs=1e-9)


def test_nash_conv_of_a_best_response_is_that_of_open_spiel() -> None:
    own = judge_of("kuhn_poker")
    table = table_of(own.game, policy_of(own, drawn))
    responses = [best_response.BestResponsePolicy(own.game.spiel, seat, table) for seat in (0, 1)]
    policy = {}
    for state in table.states:
        best = responses[state.current_player()].best_response_action(state.information_state_string())
        policy[own.game.prompt(state)] = [float(move == best) for move in own.game.moves(state).values()]
    expected = exploitability.nash_conv(own.game.spiel, table_of(own.game, policy))
    assert own.judge(policy).nash_conv == pytest.approx(expected, abs=1e-9)


# One of Kuhn's (1950), with alpha = 1/3: the first player bluffs with J in 1/3 and bets K always.
EQUILIBRIUM = {"J": 1 / 3, "Q": 0, "K": 1, "J p b": 0, "Q p b": 2 / 3, "K p b": 1}
EQUILIBRIUM |= {"J p": 1 / 3, "Q p": 0, "K p": 1, "J b": 0, "Q b": 1 / 3, "K b": 1}


def test_an_equilibrium_of_kuhn_poker_cannot_be_beaten() -> None:
    policy = {f"kuhn {view}": [1 - chance, chance] for view, chance in EQUILIBRIUM.items()}
    assert judge(Game("kuhn_poker", with_rules=False), policy).nash_conv == pytest.approx(0, abs=1e-9)


def test_probabilities_are_made_to_sum_to_one_and_what_they_lack_is_reported() -> None:
    own = judge_of("kuhn_poker")
    judged = own.judge(policy_of(own, lambda _, answers: [0.25, 0.5]))
    assert judged.illegal == pytest.approx(0.25)
    assert judged.nash_conv == pytest.approx(own.judge(policy_of(own, lambda _, answers: [1, 2])).nash_conv)


def test_perfect_play_at_tic_tac_toe_never_loses_and_a_slip_is_seen() -> None:
    own = judge_of("tic_tac_toe")

    def search(board: tuple[str, ...]) -> list[int]:
        """What each free cell is worth to `m`, by a search of our own."""
        worth = []
        for cell in (place for place, sign in enumerate(board) if sign == "."):
            after = (*board[:cell], "m", *board[cell + 1 :])
            turned = tuple({"m": "t", "t": "m", ".": "."}[sign] for sign in after)
            worth.append(1 if won(after) else -max(found(turned), default=0))
        return worth

    found = functools.cache(search)
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]

    def won(board: Sequence[str]) -> bool:
        return any(all(board[cell] == "m" for cell in line) for line in lines)

    def best(prompt: str, answers: Sequence[str]) -> list[float]:
        values = found(tuple(prompt.split()[1:]))
        return [float(value == max(values)) for value in values]

    judged = own.judge(policy_of(own, best))
    assert judged.nash_conv == pytest.approx(0)
    assert (judged.keeps_value, judged.keeps_win) == (pytest.approx(1), pytest.approx(1))
    assert (judged.loses_first, judged.loses_second) == (0, 0)
    # The answer to a first move in the middle has to be a corner; an edge loses.
    policy = policy_of(own, best) | {"ttt . . . . t . . . .": [0, 1, 0, 0, 0, 0, 0, 0]}
    judged = own.judge(policy)
    assert (judged.loses_first, judged.loses_second) == (0, 1)
    assert judged.nash_conv == pytest.approx(1)
    # Perfect play begins in the middle one time in nine, and wins whenever it can.
    assert judged.loses_second_to_perfect == pytest.approx(1 / 9)
    # Who errs one time in ten is beaten now and then, and would not be if the likeliest answer were taken.
    policy |= {"ttt . . . . t . . . .": [0.9, 0.1, 0, 0, 0, 0, 0, 0]}
    judged = own.judge(policy)
    assert judged.loses_second == pytest.approx(0.1)
    assert (judged.loses_second_to_perfect, judged.greedy_loses_second_to_perfect) == (pytest.approx(1 / 90), 0)
    assert (judged.greedy_loses_first, judged.greedy_loses_second, judged.greedy_keeps_win) == (0, 0, 1)


def test_the_known_solution_of_nim_keeps_every_win() -> None:
    own = judge_of("nim")

    def solution(prompt: str, answers: Sequence[str]) -> list[float]:
        """Who takes the last one loses: as in plain nim, leave piles whose binary sum is 0; but where only piles of one
        are left then, leave an odd number of them (Bouton 1901)."""
        piles = [int(pile) for pile in prompt.split()[1:]]
        good = []
        for answer in answers:
            left = list(piles)
            left["abcd".index(answer[0])] -= int(answer[1:])
            only_ones = max(left) <= 1
            good.append(sum(left) % 2 == 1 if only_ones else functools.reduce(operator.xor, left) == 0)
        return [one / sum(good) for one in good] if any(good) else uniform(prompt, answers)

    judged = own.judge(policy_of(own, solution))
    assert (judged.keeps_win, judged.nash_conv) == (pytest.approx(1), pytest.approx(0))
    assert (judged.loses_first, judged.loses_second) == (pytest.approx(1), 0)  # 1 3 5 7 is lost for who begins
    assert own.judge(policy_of(own, uniform)).keeps_win < 0.2


def test_a_game_that_is_too_large_is_refused_with_its_limit() -> None:
    with pytest.raises(TooLarge, match=r"liars_dice .* 100 states"):
        Judge(Game("liars_dice"), max_states=100)
    with pytest.raises(TooLarge, match=r"connect_four .* 100 states"):
        Judge(Game("connect_four"), max_states=100)


@pytest.mark.parametrize("name", ["kuhn_poker", "nim(pile_sizes=2;2;2)"])
async def test_what_a_response_learns_to_win_is_below_nash_conv_and_near_it_after_enough_games(name: str) -> None:
    own, asked = judge_of(name), list[str]()

    async def ask(questions: Sequence[Question]) -> list[list[float]]:
        asked.extend(one.prompt for one in questions)
        return [uniform(one.prompt, one.answers) for one in questions]

    exact = own.judge(policy_of(own, uniform)).nash_conv
    few, many = [
        (await exploit(own.game, ask, num_games=num, rng=random.Random(0)))["exploitability_at_least"]
        for num in (30, 1000)
    ]
    assert few < many <= exact
    assert many > exact - 0.2  # two standard errors are about 0.14 in Kuhn poker
    assert len(asked) <= 2 * len(own.questions)  # no position is asked about twice


async def test_nothing_is_won_from_an_equilibrium() -> None:
    async def ask(questions: Sequence[Question]) -> list[list[float]]:
        return [[1 - EQUILIBRIUM[one.prompt[5:]], EQUILIBRIUM[one.prompt[5:]]] for one in questions]

    figures = await exploit(Game("kuhn_poker", with_rules=False), ask, num_games=500, rng=random.Random(0))
    assert figures["exploitability_at_least"] <= 0
