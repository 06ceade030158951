"""Teachers are asked beside the training: what does not fit is dropped and counted, what fails is a value."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from orchestrator.disagreement.actions import Action
from orchestrator.disagreement.budget import Budget
from orchestrator.disagreement.cache import AnswerCache, state_key
from orchestrator.disagreement.pacing import Clock
from orchestrator.disagreement.teachers import Answered, NotAnswered, Sleep, Teacher, TeacherEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What teachers would do in a state."""

    by_teacher: Mapping[str, Answered | NotAnswered]
    """In the order in which teachers were given."""
    cost: float
    """Of these answers; those that were known cost nothing."""

    @property
    def actions(self) -> dict[str, Action | None]:
        """By teacher, None where one did not answer."""
        return {
            name: answer.action if isinstance(answer, Answered) else None for name, answer in self.by_teacher.items()
        }


class Asker:
    """Asks all teachers at once. A state that is known, or is being asked about, is not asked about again."""

    def __init__(
        self,
        endpoints: Sequence[TeacherEndpoint],
        *,
        budget: Budget,
        max_cached_states: int = 4096,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        seed: int = 0,
    ) -> None:
        """To be made where an event loop runs. `seed` of the pauses' jitter."""
        names = [endpoint.name for endpoint in endpoints]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"teachers are called {names}, expected one or more, with different names")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._teachers = [
            Teacher(one, self._session, budget=budget, clock=clock, sleep=sleep, seed=seed) for one in endpoints
        ]
        self._cache = AnswerCache[Answered](max_cached_states)
        self._asking: dict[tuple[str, str], asyncio.Task[Answered | NotAnswered]] = {}
        self.num: Counter[str] = Counter()
        """`asked`, `answered`, `cached`, and why not by reason, each also by teacher as `reason/teacher`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the teachers."""
        return tuple(teacher.endpoint.name for teacher in self._teachers)

    @property
    def num_resting(self) -> int:
        """Teachers that are left alone for now."""
        return sum(teacher.resting for teacher in self._teachers)

    @property
    def num_requests(self) -> int:
        """Requests that were sent, tries after failures included."""
        return sum(teacher.num_requests for teacher in self._teachers)

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, *, trace: str
    ) -> Answers:
        """What each teacher would do after `messages`; `trace` is the rollout that it is for. Raises nothing, and takes
        no longer than the longest deadline of a teacher."""
        try:
            state = state_key(messages, tools)
        except (TypeError, ValueError, RecursionError) as error:
            self._count("broken", *self.names)
            broken = NotAnswered(reason="broken", message=f"messages that JSON cannot hold: {error}")
            return Answers(by_teacher=dict.fromkeys(self.names, broken), cost=0.0)
        found = await asyncio.gather(*(self._one(teacher, state, messages, tools, trace) for teacher in self._teachers))
        by_teacher = {name: answer for name, (answer, _) in zip(self.names, found, strict=True)}
        return Answers(by_teacher=by_teacher, cost=sum(cost for _, cost in found))

    async def _one(
        self,
        teacher: Teacher,
        state: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        trace: str,
    ) -> tuple[Answered | NotAnswered, float]:
        """The answer, and what it cost now."""
        name = teacher.endpoint.name
        if (known := self._cache.get(state, name)) is not None:
            self._count("cached", name)
            return known, 0.0
        if (asking := self._asking.get((state, name))) is not None:
            self._count("cached", name)
            return await asyncio.shield(asking), 0.0
        self._count("asked", name)
        asking = asyncio.create_task(self._learned(teacher, state, teacher.ask(messages, tools, trace=trace)))
        self._asking[state, name] = asking
        asking.add_done_callback(lambda _: self._asking.pop((state, name), None))
        answer = await asyncio.shield(asking)
        return answer, answer.cost

    async def _learned(
        self, teacher: Teacher, state: str, asking: Awaitable[Answered | NotAnswered]
    ) -> Answered | NotAnswered:
        name, answer = teacher.endpoint.name, await asking
        if isinstance(answer, Answered):
            self._cache.put(state, name, answer)
        self._count("answered" if isinstance(answer, Answered) else answer.reason, name)
        return answer

    def _count(self, what: str, *names: str) -> None:
        for name in names:
            self.num[what] += 1
            self.num[f"{what}/{name}"] += 1

    async def close(self) -> None:
        """Questions under way are given up."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()


log = logging.getLogger(__name__)

Work = Callable[[], Awaitable[None]]
LeftOut = Callable[[], None]


class BoundedQueue:
    """Work that waits to be done by a few at a time, the newest first: answers about what an old policy did are worth
    less. What does not fit any more is left out, the oldest first; what raises is counted."""

    def __init__(self, *, max_waiting: int, num_parallel: int) -> None:
        if max_waiting < 1 or num_parallel < 1:
            raise ValueError(f"{max_waiting} may wait for {num_parallel}, expected at least 1 each")
        self._max_waiting, self._num_parallel = max_waiting, num_parallel
        self._waiting: deque[tuple[Work, LeftOut]] = deque()
        """The oldest first."""
        self._running: set[asyncio.Task[None]] = set()
        self.num: Counter[str] = Counter()
        """`queue_full`: left out; `broken`: raised; `given_up`: neither begun nor finished when it was closed."""
        self._closed = False

    def __len__(self) -> int:
        """What waits or is being done."""
        return len(self._waiting) + len(self._running)

    def offer(self, work: Work, left_out: LeftOut) -> None:
        """Takes it; never waits. `left_out` is called should it have to make room for others, or come too late."""
        if self._closed:
            self.num["given_up"] += 1
            left_out()
            return
        self._waiting.append((work, left_out))
        self._start()
        if len(self._waiting) > self._max_waiting:
            self.num["queue_full"] += 1
            _, oldest_left_out = self._waiting.popleft()
            oldest_left_out()

    async def close(self) -> None:
        """What is not done is given up."""
        self._closed = True
        self.num["given_up"] += len(self)
        self._waiting.clear()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._num_parallel:
            work, _ = self._waiting.pop()
            task = asyncio.ensure_future(self._done(work))
            self._running.add(task)
            task.add_done_callback(self._next)

    def _next(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not self._closed:
            self._start()

    async def _done(self, work: Work) -> None:
        try:
            await work()
        except Exception:  # nothing that is done beside the training may end it
            log.exception("what was to be done beside the training failed")
            self.num["broken"] += 1
