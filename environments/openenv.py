"""`openenv`: an environment of an OpenEnv server, over its WebSocket protocol (`reset`, `step`, `state`, `close`).

This module implements the protocol itself, because the `openenv` package installs much that a client does not need.
Each rollout has its own session. A rollout waits at its start for a server that is down or full. If the connection is
lost later the rollout fails, because the state of its environment is unknown.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from pydantic import BaseModel
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from grpo import (
    Environment,
    EpisodeState,
    Message,
    MultiTurnEpisode,
    RolloutContext,
    Rubric,
    UserError,
    load_object,
    messages_of,
)

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import WebSocketException
except ImportError:
    raise UserError("openenv needs websockets, which is not installed: pip install 'grpo-pipeline[openenv]'") from None

WAIT_S, STEP_LIMIT_S, CONNECT_LIMIT_S = 20.0, 20.0, 5.0
"""Limits in seconds: for the first observation (the server may be down or full), one answer, one attempt to connect.
They count as the environment's time, and are below the default `reward_timeout_s`."""
STATE_LIMIT_S, CLOSE_LIMIT_S = 3.0, 1.0
"""Limits in seconds for reading the final state and for closing; a rollout succeeds without either."""
MAX_MESSAGE_BYTES = 100 * 1024 * 1024
"""Largest message; OpenEnv's own client has the same limit."""
REFUSED_ACTION, MALFORMED_ACTION = "refused_action", "malformed_action"
"""Kinds of errors: the server, or the codec, rejects an answer as no valid action."""


class SessionLost(ConnectionError):
    """No session could be opened in time, or it was lost during a rollout."""


class OpenEnvError(RuntimeError):
    """An error that the server has reported."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        wrong = [f"{one.get('loc')}: {one.get('msg')}" for one in about.get("errors") or []]
        self.code, self.message = str(about.get("code")), "; ".join([str(about.get("message", "")), *wrong[:3]])
        super().__init__(f"{self.code}: {self.message}")


def _may_pass(error: BaseException) -> bool:
    """Returns whether a retry may help: the server is down or full."""
    return isinstance(error, SessionLost) or (isinstance(error, OpenEnvError) and error.code == "CAPACITY_REACHED")


class Observed(BaseModel):
    """A server's answer to `reset` and `step`.

    Example: ``Observed(observation={"echoed_message": "hi"}, reward=0.2, done=False)``
    """

    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def error(self) -> tuple[str, str, str] | None:
        """(error_kind, hint_template_key, message) if the environment marked this step as an error, else None."""
        for marked in (self.metadata, self.observation.get("metadata"), self.observation.get("meta"), self.observation):
            if isinstance(marked, Mapping) and marked.get("error_kind"):
                kind = str(marked["error_kind"])
                said = marked.get("error_message") or marked.get("error") or ""
                return kind, str(marked.get("hint_template_key") or kind), str(said)
        return None


class Codec:
    """Turns observations into text for the policy, and answers into actions. This one puts the answer into one field of
    an action, and shows one field of an observation, or all but its metadata as JSON.

    You can give your own class with the same two methods and no constructor arguments:
    ``args: {base_url: ..., codec: "my_codec.py:Chess"}``
    """

    def __init__(self, action_field: str, observation_field: str | None) -> None:
        self.action_field, self._observation_field = action_field, observation_field

    def to_text(self, observation: Mapping[str, Any]) -> str:
        """Returns the text for the policy. Raises ValueError if the observation lacks the field."""
        if self._observation_field is None:
            return json.dumps({key: value for key, value in observation.items() if key not in ("metadata", "meta")})
        if self._observation_field not in observation:
            raise ValueError(f"observation_field = {self._observation_field!r}: the observation has {[*observation]}")
        shown = observation[self._observation_field]
        return shown if isinstance(shown, str) else json.dumps(shown)

    def to_action(self, text: str) -> Mapping[str, Any]:
        """Returns the action for an answer. The policy is shown the message of a ValueError raised here."""
        return {self.action_field: text}


async def _ask(socket: ClientConnection, kind: str, limit_s: float, data: Mapping[str, Any] | None = None) -> Any:
    """Sends a message and returns the answer's data. Raises OpenEnvError, SessionLost or TimeoutError."""
    try:
        async with asyncio.timeout(limit_s):
            await socket.send(json.dumps({"type": kind} | ({} if data is None else {"data": dict(data)})))
            answer = json.loads(await socket.recv())
    except TimeoutError:
        raise TimeoutError(f"the OpenEnv server did not answer {kind} within {limit_s:.3g} s") from None
    except WebSocketException as error:
        raise SessionLost(f"the OpenEnv server closed the session at {kind}: {error}") from None
    about = answer.get("data", {})
    if answer.get("type") == "error":
        raise OpenEnvError(about)
    return about


