"""What comes back over HTTP: bodies within bounds, and what else than 200 comes to."""

import aiohttp
import msgspec

from orchestrator.teachers.endpoints import knows_no_temperature
from orchestrator.teachers.scoring import FailureReason, TeacherRefused

BUSY = frozenset({408, 425, 429})
AWAY = frozenset({502, 503, 504})
"""What a proxy answers for a server that it does not reach, and a server that is starting or has lost its engine."""
BYTES_PER_TOKEN, BYTES_BESIDE = 1024, 1 << 20
"""What an answer may have; one that goes on beyond it is none."""
MAX_ECHO = 300
"""Characters of a server's error that ours repeats."""


class TryAgain(Exception):
    """A failure that may pass."""

    def __init__(self, reason: FailureReason, message: str, pause_s: float = 0.0) -> None:
        """`pause_s`: what the server asks for."""
        self.reason: FailureReason = reason
        self.pause_s = pause_s
        super().__init__(message)


def of_status(status: int, path: str, data: bytes, retry_after: str | None) -> Exception:
    """What an answer other than 200 comes to."""
    text = f"{path} answered {status}: {_message_of(data)}"
    if status in BUSY:
        return TryAgain("busy", text, _seconds(retry_after))
    if status in AWAY:
        return TryAgain("down", text, _seconds(retry_after))
    if status >= 500:
        return TryAgain("error", text, _seconds(retry_after))
    if status in (401, 403):
        text += "; set the variable that api_key_var names to the teacher's API key"
    return TeacherRefused("temperature" if knows_no_temperature(text) else "refused", text)


async def body_of(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body. Raises TeacherRefused where it is longer than it may be."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > limit_bytes:
            raise TeacherRefused("nonsense", f"its answer is longer than {limit_bytes} bytes")
    return bytes(data)


def text_of(error: BaseException) -> str:
    """For people."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message_of(data: bytes) -> str:
    """What an error's body says, by any of the shapes that servers give it."""
    try:
        content = msgspec.json.decode(data)
        error = content.get("error", content)
        return str(error["message"] if isinstance(error, dict) else error)[:MAX_ECHO]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError, KeyError):
        return data[:MAX_ECHO].decode(errors="replace") or "nothing"


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0
