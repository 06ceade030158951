"""Programs run by an external sandbox service with SandboxFusion's interface: `POST /run_code`."""

import asyncio
import contextlib
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from orchestrator.sandbox.local import LocalSandbox
from orchestrator.sandbox.records import MIB, Input, LimitName, Limits, Result, SandboxUnreachable

_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_ROOM_S = 30.0
"""Beyond a program's wall time, how long the service may queue it."""


class _Failed(Exception):
    """One request that may be tried again."""


class RemoteSandbox:
    """Sends programs to a service, a bounded number at once, and again where it fails.

    What the service is told is the wall time and the memory; the other limits are its own.

    Example::

        sandbox = RemoteSandbox("http://127.0.0.1:8080")
        result = await sandbox.run("print(int(input()) + 1)", stdin=b"41")
    """

    def __init__(self, address: str, *, parallel: int = 32, retries: int = 4, first_pause_s: float = 0.5) -> None:
        """`retries` further attempts follow a failed one, after pauses that double from `first_pause_s` on."""
        if not address.startswith(("http://", "https://")) or parallel < 1:
            raise ValueError(
                f"the sandbox service's address is {address!r} and parallel={parallel}: expected http://HOST:PORT and "
                "at least 1"
            )
        self.address = address.rstrip("/")
        self._attempts = AsyncRetrying(
            retry=retry_if_exception_type(_Failed),
            stop=stop_after_attempt(retries + 1),
            wait=wait_random_exponential(multiplier=first_pause_s),
            reraise=True,
        )
        self._slots = asyncio.Semaphore(parallel)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, program: str, *, stdin: Input = b"", limits: Limits | None = None) -> Result:
        """Runs one program on the service. Raises `ValueError` for an input that is no UTF-8, and `SandboxUnreachable`
        when the last attempt has failed or the service refuses."""
        limits = limits or Limits()
        async with contextlib.AsyncExitStack() as slot:
            with LocalSandbox.waiting():
                await slot.enter_async_context(self._slots)
            request = {
                "code": program,
                "language": "python",
                "stdin": (stdin() if callable(stdin) else stdin).decode(),
                "run_timeout": limits.wall_s,
                "compile_timeout": limits.wall_s,
                "memory_limit_MB": limits.memory_bytes // MIB,
                "files": {},
                "fetch_files": [],
            }
            try:
                return await self._attempts.copy()(self._ask, request, limits)
            except _Failed as failure:
                raise SandboxUnreachable(
                    f"the sandbox service at {self.address} failed again and again, last: {failure}"
                ) from failure

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, request: dict[str, Any], limits: Limits) -> Result:
        """Makes one attempt. Raises `_Failed` where another may succeed, `SandboxUnreachable` where none would."""
        self._session = self._session or aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=limits.wall_s + _ROOM_S)
        try:
            async with self._session.post(
                f"{self.address}/run_code", json=request, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    said = f"HTTP {response.status}: {(await response.text())[:500]}"
                    if response.status in _TRY_AGAIN:
                        raise _Failed(said)
                    raise SandboxUnreachable(f"the sandbox service at {self.address} refused the request with {said}")
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise _Failed(f"no answer within {timeout.total:.0f} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from None
        try:
            return _result(answer, limits)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise _Failed(f"its answer cannot be understood ({error}): {str(answer)[:500]}") from None


def _result(answer: Any, limits: Limits) -> Result:
    """Returns the run's result, or that of the compiler where there was no run."""
    run = answer.get("run_result") or answer["compile_result"]
    if run["status"] not in ("Finished", "TimeLimitExceeded"):
        raise ValueError(f"the status is {run['status']!r}")
    stdout, stderr = ((run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
    limit: LimitName | None = None
    if run["status"] == "TimeLimitExceeded":
        limit = "wall"
    elif max(len(stdout), len(stderr)) > limits.output_bytes:
        limit = "output"
    code = 137 if limit else int(run["return_code"])
    return Result(
        exit_code=code if code >= 0 else 128 - code,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        limit=limit,
        wall_s=float(run.get("execution_time") or 0.0),
    )
