"""`textarena`: the two-player games of TextArena, by their own `step`."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.environments.games.game import SEATS

from grpo import ContextFull, Environment, Episode, EpisodeState, Role, RolloutContext, Rubric, UserError

MISSING = "TextArena's games need its package: pip install 'grpo-pipeline[textarena]', or pip install textarena"


class TextArena(Episode, Environment):
    """A game of TextArena, played by the policy in both seats, `first` and `second`, which are roles of their own. Each
    answer goes to the game as it stands, and what a seat is shown is the game's own observation.

    A seat's reward is the game's, and so is what an invalid move costs. A game that is not over after `max_moves`, or
    whose observation leaves no room for an answer, is a draw.

    Held out are games against the model before training, half in each seat; the accuracy is the share that the policy
    wins, a draw being half.
    """

    roles = tuple(Role(id=seat) for seat in SEATS)

    def __init__(self, *, game: str, max_moves: int = 100, num_eval: int = 20) -> None:
        """`game`: its id, as `TicTacToe-v0`. `num_eval`: games of an evaluation."""
        try:
            import textarena
        except ImportError:
            raise UserError(MISSING) from None
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            raise UserError(f"TextArena has no game {game!r}; give the id of one of its two-player games")
        self._make, self.game, self._max_moves, self._num_eval = textarena.make, game, max_moves, num_eval
        self.rubric = Rubric([self.result], accuracy=self.won, metrics=[self.invalid_moves, self.num_moves])
        try:
            _Table(self._make(game), seed=0)
        except AssertionError as error:
            raise UserError(f"{game} is no game of two players: {error}") from None

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        example = {"prompt": self.game}
        return [example] if split == "train" else [{**example, "plays": SEATS[n % 2]} for n in range(self._num_eval)]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        table, moves, done = _Table(self._make(self.game), seed=ctx.rng.getrandbits(32)), list[str](), False
        state.data["moves"] = moves
        try:
            while not done and len(moves) < self._max_moves:
                player, observation = table.do("get_observation")
                asked, seat = [{"role": "user", "content": observation}], SEATS[player]
                if state.example.get("plays", seat) == seat:
                    answer = (await ctx.sample(seat, asked)).text
                else:
                    answer = await ctx.ask(asked, temperature=1.0)
                moves.append(f"{seat}: {answer}")
                done, _ = table.do("step", answer)
        except ContextFull:
            if not state.trajectory:
                raise
            state.truncated = True
        rewards, told = table.do("close") if done else ({}, {})
        state.data["returns"] = [float((rewards or {}).get(player, 0.0)) for player in (0, 1)]
        state.data["invalid"] = [bool((told or {}).get(player, {}).get("invalid_move")) for player in (0, 1)]

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The moves."""
        return {key: state.data[key] for key in ("moves", "returns") if key in state.data}

    # --- the rubric ---

    def result(self, state: EpisodeState) -> dict[str, float]:
        """The game's rewards."""
        return {seat: reward for seat, reward in zip(SEATS, state.data["returns"], strict=True) if seat in state.roles}

    def won(self, state: EpisodeState) -> float:
        """1 where the first player, or the seat that the policy has alone, has won, and a half for a draw."""
        reward = state.data["returns"][SEATS.index(state.example.get("plays", SEATS[0]))]
        return 0.5 if reward == 0 else float(reward > 0)

    def invalid_moves(self, state: EpisodeState) -> dict[str, float]:
        """1 where a seat has lost by an invalid move, by seat."""
        return {seat: float(invalid) for seat, invalid in zip(SEATS, state.data["invalid"], strict=True)}

    def num_moves(self, state: EpisodeState) -> float:
        """Moves of both seats."""
        return float(len(state.data["moves"]))


class _Table:
    """One game. TextArena draws from Python's own random numbers, of which every game here has a sequence of its own,
    however many are played side by side."""

    def __init__(self, game: Any, *, seed: int) -> None:
        self._game, self._random = game, random.Random(seed).getstate()
        self.do("reset", num_players=2, seed=seed)

    def do(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Calls a method of the game."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            return getattr(self._game, what)(*arguments, **named)
        finally:
            self._random = random.getstate()
            random.setstate(outside)