def total_reward(state: EpisodeState) -> float:
    """Returns the sum of the steps' rewards."""
    return float(sum(state.data["rewards"]))


def num_steps(state: EpisodeState) -> float:
    """Returns how many actions the environment accepted."""
    return float(len(state.data["actions"]))


def finished(state: EpisodeState) -> float:
    """Returns 1 if the environment ended the episode."""
    return float(state.data["observed"].done)


class OpenEnv(MultiTurnEpisode, Environment):
    """An environment on an OpenEnv server. Each answer of the policy is an action.

    Example: ``env: [{id: openenv, args: {base_url: "http://127.0.0.1:8000", action_field: message, max_turns: 4}}]``
    """

    def __init__(
        self,
        *,
        base_url: str,
        prompt: str | Sequence[Message] = "",
        action_field: str | None = None,
        observation_field: str | None = None,
        codec: str | None = None,
        max_turns: int = 8,
        solved_at: float = 1.0,
        reset: Mapping[str, Any] | None = None,
        observes_state: bool = False,
        num_train: int = 1000,
        num_eval: int = 50,
        seed: int = 0,
    ) -> None:
        """`base_url`: the server's address. `prompt`: a text or messages shown before the first observation.
        `action_field`: the action's field for the answer. `observation_field`: the observation's field to show (null:
        all, as JSON). `codec`: `module:Class` or `path/to/file.py:Class` instead of these two (see `Codec`).
        `solved_at`: smallest total reward that counts as solved, for the accuracy. `reset`: arguments of every `reset`,
        to which each example adds its own seed: `num_eval` seeds from `seed` on are for evaluation, the next
        `num_train` for training. `observes_state`: each observation is the whole state, such as a board; teachers then
        see the prompt and the newest observation instead of the conversation. Raises ValueError."""
        super().__init__(max_turns=max_turns)
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url = {base_url!r}, expected an address such as http://127.0.0.1:8000")
        if "seed" in (reset or {}):
            raise ValueError("reset has a seed, with which all episodes would be one; remove it: examples have theirs")
        self._url, self._codec = base_url.rstrip("/"), _codec(codec, action_field, observation_field)
        self._prompt, self._solved_at = prompt, solved_at
        self._reset, self._seed, self._observes_state = dict(reset or {}), seed, observes_state
        self._num = {"train": num_train, "eval": num_eval}
        self.rubric = Rubric([total_reward], accuracy=self.solved, metrics=[num_steps, finished])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Returns one example a seed. The splits share no seed."""
        first = self._seed + (0 if split == "eval" else self._num["eval"])
        seeds = range(first, first + self._num[split])
        return [{"prompt": self._prompt, "task": f"{self._url}#{seed}", "seed": seed} for seed in seeds]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        """Plays an episode. SessionLost, TimeoutError and OpenEnvError make the rollout fail."""
        arguments = {**self._reset, "seed": state.example["seed"]}
        async with self._session(arguments) as (socket, observed):
            state.data |= {"rewards": [], "actions": [], "reset": arguments, "socket": socket, "observed": observed}
            await super().rollout(ctx, state)
            try:
                state.data["state"] = await _ask(socket, "state", STATE_LIMIT_S)
            except (OpenEnvError, SessionLost, TimeoutError):
                state.data["state"] = None

    def initial_messages(self, state: EpisodeState) -> Sequence[Message]:
        """Returns the prompt and the newest observation, in one message if the prompt ends with a user's."""
        shown = self._codec.to_text(state.data["observed"].observation)
        prompt = messages_of(state.example)
        if prompt[-1]["role"] != "user":
            return [*prompt, {"role": "user", "content": shown}]
        parts = [part for part in (prompt[-1]["content"], shown) if part]
        return [*prompt[:-1], {"role": "user", "content": "\n\n".join(parts)}]

    def observe(self, state: EpisodeState) -> Sequence[Message] | None:
        return self.initial_messages(state) if self._observes_state else None

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> str | None:
        """Sends the answer as an action, and returns the next observation (None: the episode has ended)."""
        try:
            action = dict(self._codec.to_action(state.last_text))
        except ValueError as error:
            state.mark_error(MALFORMED_ACTION, MALFORMED_ACTION, str(error))
            return f"error: {error}"
        try:
            observed = Observed(**await _ask(state.data["socket"], "step", STEP_LIMIT_S, action))
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            state.mark_error(REFUSED_ACTION, REFUSED_ACTION, error.message)
            return f"error: {error.message}"
        state.data["actions"].append(action)
        state.data["observed"] = observed
        state.data["rewards"].append(observed.reward or 0.0)
        if observed.error is not None:
            state.mark_error(*observed.error)
        return None if observed.done else self._codec.to_text(observed.observation)

    def solved(self, state: EpisodeState) -> float:
        """Returns 1 if the total reward is at least `solved_at`."""
        return float(total_reward(state) >= self._solved_at)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """Returns what a replay needs, and the server's final state if it is known."""
        return {key: state.data.get(key) for key in ("reset", "actions", "rewards", "state")}

    @asynccontextmanager
    async def _session(self, arguments: Mapping[str, Any]) -> AsyncIterator[tuple[ClientConnection, Observed]]:
        """Opens and resets a session. Waits up to WAIT_S for a server that is down or full."""
        stop, pause = stop_after_delay(WAIT_S), wait_exponential(multiplier=0.1, max=1.0)
        attempts = AsyncRetrying(retry=retry_if_exception(_may_pass), stop=stop, wait=pause, reraise=True)
        begun: tuple[ClientConnection, Observed] = await attempts(self._begin, arguments)
        socket, observed = begun
        try:
            yield socket, observed
        finally:
            with suppress(WebSocketException, TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await socket.send(json.dumps({"type": "close"}))
                    await socket.close()
            socket.transport.abort()

    async def _begin(self, arguments: Mapping[str, Any]) -> tuple[ClientConnection, Observed]:
        """Tries once to open and reset a session."""
        try:
            address = f"ws{self._url.removeprefix('http')}/ws"
            socket = await connect(address, open_timeout=CONNECT_LIMIT_S, close_timeout=1, max_size=MAX_MESSAGE_BYTES)
            try:
                return socket, Observed(**await _ask(socket, "reset", STEP_LIMIT_S, arguments))
            except BaseException:
                socket.transport.abort()
                raise
        except (OSError, TimeoutError, WebSocketException) as error:
            raise SessionLost(f"no session at {self._url} within {WAIT_S:g} s: {error!r}") from error


def _codec(location: str | None, action_field: str | None, observation_field: str | None) -> Codec:
    if location is None and action_field is not None:
        return Codec(action_field, observation_field)
    if location is None or action_field is not None or observation_field is not None:
        raise ValueError("action_field or codec says what an answer is to the environment: give one of them")
    codec: Codec = load_object(location, setting="env.args.codec")()
    if not all(callable(getattr(codec, name, None)) for name in ("to_text", "to_action")):
        raise ValueError(f"codec = {location!r}: expected a class with to_text and to_action")
    return codec
