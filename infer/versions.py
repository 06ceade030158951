"""What both ways of serving versions share: the version's folder, its checked files, its canary, how it became live.

Versions come from `<output_dir>/broadcasts/step_%06d` of the run in `output_dir`, never from a path that a request
names.
"""

from pathlib import Path

from transport.errors import CorruptError, PolicyRefused, SchemaVersionError, StaleRunError
from transport.folders import step_folder
from transport.records import Canary, PolicyManifest
from transport.run import current_run_id
from transport.weights.store import CANARY_FILE, verify_policy

CANARY_PRIORITY = -1
"""Before all waiting rollouts, so that a new version is not proved after a long queue."""


class NotLive(LookupError):
    """A version was asked for that is not served."""


class UnknownAdapter(ValueError):
    """An adapter was asked for that the version has not."""


def version_folder(output_dir: Path, *, run_id: str, version: int) -> Path:
    """The version's folder, which must lie in the run's broadcasts, with all files in itself. Raises PolicyRefused."""
    here = current_run_id(output_dir)
    if here is None:
        raise PolicyRefused("missing", f"there is no run in {output_dir}; give all programs one output_dir")
    if here != run_id:
        raise PolicyRefused("stale_run", f"run {run_id} was asked for, {output_dir} holds run {here}")
    broadcasts = output_dir.resolve() / "broadcasts"
    folder = step_folder(broadcasts, version)
    if folder.is_symlink() or (folder.exists() and folder.resolve() != folder):
        raise PolicyRefused("outside", f"{folder} leads to {folder.resolve()}, outside the run's broadcasts")
    if not folder.is_dir():
        raise PolicyRefused("missing", f"version {version} is not published: no folder {folder}")
    for file in folder.rglob("*"):
        if file.resolve().parent != file.parent:
            raise PolicyRefused("outside", f"{file} leads to {file.resolve()}, outside the run's broadcasts")
    return folder


def verified(folder: Path, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """Manifest and files, their digests checked; transport's errors as refusals."""
    try:
        return verify_policy(folder, run_id=run_id, version=version)
    except StaleRunError as error:
        raise PolicyRefused("stale_run", str(error)) from error
    except (CorruptError, SchemaVersionError) as error:
        raise PolicyRefused("corrupt", str(error)) from error


def canary_in(manifest: PolicyManifest, files: dict[str, bytes], folder: str = "") -> Canary:
    """The version's canary, of the adapter whose files' names begin with `folder`. Raises PolicyRefused."""
    if (name := f"{folder}{CANARY_FILE}") not in files:
        raise PolicyRefused("partial", f"version {manifest.version} has no {name}")
    try:
        canary = Canary.from_json(files[name])
    except ValueError as error:
        raise PolicyRefused("corrupt", str(error)) from error
    if canary.version != manifest.version:
        raise PolicyRefused("corrupt", f"{name} is of version {canary.version}, not {manifest.version}")
    return canary
