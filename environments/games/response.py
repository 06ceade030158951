"""A learned response to a policy, for games that are too large for the judge: what it wins, the best one wins as well.

The judge needs every state. Here a player learns from games against the policy instead; how near it comes to the best
response depends on how many games it has.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence

from grpo.environments.games.game import Game, drawn
from grpo.environments.games.judge import Question

Ask = Callable[[Sequence[Question]], Awaitable[Sequence[Sequence[float]]]]
"""Returns the probabilities that the policy gives the answers to each question."""
NUM_TOGETHER = 256
"""Games that are played side by side, so that the policy is asked about many positions at a time."""


class _Learner:
    """Values by Q-learning (Watkins 1989), in a table: of each move that was tried, by what the player is shown."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._table = dict[str, list[list[float]]]()
        """By prompt: the value of each move, and how often it was tried."""

    def choose(self, prompt: str, num: int, explore: float) -> int:
        """Returns one of `num` moves: any with the probability `explore`, else the best of those that were tried."""
        row = self._table.get(prompt)
        if row is None or self._rng.random() < explore:
            return self._rng.randrange(num)
        return max(range(num), key=lambda move: row[move][0] if row[move][1] else -math.inf)

    def learn(self, moves: Sequence[tuple[str, int, int]], reward: float) -> None:
        """Learns from a game: `moves` are what was shown, how many there were and which was made. The last one is worth
        the reward, and each other one what the best move behind it is."""
        worth = reward
        for prompt, num, move in reversed(moves):
            row = self._table.setdefault(prompt, [[0.0, 0.0] for _ in range(num)])
            row[move][1] += 1
            row[move][0] += (worth - row[move][0]) / row[move][1] ** 0.8
            worth = max(value for value, count in row if count)


async def exploit(game: Game, ask: Ask, *, num_games: int, rng: random.Random) -> dict[str, float]:
    """Returns `exploitability_at_least`, a lower bound of the judge's NashConv in games whose rewards sum to 0. In each
    seat a response learns from `num_games` games against the policy, exploring less and less, and then plays as many
    more, greedily. The figure is the mean reward of those, summed over both seats, less two standard errors. Illegal
    answers are left out, as by the judge."""
    chances = dict[str, Sequence[float]]()

    async def play(learner: _Learner, seat: int, num: int, explore: float) -> list[float]:
        """Returns the learner's rewards of games side by side."""
        games = [game.begin(rng) for _ in range(num)]
        made = [list[tuple[str, int, int]]() for _ in games]
        while on := [number for number, one in enumerate(games) if not one.is_terminal()]:
            shown = {number: (game.prompt(games[number]), game.moves(games[number])) for number in on}
            new = {
                prompt: Question(prompt=prompt, answers=tuple(moves))
                for number, (prompt, moves) in shown.items()
                if games[number].current_player() != seat and prompt not in chances
            }
            if new:
                chances.update(zip(new, await ask(list(new.values())), strict=True))
            for number, (prompt, moves) in shown.items():
                one = games[number]
                if one.current_player() == seat:
                    move = learner.choose(prompt, len(moves), explore)
                    made[number].append((prompt, len(moves), move))
                else:
                    [move] = rng.choices(range(len(moves)), chances[prompt])
                one.apply_action(list(moves.values())[move])
                drawn(one, rng)
            await asyncio.sleep(0)  # others have a turn
        rewards = [float(one.returns()[seat]) for one in games]
        if explore:
            for moves_made, reward in zip(made, rewards, strict=True):
                learner.learn(moves_made, reward)
        return rewards

    total, variance = 0.0, 0.0
    for seat in (0, 1):
        learner, rewards = _Learner(rng), list[float]()
        sizes = [min(NUM_TOGETHER, num_games - first) for first in range(0, num_games, NUM_TOGETHER)]
        for number, size in enumerate(sizes):
            await play(learner, seat, size, 1 - number / len(sizes))
        for size in sizes:
            rewards += await play(learner, seat, size, 0)
        mean = math.fsum(rewards) / num_games
        total += mean
        variance += math.fsum((reward - mean) ** 2 for reward in rewards) / num_games**2
    return {"exploitability_at_least": total - 2 * math.sqrt(variance), "response_games": float(num_games)}
