"""The teachers of preferences: who is asked, what they answer, and what that costs."""

import asyncio
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from configs.auxiliary import ApiSettings, PriceSettings, TeacherApiSettings
from orchestrator.endpoints import Addresses, ChatAnswer, Endpoint, EndpointError, Usage
from orchestrator.preferences.agreement import Action, Call, Tools, words
from orchestrator.preferences.turns import state_key

MAX_KNOWN = 4096
"""Answers that are kept, those that were used last: rollouts of a group are often in the same state."""
OVER_BUDGET = "over_budget"
QUESTION = """\
Two answers to the same request follow. Would both have the same effect: do they say the same, or call the same tools \
with the same arguments, whatever their wording?

<answer number="1">
{one}
</answer>

<answer number="2">
{other}
</answer>

Reply with one word: yes or no."""


class Costs:
    """What was spent, in the currency of the prices. Nothing is asked once the ceiling is reached; what is under way
    then may pass it by as many questions as are asked at a time."""

    def __init__(self, *, ceiling: float | None = None, spent: Mapping[str, float] | None = None) -> None:
        """`spent` by an earlier process of the run, by the name of whom it was spent on."""
        self._ceiling = math.inf if ceiling is None else ceiling
        self.spent: defaultdict[str, float] = defaultdict(float, spent or {})

    @property
    def total(self) -> float:
        """All that was spent."""
        return math.fsum(self.spent.values())

    @property
    def reached(self) -> bool:
        """Whether no more may be spent."""
        return self.total >= self._ceiling

    def add(self, name: str, price: PriceSettings, usage: Usage) -> None:
        """prompt tokens · price / 10⁶ + sampled tokens · price / 10⁶"""
        self.spent[name] += (usage.prompt_tokens * price.prompt + usage.completion_tokens * price.completion) / 1e6


