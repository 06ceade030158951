"""A policy that calls tools until it answers without a call."""

import asyncio
import contextlib
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.episodes.arena import Arena, CallFailed, ContextFull
from orchestrator.episodes.deadline import patient_timeout
from orchestrator.episodes.episode import MultiTurnEpisode, Response
from orchestrator.episodes.roles import Role
from orchestrator.episodes.rubric import Rubric
from orchestrator.episodes.state import EpisodeState, ProcessSpent
from orchestrator.episodes.tool_calls import Parser, Tool, ToolCall, ToolCallError, parse_tagged, tools_of

TOOL_ERROR, TOOL_TIMEOUT = "tool_error", "tool_timeout"
MAX_HANGING = 64
"""Calls past their deadline whose threads have not ended; a process that has so many is to be replaced."""
STACK_BYTES = 2 << 20
"""Of a call's thread. All of it counts as allocated from the beginning: of the usual 8 MiB, the calls of a few hundred
rollouts would take what `memory_gb` leaves."""


class ToolFailed(Exception):
    """A tool raises it to say what kind of failure it is.

    Example: ``raise ToolFailed("There is no word zzz.", error_kind="unknown_word", hint_template_key="words")``
    """

    def __init__(self, message: str, *, error_kind: str = TOOL_ERROR, hint_template_key: str | None = None) -> None:
        """`hint_template_key` defaults to `error_kind`."""
        super().__init__(message)
        self.error_kind, self.hint_template_key = error_kind, hint_template_key or error_kind


