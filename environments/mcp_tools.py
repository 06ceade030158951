"""Tools of MCP servers (Model Context Protocol), for any tool episode."""

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo.orchestrator.rollouts.tool_calls import Tool, ToolFailed
from pydantic import TypeAdapter

if TYPE_CHECKING:
    from mcp import Client

CLOSED = -32000
"""The code of MCP's error for a connection that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server with tools: a program that speaks over its standard input and output, or an address.

    Example: ``McpServer(command=("uvx", "mcp-server-time"))``, ``McpServer(url="http://127.0.0.1:9000/mcp")``
    """

    command: Sequence[str] = ()
    """The program with its arguments. It ends with the worker, and is shared by the worker's rollouts."""
    url: str = ""
    """Of a server over streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the program gets of an environment besides PATH, HOME and the like: keys of its own, for example."""
    tools: Sequence[str] | None = None
    """Names of those that the policy may call; None for all."""
    start_timeout_s: float = 20.0
    """For the server to come up and name its tools."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            raise ValueError(
                f"an MCP server has command = {self.command!r} and url = {self.url!r}, expected a list of words or an "
                "address, one of the two"
            )

    @property
    def name(self) -> str:
        """For people."""
        return self.url or " ".join(self.command)


class McpTools:
    """Connections to servers, one each for an event loop. One that has broken off is made again."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._servers = servers
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, _Connection]] = (
            weakref.WeakKeyDictionary()
        )

    async def tools(self) -> dict[str, Tool]:
        """All tools by name. Raises ValueError for a server that does not come up, or has not the tools that are named,
        and where two tools have one name."""
        known = self._connections.setdefault(asyncio.get_running_loop(), {})
        tools: dict[str, Tool] = {}
        for place, server in enumerate(self._servers):
            if place not in known or known[place].task.done() or known[place].task.cancelling():
                known[place] = _Connection(server)
            for name, tool in (await known[place].tools()).items():
                if name in tools:
                    raise ValueError(f"two MCP servers have a tool {name}; leave one out by McpServer.tools")
                tools[name] = tool
        return tools


class _Connection:
    """One server, for as long as its task runs: who opens a connection must close it in the same task."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._tools: asyncio.Future[dict[str, Tool]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._stay())

    async def tools(self) -> dict[str, Tool]:
        """Raises ValueError."""
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(self._tools)
        except TimeoutError:
            self.task.cancel()
            why = f"it did not name its tools within start_timeout_s = {self._server.start_timeout_s:g} s"
            raise ValueError(f"MCP server {self._server.name}: {why}") from None

    async def _stay(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        server = self._server
        try:
            at: Any = server.url
            if server.command:
                program, *arguments = server.command
                env = {"PATH": os.environ.get("PATH", "")} | dict(server.env)
                at = stdio_client(StdioServerParameters(command=program, args=arguments, env=env))
            async with Client(at) as client:
                self._tools.set_result(await self._listed(client))
                await asyncio.Event().wait()
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not self._tools.done():
                self._tools.set_exception(
                    ValueError(f"MCP server {server.name}: {type(error).__name__}: {error}; is it installed, and up?")
                )

    async def _listed(self, client: "Client") -> dict[str, Tool]:
        tools, cursor = dict[str, Tool](), None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools |= {one.name: self._tool(client, one) for one in page.tools}
            if (cursor := page.next_cursor) is None:
                break
        if self._server.tools is None:
            return tools
        if missing := [name for name in self._server.tools if name not in tools]:
            raise ValueError(f"there is no tool {missing[0]}; there are {', '.join(tools)}")
        return {name: tools[name] for name in self._server.tools}

    def _tool(self, client: "Client", told: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            try:
                result = await client.call_tool(told.name, arguments)
            except Exception as error:
                if getattr(error, "code", CLOSED) == CLOSED:  # the next rollout has another connection
                    self.task.cancel()
                raise ToolFailed(f"{told.name}: {error or type(error).__name__}") from None
            text = "\n".join(getattr(one, "text", None) or f"[{one.type}]" for one in result.content)
            if result.is_error:
                raise ToolFailed(text)
            return text

        return Tool(
            name=told.name,
            description=told.description or "",
            parameters={"type": "object", "properties": {}, **told.input_schema},
            function=call,
            _arguments=TypeAdapter(dict[str, Any]),
        )
