"""Versions over HTTP: whole and checked, gone on with after a broken connection, and for holders of the key alone."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from grpo.transport.errors import DeadlineError, PolicyRefused, TransportError
from grpo.transport.folders import STABLE, step_folder
from grpo.transport.keys import SharedKey
from grpo.transport.ports import free_port
from grpo.transport.weights.http import FetchedVersions, VersionServer
from grpo.transport.weights.store import ADAPTER_FILE, CANARY_FILE, METRICS_FILE, PolicyPublisher, verify_policy
from msgspec.structs import replace

from tests.transport.samples import SPEC, damage

KEY, OTHER_KEY = SharedKey("a secret of enough characters"), SharedKey("another secret, as long as that")
WEIGHTS = bytes(range(256)) * 4000
SEVERAL = replace(SPEC, adapters=("solver", "proposer"))


class Store:
    """The trainer's and the orchestrator's side."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.publisher = PolicyPublisher(folder, run_id="run")
        self.serve()

    def serve(self) -> None:
        self.server = VersionServer(self.folder, run_id="run", address=("127.0.0.1", self.port), key=KEY)

    def publish(self, version: int, weights: bytes = WEIGHTS) -> None:
        files = {ADAPTER_FILE: weights, CANARY_FILE: b"%d" % version, METRICS_FILE: b"{}"}
        several = files | {f"adapters/proposer/{name}": data for name, data in files.items()}
        self.publisher.publish(version=version, spec=SEVERAL, files=several)

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str, token: str = KEY.token) -> httpx.Response:
        return httpx.get(self.url(path), headers={"Authorization": f"Bearer {token}"}, timeout=60)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "broadcasts")
    yield made
    made.server.close()


def fetched(store: Store, tmp_path: Path, *, key: SharedKey = KEY, timeout_s: float = 60.0) -> FetchedVersions:
    return FetchedVersions(tmp_path / "own", url=store.url(), key=key, timeout_s=timeout_s)


def reason(versions: FetchedVersions, version: int, run_id: str = "run") -> str:
    with pytest.raises(PolicyRefused) as caught:
        versions.fetch(run_id, version)
    return caught.value.reason


def test_a_version_arrives_whole_and_is_fetched_anew_only_where_it_is_another(store: Store, tmp_path: Path) -> None:
    versions = fetched(store, tmp_path)
    for version in (0, 1, 2):
        store.publish(version)
        folder = versions.fetch("run", version)
        _, files = verify_policy(folder, run_id="run", version=version)
        assert files["adapters/proposer/" + ADAPTER_FILE] == WEIGHTS
    before = folder.stat().st_ino
    assert versions.fetch("run", 2).stat().st_ino == before
    store.publish(2, b"other weights")
    _, files = verify_policy(versions.fetch("run", 2), run_id="run", version=2)
    assert files[ADAPTER_FILE] == b"other weights"
    versions.keep_only({1})
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step_000001"]


@pytest.mark.parametrize("path", ["/run/0/manifest.json", f"/run/0/{ADAPTER_FILE}"])
def test_who_has_not_the_key_gets_nothing(store: Store, tmp_path: Path, path: str) -> None:
    store.publish(0)
    assert store.get(path).status_code == 200
    assert store.get(path, OTHER_KEY.token).status_code == httpx.get(store.url(path), timeout=60).status_code == 401
    assert reason(fetched(store, tmp_path, key=OTHER_KEY), 0) == "unauthorized"
    assert not list((tmp_path / "own").glob("*"))


@pytest.mark.parametrize("name", ["../../run.json", "%2e%2e/%2e%2e/run.json", "in_use.json", "no_such_file"])
def test_only_what_a_manifest_lists_is_given(store: Store, tmp_path: Path, name: str) -> None:
    store.publish(0)
    (tmp_path / "run.json").write_text("mine")
    assert store.get(f"/run/0/{name}").status_code == 404


def test_a_version_that_is_not_there_or_of_another_run_is_refused(store: Store, tmp_path: Path) -> None:
    store.publish(0)
    assert reason(fetched(store, tmp_path), 1) == "missing"
    assert reason(fetched(store, tmp_path), 0, run_id="other") == "stale_run"


