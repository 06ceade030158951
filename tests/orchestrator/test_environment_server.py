"""Environments that a server elsewhere has."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq.asyncio
from grpo.orchestrator.workers import protocol
from grpo.orchestrator.workers.failures import EnvironmentFailed, EnvironmentKilled
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.orchestrator.workers.server import EnvironmentServer

from tests.orchestrator.fakes import until
from tests.orchestrator.test_workers import HOSTILE
from tests.orchestrator.worker_pools import Clock, pool_for, reason, rolled_out, says, scored, serving, task
from tests.support import runs, until_gone

KEY = "0123456789abcdef"


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    path = tmp_path / "environment.py"
    path.write_text(HOSTILE)
    return path


@pytest.fixture
def talk(env_file: Path) -> str:
    return f"{env_file}:Talk"


@pytest.fixture
def hostile(env_file: Path) -> str:
    return f"{env_file}:Hostile"


@contextlib.asynccontextmanager
async def greeting(address: str, greeting: bytes = protocol.ALIVE) -> AsyncIterator[zmq.asyncio.Socket]:
    """An orchestrator that has greeted the server."""
    async with asyncio.timeout(60):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as orchestrator:
            orchestrator.connect(address)
            await orchestrator.send(greeting)
            yield orchestrator


@contextlib.contextmanager
def program_of(env_id: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`grpo-env`, and its address."""
    command = [sys.executable, "-m", "grpo.orchestrator.workers.server", env_id, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        try:
            yield program, program.stderr.readline().split()[-1]
        finally:
            program.kill()


async def test_it_scores_and_rolls_out_like_workers_of_our_own_for_several_at_a_time(talk: str) -> None:
    async with (
        serving(talk) as server,
        pool_for(talk, address=server.address) as one,
        pool_for(talk, address=server.address) as two,
    ):
        outcomes = await asyncio.gather(*(rolled_out(pool, "on", "bye") for pool in (one, two)))
        assert [one.rewards for one in outcomes if isinstance(one, protocol.Outcome)] == [{"policy": 2.0}] * 2
        crashed, beside = await asyncio.gather(rolled_out(one, "exit"), rolled_out(two, "on", "bye"))
        assert (reason(crashed), reason(beside)) == ("env_crashed", "")


async def test_an_orchestrator_that_goes_while_its_worker_comes_up_leaves_the_server_to_others(
    talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.server.SILENCE_LIMIT_S", 1e6)
    async with serving(talk) as server:
        async with greeting(server.address) as orchestrator:
            assert await orchestrator.recv() == protocol.ALIVE
            await orchestrator.send(protocol.frame_of(protocol.encode(protocol.Cancel(job=1))))  # for the worker
            await orchestrator.send(protocol.LEFT)
            await until(lambda: not server._sessions)
        async with pool_for(talk, address=server.address) as pool:
            assert reason(await rolled_out(pool, "on", "bye")) == ""


WAITS = """
import pathlib, time
while not pathlib.Path(__file__).with_name("go").exists(): time.sleep(0.01)
"""


async def test_an_environment_that_is_long_to_import_holds_up_no_session(
    env_file: Path, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.session.ALIVE_INTERVAL_S", 0.05)
    env_file.write_text(WAITS + HOSTILE)  # noqa: ASYNC240
    async with serving(hostile) as server:
        pool = WorkerPool(label="e", env_id=hostile, args={}, timeout_s=60.0, address=server.address)
        loading = asyncio.create_task(pool.load())
        await until(lambda: server._sessions)
        [session] = server._sessions.values()
        for _ in range(2):  # the orchestrator says that it is there although its worker says nothing
            heard_s = session.heard_s
            await until(lambda heard_s=heard_s: session.heard_s > heard_s)
        env_file.with_name("go").touch()
        await loading
        assert reason(await scored(pool, "ok")) == ""
        await pool.close()


async def test_a_silent_orchestrator_hears_that_its_worker_was_ended(
    talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.server.SILENCE_LIMIT_S", 0.1)
    async with serving(talk) as server, greeting(server.address) as orchestrator:
        while not any(isinstance(one, protocol.Left) for one in protocol.decode_from_worker(await orchestrator.recv())):
            pass


async def test_only_its_own_environment_is_served_and_a_server_that_is_not_there_is_named(talk: str) -> None:
    async with serving(talk) as server:
        with pytest.raises(EnvironmentFailed, match=r"env\.id"):
            async with pool_for("another:Environment", address=server.address):
                pass
    with pytest.raises(EnvironmentFailed, match=server.address):
        async with pool_for("another:Environment", address=server.address, start_timeout_s=0.3):
            pass


async def test_without_the_servers_key_nobody_is_served_and_with_it_all_is_as_ever(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_ENV_KEY", KEY)
    async with serving(hostile) as server:
        async with pool_for(hostile, address=server.address) as pool:
            outcome = await scored(pool, "seen")
            assert isinstance(outcome, protocol.Outcome)
            assert outcome.accuracy in (0.0, 1.0)  # the key is hidden by the program, not by this test's process
        for key in ("another-key-of-16-characters", ""):
            monkeypatch.setenv("GRPO_ENV_KEY", key)
            with pytest.raises(EnvironmentFailed):
                async with pool_for(hostile, address=server.address, start_timeout_s=0.5):
                    pass
    monkeypatch.delenv("GRPO_ENV_KEY")
    with pytest.raises(ValueError, match="GRPO_ENV_KEY"):
        EnvironmentServer(hostile, "0.0.0.0", 0)


async def test_strangers_who_say_anything_cost_nobody_anything(hostile: str) -> None:
    async with serving(hostile) as server, pool_for(hostile, address=server.address) as pool:
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.linger = 0
        stranger.connect(server.address)
        for parts in ([b"\xc1"], [b"", b"x" * 1000], [b"\x00"] * 100):
            await stranger.send_multipart(parts)
        await asyncio.sleep(0.2)
        assert reason(await scored(pool, "ok")) == ""
        stranger.close()


async def test_a_server_that_was_killed_is_missed_long_before_its_rollouts_are_late(
    talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, went_on = Clock(), asyncio.Event()
    monkeypatch.setattr("grpo.orchestrator.workers.session.time", clock)
    with program_of(talk) as (program, address):
        async with pool_for(talk, address=address, timeout_s=500) as pool:
            answers = says("on", "bye", wait=went_on.wait)
            running = asyncio.create_task(pool.run(task(), seed=0, begin=lambda: answers))
            await until(lambda: pool.num_in_environment == 0)
            program.kill()
            program.wait()
            went_on.set()
            clock.ahead_s += 20
            async with serving(talk, int(address.rpartition(":")[2])), asyncio.timeout(60):
                assert reason(await running) == ""


async def test_the_program_ends_its_workers_and_all_they_started_and_hides_its_key(
    hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_ENV_KEY", KEY)
    monkeypatch.setenv("WANDB_API_KEY", "of-the-run")
    with program_of(hostile) as (program, address):
        async with pool_for(hostile, address=address) as pool:
            as_others_see_it = Path(f"/proc/{program.pid}/environ").read_bytes()  # noqa: ASYNC240
            assert not [key for key in (KEY, "of-the-run") if key.encode() in as_others_see_it]
            found = [await scored(pool, one) for one in ("seen", "pid", "escape")]
            seen, *pids = [int(one.accuracy) for one in found if isinstance(one, protocol.Outcome)]
            assert seen == 0
            assert all(map(runs, pids))
            program.send_signal(signal.SIGTERM)
            await until(lambda: program.poll() is not None)
    assert program.returncode == 143
    until_gone(pids)


@contextlib.asynccontextmanager
async def answering(frame: bytes, *, times: int = 1000) -> AsyncIterator[str]:
    """A server that answers the first messages with this frame; its address."""
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def answers() -> None:
        for _ in range(times):
            await socket.send_multipart([(await socket.recv_multipart())[0], frame])

    running = asyncio.create_task(answers())
    try:
        async with asyncio.timeout(60):
            yield f"tcp://127.0.0.1:{port}"
    finally:
        running.cancel()
        socket.close(linger=0)


OTHER_RELEASE = protocol.frame_of(protocol.encode(protocol.Alive(protocol=protocol.PROTOCOL + 1)))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\x91\x82\xa4type\xa5Alive\xa1x" + b"\x91" * 200_000, "cannot be understood"),
        (b"\xc1", "cannot be understood"),
        (OTHER_RELEASE, "release"),
    ],
    ids=["nested", "torn", "another release"],
)
async def test_a_server_that_says_what_nobody_understands_is_a_failed_environment(frame: bytes, message: str) -> None:
    async with answering(frame) as address:
        with pytest.raises(EnvironmentFailed, match=message):
            async with pool_for("any:Any", address=address):
                pass


async def test_an_orchestrator_of_another_release_is_told_so(talk: str) -> None:
    async with serving(talk) as server, greeting(server.address, OTHER_RELEASE) as orchestrator:
        [message] = protocol.decode_from_worker(await orchestrator.recv())
        assert isinstance(message, protocol.Left)
        assert "release" in message.how


async def test_a_server_has_so_many_workers_at_most(talk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.server.MAX_SESSIONS", 1)
    async with serving(talk) as server, pool_for(talk, address=server.address) as pool:
        with pytest.raises(EnvironmentFailed, match="1 workers already"):
            async with pool_for(talk, address=server.address):
                pass
        assert reason(await rolled_out(pool, "on", "bye")) == ""


async def test_a_server_that_is_lost_early_is_a_reason_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.orchestrator.workers.session.SILENCE_LIMIT_S", 0.2)
    async with answering(protocol.ALIVE, times=1) as address:
        with pytest.raises(EnvironmentKilled):
            async with pool_for("any:Any", address=address):
                pass


async def test_a_server_that_stays_away_is_a_reason_to_start_again(talk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("grpo.orchestrator.workers.session.time", clock)
    async with contextlib.AsyncExitStack() as while_served:
        server = await while_served.enter_async_context(serving(talk))
        async with pool_for(talk, address=server.address) as pool:
            await while_served.aclose()
            running = asyncio.create_task(pool.run(task(), seed=0, begin=lambda: says("on", "bye")))
            while not running.done():
                clock.ahead_s += 1
                await asyncio.sleep(0.01)
            with pytest.raises(EnvironmentKilled, match=server.address):
                await running
