"""The judge: how far a policy is from one that nobody can beat, exactly, from its moves' probabilities alone.

What is asked of a policy are the probabilities of its answers in every state that it can be in (`questions`). From them
follows what its worst opponent wins (`judge`). Nothing is sampled, so that two versions can be told apart by any
difference, and no other player is needed, which might be weak at the same things.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo.environments.games.game import Game

from grpo import UserError

MAX_STATES = 10_000
"""States in which somebody is to move; games with more are not judged unless that is asked for."""
Policy = Mapping[str, Sequence[float]]
"""Probabilities of the legal answers, in the order of `Question.answers`, by `Question.prompt`. What they lack to 1 is
the share of illegal answers."""


class TooLarge(UserError):
    """A game has more states than are to be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the answers whose probabilities are asked for. States that are shown alike are one question."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """How strong a policy is, each seat by its own. Illegal answers are left out: each state's probabilities are those
    of its legal answers, made to sum to 1."""

    nash_conv: float
    """Sum over both seats of what the best response wins against the policy there more than the policy itself: 0 where
    nobody can beat it (Lanctot et al. 2017, arXiv:1711.00832), in units of the game's rewards."""
    illegal: float
    """Mean probability of an illegal answer, over all questions."""
    num_questions: int
    keeps_value: float | None = None
    """Mean probability of a move that keeps what the position is worth, over the positions that a move can lose; None
    in a game with hidden information, as all that follow."""
    keeps_win: float | None = None
    """The same over the positions that are won and can be lost."""
    loses_first: float | None = None
    """The chance that the policy loses as the first player, against the opponent who wins most often."""
    loses_second: float | None = None
    """The same as the second player."""
    loses_first_to_perfect: float | None = None
    """The chance that the policy loses as the first player against perfect play, which draws among the moves that keep
    the position's value."""
    loses_second_to_perfect: float | None = None
    """The same as the second player."""
    greedy_keeps_win: float | None = None
    """`keeps_win` of the likeliest answers (temperature 0), as are those that follow."""
    greedy_loses_first: float | None = None
    """1 where some opponent beats the likeliest answers of the first player, 0 where nobody does."""
    greedy_loses_second: float | None = None
    """The same as the second player."""
    greedy_loses_first_to_perfect: float | None = None
    """`loses_first_to_perfect` of the likeliest answers."""
    greedy_loses_second_to_perfect: float | None = None
    """The same as the second player."""

    def figures(self) -> dict[str, float]:
        """Returns all that was judged, by name."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


@dataclass(slots=True)
class _Node:
    """A position of a game with perfect information, after those that it leads to."""

    player: int
    """0 or 1, or below 0 where it is chance's turn or the game is over."""
    prompt: str
    children: list[int]
    chances: list[float]
    """Of the children, where it is chance's turn."""
    returns: float
    """The first player's reward, where the game is over."""
    perfect: list[float] = field(default_factory=list)
    """Of the children in perfect play, where somebody is to move: alike for those that keep what the position is worth,
    and 0 for the others."""


