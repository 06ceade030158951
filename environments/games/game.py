"""Sequential two-player games of OpenSpiel: what a player is shown, and which answers are moves."""

import functools
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo import UserError

SEATS = ("first", "second")
"""The players, as roles."""
MISSING = "the games need OpenSpiel: pip install 'grpo-pipeline[games]', or pip install open_spiel"


class Rules(NamedTuple):
    """How one game is told to a player."""

    title: str
    """The word that every prompt begins with."""
    text: str
    """The rules, and how answers are written."""
    view: Callable[[str, int], str]
    """Makes what a player (0 or 1) is shown of OpenSpiel's own text of what that player may know."""
    answer: Callable[[str], str]
    """Makes the answer that stands for a move of OpenSpiel's text of it."""


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _kuhn(known: str, player: int) -> str:
    return " ".join(["JQK"[int(known[0])], *known[1:]])


def _leduc(known: str, player: int) -> str:
    """Suits are left out: nothing in the game depends on them, and states that differ in them alone are one."""
    fields = dict(re.findall(r"\[(Private|Public|Round1|Round2):? ?([^\]]*)\]", known))
    first, second = ([("f", "c", "r")[int(move)] for move in fields[key].split()] for key in ("Round1", "Round2"))
    shown = [_rank(fields["Private"]), *first]
    return " ".join([*shown, "/", _rank(fields["Public"]), *second] if "Public" in fields else shown)


