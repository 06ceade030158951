"""Errors between two programs, and the error for what people ask for and cannot have."""

START_AGAIN = 75
"""Exit code of a program that ends because another process is gone: started again, it may go on as before (sysexits'
EX_TEMPFAIL)."""
PROOF_FAILED = 76
"""Exit code of a program, and of the run, that ends because a proof does not hold (sysexits' EX_PROTOCOL). Started
again without anything mended, it would end so again."""


class UserError(ValueError):
    """A request of a person that cannot be met; the message says what was found, and how to mend it."""

    exit_code = 2
    """Exit code of a command that ends with this error."""


class TransportError(Exception):
    """Root of all errors of this package."""


class CorruptError(TransportError, ValueError):
    """Bytes that are not what their manifest or the codec says."""


class SchemaVersionError(TransportError, ValueError):
    """A record of another format version."""


class StaleRunError(TransportError, ValueError):
    """A file or message that belongs to another run."""


class MissingRankError(TransportError, LookupError):
    """A batch that was split over fewer ranks than the trainer has."""

    def __init__(self, step: int, num_parts: int, num_ranks: int) -> None:
        split = f"batch {step} is split over {num_parts} ranks, and the trainer has {num_ranks}"
        super().__init__(f"{split}; give orchestrator and trainer the same number of ranks")


class RunFolderError(TransportError, UserError):
    """A run folder that cannot be made or joined."""


class DeadlineError(TransportError, TimeoutError):
    """Somebody did not deliver in time; the message says who."""


class PeerFailed(TransportError, RuntimeError):
    """The process that one waits for has ended; the message says which, and why."""


class PolicyRefused(TransportError, ValueError):
    """A policy version that must not be served; `reason` is a word for programs, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class ProofFailed(TransportError, ValueError):
    """A spot proof or a witness that does not hold, in a run with `proofs.on_failure: stop`; the message says which
    one, both numbers, and what to do."""


class SharedBaseError(TransportError, ValueError):
    """Base weights that cannot be shared; the message names the tensor or the setting."""


class StorageError(TransportError, OSError):
    """A disk that is full, or that forbids what must be written."""
