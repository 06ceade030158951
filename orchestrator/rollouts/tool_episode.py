"""A policy that calls tools until it answers without a call."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo.orchestrator.rollouts.clock import OwnTimeout, in_thread, together
from grpo.orchestrator.rollouts.context import CallFailed, ContextFull, RolloutContext
from grpo.orchestrator.rollouts.episode import MultiTurnEpisode, Response
from grpo.orchestrator.rollouts.parsers import Parser
from grpo.orchestrator.rollouts.roles import Role
from grpo.orchestrator.rollouts.rubric import Rubric
from grpo.orchestrator.rollouts.state import EpisodeState
from grpo.orchestrator.rollouts.tool_calls import (
    CallParser,
    Tool,
    ToolCall,
    ToolCallError,
    ToolFailed,
    ToolSource,
    parse_tagged,
    tools_of,
)

TOOL_TIMEOUT = "tool_timeout"
THINKING = Parser()


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
        tools: Iterable[Callable[..., Any]] | Mapping[str, Tool] = (),
        *,
        sources: Sequence[ToolSource] = (),
        parser: CallParser = parse_tagged,
        max_turns: int | None = None,
        result_role: str = "tool",
        timeout_s: float = 10.0,
        show_tools: bool = True,
        rubric: Rubric | None = None,
        roles: Sequence[Role] | None = None,
    ) -> None:
        """`tools`: functions with type hints and a docstring, plain or async; a plain one runs in a thread. `sources`:
        servers and the like (`McpServer`), whose tools the policy may call as well. Calls of one answer run at the same
        time. `result_role`: whose message a result is; where it is `user`, they are one message. `timeout_s`: for one
        call, to stay below the run's `reward_timeout_s`. A plain function that takes longer goes on, and nobody waits
        for it. `show_tools`: to the model's chat template; otherwise the prompt tells of them.

        Raises ValueError for a function that cannot be a tool.
        """
        super().__init__(max_turns=max_turns)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected the seconds that a tool may take")
        self._own: Mapping[str, Tool] = tools if isinstance(tools, Mapping) else tools_of(tools)
        self.tools = self._own
        """Tools by name; those of `sources` once a rollout has begun."""
        self.result_role, self.timeout_s, self.show_tools = result_role, timeout_s, show_tools
        self._parse, self._sources = parser, sources
        if rubric is not None:
            self.rubric = rubric
        if roles is not None:
            self.roles = roles

    async def call_tool(self, call: ToolCall, state: EpisodeState, ctx: RolloutContext) -> Any:
        """Makes a call. Returns a text, or what becomes one as JSON. Override it for tools that need the state. The
        policy is told what it raises."""
        function = self.tools[call.name].function
        if inspect.iscoroutinefunction(function):
            return await function(**call.arguments)
        return await in_thread(function, **call.arguments)

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        state.data |= {"num_tool_calls": 0, "tool_errors": 0}
        tools = dict(self._own)
        for source in self._sources:
            theirs = await source.open()
            if twice := theirs.keys() & tools.keys():
                raise ValueError(f"there are two tools called {min(twice)}, one of them of {source}; leave one out")
            tools |= theirs
        self.tools = tools
        await super().rollout(ctx, state)

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> Response:
        """The results of the newest answer's calls; None where it has none. One that it only thinks of is none."""
        calls = self._parse(THINKING.behind(state.last or ""), self.tools).calls
        if not calls:
            return None
        index = state.turn - 1
        made = await together(self._result(call, state, ctx) for call in calls)
        results = [self._told(result, state, index) for result in made]
        if self.result_role == "user":
            return [{"role": "user", "content": "\n".join(results)}]
        return [{"role": self.result_role, "content": result} for result in results]

    def tools_for(self, role: str, state: EpisodeState) -> Sequence[Mapping[str, Any]] | None:
        return [tool.schema for tool in self.tools.values()] if self.show_tools and self.tools else None

    # --- one call ---

    async def _result(
        self, call: ToolCall | ToolCallError, state: EpisodeState, ctx: RolloutContext
    ) -> str | ToolFailed:
        if isinstance(call, ToolCallError):
            return ToolFailed(call.message, error_kind=call.error_kind)
        try:
            async with OwnTimeout(self.timeout_s) as deadline:
                return _text(await self.call_tool(call, state, ctx))
        except ToolFailed as error:
            return error
        except (MemoryError, ContextFull, CallFailed):
            raise  # no failure of the tool's
        except Exception as error:
            if deadline.expired():
                return ToolFailed(f"{call.name} took longer than {self.timeout_s:g} s.", error_kind=TOOL_TIMEOUT)
            return ToolFailed(f"{type(error).__name__}: {error}")

    @staticmethod
    def _told(result: str | ToolFailed, state: EpisodeState, index: int) -> str:
        """Returns what the policy is told; the first failed call of an answer marks it."""
        state.data["num_tool_calls"] += 1
        if isinstance(result, str):
            return result
        state.data["tool_errors"] += 1
        message = _sendable(str(result))
        if state.trajectory[index].error is None:
            state.mark_error(result.error_kind, result.hint_template_key, message, index=index)
        return message


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
