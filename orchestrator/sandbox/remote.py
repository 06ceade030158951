"""Programs run by an external sandbox service with SandboxFusion's interface: `POST /run_code`."""

import asyncio
import base64
import random
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from orchestrator.sandbox.records import (
    MIB,
    Input,
    LimitName,
    Limits,
    Program,
    Result,
    SandboxUnreachable,
    checked_files,
)

_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_ROOM_S = 30.0
"""Beyond a program's wall time, how long the service may queue it."""


class _Failed(Exception):
    """One request that may be tried again."""


class RemoteSandbox:
    """Sends programs to a service, a bounded number at once, and again where it fails.

    What the service is told is the wall time and the memory; the other limits are its own. Commands are not sent:
    `language` says how the service runs a program's text.

    Example::

        async with RemoteSandbox("http://127.0.0.1:8080") as sandbox:
            result = await sandbox.run("print(int(input()) + 1)", stdin=b"41")
    """

    def __init__(
        self,
        address: str,
        *,
        limits: Limits | None = None,
        parallel: int = 32,
        retries: int = 4,
        first_pause_s: float = 0.5,
        language: str = "python",
    ) -> None:
        """`retries` further attempts follow a failed one, after pauses that double from `first_pause_s` on."""
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"the sandbox service's address is {address!r}: expected http://HOST:PORT")
        if parallel < 1 or retries < 0 or first_pause_s < 0:
            raise ValueError(
                f"parallel={parallel}, retries={retries}, first_pause_s={first_pause_s}: expected at least 1, 0 and 0"
            )
        self.address = address.rstrip("/")
        self.limits = limits or Limits()
        self.retries, self.first_pause_s, self.language = retries, first_pause_s, language
        self.num_retried = 0
        """Attempts that failed and were followed by another."""
        self._slots = asyncio.Semaphore(parallel)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(
        self,
        program: Program,
        *,
        stdin: Input = b"",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Result:
        """Runs one program on the service. Raises `ValueError` for what cannot be sent, and `SandboxUnreachable` when
        the last attempt has failed."""
        limits = limits or self.limits
        if not isinstance(program, str):
            raise ValueError(f"the service at {self.address} runs the text of programs, not commands such as {program}")
        contents = checked_files(files)
        async with self._slots:
            request = self._request(program, stdin() if callable(stdin) else stdin, contents, limits)
            for attempt in range(self.retries + 1):
                try:
                    return _result(await self._ask(request, limits.wall_s + _ROOM_S), limits)
                except _Failed as failure:
                    if attempt == self.retries:
                        raise SandboxUnreachable(
                            f"the sandbox service at {self.address} failed {attempt + 1} times, last: {failure}"
                        ) from failure
                self.num_retried += 1
                await asyncio.sleep(self.first_pause_s * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _request(self, program: str, stdin: bytes, files: dict[str, bytes], limits: Limits) -> dict[str, Any]:
        try:
            text = stdin.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the service takes standard input as UTF-8 text: {error}") from None
        return {
            "code": program,
            "language": self.language,
            "stdin": text,
            "run_timeout": limits.wall_s,
            "compile_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_bytes // MIB,
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": [],
        }

    async def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """One attempt. Raises `_Failed` where another may succeed, `SandboxUnreachable` where none would."""
        if self._session is None:
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.post(f"{self.address}/run_code", json=request, timeout=timeout) as response:
                if response.status in _TRY_AGAIN:
                    raise _Failed(f"HTTP {response.status}: {(await response.text())[:500]}")
                if response.status != 200:
                    said = (await response.text())[:500]
                    raise SandboxUnreachable(
                        f"the sandbox service at {self.address} refused the request with HTTP {response.status}: {said}"
                    )
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise _Failed(f"no answer within {deadline_s:.0f} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from None
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
            raise _Failed(f"it answered {str(answer)[:500]}")
        return answer


def _result(answer: Mapping[str, Any], limits: Limits) -> Result:
    """The run's result, or that of the compiler where there was no run."""
    run: Any = answer.get("run_result") or answer.get("compile_result")
    try:
        late = run["status"] == "TimeLimitExceeded"
        code, wall_s = run.get("return_code"), float(run.get("execution_time") or 0.0)
        stdout, stderr = ((run.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr"))
        if run["status"] not in ("Finished", "TimeLimitExceeded") or (not late and not isinstance(code, int)):
            raise ValueError(f"the status is {run['status']!r}, the return code {code!r}")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _Failed(f"its answer cannot be understood ({error}): {str(answer)[:500]}") from None
    limit: LimitName | None = "wall" if late else None
    if max(len(stdout), len(stderr)) > limits.output_bytes:
        limit = limit or "output"
    return Result(
        exit_code=code if not late and code >= 0 else None,
        signal=-code if not late and code < 0 else (9 if late else None),
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        stdout_bytes=len(stdout),
        stderr_bytes=len(stderr),
        limit=limit,
        wall_s=wall_s,
        cpu_s=0.0,
    )
