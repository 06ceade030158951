"""Environments that a server elsewhere has."""

import asyncio
import contextlib
import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.episodes.types import Failure, Score, Task
from orchestrator.workers import links as links_module
from orchestrator.workers import process as process_module
from orchestrator.workers import server as server_module
from orchestrator.workers.failures import EnvironmentFailed
from orchestrator.workers.links import KEY_VAR, NONCE_BYTES, RESET_AT_CLOSE, RemoteProcess, split_address
from orchestrator.workers.process import EnvironmentProcess
from orchestrator.workers.server import EnvironmentServer
from tests.orchestrator.fakes import FakeServer, settings_for

LIMIT_S = 30.0
OWN = """
import os, re, subprocess, time
from orchestrator.envs import Environment, Rubric

helpers = []

def reward(completion, example):
    if completion == "crash":
        os._exit(3)
    if completion == "hang":
        time.sleep(60)
    if completion == "hold":
        re.match("(a+)+$", "a" * 99 + "b")  # holds the interpreter's lock for longer than anybody waits
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
        return [{"prompt": word, "times": self.times} for word in ("a", "b")]
"""


@pytest.fixture
def env_id(tmp_path: Path) -> str:
    (tmp_path / "repeat.py").write_text(OWN)
    return f"{tmp_path / 'repeat.py'}:Repeat"


@pytest.fixture
def server(env_id: str) -> Iterator[EnvironmentServer]:
    with serving(env_id) as server:
        yield server


@contextlib.contextmanager
def serving(env_id: str, address: str = "127.0.0.1:0") -> Iterator[EnvironmentServer]:
    server = EnvironmentServer(env_id, address)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def environment(server: EnvironmentServer, env_id: str, **changes: Any) -> EnvironmentProcess:
    given: dict[str, Any] = {"label": "e", "env_id": env_id, "args": {"times": 2}, "timeout_s": 20.0}
    return EnvironmentProcess(**given | {"address": server.address} | changes)


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


async def test_a_crash_and_a_hang_cost_one_rollout_each(server: EnvironmentServer, env_id: str) -> None:
    one = environment(server, env_id)
    await one.prompts("train")
    results = await one.score(task(0), ["crash", "aa"])
    assert isinstance(results[0], Failure)
    assert results[0].reason == "env_crashed"
    assert f"of the server at {server.address} ended its process" in results[0].message
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
    gone = EnvironmentServer(env_id, "127.0.0.1:0")
    gone.close()
    with pytest.raises(EnvironmentFailed, match=rf"env\.address = {gone.address}: .* start its environment server"):
        await environment(gone, env_id, start_timeout_s=0.3).prompts("train")


async def test_something_else_that_listens_is_told_from_a_server(env_id: str) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(NONCE_BYTES)
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = "{}:{}".format(*other.sockets[0].getsockname())
    one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=5.0, address=address)
    with pytest.raises(EnvironmentFailed, match="what listens there is no environment server"):
        await one.prompts("train")
    other.close()
    await other.wait_closed()


async def test_without_the_servers_key_nobody_is_served(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "orchestrator.workers.server", env_id, "--listen", "127.0.0.1:0"]
    secret = {KEY_VAR: "the key of the server, long enough"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | secret)  # noqa: ASYNC220
    with process:
        assert process.stderr is not None
        found = re.search(r"at (127\.0\.0\.1:\d+)", process.stderr.readline())
        assert found is not None
        one = EnvironmentProcess(label="e", env_id=env_id, args={}, timeout_s=20.0, address=found[1])
        with pytest.raises(EnvironmentFailed, match=f"its key is another one; set {KEY_VAR}"):
            await one.prompts("train")
        monkeypatch.setenv(KEY_VAR, secret[KEY_VAR])
        assert len(await one.prompts("train")) == 2
        await one.close()
        process.terminate()
        assert process.wait(20) == 143


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
    with serving(env_id) as server:
        one = environment(server, env_id)
        async with ends(*await pids(one)):
            server.close()
    await one.close()


