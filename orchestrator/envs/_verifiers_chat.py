"""A chat loop as `verifiers` knows harnesses, within the environment's own process: no program is installed or started
for a rollout. Its agents talk and call tool servers; they run no code.

`verifiers` finds it by its id, like any harness package (`orchestrator.envs.verifiers` makes the id known).
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import MCPConnection, connect_mcp, mcp_content_to_chat_content

from orchestrator.envs._chat_endpoint import CONTEXT_FULL
from orchestrator.rollouts.tool_calls import UNKNOWN_TOOL

__all__ = ["ChatHarness"]

FAILED_CALLS = "failed_tool_calls"
"""Where a trace's `info` lists them, as (id of the call, kind of error, what was said)."""
TOOL_ERROR = "tool_error"


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Nothing is set here but what every harness has."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Asks for an answer, makes the calls in it, and so on until an answer has none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
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
        """One segment of the conversation. A turn that `verifiers` refuses ends it; so does a full context."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            talk = _Talk(session, endpoint, ctx.model, tools, places, connections, trace, tool_interception_url)
            return await talk.run(self._opening(data))

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = [message_to_wire(message) for message in prompt or []]
        return [*([{"role": "system", "content": system}] if system else []), *messages]


class _Talk:
    """One segment: where to ask, what may be called, and whom to tell."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: str,
        model: str,
        tools: list[dict[str, Any]],
        places: dict[str, tuple[str, str]],
        connections: dict[str, MCPConnection],
        trace: vf.Trace,
        gate_url: str | None,
    ) -> None:
        self._session, self._endpoint, self._model = session, endpoint, model
        self._tools, self._places, self._connections = tools, places, connections
        self._trace, self._gate_url = trace, gate_url

    async def run(self, messages: list[dict[str, Any]]) -> vf.ProgramResult:
        while True:
            status, answer = await self._post(
                f"{self._endpoint}/chat/completions",
                {"model": self._model, "messages": messages} | ({"tools": self._tools} if self._tools else {}),
            )
            if status != 200:
                # A failure is none to `verifiers` where the rollout was stopped.
                full = CONTEXT_FULL in json.dumps(answer)
                return vf.ProgramResult(0, "", "") if full else vf.ProgramResult(1, "", f"{status}: {answer}")
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(0, message.get("content") or "", "")
            for call in message["tool_calls"]:
                result = await self._result(call)
                if result is None:
                    return vf.ProgramResult(0, "", "")
                messages.append(result)

    async def _result(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """What the policy is told of a call; None where `verifiers` ends the rollout before it."""
        name = call["function"]["name"]
        arguments = json.loads(call["function"]["arguments"])
        if self._gate_url is not None:
            status, verdict = await self._post(
                self._gate_url, {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            )
            if status != 200 or verdict["action"] == "stop":
                return None
            if verdict["action"] == "deny":
                return dict(verdict["message"])
        message = {"role": "tool", "tool_call_id": call["id"], "name": name}
        if name not in self._places:
            told = f"error: there is no tool {name!r}; there are {', '.join(self._places)}"
            self._mark(call["id"], UNKNOWN_TOOL, told)
            return {**message, "content": told}
        server, tool = self._places[name]
        result = await self._connections[server].run(lambda client: client.call_tool(tool, arguments))
        content = mcp_content_to_chat_content(result.content)
        if result.is_error:
            self._mark(call["id"], TOOL_ERROR, str(content))
        return {**message, "content": content}

    def _mark(self, call_id: str, kind: str, message: str) -> None:
        self._trace.info.setdefault(FAILED_CALLS, []).append((call_id, kind, message))

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(url, json=body) as response:
            return response.status, await response.json()
