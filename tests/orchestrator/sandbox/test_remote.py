"""The client of an external sandbox service, against a small one."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrator.sandbox import Limits, RemoteSandbox, SandboxUnreachable

Answer = dict[str, Any] | int


def finished(stdout: str = "", code: int = 0, **more: Any) -> dict[str, Any]:
    run = {"status": "Finished", "execution_time": 0.25, "return_code": code, "stdout": stdout, "stderr": "", **more}
    status = "Success" if code == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": run, "files": {}}


class Service:
    """Answers from a list, the last again and again, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = [finished()]
        self.requests: list[dict[str, Any]] = []
        self.now = self.most = 0

    async def run_code(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text="what went wrong")
        return web.json_response(answer)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest_asyncio.fixture
async def connect(service: Service) -> AsyncIterator[Callable[..., RemoteSandbox]]:
    application = web.Application()
    application.router.add_post("/run_code", service.run_code)
    made: list[RemoteSandbox] = []
    async with TestServer(application) as server:

        def make(**more: Any) -> RemoteSandbox:
            made.append(RemoteSandbox(str(server.make_url("/")), first_pause_s=0.001, **more))
            return made[-1]

        yield make
        for sandbox in made:
            await sandbox.close()


Connect = Callable[..., RemoteSandbox]


async def test_a_program_is_sent_with_its_input_files_and_limits(service: Service, connect: Connect) -> None:
    service.answers = [finished("42\n")]
    limits = Limits(wall_s=3.0, memory_bytes=256 << 20)
    result = await connect().run("print(42)", stdin=b"in", files={"a/b": b"\xff"}, limits=limits)
    assert service.requests == [
        {
            "code": "print(42)",
            "language": "python",
            "stdin": "in",
            "run_timeout": 3.0,
            "compile_timeout": 3.0,
            "memory_limit_MB": 256,
            "files": {"a/b": base64.b64encode(b"\xff").decode()},
            "fetch_files": [],
        }
    ]
    assert (result.exit_code, result.signal, result.limit, result.stdout) == (0, None, None, b"42\n")
    assert result.wall_s == 0.25


@pytest.mark.parametrize(
    ("answer", "exit_code", "signal", "limit"),
    [
        (finished(code=3), 3, None, None),
        (finished(code=-9), None, 9, None),
        (finished(code=0, status="TimeLimitExceeded", return_code=None), None, 9, "wall"),
        (finished("x" * 11), 0, None, "output"),
    ],
)
async def test_how_a_program_ended_is_understood(
    service: Service, connect: Connect, answer: dict[str, Any], exit_code: int, signal: int, limit: str
) -> None:
    service.answers = [answer]
    result = await connect().run("pass", limits=Limits(output_bytes=10))
    assert (result.exit_code, result.signal, result.limit) == (exit_code, signal, limit)
    assert len(result.stdout) <= 10


async def test_a_program_that_was_not_compiled_has_the_compilers_result(service: Service, connect: Connect) -> None:
    compiled = {"status": "Finished", "return_code": 1, "execution_time": 0.1, "stdout": "", "stderr": "no"}
    service.answers = [{"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}]
    result = await connect(language="cpp").run("int main")
    assert (result.exit_code, result.stderr, service.requests[0]["language"]) == (1, b"no", "cpp")


async def test_failures_of_the_service_are_tried_again(service: Service, connect: Connect) -> None:
    broken: dict[str, Any] = {"status": "SandboxError", "message": "no room"}
    not_understood = finished(status="Error")
    service.answers = [503, broken, not_understood, finished("yes")]
    sandbox = connect()
    assert (await sandbox.run("pass")).stdout == b"yes"
    assert sandbox.num_retried == 3
    assert len(service.requests) == 4


async def test_the_last_failure_is_told(service: Service, connect: Connect) -> None:
    service.answers = [{"status": "SandboxError", "message": "no room"}]
    with pytest.raises(SandboxUnreachable, match=r"failed 3 times, last: it answered .*no room"):
        await connect(retries=2).run("pass")


async def test_a_refused_request_is_not_sent_again(service: Service, connect: Connect) -> None:
    service.answers = [422]
    with pytest.raises(SandboxUnreachable, match="HTTP 422: what went wrong"):
        await connect().run("pass")
    assert len(service.requests) == 1


async def test_no_more_requests_are_under_way_than_asked_for(service: Service, connect: Connect) -> None:
    sandbox = connect(parallel=2)
    await asyncio.gather(*(sandbox.run("pass") for _ in range(8)))
    assert service.most <= 2
    assert len(service.requests) == 8


async def test_a_service_that_is_not_there_is_named(unused_tcp_port: int) -> None:
    address = f"http://127.0.0.1:{unused_tcp_port}"
    async with RemoteSandbox(address, retries=1, first_pause_s=0.001) as sandbox:
        with pytest.raises(SandboxUnreachable, match=f"{address} failed 2 times"):
            await sandbox.run("pass")


async def test_what_cannot_be_sent_is_refused(connect: Connect) -> None:
    with pytest.raises(ValueError, match="not commands"):
        await connect().run(("ls",))
    with pytest.raises(ValueError, match="UTF-8"):
        await connect().run("pass", stdin=b"\xff")
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        RemoteSandbox("localhost:8080")