class Api:
    """A model behind an OpenAI-compatible API, with its settings, counts and costs."""

    def __init__(self, settings: ApiSettings, endpoint: Endpoint, costs: Costs) -> None:
        self.settings, self.costs, self._endpoint = settings, costs, endpoint
        self.num: Counter[str] = Counter()
        """Questions that were `asked`, `answered`, or not, by reason."""

    @property
    def num_requests(self) -> int:
        """Requests that were sent, retries included."""
        return self._endpoint.num_requests

    async def ask(self, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> ChatAnswer:
        """Its answer. Raises EndpointError, also for what the costs' ceiling does not allow, as `refused`."""
        self.num["asked"] += 1
        if self.costs.reached:
            self.num[OVER_BUDGET] += 1
            raise EndpointError("refused", f"{self.settings.name}: the ceiling of the costs has been reached")
        one = self.settings
        options = {"temperature": one.temperature, one.max_tokens_field: one.max_tokens} | dict(one.extra)
        try:
            answer = await self._endpoint.chat(messages, tools=tools, **options)
        except EndpointError as error:
            self.num[error.reason] += 1
            self._pay(error.usage, messages if error.reason in ("timeout", "cut_short", "withheld") else None)
            raise
        self.num["answered"] += 1
        self._pay(answer.usage, messages)
        return answer

    def _pay(self, usage: Usage | None, messages: Sequence[Mapping[str, Any]] | None) -> None:
        """By what the provider tells, or else by the most that `messages` and an answer can be: a token a byte."""
        if usage is None and messages is not None:
            usage = Usage(prompt_tokens=len(json.dumps(messages)), completion_tokens=self.settings.max_tokens)
        if usage is not None:
            self.costs.add(self.settings.name, self.settings.price, usage)

    async def close(self) -> None:
        """Closes its connections."""
        await self._endpoint.close()


def open_api(
    settings: ApiSettings, costs: Costs, *, own_servers: Addresses, own_key_var: str | None, own_model: str
) -> Api:
    """Without a `base_url` it is the base model `own_model` on the run's `own_servers`, with or without /v1, whose key
    is in `own_key_var`. Raises ValueError where a key is missing."""

    def own_addresses() -> list[str]:
        return [f"{server.rstrip('/').removesuffix('/v1')}/v1" for server in own_servers()]

    endpoint = Endpoint(
        settings.base_url or own_addresses,
        settings.model or own_model,
        name=settings.name,
        api_key_var=settings.api_key_var if settings.base_url is not None else own_key_var,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        requests_per_s=settings.requests_per_s,
    )
    return Api(settings, endpoint, costs)


class TeacherPool:
    """All teachers are asked at once. A state that is known, or is being asked about, is not asked about again."""

    def __init__(self, teachers: Sequence[Api]) -> None:
        self.teachers = tuple(teachers)
        self._known: OrderedDict[tuple[str, str], asyncio.Task[Action]] = OrderedDict()
        """Answers, there already or under way, by teacher and state; those that were used last at the end."""
        self.num_cached: Counter[str] = Counter()
        """By teacher."""

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools
    ) -> tuple[dict[str, Action | None], dict[str, EndpointError]]:
        """What each teacher would do after `messages`, None where it did not answer, and why. Raises ValueError for
        messages that are no JSON."""
        state = state_key(messages, tools)
        tasks = {one.settings.name: self._asked(one, state, messages, tools) for one in self.teachers}
        await asyncio.wait(tasks.values())
        failed = {name: error for name, task in tasks.items() if isinstance(error := task.exception(), EndpointError)}
        return {name: None if name in failed else task.result() for name, task in tasks.items()}, failed

    def _asked(
        self, teacher: Api, state: str, messages: Sequence[Mapping[str, Any]], tools: Tools
    ) -> asyncio.Task[Action]:
        key = (teacher.settings.name, state)
        if (known := self._known.get(key)) is not None and not _has_failed(known):
            self._known.move_to_end(key)
            self.num_cached[teacher.settings.name] += 1
            return known
        self._known[key] = task = asyncio.create_task(_action(teacher, messages, tools))
        while len(self._known) > MAX_KNOWN and next(iter(self._known.values())).done():
            self._known.popitem(last=False)
        return task

    def metrics(self) -> Counter[str]:
        """Counts since the run began: `questions_WHAT` and `questions_WHAT/TEACHER`, and `requests`."""
        num = Counter({"questions_asked": 0, "questions_answered": 0, "questions_cached": 0, "requests": 0})
        for one in self.teachers:
            for what, count in [*one.num.items(), ("cached", self.num_cached[one.settings.name])]:
                num[f"questions_{what}"] += count
                num[f"questions_{what}/{one.settings.name}"] += count
            num["requests"] += one.num_requests
        return num

    async def close(self) -> None:
        """Questions under way are given up."""
        for task in self._known.values():
            task.cancel()
        await asyncio.gather(*self._known.values(), return_exceptions=True)
        for one in self.teachers:
            await one.close()


def _has_failed(task: asyncio.Task[Action]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _action(teacher: Api, messages: Sequence[Mapping[str, Any]], tools: Tools) -> Action:
    """What a teacher would do. Raises EndpointError."""
    role = teacher.settings.tool_role if isinstance(teacher.settings, TeacherApiSettings) else "user"
    told = [
        {**one, "role": role} if one.get("role") == "tool" and "tool_call_id" not in one else one for one in messages
    ]
    answer = await teacher.ask(told, tools)
    try:
        calls = tuple(Call(name=one.name, arguments=_arguments(one.arguments)) for one in answer.tool_calls)
    except (ValueError, RecursionError) as error:
        teacher.num.update(answered=-1, nonsense=1)
        raise EndpointError("nonsense", f"{teacher.settings.name}: arguments of a call are no JSON: {error}") from None
    return Action(text=answer.text, tool_calls=calls)


def _arguments(written: str) -> dict[str, Any]:
    arguments = json.loads(written or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{written[:100]!r} is no object")
    return arguments


async def judged(judge: Api, one: str, other: str) -> bool:
    """Whether a model says that two texts do the same, by the only one of the words yes and no that it answers. Raises
    EndpointError."""
    answer = await judge.ask([{"role": "user", "content": QUESTION.format(one=one, other=other)}])
    said = {"yes", "no"}.intersection(words(answer.text))
    if len(said) != 1:
        raise EndpointError("nonsense", f"{judge.settings.name} was asked for yes or no: {answer.text[:200]!r}")
    return said == {"yes"}
