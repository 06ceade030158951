"""The one error of what a person asks of the service."""

from grpo.transport.errors import UserError


class Refused(UserError):
    """A request that cannot be served; the message says what was received and what is expected. It becomes the answer
    of that request alone."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        """`status` is of the HTTP answer, where the request is refused before it has a future."""
        super().__init__(message)
        self.status = status
