"""The error of what a person asks of the service, and that of a service that cannot go on."""

from grpo.transport.errors import START_AGAIN, UserError


class Refused(UserError):
    """A request that cannot be served; the message says what was received and what is expected. It becomes the answer
    of that request alone."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        """`status` is of the HTTP answer, where the request is refused before it has a future."""
        super().__init__(message)
        self.status = status


class LogFailed(Refused):
    """The log of commands cannot be written any more, as on a full disk. Requests are refused so that clients send them
    again, and the service ends; started again, it goes on from what is in the log."""

    exit_code = START_AGAIN

    def __init__(self, path: object, error: object) -> None:
        message = f"{path} cannot be written: {error}. Make room, and start the service again by the same command"
        super().__init__(f"{message}: it goes on where it was", status=503)


class RankGone(UserError):
    """A process that computes a part of the passes is gone, late, or cannot start. Started again, the service goes on
    from its log."""

    exit_code = START_AGAIN
