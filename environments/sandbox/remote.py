"""Programs run by an external sandbox service with SandboxFusion's interface: `POST /run_code`."""

import asyncio
import contextlib
from typing import Any

from grpo.environments.sandbox.records import MIB, LimitName, Limits, Result, SandboxError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from grpo import waiting

ATTEMPTS, FIRST_PAUSE_S = 5, 0.5
"""Pauses double."""
QUEUE_S = 30.0
"""Seconds for which the service may queue a program, beyond its wall time."""


class _Passing(SandboxError):
    """A failure that another attempt may not have."""


class RemoteSandbox:
    """Sends programs to a service, a bounded number at once, and again where it fails. The service is told the wall
    time and the memory; the other limits are its own.

    Example: ``result = await RemoteSandbox("http://127.0.0.1:8080").run("print(int(input()) + 1)", stdin=b"41")``
    """

    def __init__(self, address: str, *, parallel: int = 32) -> None:
        if not address.startswith(("http://", "https://")) or parallel < 1:
            raise ValueError(f"{address!r} with parallel={parallel}: expected http://HOST:PORT and at least 1")
        self.address, self._slots = address.rstrip("/"), asyncio.Semaphore(parallel)

    async def run(self, program: str, *, stdin: bytes = b"", limits: Limits | None = None) -> Result:
        """Runs one program on the service. Raises `ValueError` for an input that is no UTF-8, and `SandboxError` when
        the last attempt has failed or the service refuses."""
        limits = limits or Limits()
        request = {
            "code": program,
            "language": "python",
            "stdin": stdin.decode(),
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_bytes // MIB,
        }
        stop, pause = stop_after_attempt(ATTEMPTS), wait_random_exponential(multiplier=FIRST_PAUSE_S)
        attempts = AsyncRetrying(retry=retry_if_exception_type(_Passing), stop=stop, wait=pause, reraise=True)
        async with contextlib.AsyncExitStack() as slot:
            with waiting():
                await slot.enter_async_context(self._slots)
            return await attempts(self._ask, request, limits)

    async def _ask(self, request: dict[str, Any], limits: Limits) -> Result:
        """Makes one attempt."""
        import httpx  # most workers never ask a service, and it is half of their start

        try:
            async with httpx.AsyncClient(
                verify=self.address.startswith("https"), timeout=limits.wall_s + QUEUE_S
            ) as client:
                response = await client.post(f"{self.address}/run_code", json=request)
        except httpx.HTTPError as error:
            raise _Passing(f"the sandbox service at {self.address}: {type(error).__name__}: {error}") from None
        said = f"the sandbox service at {self.address} said {response.status_code}: {response.text[:500]}"
        if response.status_code != 200:
            passing = response.status_code in (408, 425, 429) or response.status_code >= 500
            raise _Passing(said) if passing else SandboxError(said)
        try:
            return _result(response.json(), limits)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise _Passing(f"{said}, which cannot be understood: {error}") from None


def _result(answer: Any, limits: Limits) -> Result:
    """Returns the run's result, or that of the compiler where there was no run."""
    run = answer.get("run_result") or answer["compile_result"]
    limit: LimitName | None = {"Finished": None, "TimeLimitExceeded": "wall"}[run["status"]]
    stdout, stderr = ((run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
    if limit is None and max(len(stdout), len(stderr)) > limits.output_bytes:
        limit = "output"
    code, most = 137 if limit else int(run["return_code"]), limits.output_bytes
    return Result(exit_code=code if code >= 0 else 128 - code, stdout=stdout[:most], stderr=stderr[:most], limit=limit)
