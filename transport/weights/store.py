"""Policy versions, one folder each: `broadcasts/step_000012/`, `STABLE` last. The trainer writes and removes them; the
orchestrator and the servers read.

A version appears whole or not at all, and what a reader returns has been checked against the manifest: run, sizes,
digests. Only the orchestrator knows which old versions somebody needs: a rollout in flight, an evaluation, a server
that still drains a version or joins late. So it writes `in_use.json`: the versions that must stay, and the newest one
that is live. Whatever it starts later, it starts under that one or a newer one, so that the file never says too little.
"""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from grpo.transport.errors import CorruptError, StaleRunError, TransportError
from grpo.transport.folders import (
    ANNOUNCED,
    STABLE,
    Content,
    check_file,
    digest_of,
    file_entry,
    mark_stable,
    read_checked,
    read_manifest,
    removable,
    remove_folder,
    remove_leftovers,
    step_folder,
    steps_in,
    write_atomic,
    write_folder,
)
from grpo.transport.receipts import RECEIPT_FILE
from grpo.transport.records import FileEntry, Natural, PolicyManifest, PolicySpec, Record
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE, WeightSender
from grpo.transport.weights.shards import MAX_SHARD_BYTES, Weight, is_weights, shard_files
from msgspec.structs import replace

log = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
CANARY_FILE = "canary.json"
METRICS_FILE = "metrics.json"
NOISE_FILE = "noise.safetensors"
"""The norm weights with a version's noise, float32, by the names of the base's checkpoint."""
OF_THE_STEP = frozenset({METRICS_FILE, RECEIPT_FILE})
"""Files that tell of the step that gave a version; with others of them it is the same snapshot."""
IN_USE_FILE = "in_use.json"


_PLAIN_KEYS = frozenset(
    {
        *("r", "lora_alpha", "target_modules", "task_type", "inference_mode", "base_model_name_or_path"),
        *("megatron_core", "revision", "peft_version", "auto_mapping", "lora_dropout", "qalora_group_size"),
    }
)
"""Keys of PEFT's configuration that do not change what a plain adapter computes; all others must be off."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """A plain adapter as PEFT's configuration describes it."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Names, sorted, or one pattern."""


def read_adapter_config(data: bytes) -> AdapterConfig:
    """Returns the adapter that PEFT's `adapter_config.json` describes. Raises `CorruptError` where it is no such file,
    or sets anything else that changes what is computed, as rsLoRA does."""
    try:
        config = json.loads(data)
        targets = config["target_modules"]
        names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
        found = AdapterConfig(rank=config["r"], alpha=config["lora_alpha"], target_modules=names)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{ADAPTER_CONFIG_FILE} is not PEFT's LoRA configuration: {error!r}") from error
    for key, value in ({"peft_type": "LORA"} | config).items():
        plain = value in (None, False, "none", [], {})
        if key in ("peft_type", "init_lora_weights"):
            plain = value in (("LORA",) if key == "peft_type" else _PLAIN_STARTS)
        if key not in _PLAIN_KEYS and not plain:
            raise CorruptError(f"{ADAPTER_CONFIG_FILE} sets {key} = {value!r}; only plain LoRA is understood")
    return found


def policy_name(version: int, *, noisy: bool = False, adapter: str = "") -> str:
    """Returns the name under which a version is served, `policy-v12`; with its noise it is another one, and so is that
    of an adapter that is not the version's first, `policy-v12-NAME`."""
    name = f"policy-v{version}-{adapter}" if adapter else f"policy-v{version}"
    return f"{name}+noise" if noisy else name


def snapshot_of(manifest: PolicyManifest) -> str:
    """Returns the digest that names a version's snapshot: of its specification and its files but `OF_THE_STEP`."""
    files = {name: entry for name, entry in manifest.files.items() if name not in OF_THE_STEP}
    return digest_of(msgspec.json.encode((manifest.spec, files), order="sorted"))


class HeldVersion(Record, frozen=True, kw_only=True):
    """A version that must stay. Example: ``HeldVersion(snapshot="xxh3_128:…", pins={"evaluation": 1})``"""

    snapshot: str | None
    """The digest under which servers have proved it; None where none has."""
    pins: dict[str, int]
    """How many times who needs it."""


class InUse(Record, frozen=True, kw_only=True):
    """The versions that must stay. Example: ``InUse(run_id="5f0c", versions={7: …, 8: …}, newest=8)``"""

    run_id: str
    versions: dict[Natural, HeldVersion]
    """Versions that somebody uses."""
    newest: Natural
    """The newest version that is live; it and all later ones are in use."""


def write_in_use(folder: Path, in_use: InUse) -> None:
    """Replaces the file in `folder`, the run's `broadcasts` folder. For the orchestrator."""
    write_atomic(folder / IN_USE_FILE, in_use.to_json(), durable=False)


