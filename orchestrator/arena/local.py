"""Episodes that run in this process, for arenas; those of environments run in workers."""

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.rollouts.clock import OwnTimeout, no_exit, waiting
from grpo.orchestrator.rollouts.episode import Episode, outcome_of, reason_of, run_episode
from grpo.orchestrator.rollouts.records import Failure, Task
from grpo.orchestrator.rollouts.roles import all_roles
from grpo.orchestrator.workers.protocol import AnyCall, EnvironmentInfo, Outcome, Score
from grpo.orchestrator.workers.session import GivenUp


class LocalPool:
    """Stands for the workers of an environment. A rollout that raises has failed; one that blocks holds up all."""

    num_restarted = 0
    solutions: tuple[str, ...] = ()

    def __init__(
        self,
        episodes: Mapping[str, Episode],
        stores: Mapping[str, int],
        *,
        timeout_s: float,
        record: Callable[[Failure | None], None] = lambda failure: None,
    ) -> None:
        """`episodes` by name; `stores` by name, with how much each holds. `timeout_s`: for all that a rollout's code
        does between two calls of a model. `record` is told of each outcome as it comes."""
        self._episodes, self._timeout_s, self.record = episodes, timeout_s, record
        roles = all_roles(episode.roles for episode in episodes.values())
        self.loaded = EnvironmentInfo(single_turn=False, roles=roles, stores=dict(stores))
        self._requested: dict[int, tuple[str, Any, Mapping[str, Any]]] = {}
        self._numbers = itertools.count()

    def ask(self, episode: str, artifact: Any, meta: Mapping[str, Any]) -> int:
        """The `index` by which a task asks for an episode about an artifact. Raises ValueError for an unknown one."""
        if episode not in self._episodes:
            raise ValueError(f"there is no episode {episode!r}; there are {sorted(self._episodes)}; see add_episode")
        self._requested[number := next(self._numbers)] = episode, artifact, meta
        return number

    async def run(
        self,
        task: Task,
        *,
        seed: int | None,
        begin: Callable[[], Callable[[AnyCall], Awaitable[Any]]],
        score: bool = True,
    ) -> Outcome | Failure:
        """Rolls out the episode that `ask` was called for. Raises ServerError."""
        name, artifact, meta = self._requested.pop(task.index)
        episode, backend, broken = self._episodes[name], begin(), list[ServerError]()

        async def answered(call: AnyCall) -> Any:
            try:
                with waiting(restart=True):
                    return await backend(call)
            except ServerError as error:  # whatever user code makes of it
                broken.append(error)
                raise

        about = {"meta": dict(meta)} if meta else {}
        try:
            async with OwnTimeout(self._timeout_s):
                running = run_episode(
                    episode,
                    answered,
                    example=artifact if isinstance(artifact, Mapping) else {"artifact": artifact},
                    split=task.split,
                    seed=seed,
                    episodes=self._episodes,
                    stores=self.loaded.stores,
                    score=score,
                    data=about,
                )
                state = await no_exit(running)
            state.extras |= {"episode": name} | about
            return outcome_of(state)
        except GivenUp as error:
            return error.failure
        except Exception as error:
            if broken:
                raise broken[0] from None
            return Failure(reason=reason_of(error), message=f"{name}: {type(error).__name__}: {error}")

    async def score(self, score: Score, **_: Any) -> list[Outcome | Failure]:
        """Raises: no episode of an arena is a single answer that is sampled before it begins."""
        raise NotImplementedError
