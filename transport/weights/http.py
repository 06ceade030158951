"""Policy versions over HTTP, for servers that share no folder with the trainer.

    GET /RUN_ID/VERSION/FILE, Authorization: Bearer TOKEN

The orchestrator serves the run's `broadcasts` folder, as it lies there. A server fetches a version's manifest and then
the files that it lists, goes on where a connection broke, checks sizes and digests, and has the version appear whole in
a folder of its own, from which it is loaded and proved like any other. The token follows from the run's key.
"""

import hmac
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx
import uvicorn
from grpo.transport.errors import CorruptError, DeadlineError, PolicyRefused, TransportError
from grpo.transport.folders import (
    MANIFEST,
    STABLE,
    digest_of,
    remove_folder,
    remove_leftovers,
    step_folder,
    steps_in,
    write_folder,
)
from grpo.transport.keys import SharedKey
from grpo.transport.records import FileEntry, PolicyManifest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Between two attempts to reach the store."""
_SILENCE_S = 10.0
"""After which a connection counts as broken."""


class VersionServer:
    """The orchestrator's end: serves the `folder` of a run's versions at host and port, in a thread of its own."""

    def __init__(self, folder: Path, *, run_id: str, address: tuple[str, int], key: SharedKey) -> None:
        """Raises `TransportError` where the address cannot be bound."""
        self._folder, self._run_id, self._token = folder, run_id, key.token.encode()
        app = Starlette(routes=[Route("/{run_id}/{version:int}/{name:path}", self._file)])
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            where = f"weight_broadcast {address[0]}:{address[1]} cannot be bound"
            raise TransportError(f"{where}: {error.strerror}; give another host or port") from error
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="versions-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Serves no more."""
        self._server.should_exit = True
        self._thread.join(_SILENCE_S)
        self._socket.close()

    async def _file(self, request: Request) -> Response:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), self._token):
            return _error(401, "unauthorized", "the token is not that of this run's key")
        if request.path_params["run_id"] != self._run_id:
            return _error(409, "stale_run", "this is the store of another run")
        version, name = request.path_params["version"], request.path_params["name"]
        folder = step_folder(self._folder, version)
        try:
            known = {MANIFEST, STABLE, *PolicyManifest.from_json((folder / MANIFEST).read_bytes()).files}
        except FileNotFoundError:
            return _error(404, "missing", f"version {version} is not published")
        if name not in known or not (folder / STABLE).exists():
            return _error(404, "missing", f"version {version} has no file {name[:100]!r}")
        return FileResponse(folder / name)


class FetchedVersions:
    """A server's end: the versions below `folder` are its copies of the versions in the store at `url`."""

    def __init__(self, folder: Path, *, url: str, key: SharedKey, timeout_s: float) -> None:
        """`timeout_s` is the limit for one version, however often the connection breaks."""
        self._folder, self._url, self._timeout_s = folder.absolute(), url.rstrip("/"), timeout_s
        self._headers = {"Authorization": f"Bearer {key.token}"}
        self._one, self._closing = threading.Lock(), threading.Event()
        remove_leftovers(self._folder)

    def fetch(self, run_id: str, version: int) -> Path:
        """Returns the version's folder, which is whole; at once where it is here already, and the same.

        Raises `PolicyRefused` for what the store does not give or a file that is not what the manifest says, and
        `DeadlineError`.
        """
        final, address = step_folder(self._folder, version), f"{self._url}/{run_id}/{version}"
        deadline = time.monotonic() + self._timeout_s
        with self._one, httpx.Client(headers=self._headers, timeout=_SILENCE_S, trust_env=False) as client:

            def pieces(name: str, size: float = math.inf) -> Iterator[bytes]:
                return self._pieces(client, f"{address}/{name}", size, deadline)

            try:
                marker, about = b"".join(pieces(STABLE)), b"".join(pieces(MANIFEST))
                if marker != digest_of(about).encode():
                    raise CorruptError(f"its manifest has digest {digest_of(about)}, its marker says {marker[:100]!r}")
                if final.exists() and (final / STABLE).read_bytes() == marker:
                    return final
                listed = PolicyManifest.from_json(about).files
                files = {name: partial(pieces, name, entry.size_bytes) for name, entry in listed.items()}
                write_folder(final, files, lambda received: _as_listed(received, listed, about), replace=True)
                return final
            except CorruptError as error:
                raise PolicyRefused("corrupt", f"version {version} from {self._url}: {error}") from error

    def _pieces(self, client: httpx.Client, address: str, size: float, deadline: float) -> Iterator[bytes]:
        """Yields a file of at most `size` bytes, and resumes it where a connection breaks. Raises `DeadlineError`."""
        have = 0
        while have < size:
            try:
                with client.stream("GET", address, headers={"Range": f"bytes={have}-"}) as answer:
                    _check_status(answer)
                    for piece in answer.iter_raw():
                        have += len(piece)
                        yield piece
                return
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
                log.warning("%s: %s; it is tried again", address, why)
                if self._closing.wait(_PAUSE_S) or time.monotonic() > deadline:
                    waited = f"waited {self._timeout_s:g} s for {address} (weight_broadcast_url)"
                    raise DeadlineError(f"{waited}: {why}") from error

    def close(self) -> None:
        """Ends all attempts to reach the store."""
        self._closing.set()

    def keep_only(self, versions: Collection[int]) -> None:
        """Removes all other copies."""
        for version in set(steps_in(self._folder)) - set(versions):
            remove_folder(step_folder(self._folder, version))


def _as_listed(received: Mapping[str, FileEntry], listed: Mapping[str, FileEntry], about: bytes) -> bytes:
    """Returns the manifest's bytes, where the received files are those that it lists. Raises `CorruptError`."""
    for name, entry in listed.items():
        if received[name] != entry:
            raise CorruptError(f"{name} is {received[name]}, the manifest says {entry}")
    return about


def _check_status(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    try:
        error = json.loads(answer.read())["error"]
        kind, message = str(error["type"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        raise CorruptError(
            f"{answer.url} answers with status {answer.status_code}: it is no store of versions"
        ) from None
    raise PolicyRefused(kind, f"the store at {answer.url.host}:{answer.url.port} refuses a version: {message}")


def _error(status: int, kind: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"type": kind, "message": message}}, status)