def _rank(card: str) -> str:
    return "JQK"[int(card) // 2]


def _board(known: str, player: int) -> str:
    """The player's own signs are m, the other's are t: both seats see their games alike."""
    own, other = ("x", "o") if player == 0 else ("o", "x")
    signs = {own: "m", other: "t", ".": "."}
    return " ".join(signs[sign] for sign in known if sign in signs)


def _piles(known: str, player: int) -> str:
    return known.partition(": ")[2]


def _taken(move: str) -> str:
    """`pile:2, take:3;` is `b3`."""
    pile, num = map(int, re.findall(r"\d+", move))
    return f"{chr(ord('a') + pile - 1)}{num}"


RULES = {
    "kuhn_poker": Rules(
        "kuhn",
        "Kuhn poker, with the cards J, Q and K. Both players have put in 1. p passes, or folds to a bet; b bets 1 "
        "more, or calls. Your card and the moves so far:",
        _kuhn,
        lambda move: move[0].lower(),
    ),
    "leduc_poker": Rules(
        "leduc",
        "Leduc poker, with two each of J, Q and K. Both players have put in 1. f folds, c checks or calls, r raises, "
        "by 2 in the first round and 4 in the second, twice a round at most. Behind / is the card that both share: a "
        "pair with it wins, else the higher card. Your card and the moves so far:",
        _leduc,
        lambda move: move[0].lower(),
    ),
    "liars_dice": Rules(
        "dice",
        "Liar's dice. Each player has rolled a die that the other does not see; the highest face counts as any. A bid "
        "such as 2-4 says that there are two dice of 4; each bid is higher than the one before it. liar doubts the "
        "newest bid. Your die and the bids so far:",
        lambda known, player: known,
        str.lower,
    ),
    "tic_tac_toe": Rules(
        "ttt",
        "Tic-tac-toe. The board, row by row: m are your signs, t the other player's. Answer with the number of a free "
        "cell, 1 to 9:",
        _board,
        lambda move: str(3 * int(move[2]) + int(move[4]) + 1),
    ),
    "connect_four": Rules(
        "four",
        "Connect four. The board, row by row from the top: m are your signs, t the other player's. Answer with the "
        "number of a column that is not full, 1 for the leftmost:",
        _board,
        lambda move: str(int(move[1:]) + 1),
    ),
    "nim": Rules(
        "nim",
        "Nim: a move takes any number from one pile, and who takes the last one loses. Answer with a pile's letter and "
        "how many to take, such as b2. The piles a, b, c and so on:",
        _piles,
        _taken,
    ),
}
"""The games that have words of their own; others are shown as OpenSpiel writes them."""


class Game:
    """A game of OpenSpiel between two players who move in turn.

    `name` is OpenSpiel's, with parameters where it takes any: `kuhn_poker`, `connect_four(rows=4,columns=4)`.
    """

    def __init__(self, name: str, *, with_rules: bool = True) -> None:
        """`with_rules`: prompts begin with the rules and end with the legal answers. Raises UserError for a game that
        is not there, or is not of two players who move in turn for rewards at its end."""
        self.spiel = _load(name)
        self.name, self._with_rules = name, with_rules
        kind = self.spiel.get_type()
        self.has_perfect_information = kind.information.name == "PERFECT_INFORMATION"
        self._by_observation = _is_seen_whole(kind)
        self._rules = RULES.get(kind.short_name)
        self.title = self._rules.title if self._rules else kind.short_name

    @property
    def lowest(self) -> float:
        """The least that a player can get."""
        return float(self.spiel.min_utility())

    def known(self, state: Any, player: int) -> str:
        """Returns OpenSpiel's text of all that a player may know in a state: the position, or where something is
        hidden, what the player has seen so far."""
        text: str = state.observation_string(player) if self._by_observation else state.information_state_string(player)
        return text

    def view(self, state: Any, player: int) -> str:
        """Returns what the player is shown: a function of `known`, and of nothing else."""
        known = self.known(state, player)
        shown = self._rules.view(known, player) if self._rules else _spaced(known)
        return f"{self.title} {shown}".strip()

    def moves(self, state: Any) -> dict[str, int]:
        """Returns the legal moves of who is to move, by the answer that stands for each."""
        player, answer = state.current_player(), self._rules.answer if self._rules else _spaced
        found = {answer(state.action_to_string(player, move)): move for move in state.legal_actions()}
        if len(found) != len(state.legal_actions()):
            raise UserError(f"{self.name} has moves of the same name: {', '.join(found)}; it cannot be played by text")
        return found

    def prompt(self, state: Any) -> str:
        """Returns what who is to move is asked."""
        shown = self.view(state, state.current_player())
        if not self._with_rules:
            return shown
        text = self._rules.text if self._rules else f"You play {self.spiel.get_type().long_name}. What you know:"
        return f"{text}\n{shown}\nAnswer with one of: {' '.join(self.moves(state))}"

    def move(self, state: Any, answer: str) -> int | None:
        """Returns the move that an answer stands for, or None. Spaces around it and capitals do not count, nor does
        thinking before it."""
        said = _spaced(answer.rpartition("</think>")[2]).casefold()
        return next((move for text, move in self.moves(state).items() if text.casefold() == said), None)

    def begin(self, rng: random.Random) -> Any:
        """Returns the first state in which somebody is to move."""
        return drawn(self.spiel.new_initial_state(), rng)


def drawn(state: Any, rng: random.Random) -> Any:
    """Draws what is chance, in place, until somebody is to move or the game is over. Returns the state."""
    while state.is_chance_node():
        outcomes = state.chance_outcomes()
        state.apply_action(rng.choices([move for move, _ in outcomes], [chance for _, chance in outcomes])[0])
    return state


def _is_seen_whole(kind: Any) -> bool:
    """Returns whether what a player observes in a game of this kind is the position."""
    return bool(kind.information.name == "PERFECT_INFORMATION" and kind.provides_observation_string)


@functools.cache
def _load(name: str) -> Any:
    try:
        import pyspiel
    except ImportError:
        raise UserError(MISSING) from None
    try:
        game = pyspiel.load_game(name)
    except (pyspiel.SpielError, RuntimeError) as error:
        raise UserError(f"OpenSpiel has no game {name!r}: {str(error).splitlines()[0]}") from None
    kind = game.get_type()
    problems = {
        f"{game.num_players()} players, expected 2": game.num_players() != 2,
        "players who move at the same time": kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL,
        "rewards before its end": kind.reward_model != pyspiel.GameType.RewardModel.TERMINAL,
        "no text of what a player knows": not (kind.provides_information_state_string or _is_seen_whole(kind)),
    }
    if wrong := [text for text, holds in problems.items() if holds]:
        raise UserError(f"the game {name} has {'; '.join(wrong)}; expected a game of two players who move in turn")
    return game
