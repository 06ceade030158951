"""`openenv`: an environment of an OpenEnv server, over its WebSocket protocol (`reset`, `step`, `state`, `close`).

The protocol is spoken here and not by the `openenv` package, whose client needs none of what that package installs.
Each rollout has a session of its own. A server that is away, or full, is waited for before the first answer; one that
is lost later costs the rollout, because nobody can tell what became of its environment.
"""

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import aiohttp

from orchestrator.envs.base import Environment
from orchestrator.importing import find
from orchestrator.rollouts.context import RolloutContext
from orchestrator.rollouts.episode import MultiTurnEpisode, Response
from orchestrator.rollouts.messages import Message, messages_of
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState

CLOSE_LIMIT_S = 1.0
STATE_LIMIT_S = 3.0
"""For the state at the end, which a rollout is complete without."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""Between attempts to reach a server; doubled after each."""
SHORTEST_TRY_S = 0.1
"""Left for the last attempt."""
HEARTBEAT_S = 40.0
"""Between pings; a server that does not answer one within half of it is gone."""
MAX_MESSAGE_BYTES = 100 * 1024 * 1024
"""As OpenEnv's own client has it."""

REFUSED_ACTION = "refused_action"
"""The server says that the answer is no action of its environment."""
MALFORMED_ACTION = "malformed_action"
"""The codec says so."""


class ServerAway(ConnectionError):
    """No server took a session in time."""


class SessionLost(ConnectionError):
    """The server went away in the middle of a rollout."""


