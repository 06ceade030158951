"""Rock, paper, scissors against players of all kinds, for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo import Environment, Episode, EpisodeState, Player, Role, RolloutContext, Rubric

BEATS = {"r": "s", "s": "p", "p": "r"}


def outcome(state: EpisodeState) -> dict[str, float]:
    """1 for the winner, -1 for the loser; who says nothing sensible loses."""
    own, other = (reply.text.strip() for reply in sorted(state.trajectory, key=lambda reply: reply.role))
    won = (BEATS.get(own) == other) - (BEATS.get(other) == own)
    return {"a": float(won), "b": float(-won)}


class Rps(Episode, Environment):
    """`a` is trained, and `b` is bound to a player."""

    roles = (Role(id="a", max_tokens=4), Role(id="b", max_tokens=4))
    rubric = Rubric([outcome])

    def __init__(
        self, *, opponent: str = "past", by: str = "uniform", per: str = "group", of: str | None = None, **pool: Any
    ) -> None:
        """`of`: the adapter of the newest version that is met."""
        self._opponent, self._by, self._per, self._of = opponent, by, per, of
        if pool:
            self.add_pool("past", **pool)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": f"{split} {number}"} for number in range(6)]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        if self._opponent == "script":
            player = Player.script(lambda state, messages: "r", name="rock")
        else:
            player = await self.opponent(self._opponent, by=self._by, per=self._per, adapter=self._of)
        ctx.bind("b", player)
        for role in ("a", "b"):
            await ctx.sample(role, [{"role": "user", "content": f"{role} {state.example['prompt']}"}])
