"""What this server does, told in the folder of the run whose versions it serves."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transport.errors import RunFolderError
from transport.run import current_run_id
from transport.status import FINISHED, StatusFile


@dataclass(slots=True, kw_only=True)
class Telling:
    """The status file `status/infer.HOST_PORT.json`, from the first version of a run on. Where it cannot be written,
    the server serves as well."""

    output_dir: Path
    host: str
    port: int
    live: Callable[[], list[int]]
    """Versions that new requests may name."""
    _file: StatusFile | None = field(default=None, init=False)

    @contextlib.contextmanager
    def loading(self, run_id: str, version: int) -> Iterator[None]:
        """A version is loaded within it; afterwards the server serves, whether or not it could be."""
        with contextlib.suppress(RunFolderError):
            if current_run_id(self.output_dir) == run_id:
                self._file = StatusFile(self.output_dir / "status" / f"infer.{self.host}_{self.port}.json")
        self._set(f"loading version {version}")
        message = None
        try:
            yield
        except Exception as error:
            message = f"version {version}: {error}"
            raise
        finally:
            self._set("serving", step=max(self.live(), default=None), message=message)

    @contextlib.contextmanager
    def said(self, state: str, *, then: str) -> Iterator[None]:
        """The server is in `state` within it, and in `then` once that is over."""
        self._set(state, step=max(self.live(), default=None))
        yield
        self._set(then, step=max(self.live(), default=None))

    def ended(self, error: BaseException | None) -> None:
        """The server ends, because it is told to, or of an error."""
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            self._set(FINISHED)
        elif self._file is not None:
            with contextlib.suppress(OSError):
                self._file.failed(error)

    def _set(self, state: str, *, step: int | None = None, message: str | None = None) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.set(state, step=step, message=message)