class ServerError(RuntimeError):
    """The server said that something went wrong."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


class Codec(Protocol):
    """What stands between an environment's observations and actions, and text.

    Example: ``args: {base_url: ..., codec: "my_codec.py:Chess"}``, whose class is made without arguments.
    """

    def to_text(self, observation: Mapping[str, Any]) -> str:
        """What the policy is shown."""
        ...

    def to_action(self, text: str) -> Mapping[str, Any]:
        """What an answer means. Raises ValueError with what is wrong with it, which the policy is shown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCodec:
    """An action with one text field, and an observation of which one field, or all as JSON, is shown.

    Example: ``FieldCodec(action_field="message", observation_field="echoed_message")``
    """

    action_field: str
    observation_field: str | None = None
    """None: all of it but its metadata."""

    def to_text(self, observation: Mapping[str, Any]) -> str:
        """Raises ValueError where the observation has no such field."""
        if self.observation_field is None:
            return json.dumps({key: value for key, value in observation.items() if key not in ("metadata", "meta")})
        if self.observation_field not in observation:
            raise ValueError(
                f"the observation has no {self.observation_field!r}, which observation_field names; it has "
                f"{', '.join(sorted(observation))}"
            )
        shown = observation[self.observation_field]
        return shown if isinstance(shown, str) else json.dumps(shown)

    def to_action(self, text: str) -> Mapping[str, Any]:
        return {self.action_field: text}

    def check(self, schema: Mapping[str, Any]) -> None:
        """Raises ValueError where no answer could be an action of this JSON schema."""
        fields, needed = sorted(schema.get("properties", {})), set(schema.get("required", ()))
        if self.action_field not in fields:
            raise ValueError(
                f"action_field = {self.action_field!r} is no field of the server's actions, which have "
                f"{', '.join(fields) or 'none'}"
            )
        if others := sorted(needed - {self.action_field}):
            raise ValueError(f"the server's actions need {', '.join(others)} beside {self.action_field}; give a codec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a server answers to `reset` and `step`.

    Example: ``Observed(observation={"echoed_message": "hi"}, reward=0.2, done=False)``
    """

    observation: Mapping[str, Any]
    reward: float | None
    done: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> tuple[str, str, str] | None:
        """(error_kind, hint_template_key, message), where the environment marked its step as one that went wrong."""
        for marked in (self.metadata, self.observation.get("metadata"), self.observation.get("meta"), self.observation):
            if isinstance(marked, Mapping) and marked.get("error_kind"):
                kind = str(marked["error_kind"])
                said = marked.get("error_message") or marked.get("error") or ""
                return kind, str(marked.get("hint_template_key") or kind), str(said)
        return None


class Session:
    """One environment of a server, for one rollout. After `TimeoutError` it is not to be used again."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, limit_s: float) -> None:
        self._socket, self.url, self._limit_s = socket, url, limit_s

    async def reset(self, arguments: Mapping[str, Any], limit_s: float) -> Observed:
        """Raises ServerError, SessionLost and TimeoutError, like all that ask the server."""
        return _observed(await self._ask("reset", min(limit_s, self._limit_s), arguments))

    async def step(self, action: Mapping[str, Any]) -> Observed:
        return _observed(await self._ask("step", self._limit_s, action))

    async def state(self) -> dict[str, Any]:
        """Of the environment: what its server is willing to tell."""
        return dict(await self._ask("state", min(STATE_LIMIT_S, self._limit_s)))

    async def close(self) -> None:
        """Tells the server, if it is still there; never for longer than `CLOSE_LIMIT_S`."""
        with suppress(TimeoutError, ConnectionError, aiohttp.ClientError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                if not self._socket.closed:
                    await self._socket.send_json({"type": "close"})
                await self._socket.close()

    async def _ask(self, kind: str, limit_s: float, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                # A refused session's error may be there before anything is sent.
                with suppress(ConnectionError):
                    await self._socket.send_json({"type": kind} | ({} if data is None else {"data": dict(data)}))
                received = await self._socket.receive()
        except TimeoutError:
            raise TimeoutError(f"{self.url} did not answer {kind} within {limit_s:.3g} s") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise SessionLost(f"{self.url} closed the session at {kind}")
        answer = json.loads(received.data)
        if answer.get("type") == "error":
            about = answer.get("data", {})
            raise ServerError(str(about.get("code", "UNKNOWN")), _said(about))
        return dict(answer.get("data", {}))


def _said(about: Mapping[str, Any]) -> str:
    wrong = about.get("errors") or []
    places = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in wrong[:3]]
    return "; ".join([str(about.get("message", "")), *places])


def _observed(data: Mapping[str, Any]) -> Observed:
    observation = data.get("observation")
    reward = data.get("reward")
    return Observed(
        observation=observation if isinstance(observation, Mapping) else {"observation": observation},
        reward=None if reward is None else float(reward),
        done=bool(data.get("done", False)),
        metadata=data.get("metadata") or {},
    )


class Servers:
    """Servers of one environment, which are asked in turn."""

    def __init__(self, urls: Sequence[str], *, connect_limit_s: float, step_limit_s: float, wait_s: float) -> None:
        self._urls = [_socket_url(url) for url in urls]
        self._schemas: dict[str, Mapping[str, Any] | None] = {}
        self._turn: Iterator[int] = itertools.count()
        self._connect_limit_s, self._step_limit_s, self._wait_s = connect_limit_s, step_limit_s, wait_s

    @asynccontextmanager
    async def begun(
        self, arguments: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None] | None
    ) -> AsyncIterator[tuple[Session, Observed]]:
        """A session that has been reset. Waits for a server that is away, full or slow. Raises ServerAway after
        `wait_s`, ServerError where the environment itself refuses, and what `check` raises at the JSON schema of the
        server's actions, where it tells."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
            end_s = asyncio.get_running_loop().time() + self._wait_s
            session, observed = await self._begin(client, arguments, end_s)
            try:
                if check is not None and (schema := await self._schema(client, session.url)) is not None:
                    check(schema)
                yield session, observed
            finally:
                await session.close()

    async def _begin(
        self, client: aiohttp.ClientSession, arguments: Mapping[str, Any], end_s: float
    ) -> tuple[Session, Observed]:
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            url = self._urls[next(self._turn) % len(self._urls)]
            try:
                return await self._try(client, url, arguments, end_s)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                reason: Exception = error
            except ServerError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                reason = error
            if (left_s := end_s - loop.time()) <= SHORTEST_TRY_S:
                raise ServerAway(
                    f"no session at {', '.join(self._urls)} within {self._wait_s:g} s (wait_s); the newest attempt, at "
                    f"{url}: {type(reason).__name__}: {reason}"
                ) from reason
            await asyncio.sleep(min(pause_s, left_s - SHORTEST_TRY_S))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _schema(self, client: aiohttp.ClientSession, url: str) -> Mapping[str, Any] | None:
        """Of a server's actions; asked for once."""
        if url not in self._schemas:
            self._schemas[url] = None
            with suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
                address = f"http{url.removeprefix('ws').removesuffix('/ws')}/schema"
                async with asyncio.timeout(self._connect_limit_s), client.get(address) as answer:
                    self._schemas[url] = dict((await answer.json())["action"])
        return self._schemas[url]

    async def _try(
        self, client: aiohttp.ClientSession, url: str, arguments: Mapping[str, Any], end_s: float
    ) -> tuple[Session, Observed]:
        loop = asyncio.get_running_loop()
        limit_s = min(self._connect_limit_s, end_s - loop.time())
        try:
            async with asyncio.timeout(limit_s):
                socket = await client.ws_connect(url, heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise TimeoutError(f"{url} took no connection within {limit_s:.3g} s") from None
        session = Session(socket, url, self._step_limit_s)
        try:
            return session, await session.reset(arguments, max(0.0, end_s - loop.time()))
        except BaseException:
            await session.close()
            raise


def _socket_url(url: str) -> str:
    scheme, separator, rest = url.rstrip("/").partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not separator or scheme not in schemes:
        raise ValueError(f"base_url = {url!r}, expected an address such as http://127.0.0.1:8000")
    return f"{schemes[scheme]}://{rest.removesuffix('/ws')}/ws"


def total_reward(state: EpisodeState) -> float:
    """The sum of the steps' rewards, or the last one that there was."""
    return float(state.data["reward"])


def num_steps(state: EpisodeState) -> float:
    """Actions that the environment took, with or without a reward for each."""
    return float(len(state.data["actions"]))


def finished(state: EpisodeState) -> float:
    """1 where the environment said that it was done."""
    return float(state.data["finished"])


def solved(state: EpisodeState) -> float:
    """1 where the reward came up to `solved_at`."""
    return float(state.data["reward"] >= state.data["solved_at"])


class OpenEnv(MultiTurnEpisode, Environment):
    """An OpenEnv server's environment: the policy's answers are its actions.

    Example: ``env: [{id: openenv, args: {base_url: "http://127.0.0.1:8000", action_field: message, max_turns: 4}}]``
    """

    def __init__(
        self,
        *,
        base_url: str | Sequence[str],
        prompt: str | Sequence[Message] = "",
        action_field: str | None = None,
        observation_field: str | None = None,
        codec: str | None = None,
        max_turns: int = 8,
        reward: Literal["sum", "last"] = "sum",
        solved_at: float = 1.0,
        reset: Mapping[str, Any] | None = None,
        observes_state: bool = False,
        num_train: int = 1000,
        num_eval: int = 50,
        seed: int = 0,
        wait_s: float = 20.0,
        connect_limit_s: float = 5.0,
        step_limit_s: float = 20.0,
    ) -> None:
        """`base_url`: of the server, or of several that are asked in turn. `prompt`: a text, or messages, before the
        first observation. `action_field`: the field of an action that takes the answer; `observation_field`: the field
        of an observation that is shown (null: all, as JSON); or `codec`, `module:Class` or `path/to/file.py:Class`, for
        both (see `Codec`). `reward`: of the steps, their `sum` or the `last`. `solved_at`: from which reward on an
        episode counts as solved, which evaluation reports. `reset`: arguments of every `reset`; each example adds its
        seed: `num_eval` of them from `seed` on are evaluated, the next `num_train` trained. `observes_state`: every
        observation tells the whole state, as a board does, so that teachers are shown the prompt and the newest one
        instead of the conversation. `wait_s`: for the first observation, of a server that may be away at first.
        `connect_limit_s`: for one connection. `step_limit_s`: for one answer of the server. They count as time of the
        environment: let `wait_s` + `connect_limit_s` stay below the run's `reward_timeout_s` (30 s), and `step_limit_s`
        by 5 s.
        """
        super().__init__(max_turns=max_turns)
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        limits = {"wait_s": wait_s, "connect_limit_s": connect_limit_s, "step_limit_s": step_limit_s}
        for name, number in {**limits, "num_train": num_train, "num_eval": num_eval}.items():
            if not number > 0:
                raise ValueError(f"{name} = {number}, expected more than 0")
        if not urls:
            raise ValueError("base_url is an empty list; name a server")
        if reward not in ("sum", "last"):
            raise ValueError(f"reward is {reward!r}, expected sum or last")
        if "seed" in (reset or {}):
            raise ValueError(
                f"reset has seed = {(reset or {})['seed']}, with which all episodes would be one; remove it: each "
                "example has a seed of its own, from env.args.seed on"
            )
        if not math.isfinite(solved_at):
            raise ValueError(f"solved_at = {solved_at}, expected a finite number")
        self._urls, self._servers = urls, Servers(urls, **limits)
        self._codec = _codec(codec, action_field, observation_field)
        self._prompt, self._reward, self._solved_at = prompt, reward, solved_at
        self._reset, self._seed, self._observes_state = dict(reset or {}), seed, observes_state
        self._num = {"train": num_train, "eval": num_eval}
        self.rubric = Rubric([total_reward], accuracy=solved, metrics=[num_steps, finished])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Seeds: no seed is in both splits."""
        first = self._seed + (0 if split == "eval" else self._num["eval"])
        return [
            {"prompt": self._prompt, "task": f"{self._urls[0]}#{seed}", "seed": seed}
            for seed in range(first, first + self._num[split])
        ]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Raises ServerAway, SessionLost, TimeoutError and ServerError, each of which costs the rollout."""
        state.data |= {"rewards": [], "actions": [], "finished": False, "solved_at": self._solved_at}
        arguments = {**self._reset, "seed": state.example["seed"]}
        check = self._codec.check if isinstance(self._codec, FieldCodec) else None
        async with self._servers.begun(arguments, check) as (session, observed):
            state.data |= {"session": session, "observed": observed, "reset": arguments}
            await super().rollout(ctx, state)
            state.data["state"] = await _state_of(session)
        rewards = state.data["rewards"]
        state.data["reward"] = sum(rewards) if self._reward == "sum" else (rewards or [0.0])[-1]

    def initial_messages(self, state: EpisodeState) -> Sequence[Message]:
        """The prompt and the newest observation; where the prompt ends with a user's message, both in one."""
        shown = self._codec.to_text(state.data["observed"].observation)
        prompt = messages_of(state.example)
        if prompt[-1]["role"] != "user":
            return [*prompt, {"role": "user", "content": shown}]
        parts = [part for part in (prompt[-1]["content"], shown) if part]
        return [*prompt[:-1], {"role": "user", "content": "\n\n".join(parts)}]

    def observe(self, state: EpisodeState) -> Sequence[Message] | None:
        return self.initial_messages(state) if self._observes_state else None

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        """Takes the answer for an action."""
        session: Session = state.data["session"]
        try:
            action = dict(self._codec.to_action(state.last_text))
        except ValueError as error:
            state.mark_error(MALFORMED_ACTION, MALFORMED_ACTION, str(error))
            return f"error: {error}"
        try:
            observed = await session.step(action)
        except ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            state.mark_error(REFUSED_ACTION, REFUSED_ACTION, error.message)
            return f"error: {error.message}"
        state.data["actions"].append(action)
        state.data["observed"] = observed
        if observed.reward is not None:
            state.data["rewards"].append(observed.reward)
        if observed.error is not None:
            state.mark_error(*observed.error)
        state.data["finished"] = observed.done
        return None if observed.done else self._codec.to_text(observed.observation)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """What is needed to play the episode again, and the server's state at its end, where it tells."""
        return {key: state.data.get(key) for key in ("reset", "actions", "rewards", "state")}


async def _state_of(session: Session) -> dict[str, Any] | None:
    """None where the server does not tell; the rollout is over, and complete without it."""
    try:
        return await session.state()
    except (ServerError, SessionLost, TimeoutError):
        return None


def _codec(location: str | None, action_field: str | None, observation_field: str | None) -> Codec:
    if location is None:
        if action_field is None:
            raise ValueError("neither action_field nor codec says what an answer is to the environment; give one")
        return FieldCodec(action_field=action_field, observation_field=observation_field)
    if action_field is not None or observation_field is not None:
        raise ValueError(f"codec = {location!r} does what action_field and observation_field do; remove them")
    codec: Codec = find(location, setting="env.args.codec")()
    for name in ("to_text", "to_action"):
        if not callable(getattr(codec, name, None)):
            raise ValueError(f"codec = {location!r} has no method {name}; see orchestrator.envs.openenv.Codec")
    return codec
