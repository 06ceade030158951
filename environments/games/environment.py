"""`game`: a policy plays both seats of a two-player game against itself, and an exact judge says how strong it is."""

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.environments.games.game import SEATS, Game, drawn
from grpo.environments.games.judge import MAX_STATES, Judge, Judged, Question, TooLarge
from grpo.environments.games.response import exploit
from grpo.environments.games.search import Minimax

from grpo import DrawRule, Environment, Episode, EpisodeState, Role, RolloutContext, Rubric, UserError

JUDGED = (*Judged.__dataclass_fields__, "exploitability_at_least", "response_games")


class Games(Episode, Environment):
    """One game of OpenSpiel, played by the policy in both seats, `first` and `second`, which are roles of their own:
    each move is an answer to a prompt that has what that seat may know, and nothing else.

    A seat's reward is the game's. An illegal answer ends the game: who gave it gets `illegal_reward`, and the other
    seat 0; that of an opponent becomes a legal one at random. Chance is drawn by the rollout's seed.

    Held out is one example, in which the policy is judged (`grpo.environments.games.judge`): the measures are those of
    `Judged`, and the accuracy is 1 - NashConv / NashConv of uniform play, at least 0. A game that is too large for it
    is played against moves drawn at random, half of the games in each seat, and the accuracy is the share that the
    policy wins, a draw being half.
    """

    roles = tuple(Role(id=seat) for seat in SEATS)

    def __init__(
        self,
        *,
        game: str,
        rules: bool = True,
        illegal_reward: float | None = None,
        max_states: int = MAX_STATES,
        num_eval: int = 100,
        opponent: str | None = None,
        by: DrawRule = "uniform",
        every: int = 5,
        keep: int = 16,
        adapter: str | None = None,
        self_play: float = 0.0,
        random_moves: int = 0,
        response_games: int = 0,
    ) -> None:
        """`game`: OpenSpiel's name of it, as `kuhn_poker` or `nim(pile_sizes=1;2;3)`. `rules`: prompts begin with the
        rules and end with the legal answers; false: for a model that knows them, prompts are the position alone.
        `illegal_reward`: None is the least that the game can bring, less 1. `max_states`: games with more states in
        which somebody is to move are not judged. `num_eval`: games against random moves, where that is so. `opponent`:
        who has the one seat in training, which seat by chance: `past`, drawn `by` a rule from each version that is a
        multiple of `every`, of which the newest `keep` stay; `newest`; `base`; `minimax-3`, a search that looks 3 moves
        ahead, or any other number (None: the policy is trained in both). `adapter`: which adapter of `past` or
        `newest`, where there are several. `self_play`: the share of games in which the policy is trained in both seats
        all the same. `random_moves`: training games begin with up to so many legal moves at random, so that the policy
        learns to answer what it would not play itself. `response_games`: in evaluations, a response to the policy
        learns from so many games in each seat, and what it wins is a lower bound of exploitability (0: none)."""
        self._opponent, self._by, self._self_play, self._random_moves = opponent, by, self_play, random_moves
        self._newest = adapter if opponent == "newest" else None
        if opponent == "past":
            self.add_pool("past", every=every, keep=keep, adapter=adapter)
        self.game = Game(game, with_rules=rules)
        if response_games < 0:
            raise UserError(f"a response learns from {response_games} games, expected at least 0")
        self._search = None
        if opponent is not None and opponent.startswith("minimax"):
            if not (depth := opponent.removeprefix("minimax-")).isdecimal():
                raise UserError(f"the opponent is {opponent!r}, expected minimax- and how many moves it looks ahead")
            self._search = Minimax(self.game, int(depth))
        self.illegal_reward = self.game.lowest - 1 if illegal_reward is None else illegal_reward
        self._max_states, self._num_eval, self._response_games = max_states, num_eval, response_games
        self.rubric = Rubric(
            [self.result], accuracy=self.won, metrics=[self.illegal_answers, self.num_moves, *map(_measure, JUDGED)]
        )

    @functools.cached_property
    def judge(self) -> Judge:
        """The judge of this game. Raises TooLarge."""
        return Judge(self.game, max_states=self._max_states)

    @functools.cached_property
    def _uniform(self) -> float:
        """NashConv of uniform play."""
        return self.judge.judge({one.prompt: [1.0] * len(one.answers) for one in self.judge.questions}).nash_conv

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        example: dict[str, Any] = {"prompt": f"{self.game.title}"}
        if split == "train":
            return [example]
        try:
            assert self.judge
        except TooLarge:
            return [
                {**example, "plays": SEATS[number % 2], "judged": number == 0 and self._response_games > 0}
                for number in range(self._num_eval)
            ]
        return [{**example, "judged": True}]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        if state.example.get("judged"):
            state.data["judged"] = await self.judge_policy(ctx)
        position = self.game.begin(ctx.rng)
        if self._opponent is not None and ctx.split == "train" and ctx.rng.random() >= self._self_play:
            if self._search is not None:
                player = self._search.player(position, ctx.rng)
            else:
                player = await self.opponent(self._opponent, by=self._by, per="game", adapter=self._newest)
            ctx.bind(ctx.rng.choice(SEATS), player)
        if self._random_moves and ctx.split == "train":
            self._open(ctx, state, position)
        while not position.is_terminal():
            seat = position.current_player()
            if SEATS[seat] not in state.players:
                state.data.setdefault("positions", []).append(" ".join(map(str, position.history())))
            answer = await self.answer(ctx, state, SEATS[seat], position)
            move = self.game.move(position, answer)
            if move is None and SEATS[seat] in state.players:  # the policy has nothing to learn from that
                answer = ctx.rng.choice(list(self.game.moves(position)))
                move = self.game.move(position, answer)
            state.data.setdefault("moves", []).append(f"{SEATS[seat]}: {answer}")
            if move is None:
                state.mark_error(
                    "illegal_move", "illegal_move", f"expected one of {' '.join(self.game.moves(position))}"
                )
                state.data["illegal"] = seat
                state.data["returns"] = [self.illegal_reward if one == seat else 0.0 for one in (0, 1)]
                return
            position.apply_action(move)
            drawn(position, ctx.rng)
        state.data["returns"] = list(position.returns())

    def _open(self, ctx: RolloutContext, state: EpisodeState, position: Any) -> None:
        """Makes moves at random, in place; none by which the game would be over."""
        for _ in range(ctx.rng.randint(0, self._random_moves)):
            answer, move = ctx.rng.choice(list(self.game.moves(position).items()))
            if position.child(move).is_terminal():
                return
            state.data.setdefault("moves", []).append(f"{SEATS[position.current_player()]}: {answer} (at random)")
            position.apply_action(move)
            drawn(position, ctx.rng)

    async def answer(self, ctx: RolloutContext, state: EpisodeState, seat: str, position: Any) -> str:
        """Returns the move of who is to move, as text: the policy's, or a legal one at random where the policy has the
        other seat alone. To be overridden for other opponents."""
        if state.example.get("plays", seat) != seat:
            return ctx.rng.choice(list(self.game.moves(position)))
        return (await ctx.sample(seat, [{"role": "user", "content": self.game.prompt(position)}])).text

    async def judge_policy(self, ctx: RolloutContext) -> dict[str, float]:
        """Returns what the judge says about the policy, by the probabilities of its answers in all states, and what a
        response learned to win against it."""

        async def ask(questions: Sequence[Question]) -> list[list[float]]:
            prompts = [[{"role": "user", "content": question.prompt}] for question in questions]
            scored = await ctx.score_answers(SEATS[0], prompts, [question.answers for question in questions])
            return [[math.exp(logprob) for logprob in logprobs] for logprobs in scored]

        figures = dict[str, float]()
        if self._response_games:
            figures = await exploit(self.game, ask, num_games=self._response_games, rng=ctx.rng)
        try:
            judge = self.judge
        except TooLarge:
            return figures
        given = await ask(judge.questions)
        policy = {question.prompt: chances for question, chances in zip(judge.questions, given, strict=True)}
        return figures | (await asyncio.to_thread(judge.judge, policy)).figures()

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The moves, the positions of the policy's moves as OpenSpiel numbers all that led to them, and what the judge
        said."""
        return {key: state.data[key] for key in ("moves", "positions", "returns", "judged") if key in state.data}

    # --- the rubric ---

    def result(self, state: EpisodeState) -> dict[str, float]:
        """The game's rewards."""
        return {seat: reward for seat, reward in zip(SEATS, state.data["returns"], strict=True) if seat in state.roles}

    def won(self, state: EpisodeState) -> float:
        """What the judge says, where it was asked; else 1 where the first player, or the seat that the policy has
        alone, has won, and a half for a draw."""
        if (nash_conv := state.data.get("judged", {}).get("nash_conv")) is not None:
            return max(0.0, 1 - nash_conv / self._uniform) if self._uniform else 1.0
        own = state.roles[0] if state.players else state.example.get("plays", SEATS[0])
        reward = state.data["returns"][SEATS.index(own)]
        return 0.5 if reward == 0 else float(reward > 0)

    def illegal_answers(self, state: EpisodeState) -> dict[str, float]:
        """1 where a seat has ended the game by an illegal answer, by seat."""
        return {seat: float(state.data.get("illegal") == number) for number, seat in enumerate(SEATS)}

    def num_moves(self, state: EpisodeState) -> float:
        """Moves of both seats."""
        return float(len(state.data["moves"]))


def _measure(name: str) -> Any:
    """Returns the metric of one of the judge's figures; nothing where the judge was not asked."""

    def measure(state: EpisodeState) -> float | dict[str, float]:
        figures: dict[str, float] = state.data.get("judged", {})
        return figures.get(name, {})

    measure.__name__ = name
    return measure