class ToolEpisode(MultiTurnEpisode):
    """The policy calls tools and sees what they return, until an answer has no call in it.

    Example::

        def look_up(word: str) -> int:
            '''The number of a word.

            Args:
                word: the word to look up
            '''
            return {"apple": 3, "plum": 4}[word]

        def right(completion, example):
            return float(completion.strip() == example["answer"])

        class LookUp(ToolEpisode, Environment):
            rubric = Rubric([right])

            def __init__(self, max_turns=4):
                super().__init__([look_up], max_turns=max_turns)

            def dataset(self, split):
                return [{"prompt": "What is apple + plum?", "answer": "7"}]

    Its policy writes `<tool_call>{"name": "look_up", "arguments": {"word": "apple"}}</tool_call>`; with
    `parser=parse_bracketed` it writes `LOOK_UP[apple]`.

    A failed call costs no rollout: the policy is told what was wrong, and the answer is marked as in
    `EpisodeState.mark_error`, by the first of its failed calls. `state.data` counts in `num_tool_calls` the calls that
    the policy wrote, and in `tool_errors` those that failed.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]] | Mapping[str, Tool],
        *,
        parser: Parser = parse_tagged,
        max_turns: int | None = None,
        result_role: str = "tool",
        timeout_s: float = 10.0,
        show_tools: bool = True,
        rubric: Rubric | None = None,
        roles: Sequence[Role] | None = None,
    ) -> None:
        """`tools`: functions with type hints and a docstring, plain or async; a plain one runs in a thread of its own.
        `result_role`: whose message a result is; where it is `user`, an answer's results are one message.
        `timeout_s`: for one call; all calls of an answer together are to stay below the run's `reward_timeout_s`. Where
        another rollout's code holds up the event loop, an eighth of the limit at most is counted each time. A plain
        function that takes longer goes on, and nobody waits for it. `show_tools`: to the model's chat template;
        otherwise the prompt tells of them.

        Raises ValueError for a function that cannot be a tool.
        """
        super().__init__(max_turns=max_turns)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected the seconds that a tool may take")
        self.tools: Mapping[str, Tool] = tools if isinstance(tools, Mapping) else tools_of(tools)
        self.result_role, self.timeout_s, self.show_tools = result_role, timeout_s, show_tools
        self._parse, self._hanging = parser, set[threading.Thread]()
        if rubric is not None:
            self.rubric = rubric
        if roles is not None:
            self.roles = roles

    async def call_tool(self, call: ToolCall, state: EpisodeState, arena: Arena) -> Any:
        """What a call returns: a text, or what becomes one as JSON. Override it for tools that need the state. What it
        raises is told to the policy."""
        function = self.tools[call.name].function
        if inspect.iscoroutinefunction(function):
            return await function(**call.arguments)
        return await self._in_thread(function, call.arguments)

    async def rollout(self, arena: Arena, state: EpisodeState) -> None:
        state.data |= {"num_tool_calls": 0, "tool_errors": 0}
        await super().rollout(arena, state)

    async def respond(self, state: EpisodeState, arena: Arena) -> Response:
        """The results of the newest answer's calls; None where it has none."""
        calls = self._parse(state.last_text, self.tools).calls
        if not calls:
            return None
        index = state.turn - 1
        results = [await self._result(call, state, arena, index) for call in calls]
        if self.result_role == "user":
            return [{"role": "user", "content": "\n".join(results)}]
        return [{"role": self.result_role, "content": result} for result in results]

    def tools_for(self, role: str, state: EpisodeState) -> Sequence[Mapping[str, Any]] | None:
        return [tool.schema for tool in self.tools.values()] if self.show_tools and self.tools else None

    # --- one call ---

    async def _result(self, call: ToolCall | ToolCallError, state: EpisodeState, arena: Arena, index: int) -> str:
        state.data["num_tool_calls"] += 1
        if isinstance(call, ToolCallError):
            return self._failed(state, index, call.error_kind, call.error_kind, call.message)
        try:
            async with patient_timeout(self.timeout_s) as deadline:
                result = await self.call_tool(call, state, arena)
        except ToolFailed as error:
            return self._failed(state, index, error.error_kind, error.hint_template_key, str(error))
        except (MemoryError, ProcessSpent, ContextFull, CallFailed):
            raise  # no failure of the tool's
        except Exception as error:
            if deadline.expired():
                message = f"{call.name} took longer than {self.timeout_s:g} s."
                return self._failed(state, index, TOOL_TIMEOUT, TOOL_TIMEOUT, message)
            return self._failed(state, index, TOOL_ERROR, TOOL_ERROR, f"{type(error).__name__}: {error}")
        return _text(result)

    @staticmethod
    def _failed(state: EpisodeState, index: int, kind: str, key: str, message: str) -> str:
        state.data["tool_errors"] += 1
        if state.trajectory[index].error is None:
            state.mark_error(kind, key, _sendable(message), index=index)
        return _sendable(message)

    async def _in_thread(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """A plain function's result. Its thread is left alone where nobody waits for it any more. Raises ProcessSpent
        where there are too many of those, or there is no room for another one."""
        self._hanging = {thread for thread in self._hanging if thread.is_alive()}
        if len(self._hanging) >= MAX_HANGING:
            raise ProcessSpent(
                f"{len(self._hanging)} calls of tools are past their deadline of {self.timeout_s:g} s and have not "
                "ended; give what they wait for a deadline of its own"
            )
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def run() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = context.run(function, **arguments), None
            except BaseException as error:  # the one who waits decides what it means
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, done, outcome)

        thread = _started(run)
        try:
            result, error = await done
        finally:
            if not done.done() or done.cancelled():
                self._hanging.add(thread)
        if error is not None:
            raise error
        return result


def _started(run: Callable[[], None]) -> threading.Thread:
    """A thread that runs. Raises ProcessSpent where there is no room for it."""
    usual = threading.stack_size()
    try:
        threading.stack_size(usual or STACK_BYTES)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
    except RuntimeError as error:
        raise ProcessSpent(
            f"{error} for a tool beside {threading.active_count()} others, each of which takes "
            f"{(usual or STACK_BYTES) >> 20} MiB of memory_gb; raise env[].memory_gb or env[].num_workers, or make the "
            "tool async"
        ) from None
    finally:
        threading.stack_size(usual)
    return thread


def _settle(done: "asyncio.Future[Any]", outcome: Any) -> None:
    if not done.done():
        done.set_result(outcome)


def _text(result: Any) -> str:
    if isinstance(result, str):
        return _sendable(result)
    try:
        return _sendable(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError):
        return _sendable(str(result))


def _sendable(text: str) -> str:
    """Halves of surrogate pairs, which a policy can write as JSON escapes, as question marks."""
    return text if text.isascii() else text.encode(errors="replace").decode()
