"""An environment whose code passes anything to everything that user code is given, and returns anything."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from grpo import Environment, Episode, EpisodeState, Role, RolloutContext, Rubric, SingleTurnEpisode, endpoint_of

ASK: Any = [{"role": "user", "content": "x"}]
ASKED = {"messages": ASK, "prompt": "x"}


class Raises:
    """Whatever is done with it."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("mine")

    __repr__ = __str__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __eq__ = __hash__ = __getattr__ = _raise


class Text(str): ...


class Number(float): ...


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


VALUES: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (None, True, 0, -1, 1, 7, 1 << 31, 1 << 63, -(10**30), 10**5000)),
    *(lambda value=value: value for value in (0.5, -0.0, float("nan"), float("inf"), float("-inf"), 1e308, 1e-320)),
    *(lambda value=value: value for value in ("", "a", "\ud800", "\0", "<|im_end|>", "9" * 5000, "policy", "turns")),
    *(lambda value=value: value for value in (b"raw", object, len, Raises, Exception("mine"), Decimal("NaN"), 1j)),
    *(lambda value=value: value for value in (np.float32("nan"), np.int64(3), np.zeros(3), Text("a"), Number(2.0))),
    lambda: "long " * 600_000,
    lambda: [],
    lambda: {},
    lambda: [None],
    lambda: [{}],
    lambda: {"a": float("nan")},
    lambda: {1: 2, "b": [3]},
    lambda: {"policy": 1e300},
    lambda: {"\ud800": 1.0},
    lambda: {str(number): 1.0 for number in range(5000)},
    lambda: [{"role": "user", "content": "x"}] * 3000,
    lambda: [{"role": "user", "content": "\ud800"}],
    lambda: [{"role": "user", "content": "long " * 600_000}],
    lambda: [{"role": 5, "content": None}],
    lambda: [{"role": "nobody", "content": "x", "more": {"a": [1, 2]}}],
    lambda: [{"role": "assistant", "content": "<|im_end|>"}],
    lambda: {"role": "user", "content": [{"type": "text", "text": 5}]},
    lambda: {"type": "function", "function": {"name": "\ud800"}},
    lambda: [{"type": "function", "function": {"name": "add", "parameters": {}}}],
    lambda: {"prompt": 5},
    lambda: [{"prompt": "x"}, 5],
    lambda: [{"prompt": "x" * 3_000_000}],
    lambda: _deep(100_000),
    _cyclic,
    lambda: {1, 2},
    lambda: (number for number in range(3)),
    Raises,
    object,
]


async def _delayed(ctx: RolloutContext, timeout_s: Any) -> None:
    async with ctx.delayed(timeout_s):
        await asyncio.sleep(0)
    await ctx.sample("policy", ASK)


async def _served(ctx: RolloutContext, *role: Any, body: Any) -> None:
    import aiohttp

    async with endpoint_of(ctx, *role) as at, aiohttp.ClientSession() as client:
        head = {"Authorization": f"Bearer {at.api_key}", "Content-Type": "application/json"}
        for kind in ("chat/completions", "completions"):
            async with client.post(f"{at.base_url}/{kind}", data=json.dumps(body), headers=head) as answer:
                if answer.status >= 500:  # which nothing else here raises, so that the test sees it
                    raise TimeoutError(f"the endpoint answered {answer.status}")


async def _cancelled(ctx: RolloutContext, num: Any) -> None:
    for _ in range(min(int(num), 5)):
        asking = asyncio.create_task(ctx.sample("policy", ASK))
        await asyncio.sleep(0)
        asking.cancel()


async def _plainly(function: Callable[..., Any], *given: Any, **more: Any) -> None:
    function(*given, **more)


