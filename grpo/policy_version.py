"""A published version of a run's policy, for the commands that take it elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from grpo.run_files import read_run
from grpo.service_folder import open_service, service_program
from grpo.transport.errors import UserError
from grpo.transport.folders import STABLE, read_checked, read_manifest, step_folder, steps_in
from grpo.transport.records import Canary, FileEntry, PolicyManifest, PolicySpec, adapter_folders
from grpo.transport.run import Role, recorded_settings
from grpo.transport.weights.dequantized import FOLDER as DEQUANTIZED
from grpo.transport.weights.identity import base_identity, resolve_model
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, CANARY_FILE, verify_policy


class CannotExport(UserError):
    """There is no such version, or what was made of it does not compute as it did."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A published version with what belongs to it."""

    run: Path
    name: str
    """What exports of it are called."""
    settings: dict[str, Any]
    """Those of the program that trained it."""
    folder: Path
    manifest: PolicyManifest
    files: dict[str, bytes]
    """All but large weights, by their names in the folder."""
    prefix: str
    """Beginning of the names of the chosen adapter's files."""
    base_name: str
    """Name of the base model in the run's settings."""
    base: Path
    """A checkpoint with the base's values, plain."""

    @property
    def canary(self) -> Canary:
        """The trainer's numbers."""
        return Canary.from_json(self.files[f"{self.prefix}{CANARY_FILE}"])


def open_version(run: Path, step: int | None, *, lora: str | None = None) -> Version:
    """Returns the version of a step, None: the newest, checked. Raises `NoRun`, `CannotExport`, `TransportError` and
    OSError."""
    run_id = read_run(run).run_id
    settings = program_settings(run, "train")
    broadcasts = run / "broadcasts"
    there = steps_in(broadcasts, part=STABLE)
    step = max(there, default=0) if step is None else step
    if step not in there:
        kept = "weight_broadcast.keep_last and keep_interval of the trainer say which stay"
        raise CannotExport(f"{run} has no version {step}; there are {there or 'none'}; {kept}")
    folder = step_folder(broadcasts, step)
    manifest, files = verify_policy(folder, run_id=run_id, version=step)
    spec = manifest.spec
    if lora is not None and lora not in spec.adapters:
        raise CannotExport(
            f"--lora is {lora!r}, and the adapters are {', '.join(spec.adapters) or 'one without a name'}"
        )
    place = spec.adapters.index(lora) if lora else 0
    base = resolve_model(str(settings["model"]))
    if base_identity(base) != spec.base_model:
        raise CannotExport(f"{base} is not the model any more that the run was trained on ({spec.base_model})")
    return Version(
        run=run,
        name=f"step_{step}",
        settings=settings,
        folder=folder,
        manifest=manifest,
        files=files,
        prefix=adapter_folders(spec.adapters)[place],
        base_name=str(settings["model"]),
        base=run / DEQUANTIZED if spec.quantization else base,
    )


def open_checkpoint(service: Path, text: str) -> Version:
    """Returns a checkpoint of a training service, checked. `text` is its path (`tinker://…`) or the end of that. Raises
    `NoRun`, `UserError`, `CannotExport`, `TransportError` and OSError."""
    about = service_program(service)
    with open_service(service) as reader:
        path = reader.checkpoint(text)
        version, (model,) = reader.version_of(path), reader.models(path.removeprefix("tinker://").split("/")[0])
    folder = service / "checkpoints" / path.removeprefix("tinker://")
    entries = msgspec.json.decode(read_manifest(folder), type=dict[str, FileEntry])
    files = {name: read_checked(folder, name, entry) for name, entry in entries.items()}
    if CANARY_FILE not in files:  # that of a snapshot is with the version that servers got
        if version is None:
            raise CannotExport(f"{folder} has no {CANARY_FILE}, by which an export is compared")
        files[CANARY_FILE] = (step_folder(service / "broadcasts", version) / CANARY_FILE).read_bytes()
    config, base = json.loads(files[ADAPTER_CONFIG_FILE]), resolve_model(str(about["settings"]["model"]))
    if base_identity(base) != about["base_model"]:
        raise CannotExport(f"{base} is not the model any more that the service trains on ({about['base_model']})")
    spec = PolicySpec(
        base_model=about["base_model"],
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=tuple(config["target_modules"]),
        sequence_len=about["settings"]["sequence_len"],
        dtype=Canary.from_json(files[CANARY_FILE]).dtype,
    )
    return Version(
        run=service,
        name="-".join([model.name, *path.split("/")[-2:]]),
        settings={"lora_rank": spec.rank, "lora_alpha": spec.alpha, "sequence_len": spec.sequence_len},
        folder=folder,
        manifest=PolicyManifest(run_id=read_run(service).run_id, files=entries, version=version or 0, spec=spec),
        files=files,
        prefix="",
        base_name=str(about["settings"]["model"]),
        base=base,
    )


def program_settings(run: Path, role: Role) -> dict[str, Any]:
    """Returns the settings with which a program has joined the run. Raises `CannotExport` where it has not."""
    if (settings := recorded_settings(run, role)) is None:
        raise CannotExport(f"{run} has no settings of grpo-{role}: it has not joined this run")
    return settings


def recorded_arguments(run: Path) -> dict[str, Any]:
    """Returns the arguments of the chat template with which the run's prompts were written; none where none were
    given."""
    model = (recorded_settings(run, "orch") or {}).get("model", {})
    arguments: dict[str, Any] = model.get("chat_template_kwargs", {})
    return arguments
