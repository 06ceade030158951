"""Environments that a server elsewhere has."""

import asyncio
import contextlib
import errno
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from orchestrator.episodes.types import Failure, Score, Task
from orchestrator.workers.hosting import Answerer, Call, EpisodeHost, EpisodeProcess
from orchestrator.workers.links import RESET_AT_CLOSE, Link, NotOurServer, OwnProcess, RemoteProcess, session_url
from orchestrator.workers.spawned import KEY_VAR
from orchestrator.workers.tunnel import HEARTBEAT_S, PROTOCOL, WINDOW_BYTES
from orchestrator.workers.wire import HEADER, Loaded, Played, Sampled

from orchestrator.workers import links as links_module
from orchestrator.workers import process as process_module
from orchestrator.workers import server as server_module
from orchestrator.workers import spawned as spawned_module
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.process import EnvironmentProcess
from orchestrator.workers.server import REST_S, EnvironmentServer
from tests.orchestrator.fakes import FakeServer, settings_for

LIMIT_S = 30.0
OWN = """
import os, re, subprocess, time
from grpo import Environment, Rubric

helpers = []

def reward(completion, example):
    if completion == "crash":
        os._exit(3)
    if completion == "hang":
        time.sleep(60)
    if completion == "hold":
        re.match("(a+)+$", "a" * 99 + "b")  # holds the interpreter's lock for longer than anybody waits
    if completion == "key":
        return "GRPO_ENV_KEY" in os.environ
    if completion == "pid":
        return os.getpid()
    if completion == "helper":
        helpers.append(subprocess.Popen(["sleep", "600"]))
        return helpers[-1].pid
    return float(completion == example["prompt"] * example["times"])

class Repeat(Environment):
    rubric = Rubric([reward])
    def __init__(self, times=1):
        self.times = times
    def dataset(self, split):
        if split == "big":
            return [{"prompt": "x" * (1 << 20), "times": 20}] * 20
        return [{"prompt": word, "times": self.times} for word in ("a", "b")]
"""

ECHO = """
import os, socket, struct, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
os.pwrite(int(os.environ["GRPO_RUNNING_FD"]), struct.pack("<q", 7), 0)
while data := connection.recv(1 << 20):
    if b"crash" in data:
        os._exit(3)
    if b"abort" in data:
        os.abort()
    if b"leave" in data:
        connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.3)
        os._exit(5)
    if b"stop" in data:
        time.sleep(600)
    connection.sendall(data)
"""


@pytest.fixture
def env_id(tmp_path: Path) -> str:
    (tmp_path / "repeat.py").write_text(OWN)
    return f"{tmp_path / 'repeat.py'}:Repeat"


@pytest_asyncio.fixture
async def server(env_id: str) -> AsyncIterator[EnvironmentServer]:
    async with serving(env_id) as server:
        yield server


@contextlib.asynccontextmanager
async def serving(env_id: str, port: int = 0) -> AsyncIterator[EnvironmentServer]:
    server = EnvironmentServer(env_id, "127.0.0.1", port)
    task = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.close(), LIMIT_S)


@contextlib.asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """The address of something else than an environment server."""
    other = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with other:
        yield "http://{}:{}".format(*other.sockets[0].getsockname())


class Relay:
    """Passes connections on to a server, until it is dead without a word."""

    def __init__(self, server: EnvironmentServer) -> None:
        self._port = port_of(server)
        self._writers: list[asyncio.StreamWriter] = []
        self.is_dead = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.is_dead:
                writer.write(data)
        if not self.is_dead:
            writer.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def environment(server: EnvironmentServer, env_id: str, **changes: Any) -> EnvironmentProcess:
    given: dict[str, Any] = {"label": "e", "env_id": env_id, "args": {"times": 2}, "timeout_s": 20.0}
    return EnvironmentProcess(**given | {"address": server.address} | changes)


def port_of(server: EnvironmentServer) -> int:
    return int(server.address.rpartition(":")[2])


def task(index: int) -> Task:
    return Task(env="e", split="train", index=index, messages=())


async def test_it_scores_like_a_process_of_our_own(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id, hash_keys=("prompt",))
    assert [messages[0]["content"] for messages in await one.prompts("train")] == ["a", "b"]
    assert len(set(one.identities)) == 2
    results = await one.score(task(1), ["bb", "b"])
    assert [result.reward for result in results if isinstance(result, Score)] == [1.0, 0.0]
    await one.close()


