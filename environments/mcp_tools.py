"""Tools of MCP servers (Model Context Protocol), for any tool episode."""

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo import Tool, ToolFailed

if TYPE_CHECKING:
    from mcp import Client

CLOSED = -32000
"""MCP's error code for a lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """An MCP server, by the program that starts it (stdio) or by its address.

    Example: ``McpServer(command=("uvx", "mcp-server-time"))``, ``McpServer(url="http://127.0.0.1:9000/mcp")``
    """

    command: Sequence[str] = ()
    """The program and its arguments. A worker's rollouts share it, and it ends with the worker."""
    url: str = ""
    """The address of a server over streamable HTTP."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the program, such as its keys, besides PATH, HOME and the like."""
    tools: Sequence[str] | None = None
    """Names of the tools that the policy may call (None: all)."""
    start_timeout_s: float = 20.0
    """Seconds that the server may take to start and list its tools."""
    _connections: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection]" = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            raise ValueError(
                f"an MCP server has command = {self.command!r} and url = {self.url!r}, expected a list of words or an "
                "address, one of the two"
            )

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"

    async def open(self) -> Mapping[str, Tool]:
        """Returns the tools by name. Each event loop has one connection, which is opened again after it is lost. Raises
        ValueError if the server does not start, or lacks one of `tools`."""
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None or connection.task.done() or connection.task.cancelling():
            connection = self._connections[loop] = _Connection(self)
        return await connection.tools()


class _Connection:
    """A connection and the task that keeps it open; a connection must be closed by the task that opened it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._tools: asyncio.Future[dict[str, Tool]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._stay())

    async def tools(self) -> dict[str, Tool]:
        """Returns the tools once the server has listed them. Raises ValueError if it does not in time."""
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(self._tools)
        except TimeoutError:
            self.task.cancel()
            limit = f"start_timeout_s = {self._server.start_timeout_s:g} s"
            raise ValueError(f"{self._server} did not name its tools within {limit}") from None

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
                    ValueError(f"{server}: {type(error).__name__}: {error}; is it installed, and up?")
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

    def _tool(self, client: "Client", listed: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            try:
                result = await client.call_tool(listed.name, arguments)
            except Exception as error:
                if getattr(error, "code", CLOSED) == CLOSED:  # the next rollout has another connection
                    self.task.cancel()
                raise ToolFailed(f"{listed.name}: {error or type(error).__name__}") from None
            text = "\n".join(getattr(one, "text", None) or f"[{one.type}]" for one in result.content)
            if result.is_error:
                raise ToolFailed(text)
            return text

        return Tool.of_schema(listed.name, call, parameters=listed.input_schema, description=listed.description or "")
