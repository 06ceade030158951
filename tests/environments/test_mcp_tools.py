"""Tools of real MCP servers: a program over its standard input and output, and one over HTTP."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpo.transport.ports import free_port

from grpo import Environment, EpisodeState, McpServer, Rubric, ToolEpisode, play
from tests.orchestrator.rollouts.test_tool_calls import tagged
from tests.support import until

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")

@server.tool()
def price(fruit: str) -> int:
    """What a fruit costs."""
    if fruit not in ("apple", "plum"):
        raise ValueError(f"no {fruit}")
    return len(fruit)

@server.tool()
async def slow() -> str:
    """Takes its time."""
    await asyncio.sleep(60)
    return ""

@server.tool()
def key() -> str:
    """What it was given, and what it was not."""
    return str([os.environ.get(name) for name in ("SHOP_KEY", "RUN_KEY")])

@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


class Shop(ToolEpisode, Environment):
    rubric = Rubric([lambda completion: float(completion == "done")])

    def __init__(self, *servers: McpServer, **options: Any) -> None:
        super().__init__(sources=servers, **options)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return []


def call(name: str, **arguments: Any) -> str:
    return tagged({"name": name, "arguments": arguments})


async def played(shop: Shop, *answers: str) -> tuple[EpisodeState, list[str]]:
    state = await play(shop, {"prompt": "Buy."}, [*answers, "done"])
    return state, [message["content"] for message in state.messages if message["role"] == "tool"]


@pytest.fixture
def program(tmp_path: Path) -> McpServer:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return McpServer(command=(sys.executable, str(path)), env={"SHOP_KEY": "a"}, start_timeout_s=240)


async def test_a_program_is_called_its_errors_are_told_and_it_sees_its_own_keys(
    program: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_KEY", "secret")
    shop = Shop(program, timeout_s=60)
    calls = [call("price", fruit="plum"), call("price", fruit="car"), call("key"), call("price")]
    state, told = await played(shop, "".join(calls))
    assert told[0] == "4"
    assert "no car" in told[1]
    assert told[2] == "['a', None]"
    assert "fruit" in told[3]
    assert state.data == {"num_tool_calls": 4, "tool_errors": 2}
    names = {tool["function"]["name"] for tool in shop.tools_for("policy", state) or ()}
    assert names == {"price", "slow", "key", "die"}
    _, [told_late] = await played(Shop(program, timeout_s=0.2), call("slow"))
    assert "0.2 s" in told_late
    state, _ = await played(shop, call("die"))
    assert state.data["tool_errors"] == 1
    assert (await played(shop, call("price", fruit="apple")))[1] == ["5"]  # started again for the next rollout


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_over_http_is_called_and_only_the_tools_that_are_named(program: McpServer) -> None:
    port = free_port()
    with subprocess.Popen([*program.command, str(port)], stderr=subprocess.DEVNULL) as process:
        until(lambda: listens(port), process)
        shop = Shop(McpServer(url=f"http://127.0.0.1:{port}/mcp", tools=["price"], start_timeout_s=240))
        for _ in range(2):  # each event loop has a connection of its own
            state, told = asyncio.run(played(shop, call("price", fruit="apple") + call("slow")))
            assert told[0] == "5"
            assert "price" in told[1]
            assert state.data["tool_errors"] == 1
        process.terminate()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(url="http://127.0.0.1:9/mcp", start_timeout_s=20), "127.0.0.1:9"),
        (McpServer(command=("sh", "-c", "while read line; do :; done"), start_timeout_s=0.2), "start_timeout_s"),
    ],
)
async def test_a_server_that_is_not_there_is_named(server: McpServer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await played(Shop(server))