async def test_two_orchestrators_are_served_apart(server: EnvironmentServer, env_id: str) -> None:
    both = [environment(server, env_id, args={"times": times}) for times in (1, 3)]
    for one in both:
        await one.prompts("train")
    scores = [await one.score(task(0), ["a", "aaa"]) for one in both]
    rewards = [[result.reward for result in results if isinstance(result, Score)] for results in scores]
    assert rewards == [[1.0, 0.0], [0.0, 1.0]]
    for one in both:
        await one.close()


async def test_frames_of_20_mib_pass_both_ways(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    prompts = await one.prompts("big")
    assert [messages[0]["content"] for messages in prompts] == ["x" * (1 << 20)] * 20
    big = Task(env="e", split="big", index=0, messages=())
    results = await one.score(big, ["x" * (20 << 20), "x" * ((20 << 20) - 1)])
    assert [result.reward for result in results if isinstance(result, Score)] == [1.0, 0.0]
    await one.close()


async def test_a_crash_and_a_hang_cost_one_rollout_each(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    await one.prompts("train")
    results = await one.score(task(0), ["crash", "aa"])
    assert isinstance(results[0], Failure)
    assert results[0].reason == "env_crashed"
    assert f"of the server at {server.address} ended its process with exit code 3" in results[0].message
    assert isinstance(results[1], Score)
    one._timeout_s = 0.5
    [late] = await one.score(task(0), ["hang"])
    assert isinstance(late, Failure)
    assert late.reason == "env_timeout"
    await one.close()


async def test_another_environment_than_the_servers_is_refused(server: EnvironmentServer) -> None:
    one = environment(server, "reverse-text", args={})
    with pytest.raises(EnvironmentFailed, match=r"env\.id is 'reverse-text', and the server at env\.address serves"):
        await one.prompts("train")
    await one.close()


async def test_a_server_that_is_not_there_is_named(env_id: str) -> None:
    async with serving(env_id) as gone:
        pass
    with pytest.raises(EnvironmentFailed, match=rf"env\.address = {gone.address}: .* start its environment server"):
        await environment(gone, env_id, start_timeout_s=0.3).prompts("train")


async def health(server: EnvironmentServer) -> Any:
    async with aiohttp.ClientSession() as client, client.get(f"{server.address}/health") as response:
        assert response.status == 200
        return await response.json()


async def test_health_says_what_is_served_and_to_how_many(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    assert await health(server) == {"env_id": env_id, "sessions": 0}
    await one.prompts("train")
    assert await health(server) == {"env_id": env_id, "sessions": 1}
    await one.close()


# --- who is there ---


@pytest.mark.parametrize(
    "says",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"],
    ids=["hangs up", "ssh", "http"],
)
async def test_something_else_that_listens_is_told_from_a_server(env_id: str, says: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(says)
        writer.close()

    async with listening(answer) as address:
        one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=5.0, address=address)
        with pytest.raises(EnvironmentFailed, match="what listens there is no environment server"):
            await one.prompts("train")


async def test_another_websocket_server_is_told_from_ours() -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        await response.receive()
        return response

    other = await asyncio.get_running_loop().create_server(web.Server(echo), "127.0.0.1", 0)
    async with other:
        with pytest.raises(NotOurServer, match=f"no environment server .*it does not speak {PROTOCOL}"):
            await RemoteProcess("http://{}:{}".format(*other.sockets[0].getsockname()), LIMIT_S).open()


async def test_an_answer_that_may_be_another_one_in_a_moment_is_waited_for() -> None:
    num_requests = 0

    async def be_away(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal num_requests
        num_requests += 1
        return web.Response(status=503)

    other = await asyncio.get_running_loop().create_server(web.Server(be_away), "127.0.0.1", 0)
    async with other:
        with pytest.raises(OSError, match="it answers with status 503"):
            await RemoteProcess("http://{}:{}".format(*other.sockets[0].getsockname()), 0.4).open()
    assert num_requests > 1


async def test_without_the_servers_key_nobody_is_served(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "orchestrator.workers.server", env_id, "--port", "0"]
    secret = {KEY_VAR: "the key of the server, long enough"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | secret)  # noqa: ASYNC220
    with process:
        assert process.stderr is not None
        found = re.search(r"at (http://127\.0\.0\.1:\d+)", process.stderr.readline())
        assert found is not None
        one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=20.0, address=found[1])
        for other_key in (None, "another key, long enough as well"):
            if other_key is not None:
                monkeypatch.setenv(KEY_VAR, other_key)
            with pytest.raises(EnvironmentFailed, match=f"its key is another one; set {KEY_VAR}"):
                await one.prompts("train")
        monkeypatch.setenv(KEY_VAR, secret[KEY_VAR])
        assert len(await one.prompts("train")) == 2
        [result] = await one.score(task(0), ["key"])
        assert isinstance(result, Score)
        assert result.reward == 0.0  # code of the environment does not get it
        process.terminate()
        assert await asyncio.to_thread(process.wait, 20) == 143
        await one.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 426),
        ({"Connection": "Upgrade", "Upgrade": "websocket"}, 426),
        ({"Sec-WebSocket-Protocol": "grpo-env.0"}, 426),
        ({"Sec-WebSocket-Protocol": PROTOCOL, "Origin": "https://any.example"}, 403),
        ({"Sec-WebSocket-Protocol": PROTOCOL, "Authorization": "Bearer of no key that there is"}, 401),
    ],
)
async def test_what_is_no_orchestrator_of_ours_gets_no_process(
    server: EnvironmentServer, headers: dict[str, str], status: int
) -> None:
    handshake = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
    }
    complete = handshake | headers if "Sec-WebSocket-Protocol" in headers else headers
    async with aiohttp.ClientSession() as client, client.get(session_url(server.address), headers=complete) as response:
        assert response.status == status
    assert not server._sessions


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl, which makes the certificate")
async def test_a_proxy_with_tls_is_reached_where_its_certificate_is_trusted(
    server: EnvironmentServer, env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)  # noqa: ASYNC221
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    relay = Relay(server)
    async with listening(relay.serve, context) as address:
        secure = address.replace("http:", "https:")
        with pytest.raises(EnvironmentFailed, match=r"self-signed certificate.*; .* set SSL_CERT_FILE"):
            await environment(server, env_id, address=secure).prompts("train")
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        one = environment(server, env_id, address=secure)
        assert len(await one.prompts("train")) == 2
        await one.close()
        relay.close()
    plain = server.address.replace("http:", "https:")
    with pytest.raises(EnvironmentFailed, match="is there no TLS, say http://"):
        await environment(server, env_id, address=plain, start_timeout_s=0.2).prompts("train")


