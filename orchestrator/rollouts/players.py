"""Players: who sits at a role for one game without being trained.

A pool is a rule by which a run's snapshots are kept as opponents. Which of them a game meets, the orchestrator draws
(`grpo.orchestrator.opponents`); scripts, searches and other people's models answer where the episode runs.
"""

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from grpo.orchestrator.rollouts.messages import Message

BASE, NEWEST = "base", "newest"
"""Opponents that need no pool: the model before training, and the policy by the version that the game began under."""
DrawRule = Literal["uniform", "pfsp", "nearest", "newest"]
RULES = get_args(DrawRule)


class PlayerId(msgspec.Struct, frozen=True, kw_only=True):
    """A player as records name it. Example: ``PlayerId(name="v12", digest="xxh3_128:5ba6…")``"""

    name: str
    """`v12`, with several adapters `v12/exploiter`; `base`; what a script or an endpoint is called."""
    digest: str = ""
    """Of the snapshot; of the base model; of a script's source. Empty for an endpoint, whose weights nobody here
    knows."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Which snapshots of a run are opponents. Example: ``Pool(every=5, keep=16)``"""

    every: int = 1
    """Versions that are multiples of it join, from `every` on."""
    keep: int | None = None
    """So many of the newest stay (None: all)."""
    members: tuple[int | str, ...] = ()
    """Versions or digests of snapshots, which alone are members (empty: by `every` and `keep`)."""
    adapter: str | None = None
    """Which adapter of a version plays (None: the first, or only one)."""

    def __post_init__(self) -> None:
        if self.every < 1 or (self.keep is not None and self.keep < 1):
            raise ValueError(f"a pool has every={self.every} and keep={self.keep}, expected at least 1 of each")
        if self.members and (self.every != 1 or self.keep is not None):
            raise ValueError("a pool with members= has those alone; leave out every= and keep=")


Answering = Callable[[Any, Sequence[Message]], str | Awaitable[str]]
"""`(state, messages) -> text`; a plain function runs in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """Who answers for a role in one episode, untrained. `RolloutContext.opponent` draws one; `Player.script` and
    `Player.model` make others."""

    id: PlayerId
    drawn: int | None = None
    """The call that drew it, if our servers answer for it."""
    answer: Answering | None = None

    @classmethod
    def script(cls, function: Answering, *, name: str | None = None) -> "Player":
        """Returns a player that answers by `function(state, messages)`: a rule, or a search through the game in the
        state. `name` tells apart what one source makes, such as searches of different depth.

        Example: ``Player.script(lambda state, messages: "rock", name="always-rock")``
        """
        called = str(name or getattr(function, "__name__", type(function).__name__))
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            source = getattr(function, "__qualname__", called)
        digest = hashlib.sha256(f"{called}\n{source}".encode()).hexdigest()[:32]
        return cls(id=PlayerId(name=f"script:{called}", digest=f"sha256:{digest}"), answer=function)

    @classmethod
    def model(cls, client: Any, *, name: str, temperature: float = 1.0, max_tokens: int | None = None) -> "Player":
        """Returns a player that another model is, such as `OpenAIClient.for_openai("gpt-4o-mini")`. Our own servers'
        model before training is the opponent `base`."""

        async def answer(state: Any, messages: Sequence[Message]) -> str:
            text: str = await client.complete(messages, temperature=temperature, max_tokens=max_tokens)
            return text

        return cls(id=PlayerId(name=f"model:{name}"), answer=answer)


def check_draw(pool: str, *, by: str, per: str, adapter: str | None, pools: Mapping[str, Pool]) -> None:
    """Raises ValueError for an opponent that there cannot be."""
    if pool not in (BASE, NEWEST) and pool not in pools:
        known = ", ".join([BASE, NEWEST, *pools])
        raise ValueError(f"there is no pool {pool!r}; opponents are {known}; self.add_pool({pool!r}, ...) makes one")
    if by not in RULES:
        raise ValueError(f"opponents are drawn by {by!r}, expected one of {', '.join(RULES)}")
    if per not in ("group", "game"):
        raise ValueError(f"opponents are drawn per {per!r}, expected group or game")
    if adapter is not None and pool != NEWEST:
        raise ValueError(f"adapter {adapter!r} is given for {pool}; a pool has its own, and only {NEWEST} takes one")


def checked_name(name: str, pools: Sequence[str]) -> str:
    """Returns the name of a new pool. Raises ValueError for one that is taken."""
    if name in (BASE, NEWEST, *pools) or not name:
        raise ValueError(f"a pool is named {name!r}; {BASE}, {NEWEST} and names of other pools are taken")
    return name