@pytest.mark.parametrize(
    ("name", "how"),
    [(ADAPTER_FILE, "flip"), (ADAPTER_FILE, "truncate"), ("manifest.json", "truncate"), (STABLE, "flip")],
)
def test_a_torn_file_is_refused_and_fetched_anew(store: Store, tmp_path: Path, name: str, how: str) -> None:
    store.publish(0)
    whole = {path: path.read_bytes() for path in step_folder(store.folder, 0).iterdir() if path.is_file()}
    damage(step_folder(store.folder, 0) / name, how)
    if name == "manifest.json":
        with pytest.raises((PolicyRefused, TransportError)):
            fetched(store, tmp_path, timeout_s=1.0).fetch("run", 0)
    else:
        assert reason(fetched(store, tmp_path), 0) == "corrupt"
    assert not list((tmp_path / "own").glob("step_*"))
    for path, data in whole.items():
        path.write_bytes(data)
    verify_policy(fetched(store, tmp_path).fetch("run", 0), run_id="run", version=0)


class Breaking(threading.Thread):
    """Passes bytes on to the store, and breaks each connection after some."""

    def __init__(self, port: int, after: int) -> None:
        super().__init__(daemon=True)
        self._to, self._after, self.passed = port, after, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        while True:
            ours, _ = self._socket.accept()
            with suppress(OSError), ours, socket.create_connection(("127.0.0.1", self._to)) as theirs:
                threading.Thread(target=self._pass_on, args=(ours, theirs), daemon=True).start()
                left = self._after
                while left > 0 and (data := theirs.recv(min(left, 65536))):
                    ours.sendall(data)
                    left -= len(data)
                    self.passed += len(data)
                ours.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _pass_on(ours: socket.socket, theirs: socket.socket) -> None:
        try:
            while data := ours.recv(65536):
                theirs.sendall(data)
        except OSError:
            return


def test_a_broken_connection_is_gone_on_with_where_it_broke(store: Store, tmp_path: Path) -> None:
    store.publish(0)
    between = Breaking(store.port, after=700_000)
    versions = FetchedVersions(tmp_path / "own", url=f"http://127.0.0.1:{between.port}", key=KEY, timeout_s=60.0)
    verify_policy(versions.fetch("run", 0), run_id="run", version=0)
    assert between.passed < 1.3 * 2 * len(WEIGHTS), "what had arrived was not fetched again"


def test_a_store_that_comes_back_in_time_is_waited_for_and_one_that_does_not_is_named(
    store: Store, tmp_path: Path
) -> None:
    store.publish(0)
    store.server.close()
    with pytest.raises(DeadlineError, match=str(store.port)):
        fetched(store, tmp_path, timeout_s=0.6).fetch("run", 0)
    timer = threading.Timer(0.7, store.serve)
    timer.start()
    verify_policy(fetched(store, tmp_path).fetch("run", 0), run_id="run", version=0)
    timer.join()


def test_a_store_that_goes_for_good_in_the_midst_of_a_file_is_named_and_leaves_nothing(
    store: Store, tmp_path: Path
) -> None:
    store.publish(0)
    between = Breaking(store.port, after=700_000)
    versions = FetchedVersions(tmp_path / "own", url=f"http://127.0.0.1:{between.port}", key=KEY, timeout_s=0.0)
    with pytest.raises(DeadlineError, match=str(between.port)):
        versions.fetch("run", 0)
    assert not list((tmp_path / "own").iterdir())


def test_a_server_that_ends_does_not_go_on_waiting(store: Store, tmp_path: Path) -> None:
    store.server.close()
    versions = fetched(store, tmp_path, timeout_s=120.0)
    threading.Timer(0.3, versions.close).start()
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        versions.fetch("run", 0)
    assert time.monotonic() - began < 30


def test_a_port_in_use_is_named(store: Store) -> None:
    with pytest.raises(TransportError, match=str(store.port)):
        store.serve()