async def test_an_orchestrator_whose_machine_is_gone_is_found_out_within_a_minute(
    server: EnvironmentServer, env_id: str
) -> None:
    one = environment(server, env_id)
    await one.prompts("train")
    [connection] = server._connections.values()
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle_s, interval_s, num_probes = (
        connection.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + interval_s * num_probes <= 60
    await one.close()


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
    with serving(env_id) as server:
        one = environment(server, env_id)
        await one.prompts("train")
    scoring = asyncio.create_task(one.score(task(0), ["aa", "aa"]))
    await asyncio.wait_for(warned.wait(), LIMIT_S)
    with serving(env_id, server.address):
        before, after = await scoring
        await one.close()
    assert isinstance(before, Failure)
    assert before.reason == "env_crashed"
    assert isinstance(after, Score)
    assert warnings == ["waiting for the environment server, %g s at most: %s"]


async def test_a_process_that_the_server_could_not_start_is_asked_for_again(
    server: EnvironmentServer, env_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commands = [["/bin/false"], ["/there/is/no/such/program"]]
    child_command = server_module.child_command
    monkeypatch.setattr(process_module, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(server_module, "child_command", lambda fd: commands.pop() if commands else child_command(fd))
    one = environment(server, env_id)
    assert len(await one.prompts("train")) == 2
    assert "could not be served: [Errno 2]" in caplog.text
    monkeypatch.setattr(server_module, "child_command", lambda fd: ["/bin/false"])
    with pytest.raises(EnvironmentFailed, match=r"did not start: .* ended its process or the connection"):
        await environment(server, env_id, start_timeout_s=0.3).prompts("train")
    await one.close()


async def test_a_connection_that_is_reset_is_tried_again_and_one_that_is_hung_up_is_not() -> None:
    num_connections = 0

    async def reset_then_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readexactly(NONCE_BYTES)
        if num_connections == 1:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        writer.close()

    other = await asyncio.start_server(reset_then_hang_up, "127.0.0.1", 0)
    address = "{}:{}".format(*other.sockets[0].getsockname())
    with pytest.raises(OSError, match="what listens there is no environment server"):
        await RemoteProcess(address, LIMIT_S).open()
    assert num_connections == 2
    other.close()
    await other.wait_closed()


async def test_a_silent_listener_is_left_without_an_open_connection() -> None:
    left: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not left.done():
            left.set_result(await reader.read())
        writer.close()

    other = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    address = "{}:{}".format(*other.sockets[0].getsockname())
    with pytest.raises(OSError, match=rf"no answer from env\.address = {address} within 0\.3 s"):
        await RemoteProcess(address, start_timeout_s=0.3).open()
    assert len(await asyncio.wait_for(left, LIMIT_S)) == NONCE_BYTES
    other.close()
    await other.wait_closed()


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
    with serving(env_id) as server:
        one = environment(server, env_id, start_timeout_s=LIMIT_S)
        assert len(await one.prompts("train")) == 2
        await one.close()
    assert "cannot take a connection: [Errno 24] Too many open files" in caplog.text


def test_a_greeting_has_one_deadline_however_slowly_it_comes(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GREETING_S", 0.3)
    with serving(env_id) as server, connected(server) as slow:
        slow.settimeout(0.05)
        for _ in range(NONCE_BYTES - 1):
            try:
                slow.send(b"x")
                assert slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
        pytest.fail("the server still waits")


def test_only_so_many_connections_are_waited_for_to_greet(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GREETING_S", LIMIT_S)
    monkeypatch.setattr(server_module, "MAX_GREETING", 2)
    with serving(env_id) as server, connected(server) as first, connected(server), connected(server) as third:
        third.sendall(bytes(NONCE_BYTES))
        third.settimeout(0.2)
        with pytest.raises(TimeoutError):
            third.recv(1)
        first.close()
        third.settimeout(LIMIT_S)
        assert len(third.recv(1)) == 1


def connected(server: EnvironmentServer) -> socket.socket:
    return socket.create_connection(split_address(server.address), LIMIT_S)


def test_an_address_that_others_reach_needs_a_key(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VAR, "short")
    with pytest.raises(ValueError, match=f"can be reached from other machines, and {KEY_VAR} has 5 characters"):
        EnvironmentServer(env_id, "0.0.0.0:0")


@pytest.mark.parametrize("address", ["here", ":7", "host:", "host:x", "host:70000"])
def test_addresses_have_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
    with pytest.raises(ValueError, match="address"):
        settings_for(Path("x"), FakeServer(), env=[{"id": "reverse-text", "address": f"{address}x"}])