Call = Callable[[RolloutContext, EpisodeState, Any], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "sample role": lambda ctx, state, value: ctx.sample(value, ASK),
    "sample messages": lambda ctx, state, value: ctx.sample("policy", value),
    "sample content": lambda ctx, state, value: ctx.sample("policy", [{"role": "user", "content": value}]),
    "sample role of message": lambda ctx, state, value: ctx.sample("policy", [{"role": value, "content": "x"}]),
    "sample raw text": lambda ctx, state, value: ctx.sample("policy", [{"role": "user", "content": value}], raw=True),
    **{
        f"sample {name}": lambda ctx, state, value, name=name: ctx.sample("policy", ASK, **{name: value})
        for name in ("tools", "max_tokens", "temperature", "raw", "logprobs")
    },
    "ask": lambda ctx, state, value: ctx.ask(value),
    "ask content": lambda ctx, state, value: ctx.ask([{"role": "user", "content": value}]),
    **{
        f"ask {name}": lambda ctx, state, value, name=name: ctx.ask(ASK, **({"model": "policy"} | {name: value}))
        for name in ("model", "temperature", "max_tokens")
    },
    "delayed": lambda ctx, state, value: _delayed(ctx, value),
    "spawn": lambda ctx, state, value: ctx.spawn(value, [{"prompt": "x"}]),
    "spawn examples": lambda ctx, state, value: ctx.spawn("solve", value),
    "spawn example": lambda ctx, state, value: ctx.spawn("solve", [value, value]),
    "spawn prompt": lambda ctx, state, value: ctx.spawn("solve", [{"prompt": value}]),
    "store": lambda ctx, state, value: ctx.stores[value].count(),
    "store add": lambda ctx, state, value: ctx.stores["turns"].add(value),
    "store add weight": lambda ctx, state, value: ctx.stores["turns"].add("a", weight=value),
    "store sample": lambda ctx, state, value: ctx.stores["turns"].sample(value),
    "store sample weighted": lambda ctx, state, value: ctx.stores["turns"].sample(1, weighted=value),
    "store sample replace": lambda ctx, state, value: ctx.stores["turns"].sample(1, replace=value),
    "store get": lambda ctx, state, value: ctx.stores["turns"].get(value),
    "store set_weight": lambda ctx, state, value: ctx.stores["turns"].set_weight(value, 1.0),
    "store set_weight weight": lambda ctx, state, value: ctx.stores["turns"].set_weight("a", value),
    **{
        f"mark {name}": lambda ctx, state, value, name=name: _plainly(
            state.mark_error, **({"kind": "kind", "key": "key"} | {name: value})
        )
        for name in ("kind", "key", "message", "index")
    },
    "endpoint": lambda ctx, state, value: _served(ctx, value, body=ASKED),
    "endpoint body": lambda ctx, state, value: _served(ctx, body=value),
    "endpoint messages": lambda ctx, state, value: _served(ctx, body={"messages": value, "prompt": value}),
    **{
        f"endpoint {names[0]}": lambda ctx, state, value, names=names: _served(
            ctx, body=ASKED | dict.fromkeys(names, value)
        )
        for names in (("n", "stream", "stream_options", "model"), ("temperature", "max_tokens"))
    },
    "cancel": lambda ctx, state, value: _cancelled(ctx, value),
    "observed": lambda ctx, state, value: _plainly(setattr, state.trajectory[0], "observed", value),
}
FIELDS = ["messages", "trajectory", "role", "data", "done", "truncated", "children"]
FIELDS += ["rewards", "accuracy", "metrics", "extras", "example"]
OF_REPLY = ["role", "text", "call", "error", "messages", "index", "tokens"]
RETURNS = ["reward", "role's reward", "metric", "metrics", "accuracy", "extras", "extra", "run"]
PLACES = [*CALLS, *RETURNS]
PLACES += [f"{when}.{name}" for when in ("state", "ended") for name in FIELDS] + [f"reply.{name}" for name in OF_REPLY]


def _returned(place: str, other: Any) -> Callable[[EpisodeState], Any]:
    def function(state: EpisodeState) -> Any:
        at, value = state.data.get("plan", ("", None))
        return value if at == place else {"policy": value} if at == f"role's {place}" else other

    function.__name__ = place
    return function


def _metrics(state: EpisodeState) -> Any:
    at, value = state.data.get("plan", ("", None))
    return {"one": value, "two": 1.0} if at == "metrics" else {}


numbers = itertools.count()


async def _as_planned(ctx: RolloutContext, state: EpisodeState) -> None:
    reply = state.trajectory[0]
    try:
        place, index, caught = json.loads(reply.text)
    except ValueError:
        return
    value = VALUES[index]()
    state.data["plan"] = place, value
    kind, _, name = place.partition(".")
    try:
        if place in CALLS:
            await CALLS[place](ctx, state, value)
        elif kind in ("state", "reply"):
            setattr(state if kind == "state" else reply, name, value)
    except Exception:
        if not caught:
            raise


async def _in_the_reward(ctx: RolloutContext, state: EpisodeState) -> Any:
    await _as_planned(ctx, state)
    return _returned("reward", 1.0)(state)


class Numbered(Environment):
    def __init__(self, num: int) -> None:
        self._num = num

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": f"number {number}."} for number in range(self._num)]


class AbsurdReward(Numbered):
    """A single answer, which says the same, and whose reward does it."""

    rubric = Rubric([_in_the_reward])


class Absurd(Episode, Numbered):
    """Its policy's first answer says what is passed where: `[place, index of the value, whether errors are caught]`."""

    roles = (Role(id="policy"),)
    rubric = Rubric(
        [lambda: float(next(numbers) % 2), _returned("reward", 0.0)],
        accuracy=_returned("accuracy", 1.0),
        metrics=[_returned("metric", 0.5), _metrics],
    )
    episodes = {"solve": SingleTurnEpisode(rubric=Rubric([lambda: 1.0]))}  # noqa: RUF012
    stores = {"turns": 50}  # noqa: RUF012

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        await ctx.sample("policy", [{"role": "user", "content": state.example["prompt"]}])
        await _as_planned(ctx, state)

    def extras(self, state: EpisodeState) -> Any:
        place, value = state.data.get("plan", ("", None))
        return value if place == "extras" else {"one": value} if place == "extra" else {}

    async def run(self, ctx: RolloutContext) -> EpisodeState:
        state = await super().run(ctx)
        place, value = state.data.get("plan", ("", None))
        kind, _, name = place.partition(".")
        if kind == "ended":
            setattr(state, name, value)
        return value if place == "run" else state
