"""Policy versions over HTTP, for servers that share no folder with the trainer.

    GET /RUN_ID/VERSION/FILE, Authorization: Bearer TOKEN

The orchestrator serves the run's `broadcasts` folder, as it lies there. A server fetches a version's manifest and then
the files that it lists, goes on where a connection broke, checks sizes and digests, and has the version appear whole in
a folder of its own, from which it is loaded and proved like any other. The token follows from the run's key.
"""

import hmac
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from transport.errors import CorruptError, DeadlineError, PolicyRefused, TransportError
from transport.folders import MANIFEST, STABLE, check_file, digest_of, fsync, remove_folder, step_folder, steps_in
from transport.keys import SharedKey
from transport.records import FileEntry, PolicyManifest

log = logging.getLogger(__name__)
_PAUSE_S = 0.5
"""Between two attempts to reach the store."""
_SILENCE_S = 10.0
"""After which a connection counts as broken."""


class VersionServer:
    """The orchestrator's end: serves the `folder` of a run's versions at host and port, in a thread of its own."""

    def __init__(self, folder: Path, *, run_id: str, address: tuple[str, int], key: SharedKey) -> None:
        """Raises `TransportError` where the address cannot be had."""
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
    """A server's end: the versions below `folder` are its own copies of those in the store at `url`."""

    def __init__(self, folder: Path, *, url: str, key: SharedKey, timeout_s: float) -> None:
        """`timeout_s`: for one version, whatever breaks."""
        self._folder, self._url, self._timeout_s = folder.absolute(), url.rstrip("/"), timeout_s
        self._headers = {"Authorization": f"Bearer {key.token}"}
        self._one, self._closing = threading.Lock(), threading.Event()

    def fetch(self, run_id: str, version: int) -> Path:
        """Returns the version's folder, which is whole; at once where it is here already, and the same.

        Raises `PolicyRefused` for what the store does not give or a file that is not what the manifest says, and
        `DeadlineError`.
        """
        final, address = step_folder(self._folder, version), f"{self._url}/{run_id}/{version}"
        deadline = time.monotonic() + self._timeout_s
        with self._one, httpx.Client(headers=self._headers, timeout=_SILENCE_S, trust_env=False) as client:
            while True:
                try:
                    return self._attempt(client, address, final)
                except CorruptError as error:
                    raise PolicyRefused("corrupt", f"version {version} from {self._url}: {error}") from error
                except httpx.TransportError as error:
                    log.warning("version %d from %s: %s; goes on", version, self._url, error or type(error).__name__)
                    if self._closing.wait(_PAUSE_S) or time.monotonic() > deadline:
                        waited = f"waited {self._timeout_s:g} s for version {version} from {self._url}"
                        raise DeadlineError(
                            f"{waited} (weight_broadcast_url): {error or type(error).__name__}"
                        ) from error

    def _attempt(self, client: httpx.Client, address: str, final: Path) -> Path:
        """Goes on with what an earlier attempt, of this process or another, has left."""
        marker, about = (_get(client, f"{address}/{name}") for name in (STABLE, MANIFEST))
        if marker != digest_of(about).encode():
            raise CorruptError(f"its manifest has digest {digest_of(about)}, its marker says {marker[:100]!r}")
        if final.exists() and (final / STABLE).read_bytes() == marker:
            return final
        part = final.with_name(f".{final.name}.{marker[-16:].decode()}.part")
        for name, entry in PolicyManifest.from_json(about).files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            _fetch_file(client, f"{address}/{name}", part, name, entry)
        (part / MANIFEST).write_bytes(about)
        (part / STABLE).write_bytes(marker)
        if final.exists():
            remove_folder(final)
        part.rename(final)
        fsync(self._folder)
        return final

    def close(self) -> None:
        """Tries no more to reach the store."""
        self._closing.set()

    def keep_only(self, versions: Collection[int]) -> None:
        """Removes all other copies, and what is left of attempts."""
        for version in set(steps_in(self._folder)) - set(versions):
            remove_folder(step_folder(self._folder, version))
        for leftover in self._folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _fetch_file(client: httpx.Client, address: str, folder: Path, name: str, entry: FileEntry) -> None:
    """Fetches what is missing of a file. One that is torn is removed, so that the next attempt begins anew."""
    with (folder / name).open("ab") as file:
        have = os.fstat(file.fileno()).st_size
        if have < entry.size_bytes:
            with client.stream("GET", address, headers={"Range": f"bytes={have}-"}) as answer:
                _check_status(answer)
                if answer.status_code != httpx.codes.PARTIAL_CONTENT:
                    file.truncate(0)
                for piece in answer.iter_raw():
                    file.write(piece)
    try:
        check_file(folder, name, entry)
    except CorruptError:
        (folder / name).unlink()
        raise


def _get(client: httpx.Client, address: str) -> bytes:
    answer = client.get(address)
    _check_status(answer)
    return answer.content


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
