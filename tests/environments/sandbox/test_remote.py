"""The client of an external sandbox service, against a small one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpo.environments.sandbox import remote
from grpo.environments.sandbox.records import Limits, SandboxError
from grpo.environments.sandbox.remote import RemoteSandbox
from grpo.transport.ports import free_port


def finished(stdout: str = "", code: int = 0, **more: Any) -> dict[str, Any]:
    run = {"status": "Finished", "return_code": code, "stdout": stdout, "stderr": "", **more}
    return {"status": "Success" if code == 0 else "Failed", "compile_result": None, "run_result": run, "files": {}}


class Service:
    """Answers from a list, the last again and again, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = [finished()]
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    async def run_code(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text="what went wrong", headers={"Location": "/elsewhere"})
        return web.json_response(answer)


@pytest_asyncio.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    made, application = Service(), web.Application()
    application.router.add_post("/run_code", made.run_code)
    async with TestServer(application) as server:
        made.url = str(server.make_url("/"))
        yield made


async def test_a_program_is_sent_with_its_input_and_limits(service: Service) -> None:
    service.answers = [finished("42\n")]
    limits = Limits(wall_s=3.0, memory_bytes=256 << 20)
    result = await RemoteSandbox(service.url).run("print(42)", stdin=b"in", limits=limits)
    [request] = service.requests
    assert (request["code"], request["language"], request["stdin"]) == ("print(42)", "python", "in")
    assert (request["run_timeout"], request["memory_limit_MB"]) == (3.0, 256)
    assert (result.exit_code, result.limit, result.stdout) == (0, None, b"42\n")


@pytest.mark.parametrize(
    ("answer", "exit_code", "limit"),
    [
        (finished(code=3), 3, None),
        (finished(code=-9), 137, None),
        (finished(status="TimeLimitExceeded", return_code=None), 137, "wall"),
        (finished("x" * 11), 137, "output"),
        ({"run_result": None, "compile_result": finished(code=1)["run_result"]}, 1, None),
    ],
)
async def test_how_a_program_ended_is_understood(
    service: Service, answer: dict[str, Any], exit_code: int, limit: str
) -> None:
    service.answers = [answer]
    result = await RemoteSandbox(service.url).run("pass", limits=Limits(output_bytes=10))
    assert (result.exit_code, result.limit) == (exit_code, limit)
    assert len(result.stdout) <= 10


async def test_failures_of_the_service_are_tried_again(service: Service) -> None:
    service.answers = [503, {"status": "SandboxError"}, finished(status="Error"), finished("yes")]
    assert (await RemoteSandbox(service.url).run("pass")).stdout == b"yes"
    assert len(service.requests) == 4
    # The last failure is told; refusals are not asked again, and redirects not followed.
    for answer, num_requests in ((503, 5), (422, 1), (307, 1)):
        service.answers, service.requests = [answer], []
        with pytest.raises(SandboxError, match=str(answer)):
            await RemoteSandbox(service.url).run("pass")
        assert len(service.requests) == num_requests


async def test_a_service_that_is_not_there_is_named_and_what_cannot_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SandboxError, match=address):
        await RemoteSandbox(address).run("pass")
    with pytest.raises(ValueError, match="utf-8"):
        await RemoteSandbox(address).run("pass", stdin=b"\xff")
    with pytest.raises(ValueError, match="http"):
        RemoteSandbox("localhost:8080")
