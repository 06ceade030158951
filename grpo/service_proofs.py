"""The page of `grpo prove` of a training service, or of one of its models: from its folder alone."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from grpo import proofs
from grpo.commands.status import run_status
from grpo.orchestrator.witness import largest_gap
from grpo.proofs import Page, Part
from grpo.run_files import metrics, read_run
from grpo.service_folder import (
    COMMANDS_FILE,
    FATES,
    MODELS,
    Canary,
    Datum,
    Model,
    ServiceReader,
    Step,
    open_service,
    service_of,
    service_program,
)
from grpo.transport.errors import TransportError
from grpo.transport.folders import STABLE, check_file, read_manifest
from grpo.transport.records import FileEntry, PolicyManifest
from grpo.transport.traces import trace_path, traced_steps
from grpo.transport.witness import TOLERANCE

Of = tuple[Model, Sequence[Step], Sequence[Datum]]


def prove(folder: Path, *, limit_s: float = math.inf) -> Page:
    """Returns the page of what is in `folder`: a training service, one of its models, or any other run. Questions to
    its database may take `limit_s` seconds altogether. Raises `NoRun`, and `UserError` for a run of another
    release."""
    if (found := service_of(folder)) is None:
        return proofs.prove(folder, limit_s=limit_s)
    service, only = found
    run, state = read_run(folder), run_status(folder, count=False).state
    files, digest, _ = proofs.files_part(service, state)
    with ExitStack() as stack:
        reader = stack.enter_context(open_service(service, limit_s=limit_s))
        models: list[Of] = []

        def read() -> Part:
            models.extend((one, reader.steps(one.id), reader.datums(one)) for one in reader.models(only))
            return _datums(service, reader, models)

        datums = proofs.guarded("datums", read)
        made: tuple[tuple[str, Callable[[], Part]], ...] = (
            ("versions", lambda: _versions(service, reader, only)),
            ("tokens", lambda: _tokens(models, only)),
            ("gradients", lambda: _gradients(models, only)),
        )
        parts = [
            *(proofs.guarded(name, make) for name, make in made),
            datums,
            proofs.guarded("checkpoints", lambda: _checkpoints(service, reader, only)),
            proofs.guarded("code", lambda: _code(service)),
            files,
        ]
    newest = max((steps[-1].step for _, steps, _ in models if steps), default=0)
    page = Page(run_id=run.run_id, state=state, step=newest, max_steps=None, digest=digest, parts=parts)
    return proofs.without_path(page, service)


def _versions(service: Path, reader: ServiceReader, only: str | None) -> Part:
    canaries = [one for one in reader.canaries() if only in (None, one.model)]
    kept, broken = proofs.kept_folders(service, read_run(service).run_id, "broadcasts", PolicyManifest)
    part = Part(name="versions", broken=broken if only is None else [])
    for one in canaries:
        figures = one.report.canary
        if not figures.agrees:
            part.broken.append(
                f"version {one.version} was {figures.gap:.3g} nats off, allowed: {figures.tolerance:.3g}"
            )
        if one.version in kept and kept[one.version].digest != one.report.snapshot:
            part.broken.append(f"version {one.version} on disk is another snapshot than the server has proved")
    proved = {one.version for one in canaries}
    if only is None and (without := sorted(reader.sampled_versions().keys() - proved)):
        part.broken.append(f"{proofs.ranges(without)} were sampled from, and no server has proved them")
    if gone := sorted(proved - kept.keys()):
        part.unproved.append(f"gone from disk: {proofs.ranges(gone)}; their files cannot be compared again")
    part.broken = proofs.listed(part.broken)
    part.facts = {"canaries": [_figures(one) for one in canaries], "proved": sorted(proved), "gone": gone}
    part.facts["files"] = {version: one.digest for version, one in kept.items() if version in proved}
    part.summary = f"{len(canaries):,} proved by their canary"
    if canaries:
        worst = max(canaries, key=lambda one: one.report.canary.gap / max(one.report.canary.tolerance, 1e-300))
        figures = worst.report.canary
        part.summary += f", at most {figures.gap:.2g} nats off (allowed: {figures.tolerance:.2g})"
    part.summary += f"; {len(part.facts['files']):,} on disk, as their manifests say" if not part.broken else ""
    return part


def _figures(one: Canary) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(one.report.canary)
    return {"version": one.version, "server": "grpo-infer", "snapshot": one.report.snapshot, **figures}


def _tokens(models: Sequence[Of], only: str | None) -> Part:
    receipts = {(model.id, step.step): step.receipt for model, steps, _ in models for step in steps}
    total = sum(one.num_tokens for one in receipts.values())
    now = sum(one.num_proved_now for one in receipts.values())
    spots = [spot for one in receipts.values() for spot in one.spots]
    in_spots = sum(spot.num_tokens for spot in spots)
    part = Part(name="tokens", facts={"trained": total, "proved_at_lag_0": now, "proved_in_spots": in_spots})
    for (model, step), one in receipts.items():
        failed = [spot.rollout for spot in one.spots if not getattr(spot, spot.measure) <= spot.tolerance]
        part.broken += [f"{model}: datum {rollout} of step {step} is not of its version" for rollout in failed]
    if only is not None:
        rows = {
            step: [one.num_tokens, one.num_proved_now, sum(spot.num_tokens for spot in one.spots)]
            for (_, step), one in receipts.items()
        }
        part.facts["by_step"] = rows
    part.summary = (
        f"{total:,} trained: {now:,} ({proofs.share(now, total)}) proved by the step that trained them, at lag 0: a "
        "snapshot of the very weights sampled them here"
    )
    if total > now:
        text = (
            "were not sampled here, or under earlier weights, or not at temperature 1: nobody has computed them again"
        )
        part.unproved.append(f"{total - now:,} tokens {text}")
    return part


def _gradients(models: Sequence[Of], only: str | None) -> Part:
    part, gaps = Part(name="gradients"), dict[tuple[str, int], float]()
    for model, steps, _ in models:
        for number, step in enumerate(steps, start=1):
            if step.step != number:
                part.broken.append(f"{model.name}: step {step.step} of the log is its {number}th")
            if (witness := step.receipt.witness) is None:
                part.unproved.append(f"{model.name}: there is no witness of step {step.step}")
                continue
            gaps[model.id, step.step] = gap = largest_gap(step.expected, witness)
            if not gap <= TOLERANCE:
                part.broken.append(f"{model.name}: the witness of step {step.step} differs by {gap:.3g} of its size")
    num = sum(len(steps) for _, steps, _ in models)
    part.summary = (
        f"{sum(gap <= TOLERANCE for gap in gaps.values()):,} of {num:,} steps bear the witness of their datums"
    )
    part.summary += f", at most {max(gaps.values()):.2g} of its size off" if gaps else ""
    part.broken = proofs.listed(part.broken)
    part.facts = {"steps": num, "largest": max(gaps.values(), default=None)}
    if only is not None:
        part.facts["gaps"] = {step: gap for (_, step), gap in gaps.items()}
    return part


def _datums(service: Path, reader: ServiceReader, models: Sequence[Of]) -> Part:
    fates = Counter(one.fate for _, _, datums in models for one in datums)
    checks: dict[str, list[str]] = {
        "every datum has one known fate": [],
        "each step has trained as many datums as it has told": [],
        "metrics.jsonl has the steps of the log": [],
        "traces show just the datums of their step": [],
    }
    states, numbers, lines, traced = checks.values()
    for model, steps, datums in models:
        folder = service / MODELS / model.name
        own = {step.step: set[str]() for step in steps}
        for one in datums:
            if one.fate not in FATES or (one.fate == "trained") != (one.step in own):
                states.append(f"{model.name}: datum {one.id} is {one.fate}, in step {one.step}")
            elif one.step is not None:
                own[one.step].add(one.id)
        figures = reader.metrics(model.id)
        for step, told in zip(steps, figures, strict=True):
            if told["rollout/num"] != len(own[step.step]):
                numbers.append(
                    f"{model.name}: step {step.step} has {len(own[step.step])}, told {told['rollout/num']:g}"
                )
        if figures != metrics(folder):
            lines.append(f"{model.name}: {len(metrics(folder))} lines, expected {len(figures)}")
        for step_number in traced_steps(folder):
            table = pq.read_table(
                trace_path(folder, step_number), columns=["rollout"], filters=[("trained", "=", True)]
            )
            if not set(table["rollout"].to_pylist()) <= own.get(step_number, set()):
                traced.append(f"{model.name}: step {step_number}")
    dropped = Counter(one.reason or "" for _, _, datums in models for one in datums if one.fate == "dropped")
    refused = Counter(one.reason or "" for _, _, datums in models for one in datums if one.fate == "refused")
    violated = sum(map(bool, checks.values()))
    counted = ", ".join(f"{num:,} {fate}" for fate, num in fates.most_common())
    return Part(
        name="datums",
        summary=f"{counted or 'none'}; {len(checks) - violated} of {len(checks)} checks hold",
        facts={"states": dict(fates), "dropped": dict(dropped), "refused": dict(refused), "checks": checks},
        broken=[f"{name}: {one}" for name, found in checks.items() for one in proofs.listed(found)],
    )


def _checkpoints(service: Path, reader: ServiceReader, only: str | None) -> Part:
    part, whole = Part(name="checkpoints"), dict[str, str]()
    for path in reader.checkpoints(only):
        folder = service / "checkpoints" / path.removeprefix("tinker://")
        if not (folder / STABLE).exists():
            part.unproved.append(f"{path} is gone from disk")
            continue
        try:
            data = read_manifest(folder)
            for name, entry in msgspec.json.decode(data, type=dict[str, FileEntry]).items():
                check_file(folder, name, entry)
            whole[path] = json.loads(data)["adapter_model.safetensors"]["digest"]
        except (TransportError, OSError, msgspec.MsgspecError) as error:
            part.broken.append(str(error))
    part.broken, part.unproved = proofs.listed(part.broken), proofs.listed(part.unproved)
    part.facts = {"files": whole}
    part.summary = f"{len(whole):,} on disk, as their manifests say"
    return part


def _code(service: Path) -> Part:
    about = service_program(service)
    versions = about.get("versions", {})
    shown = [f"{name} {version}" for name, version in sorted(versions.items()) if name in ("grpo-pipeline", "torch")]
    base = about.get("base_model")
    part = Part(name="code", facts={"base_model": base, "libraries": {"service": versions}, "files": {}})
    part.summary = f"{', '.join(shown) or 'libraries unknown'}; base model {base or 'unknown'}"
    part.unproved.append(f"the loops are the tenants' own: what they asked for is in {COMMANDS_FILE}, and not why")
    return part
