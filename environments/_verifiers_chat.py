"""A harness of `verifiers` that runs a chat loop in the environment's own process, so that a rollout installs and
starts no program. Its agents chat and call tool servers; they run no code.

`verifiers` finds it by its id, like any harness package (`grpo.environments.verifiers` makes the id known).
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import MCPConnection, connect_mcp, mcp_content_to_chat_content

__all__ = ["ChatHarness"]

CONTEXT_FULL = "context_length_exceeded"
"""The error code of OpenAI's API for a full context; `verifiers` passes it on inside the error's text."""
FAILED_CALLS = "failed_tool_calls"
"""The key in a trace's `info` that lists failed calls, as (id of the call, kind of error, message)."""


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """The settings that every harness has."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Samples answers and makes the tool calls in them, until an answer has no call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Runs one segment of the conversation. It ends early if `verifiers` refuses a turn or the context is full."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            messages: list[Any] = self._opening(data)
            more = {"tools": tools} if tools else {}
            while True:
                try:
                    made = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
                except openai.APIStatusError as error:
                    # `verifiers` does not count this as a failure if it has stopped the rollout.
                    return vf.ProgramResult(0 if CONTEXT_FULL in str(error) else 1, "", str(error))
                message = made.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, message.get("content", ""), "")
                messages += [await _result(call, places, connections, trace) for call in message["tool_calls"]]

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *map(message_to_wire, prompt or [])]


async def _result(
    call: dict[str, Any],
    places: dict[str, tuple[str, str]],
    connections: dict[str, MCPConnection],
    trace: vf.Trace,
) -> dict[str, Any]:
    """Makes a tool call and returns its result as a message for the policy."""
    name, error = call["function"]["name"], ""
    if name in places:
        server, tool = places[name]
        arguments = json.loads(call["function"]["arguments"])
        result = await connections[server].run(lambda client: client.call_tool(tool, arguments))
        told, error = mcp_content_to_chat_content(result.content), "tool_error" if result.is_error else ""
    else:
        told, error = f"error: there is no tool {name!r}; there are {', '.join(places)}", "unknown_tool"
    if error:
        trace.info.setdefault(FAILED_CALLS, []).append((call["id"], error, str(told)))
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": told}
