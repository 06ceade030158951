"""The base class of environments."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from grpo.orchestrator.rollouts.context import current_context
from grpo.orchestrator.rollouts.episode import Episode, SingleTurnEpisode
from grpo.orchestrator.rollouts.players import DrawRule, Player, Pool, checked_name
from grpo.orchestrator.rollouts.roles import Role, all_roles
from grpo.orchestrator.rollouts.rubric import Rubric


class Environment(ABC):
    """Prompts, how they are rolled out, and what the outcome is worth. Lives in processes of its own.

    Example: one answer to each prompt, which a rubric scores::

        def exact(completion, example):
            return float(completion.strip() == example["answer"])

        class Shout(Environment):
            rubric = Rubric([exact])

            def dataset(self, split):
                words = {"train": ["hello", "world"], "eval": ["moin"]}[split]
                return [{"prompt": f"Shout: {word}", "answer": word.upper()} for word in words]

    Everything else has an episode: see MultiTurnEpisode, ToolEpisode, and `RolloutContext.spawn` for sub-episodes.
    """

    rubric: Rubric
    """Scores single answers; a class attribute, or set in `__init__`. An environment with an episode needs none: the
    episode has its own."""
    episode: Episode | None = None
    """How an example is rolled out. None: one answer. An environment that is itself an Episode is its own."""
    episodes: Mapping[str, Episode] = {}
    """Sub-episodes by name, for `RolloutContext.spawn`."""
    stores: Mapping[str, int] = {}
    """Artifact stores by name, with the number of artifacts that each may hold."""
    pools: Mapping[str, Pool] = {}
    """Opponents by name, as `add_pool` made them."""
    made_with: Mapping[str, Any] = {}
    """The arguments of `__init__`, from which other processes make the environment again."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Defined here, it would let object.__init__ take any arguments without a word.
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        environment = super().__new__(cls)
        try:
            bound = inspect.signature(cls.__init__).bind(environment, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}(): {error}") from None
        (_, *given), kinds = bound.arguments.items(), bound.signature.parameters
        environment.made_with = {}
        for name, value in given:
            is_kwargs = kinds[name].kind is inspect.Parameter.VAR_KEYWORD
            environment.made_with |= value if is_kwargs else {name: value}
        return environment

    def add_pool(
        self,
        name: str,
        *,
        every: int = 1,
        keep: int | None = None,
        members: Sequence[int | str] = (),
        adapter: str | None = None,
    ) -> None:
        """Makes snapshots of the run opponents, under a name for `opponent`: each version that is a multiple of
        `every`, of which the newest `keep` stay (None: all), or the `members` alone, versions or digests. With several
        adapters `adapter` names the one that plays. To be called by `__init__`. Raises ValueError.

        Example: ``self.add_pool("past", every=5, keep=16)``
        """
        pool = Pool(every=every, keep=keep, members=tuple(members), adapter=adapter)
        self.pools = {**self.pools, checked_name(name, [*self.pools]): pool}

    async def opponent(
        self,
        pool: str,
        *,
        by: DrawRule = "uniform",
        per: Literal["group", "game"] = "group",
        adapter: str | None = None,
    ) -> Player:
        """Returns the opponent of the game that calls it; see `RolloutContext.opponent`."""
        return await current_context.get().opponent(pool, by=by, per=per, adapter=adapter)

    @abstractmethod
    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Returns the examples of `train` or `eval`, the same at every call. Each has a `prompt`: a text, which becomes
        the user's message, or a list of chat messages. Whatever else it has is for episodes and reward functions; a
        `solution`, a text, can be a hint too (`hints.sources: [solution]`), in training alone."""


def is_single_turn(environment: Environment) -> bool:
    """Tells whether each rollout is one answer to its prompt, which the environment's rubric scores."""
    return environment.episode is None and not isinstance(environment, Episode)


def episode_of(environment: Environment) -> Episode:
    """Returns how an environment's examples are rolled out. Raises ValueError for an environment that cannot be."""
    if is_single_turn(environment):
        rubric = getattr(environment, "rubric", None)
        if rubric is None or environment.episodes or environment.stores or environment.pools:
            raise ValueError(f"{type(environment).__name__} has no episode: give it one, or a rubric and nothing else")
        return SingleTurnEpisode(rubric=rubric)
    episode = environment if isinstance(environment, Episode) else environment.episode
    for one in (episode, *environment.episodes.values()):
        if not isinstance(one, Episode) or not hasattr(one, "rubric"):
            raise ValueError(
                f"{type(environment).__name__} has {one!r} for an episode, expected an Episode object with a rubric"
            )
    assert episode is not None
    return episode


def roles_of(environment: Environment) -> list[Role]:
    """Returns the roles of all its episodes. Raises ValueError where they contradict each other."""
    return all_roles(one.roles for one in (episode_of(environment), *environment.episodes.values()))