def read_in_use(folder: Path, *, run_id: str) -> InUse | None:
    """Returns the newest file of this run's orchestrator; None where there is none. Raises `CorruptError`."""
    try:
        in_use = InUse.from_json((folder / IN_USE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return in_use if in_use.run_id == run_id else None


class PolicyPublisher:
    """The trainer's end: the only writer below `folder`, the run's `broadcasts` folder."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        keep_last: int | None = None,
        keep_interval: int | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        sender: WeightSender | None = None,
    ) -> None:
        """After each publication it removes versions that nobody needs by the orchestrator's word, except the newest
        `keep_last` (None: all) and multiples of `keep_interval`. A `sender` brings weights that are no adapter to the
        servers, instead of files."""
        self.folder, self._run_id = folder, run_id
        self._keep = {"keep_last": keep_last, "keep_interval": keep_interval}
        self._max_shard_bytes, self._sender = max_shard_bytes, sender
        remove_leftovers(folder)

    def publish(
        self, *, version: int, spec: PolicySpec, files: Mapping[str, Content], weights: Sequence[Weight] = ()
    ) -> None:
        """Makes `version` visible to every reader, whole. If the same version is there already, metrics and receipt
        aside, it stays untouched; another one is removed first, so that for a moment there is none. The `files` include
        an adapter. Where weights are broadcast, a version older than what servers have received is not sent again.

        Raises `StorageError`, and `DeadlineError` where a server does not receive the weights; the version is not
        stable then.
        """
        folder, sender = step_folder(self.folder, version), self._sender
        if sender is None:
            contents = {**shard_files(weights, max_shard_bytes=self._max_shard_bytes), **files}
        else:
            contents = {**files, ANNOUNCEMENT_FILE: sender.announcement(weights).to_json()}
        if self._holds(folder, version, spec, contents):
            log.info("version %d is published already, and the same", version)
            return
        self._warn_of_other(folder, version, contents)
        newest = max(steps_in(self.folder, part=STABLE), default=-1)
        if sender is not None and version < newest:
            log.info("version %d is not sent again: servers have gone on to version %d", version, newest)
            return

        def manifest(entries: dict[str, FileEntry]) -> bytes:
            return PolicyManifest(run_id=self._run_id, version=version, spec=spec, files=entries).to_json()

        write_folder(folder, contents, manifest, marker=STABLE if sender is None else ANNOUNCED, replace=True)
        if sender is not None:
            sender.send(weights)
            mark_stable(folder)
        self._remove_old()

    def _holds(self, folder: Path, version: int, spec: PolicySpec, contents: Mapping[str, Content]) -> bool:
        """Whether the version is there, whole and with just this content; what tells of its step may differ."""
        try:
            there, _ = verify_policy(folder, run_id=self._run_id, version=version)
        except (TransportError, OSError):
            return False
        files = {name: file_entry(content) for name, content in contents.items() if name not in OF_THE_STEP}
        same = snapshot_of(there) == snapshot_of(replace(there, spec=spec, files=files))
        return same and (folder / STABLE).exists()

    def _warn_of_other(self, folder: Path, version: int, contents: Mapping[str, Content]) -> None:
        """Warns where the version is there with another adapter."""
        try:
            there, _ = verify_policy(folder, run_id=self._run_id, version=version)
        except (TransportError, OSError):
            return
        names = [name for name in there.files.keys() & contents.keys() if name.endswith(ADAPTER_FILE)]
        if any(file_entry(contents[name]) != there.files[name] for name in names):
            log.warning(
                "version %d was published before with another adapter, and is replaced: the state that training goes "
                "on from is not the one that had given it, or its step was trained again and came out otherwise",
                version,
            )

    def _remove_old(self) -> None:
        """Removes what nobody needs. What cannot be removed stays, with a warning."""
        try:
            if (in_use := read_in_use(self.folder, run_id=self._run_id)) is None:
                return
            for version in removable(steps_in(self.folder), **self._keep):
                if version < in_use.newest and version not in in_use.versions:
                    remove_folder(step_folder(self.folder, version))
        except (OSError, TransportError) as error:
            log.warning("old policy versions stay: %s", error)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A version, with the bytes of its small files."""

    manifest: PolicyManifest
    small_files: Mapping[str, bytes]
    """Every file but the weights, checked."""


class PolicyReader:
    """The orchestrator's end: notices versions below `folder`, the run's `broadcasts` folder; the weights themselves
    are for the servers."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def poll(self, version: int) -> PublishedPolicy | None:
        """Returns `version`, or None where it is not there yet. Raises `CorruptError`, `StaleRunError`."""
        folder = step_folder(self._folder, version)
        if not folder.exists():
            return None
        manifest, small = _read(folder, self._run_id, version, weights=False)
        return PublishedPolicy(manifest=manifest, small_files=small)

    def snapshot(self, version: int) -> str | None:
        """Returns the digest of `version` as it is published or announced now; None where it is not there, or is being
        replaced."""
        with contextlib.suppress(CorruptError, OSError):
            return snapshot_of(PolicyManifest.from_json(read_manifest(step_folder(self._folder, version))))
        return None

    def latest(self) -> int | None:
        """Returns the highest version there is."""
        return max(steps_in(self._folder, part=STABLE), default=None)


def verify_policy(folder: Path, *, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """Returns the manifest of a version's folder and the bytes of its files, all checked against sizes and digests.

    Of a version that is no adapter, whose weights are large, they are checked piece by piece and not returned.
    Raises `CorruptError`, `SchemaVersionError` or `StaleRunError`.
    """
    return _read(folder, run_id, version, weights=True)


def _read(folder: Path, run_id: str, version: int, *, weights: bool) -> tuple[PolicyManifest, dict[str, bytes]]:
    """Returns what `verify_policy` does, with or without the weights."""
    manifest = PolicyManifest.from_json(read_manifest(folder))
    if manifest.run_id != run_id:
        raise StaleRunError(f"{folder} belongs to run {manifest.run_id}, this is run {run_id}")
    if manifest.version != version:
        raise CorruptError(f"{folder} holds version {manifest.version}, expected {version}")
    held = {}
    for name, entry in manifest.files.items():
        if not is_weights(name) or (weights and manifest.spec.kind == "adapter"):
            held[name] = read_checked(folder, name, entry)
        elif weights:
            check_file(folder, name, entry)
    return manifest, held
