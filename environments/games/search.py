"""A search as a player: minimax, for games in which nothing is hidden."""

import math
import random
from typing import Any

from grpo.environments.games.game import Game

from grpo import Player, UserError

MAX_KNOWN = 200_000
"""Values of positions that are kept; a search that has more begins anew."""
NEARER = 1 - 1e-6
"""What a value counts for a move earlier: a win at once is better than a later one, and a late loss than an early one.
"""


class Minimax:
    """Looks `depth` moves ahead, the own one included, in games whose rewards sum to 0. What is not over then counts as
    0; a depth of the game's length is perfect play. Of equally good moves it draws one. Values are kept from game to
    game.

    Example: ``Minimax(Game("connect_four"), 4)``
    """

    def __init__(self, game: Game, depth: int) -> None:
        """Raises UserError for a game with hidden information, and for a depth below 1."""
        if not game.has_perfect_information:
            raise UserError(f"minimax cannot play {game.name}, where something is hidden from it")
        if depth < 1:
            raise UserError(f"minimax looks {depth} moves ahead, expected at least 1")
        self._game, self._depth = game, depth
        self._values = dict[tuple[int, int, str], float]()
        """What positions are worth, by moves to look ahead, who is to move, and what that player knows."""

    def player(self, position: Any, rng: random.Random) -> Player:
        """Returns the search as a player of one game, whose `position` changes in place."""
        return Player.script(lambda state, messages: self.answer(position, rng), name=f"minimax-{self._depth}")

    def answer(self, position: Any, rng: random.Random) -> str:
        """Returns the move of who is to move, as text."""
        sign = 1 if position.current_player() == 0 else -1
        worth = {
            answer: sign * self._worth(position.child(move), self._depth - 1)
            for answer, move in self._game.moves(position).items()
        }
        best = max(worth.values())
        return rng.choice([answer for answer, value in worth.items() if value == best])

    def _worth(self, position: Any, depth: int) -> float:
        """Returns what a position is worth to the first player."""
        if position.is_terminal():
            return float(position.returns()[0])
        player = position.current_player()
        if depth == 0 and player >= 0:
            return 0.0
        key = depth, player, self._game.known(position, max(0, player))
        if key not in self._values:
            if player >= 0:
                following = [self._worth(position.child(move), depth - 1) for move in position.legal_actions()]
                value = NEARER * (max, min)[player](following)
            else:
                value = math.fsum(
                    chance * self._worth(position.child(move), depth) for move, chance in position.chance_outcomes()
                )
            if len(self._values) >= MAX_KNOWN:
                self._values.clear()
            self._values[key] = value
            return value
        return self._values[key]