class Judge:
    """Judges policies at one game: what needs no policy is computed once."""

    def __init__(self, game: Game, *, max_states: int = MAX_STATES) -> None:
        """Raises TooLarge."""
        self.game, self._max_states = game, max_states
        self._nodes: list[_Node] = []
        self._states: dict[str, tuple[str, list[int]]] = {}
        """Prompt and moves by information state, of a game with hidden information."""
        asked: dict[str, tuple[str, ...]] = {}
        if game.has_perfect_information:
            self._add_position(game.spiel.new_initial_state(), {}, asked)
            self._find_perfect_play()
        else:
            self._add_states(asked)
        self.questions = [Question(prompt=prompt, answers=answers) for prompt, answers in asked.items()]

    def judge(self, policy: Policy) -> Judged:
        """Returns how strong the policy is."""
        legal, illegal = dict[str, list[float]](), []
        for question in self.questions:
            given = [float(chance) for chance in policy[question.prompt]]
            total = math.fsum(given)
            if len(given) != len(question.answers) or not min(given) >= 0 or not total > 0:
                raise ValueError(
                    f"the probabilities of {' '.join(question.answers)} at {question.prompt!r} are {given}; expected "
                    "one for each, from 0 on, and not all 0"
                )
            legal[question.prompt] = [chance / total for chance in given]
            illegal.append(1 - total)
        if self._nodes:
            figures = self._of_positions(legal)
            greedy = self._of_positions({prompt: _likeliest(chances) for prompt, chances in legal.items()})
            figures |= {
                f"greedy_{key}": value for key, value in greedy.items() if key.startswith(("keeps_win", "loses"))
            }
        else:
            figures = {"nash_conv": self._nash_conv(legal)}
        share = max(0.0, math.fsum(illegal) / len(illegal))
        return Judged(illegal=share, num_questions=len(self.questions), **figures)

    def _check(self, num: int) -> None:
        if num > self._max_states:
            raise TooLarge(
                f"{self.game.name} has more than {self._max_states} states in which somebody is to move, which is too "
                "many to be judged exactly; raise max_states, take a smaller game, or let a response be learned "
                "(grpo judge --games N)"
            )

    # --- hidden information ---

    def _add_states(self, asked: dict[str, tuple[str, ...]]) -> None:
        """Finds all information states, by a walk over all histories."""
        game, left = self.game, [self.game.spiel.new_initial_state()]
        while left:
            state = left.pop()
            if state.is_terminal():
                continue
            if not state.is_chance_node():
                key = state.information_state_string()
                if key not in self._states:
                    moves, prompt = game.moves(state), game.prompt(state)
                    self._states[key] = prompt, list(moves.values())
                    asked.setdefault(prompt, tuple(moves))
                    self._check(len(self._states))
            left += [state.child(move) for move in reversed(state.legal_actions())]

    def _nash_conv(self, legal: Mapping[str, list[float]]) -> float:
        """Returns OpenSpiel's own NashConv of the policy."""
        import pyspiel

        table = {key: list(zip(moves, legal[prompt], strict=True)) for key, (prompt, moves) in self._states.items()}
        return float(pyspiel.nash_conv(self.game.spiel, table))

    # --- perfect information ---

    def _add_position(self, state: Any, known: dict[str, int], asked: dict[str, tuple[str, ...]]) -> int:
        """Returns the number of a position, behind those of all positions that it leads to."""
        player = -1 if state.is_terminal() else max(-1, state.current_player())
        key = f"{state.current_player()} {self.game.known(state, max(0, player))}"
        if key in known:
            return known[key]
        prompt, chances, children = "", list[float](), list[int]()
        if player >= 0:
            moves, prompt = self.game.moves(state), self.game.prompt(state)
            asked.setdefault(prompt, tuple(moves))
            self._check(len(asked))
            children = [self._add_position(state.child(move), known, asked) for move in moves.values()]
        elif not state.is_terminal():
            chances = [chance for _, chance in state.chance_outcomes()]
            children = [self._add_position(state.child(move), known, asked) for move, _ in state.chance_outcomes()]
        known[key] = len(self._nodes)
        returns = float(state.returns()[0]) if state.is_terminal() else 0.0
        self._nodes.append(_Node(player, prompt, children, chances, returns))
        return known[key]

    def _find_perfect_play(self) -> None:
        """Finds what each position is worth to the first player, where both play best, and the moves that keep it."""
        self._values = self._backwards(lambda node, values: (max, min)[node.player](values))
        for node, worth in zip(self._nodes, self._values, strict=True):
            if node.player >= 0:
                keeping = [self._values[child] == worth for child in node.children]
                node.perfect = [kept / sum(keeping) for kept in keeping]

    def _backwards(self, choice: Any, end: Any = lambda returns: returns) -> list[float]:
        """Returns a value of each position: `end` of the first player's reward where the game is over, `choice` of the
        position and the values that it leads to where somebody is to move, and the mean over what is chance."""
        values: list[float] = []
        for node in self._nodes:
            following = [values[child] for child in node.children]
            if node.player >= 0:
                values.append(choice(node, following))
            elif following:
                values.append(_dot(node.chances, following))
            else:
                values.append(end(node.returns))
        return values

    def _of_positions(self, legal: Mapping[str, list[float]]) -> dict[str, float]:
        def against(seat: int, reply: Any, end: Any = lambda returns: returns) -> float:
            """The policy moves as `seat`, the other player by `reply`. Returns the first player's reward, or `end` of
            it."""
            return self._backwards(
                lambda node, values: _dot(legal[node.prompt], values) if node.player == seat else reply(node, values),
                end,
            )[-1]

        def least(_: _Node, values: list[float]) -> float:
            return min(values)

        def most(_: _Node, values: list[float]) -> float:
            return max(values)

        def perfect(node: _Node, values: list[float]) -> float:
            return _dot(node.perfect, values)

        def first_lost(returns: float) -> float:
            return float(returns < 0)

        def second_lost(returns: float) -> float:
            return float(returns > 0)

        kept, kept_wins = list[float](), list[float]()
        for node, worth in zip(self._nodes, self._values, strict=True):
            if node.player < 0:
                continue
            if not all(node.perfect):
                kept.append(_dot(legal[node.prompt], [chance > 0 for chance in node.perfect]))
                if (worth if node.player == 0 else -worth) > 0:
                    kept_wins.append(kept[-1])
        return {
            "nash_conv": against(1, most) - against(0, least),
            "keeps_value": math.fsum(kept) / max(1, len(kept)),
            "keeps_win": math.fsum(kept_wins) / max(1, len(kept_wins)),
            "loses_first": against(0, most, first_lost),
            "loses_second": against(1, most, second_lost),
            "loses_first_to_perfect": against(0, perfect, first_lost),
            "loses_second_to_perfect": against(1, perfect, second_lost),
        }


def _likeliest(chances: Sequence[float]) -> list[float]:
    """Returns 1 for the largest, the first of equal ones, and 0 for the others."""
    best = max(range(len(chances)), key=chances.__getitem__)
    return [float(number == best) for number in range(len(chances))]


def _dot(weights: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def judge(game: Game, policy: Policy, *, max_states: int = MAX_STATES) -> Judged:
    """Returns how strong a policy is at a game. Raises TooLarge, and ValueError for what is no policy.

    Example: ``judge(Game("kuhn_poker"), {prompt: [0.5, 0.5] for prompt in ...}).nash_conv``
    """
    return Judge(game, max_states=max_states).judge(policy)