# --- what is stuck, and what hangs up ---


@contextlib.asynccontextmanager
async def ends(*pids: int) -> AsyncIterator[None]:
    """These processes end soon after what is in the block."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for descriptor in descriptors:
            ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], LIMIT_S)
            assert ended
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


async def pids(one: EnvironmentProcess) -> list[int]:
    """Of an environment's process and of one that it has started."""
    results = await one.score(task(0), ["pid", "helper"])
    return [int(result.reward) for result in results if isinstance(result, Score)]


async def late(one: EnvironmentProcess, *completions: str) -> bool:
    one._timeout_s = 0.5
    async with asyncio.timeout(LIMIT_S):
        first, *_ = await one.score(task(0), completions)
    one._timeout_s = 20.0
    return isinstance(first, Failure) and first.reason == "env_timeout"


async def test_a_reward_that_lets_no_other_thread_run_ends_with_its_deadline(
    server: EnvironmentServer, env_id: str
) -> None:
    one = environment(server, env_id)
    async with ends(*await pids(one)):
        assert await late(one, "hold")
    await one.close()


async def test_a_process_that_reads_nothing_can_be_given_up(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    async with ends(*await pids(one)):
        assert await late(one, "hold", "x" * (32 << 20), "x")
    await one.close()


async def test_a_process_that_crashes_takes_what_it_started_with_it(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    async with ends(*await pids(one)):
        [crash] = await one.score(task(0), ["crash"])
        assert isinstance(crash, Failure)
        assert crash.reason == "env_crashed"
    await one.close()


async def test_a_server_that_is_closed_ends_its_processes_and_all_they_started(env_id: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(env_id))
        one = environment(server, env_id)
        async with ends(*await pids(one)):
            await stack.aclose()
    await one.close()


async def test_an_orchestrator_or_a_server_whose_machine_is_gone_is_found_out_within_a_minute(
    server: EnvironmentServer, env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HEARTBEAT_S * 1.5 + 2 < 60  # aiohttp rounds each of both times up to a full second
    for module in (links_module, server_module):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.4)
    relay = Relay(server)
    async with listening(relay.serve) as address:
        one = environment(server, env_id, address=address)
        async with ends(*await pids(one)):
            await asyncio.sleep(1.5)
            assert [type(result) for result in await one.score(task(0), ["a"])] == [Score]  # silence alone is no end
            relay.is_dead = True
        async with asyncio.timeout(LIMIT_S):
            [lost] = await one.score(task(0), ["a"])
        assert isinstance(lost, Failure)
        assert lost.reason == "env_crashed"
        assert "has lost its connection" in lost.message
        await one.close()
        relay.close()


async def test_what_a_process_does_not_read_fills_no_memory_of_the_server(
    server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_child(monkeypatch)
    link = RemoteProcess(server.address)
    await link.open()
    link.send(framed(b"stop"))
    link.send(framed(bytes(4 * WINDOW_BYTES)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.drain(), 0.5)
    assert link._session is not None
    assert link._session.tunnel._num_outgoing > 2 * WINDOW_BYTES
    await link.close()


async def test_a_peer_that_sends_more_than_there_is_room_for_is_left(
    server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_child(monkeypatch)
    link = RemoteProcess(server.address)
    await link.open()
    assert link._session is not None
    link._session.tunnel._room = 1 << 40
    link.send(framed(b"stop"))
    link.send(framed(bytes(4 * WINDOW_BYTES)))
    with pytest.raises(EOFError):
        await asyncio.wait_for(link.receive(), LIMIT_S)
    assert "has lost its connection" in await link.ended()
    await link.close()


# --- links ---


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def fake_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes say whatever they are told, and are running the code of rollout 7."""
    command = [sys.executable, "-S", "-c", ECHO]
    monkeypatch.setattr(spawned_module, "child_command", lambda fd, env_id: [*command, str(fd)])


@pytest.fixture(params=["own", "remote"])
def link(request: pytest.FixtureRequest, server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch) -> Link:
    fake_child(monkeypatch)
    return OwnProcess() if request.param == "own" else RemoteProcess(server.address)


async def test_frames_come_back_whole_and_in_order(link: Link) -> None:
    await link.open()
    bodies = [b"", b"a", bytes(range(256)) * (1 << 16), b"b" * 70_000]
    for body in bodies:
        link.send(framed(body))
    assert [await asyncio.wait_for(link.receive(), LIMIT_S) for _ in bodies] == bodies
    await asyncio.wait_for(link.drain(), LIMIT_S)
    await link.close()
    with pytest.raises(EOFError):
        await link.receive()


async def test_a_receive_that_is_cancelled_loses_nothing(link: Link) -> None:
    await link.open()
    for part in (HEADER.pack(6), b"ab", b"cd"):
        link.send(part)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.receive(), 0.1)
    link.send(b"ef")
    assert await asyncio.wait_for(link.receive(), LIMIT_S) == b"abcdef"
    await link.close()


@pytest.mark.parametrize(
    ("says", "how"),
    [
        (b"crash", "ended its process with exit code 3"),
        (b"leave", "ended its process with exit code 5"),
        (b"abort", "had its process ended by SIGABRT"),
    ],
)
async def test_what_was_said_before_a_process_ended_arrives_and_then_how_it_ended(
    link: Link, says: bytes, how: str
) -> None:
    await link.open()
    link.send(framed(b"x" * 3_000_000))
    assert await asyncio.wait_for(link.receive(), LIMIT_S) == b"x" * 3_000_000
    link.send(framed(says))
    with pytest.raises(EOFError):
        await asyncio.wait_for(link.receive(), LIMIT_S)
    assert how in await link.ended()
    assert await link.running() == 7
    assert not link.lost()
    await link.close()
    assert await link.running() is None


async def test_a_process_that_is_killed_has_still_said_whose_code_it_ran(link: Link) -> None:
    await link.open()
    link.send(framed(b"x"))
    assert await asyncio.wait_for(link.receive(), LIMIT_S) == b"x"
    link.send(framed(b"y" * (6 * WINDOW_BYTES)))  # which nobody here reads
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.drain(), 1.0)
    await asyncio.wait_for(link.kill(), REST_S - 1)
    assert await link.running() == 7
    assert "had its process ended by SIGKILL" in await link.ended()
    await link.open()
    link.send(framed(b"y"))
    assert await asyncio.wait_for(link.receive(), LIMIT_S) == b"y"
    await link.close()


async def test_a_server_that_does_not_say_that_a_killed_process_has_ended_is_hung_up(
    server: EnvironmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_child(monkeypatch)
    monkeypatch.setattr(links_module, "KILL_TIMEOUT_S", 0.2)
    relay = Relay(server)
    async with listening(relay.serve) as address:
        link = RemoteProcess(address)
        await link.open()
        relay.is_dead = True
        await asyncio.wait_for(link.kill(), LIMIT_S)
        with pytest.raises(EOFError):
            await asyncio.wait_for(link.receive(), LIMIT_S)
        assert await link.running() is None
        assert link.lost()
        assert "has lost its connection" in await link.ended()
        await link.close()
        relay.close()


async def test_a_link_that_is_not_open_knows_of_no_process(link: Link) -> None:
    link.send(b"dropped")
    await link.drain()
    await link.kill()
    assert await link.running() is None
    assert await link.ended() == "has been ended"
    await link.close()


# --- episodes ---

TALK = """
import os
from grpo import Environment, MultiTurnEpisode, Rubric

def reward(state):
    return float(state.turn)

class Talk(MultiTurnEpisode, Environment):
    rubric = Rubric([reward])
    def dataset(self, split):
        return [{"prompt": "say something"}]
    async def respond(self, state, arena):
        if state.last_text == "crash":
            os._exit(3)
        return None if state.last_text == "bye" else "go on"
"""


def says(*texts: str, once: asyncio.Event | None = None) -> Callable[[], Answerer]:
    """A model's answers, from the second one on `once` this is set."""

    def begin() -> Answerer:
        left = list(texts)

        async def answer(call: Call) -> Sampled:
            if len(left) < len(texts) and once is not None:
                await once.wait()
            return Sampled(call=call.call, text=left.pop(0), finish_reason="stop", num_tokens=1)

        return answer

    return begin


async def test_of_many_episodes_in_a_process_the_one_that_crashes_it_is_blamed_and_the_others_begin_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    env_id = f"{tmp_path / 'talk.py'}:Talk"
    example = Task(env="e", split="train", index=0, messages=({"role": "user", "content": "say something"},))
    async with serving(env_id) as server:
        make = partial(EpisodeProcess, label="e", env_id=env_id, args={}, timeout_s=20.0, address=server.address)
        host = EpisodeHost(make, Loaded())
        crashed = asyncio.Event()
        others = [
            asyncio.create_task(host.play(example, seed=0, begin=says("hi", "bye", once=crashed))) for _ in range(3)
        ]
        async with asyncio.timeout(LIMIT_S):
            crash = await host.play(example, seed=0, begin=says("hi", "crash"))
            crashed.set()
            outcomes = await asyncio.gather(*others)
        assert isinstance(crash, Failure)
        assert crash.reason == "env_crashed"
        assert f"of the server at {server.address} ended its process with exit code 3" in crash.message
        assert [outcome.rewards for outcome in outcomes if isinstance(outcome, Played)] == [{"policy": 2.0}] * 3
        assert host.num_restarted == 3
        await host.close()


# --- a server that is away, or busy ---


async def test_a_server_that_is_away_for_a_while_costs_one_rollout(
    env_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = asyncio.Event()
    warnings: list[str] = []

    def warn(message: str, *_: object) -> None:
        warnings.append(message)
        warned.set()

    monkeypatch.setattr(links_module.log, "warning", warn)
    async with serving(env_id) as server:
        one = environment(server, env_id)
        await one.prompts("train")
    scoring = asyncio.create_task(one.score(task(0), ["aa", "aa"]))
    await asyncio.wait_for(warned.wait(), LIMIT_S)
    async with serving(env_id, port_of(server)):
        before, after = await scoring
        await one.close()
    assert isinstance(before, Failure)
    assert before.reason == "env_crashed"
    assert f"of the server at {server.address} has ended with its server" in before.message
    assert isinstance(after, Score)
    assert warnings == ["waiting for the environment server, %g s at most: %s"]


async def test_a_process_that_the_server_could_not_start_is_asked_for_again(
    server: EnvironmentServer, env_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commands = [["/bin/false"], ["/there/is/no/such/program"]]
    child_command = spawned_module.child_command
    monkeypatch.setattr(process_module, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(
        spawned_module, "child_command", lambda fd, env_id: commands.pop() if commands else child_command(fd, env_id)
    )
    one = environment(server, env_id)
    assert len(await one.prompts("train")) == 2
    assert "could not be served: [Errno 2]" in caplog.text
    monkeypatch.setattr(spawned_module, "child_command", lambda fd, env_id: ["/bin/false"])
    with pytest.raises(EnvironmentFailed, match=r"did not start: .* ended its process with exit code 1"):
        await environment(server, env_id, start_timeout_s=0.3).prompts("train")
    await one.close()


async def test_a_connection_that_is_reset_is_tried_again_and_one_that_is_hung_up_is_not() -> None:
    num_connections = 0

    async def reset_then_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if num_connections == 1:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        writer.close()

    async with listening(reset_then_hang_up) as address:
        with pytest.raises(NotOurServer, match="what listens there is no environment server"):
            await RemoteProcess(address, LIMIT_S).open()
    assert num_connections == 2


async def test_connections_that_are_no_sessions_yet_are_reset_where_a_server_is_ended(env_id: str) -> None:
    loop = asyncio.get_running_loop()
    async with serving(env_id) as server:
        early = connected(server)
        await loop.sock_sendall(early, b"GET /v1/session HTTP/1.1\r\n")
        assert await health(server) == {"env_id": env_id, "sessions": 0}  # by then `early` has been accepted, too
    with early, pytest.raises(ConnectionResetError):
        await loop.sock_recv(early, 1)


async def test_a_silent_listener_is_left_without_an_open_connection() -> None:
    left: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not left.done():
            left.set_result(await reader.read())
        writer.close()

    async with listening(keep_silent) as address:
        with pytest.raises(OSError, match=rf"no answer from env\.address = {address} within 0\.3 s"):
            await RemoteProcess(address, start_timeout_s=0.3).open()
        assert (await asyncio.wait_for(left, LIMIT_S)).startswith(b"GET /v1/session HTTP/1.1")


async def test_a_server_that_could_not_accept_a_connection_goes_on(
    env_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENOBUFS, "No buffer space available")]
    accept = socket.socket.accept

    def fail_at_first(listener: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(server_module, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    async with serving(env_id) as server:
        one = environment(server, env_id, start_timeout_s=LIMIT_S)
        assert len(await one.prompts("train")) == 2
        await one.close()
    assert "cannot take a connection: [Errno 24] Too many open files" in caplog.text


@pytest.mark.parametrize("begins", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["slow", "kept"])
async def test_a_greeting_has_one_deadline_however_slowly_it_comes(
    env_id: str, monkeypatch: pytest.MonkeyPatch, begins: bytes
) -> None:
    monkeypatch.setattr(server_module, "GREETING_S", 0.3)
    loop = asyncio.get_running_loop()
    async with serving(env_id) as server, asyncio.timeout(LIMIT_S):
        with connected(server) as slow, contextlib.suppress(ConnectionError):
            await loop.sock_sendall(slow, begins)
            reading = asyncio.create_task(drain(slow))
            while not reading.done():
                await loop.sock_sendall(slow, b"GET /"[:1])
                await asyncio.sleep(0.05)
            await reading
        assert not server._connections.connections


async def drain(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
        pass


async def test_only_so_many_connections_are_waited_for_to_greet(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GREETING_S", LIMIT_S)
    monkeypatch.setattr(server_module, "MAX_GREETING", 2)
    loop = asyncio.get_running_loop()
    async with serving(env_id) as server:
        with connected(server) as first, connected(server), connected(server) as third:
            await loop.sock_sendall(third, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.sock_recv(third, 1), 0.2)
            first.close()
            assert await asyncio.wait_for(loop.sock_recv(third, 1), LIMIT_S) == b"H"


def connected(server: EnvironmentServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port_of(server)), LIMIT_S)
    connection.setblocking(False)
    return connection


async def test_sessions_leave_their_places_to_others(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_GREETING", 1)
    fake_child(monkeypatch)
    async with serving(env_id) as server:
        links = [RemoteProcess(server.address, LIMIT_S) for _ in range(3)]
        for link in links:
            await link.open()
        for link in links:
            await link.close()


async def test_an_address_that_others_reach_needs_a_key(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "short")
    with pytest.raises(ValueError, match=f"can be reached from other machines, and {KEY_VAR} has 5 characters"):
        EnvironmentServer(env_id, "0.0.0.0", 0)


@pytest.mark.parametrize(
    "address", ["here", "host:7", "ftp://host:7", "http://", "http://host:70000", "http://a@host:7", "http://host:7/a"]
)
def test_addresses_are_those_of_http_servers(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://host:port|out of range"):
        session_url(address)


def test_an_address_of_the_settings_is_a_url() -> None:
    with pytest.raises(ValueError, match="address"):
        settings_for(Path("x"), FakeServer(), env=[{"id": "reverse-text", "address": "host:7000"}])


def test_sessions_are_below_the_address() -> None:
    assert session_url("https://envs.example/") == "https://envs.example/v1/session"
    assert session_url("http://[::1]:7000") == "http://[::1]:7000/v1/session"
