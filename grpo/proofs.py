"""The page of `grpo prove`: what is proved of a run, what is not, and what is broken, from the run's folder alone.

Each part of the page is made by itself: a file that is damaged is named, and the other parts are there all the same.
Nothing here needs torch or a network, and the folder's own path is not on the page.
"""

import json
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from grpo.commands.ledger_check import check
from grpo.orchestrator.ledger import LEDGER_FILE
from grpo.orchestrator.ledger_reader import LedgerReader, NoRollouts, open_ledger
from grpo.orchestrator.witness import Expectation, expected_witness, kept_gap, largest_gap, sentence, unpacked
from grpo.run_files import STEP, NoRun, ProgramStatus, metrics, orch_settings, read, read_run
from grpo.transport.batches.store import StepStore
from grpo.transport.digests import DIGESTS_FILE, MAY_GO, differing, final_files, read_digests
from grpo.transport.errors import CorruptError, ProofFailed, TransportError, UserError
from grpo.transport.folders import STABLE, check_file, digest_of, read_manifest, step_folder, steps_in
from grpo.transport.receipts import RECEIPT_FILE, REFUSED, ExpectedWitness, KeptWitness, Receipt, SpotProof, Witness
from grpo.transport.records import SCHEMA_VERSION, BatchManifest, Manifest, PolicyManifest
from grpo.transport.run import RUN_FILE, RunFile, code_changes
from grpo.transport.status import FAILED, FINISHED, STOPPED
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE
from grpo.transport.weights.store import snapshot_of
from grpo.transport.witness import TOLERANCE

SAME = 1e-8
"""Share of its size by which the witness of the same samples may differ, in another order of the same sums and with its
nine digits."""
MAX_SHOWN = 10
"""Findings of one kind that are listed; the rest are counted."""
_NOT_NOW = {
    "interrupted": "is too large to be read here; grpo prove takes its time",
    "database is locked": "is being written; ask again",
}
"""Errors of SQLite that say nothing about the ledger."""
STARTING, RUNNING, ENDED_EARLY = "starting", "running", "ended early"


class Part(msgspec.Struct, kw_only=True):
    """One part of the page. Example: ``Part(name="versions", summary="13 proved by their canary on 1 server")``"""

    name: str
    summary: str = ""
    facts: dict[str, Any] = msgspec.field(default_factory=dict)
    """The figures behind the summary, as JSON takes them."""
    unproved: list[str] = msgspec.field(default_factory=list)
    """What has no proof, and why."""
    broken: list[str] = msgspec.field(default_factory=list)
    """What contradicts a proof."""


class Page(msgspec.Struct, kw_only=True):
    """What `grpo prove` says of a run."""

    run_id: str
    state: str
    """`starting`, `running`, `finished`, `failed`, `stopped` or `ended early`."""
    step: int
    """The newest step that is trained."""
    max_steps: int | None
    digest: str | None
    """The digest of all files' digests at the end of the run, which stands for the whole run."""
    parts: list[Part]

    @property
    def unproved(self) -> list[str]:
        """All that remains unproved, each with its part."""
        return [f"{part.name}: {one}" for part in self.parts for one in part.unproved]

    @property
    def broken(self) -> list[str]:
        """All that is broken, each with its part."""
        return [f"{part.name}: {one}" for part in self.parts for one in part.broken]

    @property
    def verdict(self) -> str:
        """The result in a line."""
        if self.broken:
            return f"broken: {_num(len(self.broken), 'finding')}"
        if self.unproved:
            return f"nothing is broken; unproved: {_num(len(self.unproved), 'thing')}"
        return "everything is proved"

    def exit_code(self, *, strict: bool = False) -> int:
        """Returns 1 where something is broken, and with `strict` 3 where something is only unproved."""
        return 1 if self.broken else 3 if strict and self.unproved else 0

    def as_fields(self) -> dict[str, Any]:
        """Returns the page as JSON takes it."""
        fields: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {"verdict": self.verdict, "unproved": self.unproved, "broken": self.broken, **fields}


@dataclass(kw_only=True)
class _Run:
    """What several parts read."""

    folder: Path
    file: RunFile
    state: str
    records: Sequence[Mapping[str, float]]
    """The lines of `metrics.jsonl`, read before the ledger was frozen."""
    ledger: LedgerReader | None = None
    """None where there is none, or it cannot be read."""
    steps: Sequence[int] = ()
    """The steps that are trained, ascending."""
    receipts: Mapping[int, tuple[ExpectedWitness | None, Receipt | None]] = field(default_factory=dict)
    kept: Mapping[int, KeptWitness] = field(default_factory=dict)
    """Of the steps whose gradients bore the witness of their batch."""

    def settings(self, role: str) -> Mapping[str, Any]:
        """Returns the settings of a program."""
        found: Mapping[str, Any] = self.file.programs.get(role, {}).get("settings", {})
        return found

    @property
    def is_supervised(self) -> bool:
        """Whether it is a stage of `grpo sft`, in which nothing is sampled."""
        return "model" in (of_orch := self.settings("orch")) and "env" not in of_orch


def prove(folder: Path, *, limit_s: float = math.inf) -> Page:
    """Returns the page of the run in `folder`. Questions to the ledger may take `limit_s` seconds altogether. Raises
    `NoRun`, and `UserError` for a run of another release."""
    state = _state(folder)
    files, digest, wrong = files_part(folder, state)
    run = _Run(folder=folder, file=_run_file(folder, wrong), state=state, records=metrics(folder))
    with ExitStack() as stack:
        opened = guarded("rollouts", lambda: _open(run, stack, limit_s))
        parts = [
            guarded("versions", lambda: _versions(run)),
            guarded("tokens", lambda: _tokens(run)),
            guarded("gradients", lambda: _gradients(run)),
            _joined(guarded("rollouts", lambda: _rollouts(run)), opened),
            guarded("batches", lambda: _batches(run)),
            guarded("code", lambda: _code(run)),
            files,
        ]
    page = Page(
        run_id=run.file.run_id,
        state=state,
        step=max(run.steps, default=0),
        max_steps=orch_settings(run.file).get("max_steps"),
        digest=digest,
        parts=parts,
    )
    return without_path(page, folder)


def without_path(page: Page, folder: Path) -> Page:
    """Returns the page without the folder's own path: the same comes of a copy elsewhere."""
    return msgspec.convert(_renamed(msgspec.to_builtins(page, str_keys=True), f"{folder}/"), Page)


def _renamed(value: Any, path: str) -> Any:
    """Returns `value`, made of lists and mappings, without `path` in its texts."""
    if isinstance(value, str):
        return value.replace(path, "")
    if isinstance(value, dict):
        return {key: _renamed(one, path) for key, one in value.items()}
    return [_renamed(one, path) for one in value] if isinstance(value, list) else value


def guarded(name: str, make: Callable[[], Part]) -> Part:
    """Returns a part, or one that says that what it reads is damaged: bytes that have changed may raise anything."""
    try:
        return make()
    except Exception as error:
        if isinstance(error, sqlite3.OperationalError) and str(error) in _NOT_NOW:
            text = f"{LEDGER_FILE} {_NOT_NOW[str(error)]}"
            return Part(name=name, summary="not read", unproved=[text])
        told = isinstance(error, (UserError, TransportError, OSError, sqlite3.Error))
        message = str(error) if told else f"{type(error).__name__}: {error}"
        return Part(name=name, summary="cannot be read", broken=[message])


def _joined(part: Part, other: Part) -> Part:
    return Part(
        name=part.name,
        summary=part.summary or other.summary,
        facts=part.facts,
        unproved=other.unproved + part.unproved,
        broken=other.broken + part.broken,
    )


def _num(num: int, what: str) -> str:
    return f"{num:,} {what}" + ("" if num == 1 else "s")


def ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as text. Example: ``ranges([1, 2, 3, 7])`` is `1 to 3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return ", ".join(shown[:MAX_SHOWN]) + (f" and {len(shown) - MAX_SHOWN} more ranges" if shown[MAX_SHOWN:] else "")


def listed(found: Sequence[str]) -> list[str]:
    more = len(found) - MAX_SHOWN
    return [*found[:MAX_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]


# --- where the run stands, and its files ---


def _state(folder: Path) -> str:
    """Returns how far the run has come. The digests are the last that a run writes."""
    if (folder / DIGESTS_FILE).exists():
        return FINISHED
    orch, launcher = (read(folder / "status" / f"{name}.json", ProgramStatus) for name in ("orch", "launcher"))
    if (orch is not None and orch.alive) or (launcher is not None and launcher.alive):
        return RUNNING
    for status in (orch, launcher):
        if status is not None and status.state in (FINISHED, FAILED, STOPPED):
            return status.state
    return STARTING if (orch, launcher) == (None, None) and not (folder / LEDGER_FILE).exists() else ENDED_EARLY


def _run_file(folder: Path, wrong: Mapping[str, str]) -> RunFile:
    """Returns `run.json`, an empty one where that is damaged, as `wrong` says. Raises `NoRun`, and `UserError` for
    another release."""
    try:
        file = read_run(folder)
    except NoRun:
        if RUN_FILE not in wrong:
            raise
        return RunFile(run_id="unknown")
    if file.schema_version != SCHEMA_VERSION and RUN_FILE not in wrong:
        version = f"it has schema version {file.schema_version}, this program reads {SCHEMA_VERSION}"
        raise UserError(f"{folder / RUN_FILE} is not a run of this release: {version}; use the release that made it")
    return file


def files_part(folder: Path, state: str) -> tuple[Part, str | None, Mapping[str, str]]:
    """Returns the part, the digest that stands for all files, and what is wrong with which."""
    part = Part(name="files")
    try:
        found = read_digests(folder)
    except (CorruptError, OSError) as error:
        part.summary = "cannot be compared"
        part.broken.append(str(error))
        return part, None, {}
    if found is None:
        goes_on = state in (STARTING, RUNNING)
        part.summary = "not final yet" if goes_on else "not compared"
        if not goes_on:
            why = "it was not written" if state == FINISHED else "this run has not come to its end"
            part.unproved.append(f"there is no {DIGESTS_FILE}, because {why}: a change of a file may go unseen")
        return part, None, {}
    digests, whole = found
    wrong, gone = differing(folder, digests)
    more = sorted(set(final_files(folder)) - digests.files.keys())
    num_bytes = sum(entry.size_bytes for entry in digests.files.values())
    same = len(digests.files) - len(wrong) - len(gone)
    part.summary = f"{same:,} of {len(digests.files):,} are what they were at the end of the run: {whole}"
    part.facts = {"digest": whole, "num_files": len(digests.files), "num_bytes": num_bytes, "gone": gone}
    part.broken = [f"{name} {what}" for name, what in sorted(wrong.items())]
    part.broken += [f"{name} was not there at the end of the run" for name in more]
    for start in MAY_GO:
        if names := [name for name in gone if name.startswith(start)]:
            where = sorted({name.split("/")[1] for name in names})
            part.unproved.append(f"{start.rstrip('/')}: {', '.join(listed(where))} of the end of the run are gone")
    return part, whole, wrong


def _open(run: _Run, stack: ExitStack, limit_s: float) -> Part:
    """Opens the ledger as it is now, and reads what several parts need."""
    try:
        ledger = stack.enter_context(open_ledger(run.folder, limit_s=limit_s))
    except NoRollouts:
        if run.is_supervised:
            return _supervised(run)
        return Part(name="rollouts", summary="none", unproved=[f"there is no {LEDGER_FILE} with rollouts"])
    ledger.freeze()
    run.steps = sorted(step for step, whole in ledger.steps().items() if whole)
    run.ledger = ledger
    run.receipts, run.kept = ledger.receipts(), ledger.kept()
    return Part(name="rollouts")


def _supervised(run: _Run) -> Part:
    """Reads what a supervised stage has left, which has no ledger: the trainer's receipts lie beside its versions, and
    batches that are still on disk say which witness each must have."""
    receipts = {}
    for step in steps_in(broadcasts := run.folder / "broadcasts", part=STABLE):
        with suppress(FileNotFoundError):  # version 0 has none
            receipts[step] = Receipt.from_json((step_folder(broadcasts, step) / RECEIPT_FILE).read_bytes())
    batches = {step: _of_batch(run, step, receipt) for step, receipt in receipts.items()}
    run.receipts = {
        step: (None if (batch := batches[step]) is None else batch.witness, one) for step, one in receipts.items()
    }
    run.steps = sorted({int(line[STEP]) for line in run.records if STEP in line} | receipts.keys())
    return Part(name="rollouts", summary="none: answers that were known before were learned")


# --- versions ---


def _versions(run: _Run) -> Part:
    proofs = [] if run.ledger is None else run.ledger.proofs()
    kept, broken = kept_folders(run.folder, run.file.run_id, "broadcasts", PolicyManifest)
    part, proved = Part(name="versions", broken=broken), {one["version"] for one in proofs}
    servers = Counter[str](one["server"] for one in proofs)
    for one in proofs:
        gap, tolerance = one[one["measure"]], one["tolerance"]
        if not gap <= tolerance:
            where = (
                f"version {one['version']} was {gap:.3g} nats ({one['measure']}) from the trainer on {one['server']}"
            )
            part.broken.append(f"{where}, allowed are {tolerance:.3g}")
    snapshots = {(one["version"], one["snapshot"]) for one in proofs}
    other = [version for version, one in kept.items() if version in proved and (version, one.digest) not in snapshots]
    if other:
        text = f"{ranges(other)} on disk are other snapshots than those that servers have proved"
        (part.broken if run.state == FINISHED else part.unproved).append(text)
    part.broken = listed(part.broken)
    sampled = set() if run.ledger is None else run.ledger.trained_versions().keys()
    gone = sorted((proved | sampled) - kept.keys())
    if unproved := sorted(sampled - proved):
        part.unproved.append(
            f"no server has proved {ranges(unproved)}, and rollouts that were sampled under are trained"
        )
    if gone:
        keep = "weight_broadcast.keep_last and keep_interval say which stay"
        part.unproved.append(f"gone from disk: {ranges(gone)}; their files cannot be compared again ({keep})")
    if sent := [version for version, manifest in kept.items() if manifest.sent]:
        part.unproved.append(f"{ranges(sent)} went to servers over NCCL: their weights are in no file")
    part.facts = {
        "proved": sorted(proved),
        "servers": dict(sorted(servers.items())),
        "canaries": proofs,
        "files": {version: one.digest for version, one in kept.items()},
        "gone": gone,
    }
    part.summary = f"{len(proved):,} proved by their canary on {_num(len(servers), 'server')}"
    if proofs:
        worst = max(proofs, key=lambda one: one[one["measure"]] / max(one["tolerance"], 1e-300))
        part.facts["largest"] = {
            key: worst[key] for key in ("version", "server", "max_abs", "mean_abs", "tolerance", "measure")
        }
        part.summary += f", at most {worst[worst['measure']]:.2g} nats off (allowed: {worst['tolerance']:.2g})"
    part.summary += f"; {len(kept):,} on disk, as their manifests say" if not broken else ""
    return part


@dataclass(frozen=True, slots=True)
class _Whole:
    """A folder that agrees with its manifest."""

    digest: str
    """The manifest's; a version's is that of its snapshot."""
    sent: bool
    """Whether the weights went another way."""


def kept_folders(folder: Path, run_id: str, name: str, kind: type[Manifest]) -> tuple[dict[int, _Whole], list[str]]:
    """Returns by step the folders in `batches` or `broadcasts` of a run that agree with their manifests, and what is
    wrong with the others. One that was removed or made anew meanwhile is left out."""
    kept: dict[int, _Whole] = {}
    broken = []
    for step in steps_in(folder / name, part=STABLE):
        one = step_folder(folder / name, step)
        before = _stamp(one)
        try:
            kept[step] = _whole(one, before, kind, run_id)
        except (TransportError, OSError) as error:
            if _stamp(one) == before:
                broken.append(str(error))
    return kept, broken


def _stamp(folder: Path) -> tuple[object, ...]:
    """Changes whenever a file in a folder does."""
    found = [(str(path), path.lstat()) for path in sorted(folder.rglob("*"))]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)


@lru_cache(maxsize=1024)
def _whole(folder: Path, _stamp: object, kind: type[Manifest], run_id: str) -> _Whole:
    """Returns what is known of a folder, which is read once as long as nothing in it changes. Raises `CorruptError`."""
    data = read_manifest(folder)
    manifest = kind.from_json(data)
    number = manifest.step if isinstance(manifest, BatchManifest) else getattr(manifest, "version", None)
    if manifest.run_id != run_id or step_folder(folder.parent, number or 0) != folder:
        raise CorruptError(f"{folder} holds number {number} of run {manifest.run_id}, expected run {run_id}")
    for name, entry in manifest.files.items():
        check_file(folder, name, entry)
    digest = snapshot_of(manifest) if isinstance(manifest, PolicyManifest) else digest_of(data)
    return _Whole(digest=digest, sent=ANNOUNCEMENT_FILE in manifest.files)


# --- tokens and gradients ---


def _tokens(run: _Run) -> Part:
    part = Part(name="tokens")
    receipts = {step: one for step in run.steps if (one := run.receipts.get(step, (None, None))[1]) is not None}
    total = sum(one.num_tokens for one in receipts.values())
    now = sum(one.num_proved_now for one in receipts.values())
    spots = [spot for one in receipts.values() for spot in one.spots]
    held = [spot for spot in spots if spot.failed_at is None and getattr(spot, spot.measure) <= spot.tolerance]
    failed = [(step, spot) for step, one in receipts.items() for spot in one.spots if spot not in held]
    in_spots = sum(spot.num_tokens for spot in held)
    part.facts = {
        "trained": total,
        "proved_at_lag_0": now,
        "proved_in_spots": in_spots,
        "spots": len(spots),
        "by_server": dict(sorted(Counter(f"{spot.server}" for spot in held).items())),
        "by_step": {step: [one.num_tokens, one.num_proved_now, _in_spots(one)] for step, one in receipts.items()},
        "by_adapter": dict(sorted(Counter(spot.adapter for spot in held).items())),
    }
    refused = {step: [_failed(step, spot) for spot in one.spots] for step, one in _refused(run).items()}
    stopped = [told for step, found in refused.items() if step not in receipts for told in found]
    part.broken = (_ended_by(run) or listed(stopped)) + listed([_failed(step, spot) for step, spot in failed])
    for step in sorted(refused.keys() & receipts.keys()):
        part.unproved.append(f"a proof failed before the step was tried again: {refused[step][0]}")
    if dropped := [rollout for one in receipts.values() for rollout in one.dropped]:
        part.facts["dropped"] = dropped
    if held:
        worst = max(held, key=lambda spot: getattr(spot, spot.measure) / max(spot.tolerance, 1e-300))
        part.facts["largest"] = msgspec.to_builtins(worst)
    if run.is_supervised:
        part.summary = f"{total:,} trained, which no server had sampled"
    elif receipts:
        later = total - now
        part.summary = (
            f"{total:,} trained: {now:,} ({share(now, total)}) proved by the step that trained them, at lag 0; of the "
            f"other {later:,}, {in_spots:,} ({share(in_spots, later)}) in {_num(len(held), 'spot proof')}"
        )
        if held:
            part.summary += f", at most {getattr(worst, worst.measure):.2g} nats off (allowed: {worst.tolerance:.2g})"
    else:
        part.summary = "none"
    if without := [step for step in run.steps if step not in receipts]:
        part.unproved.append(f"the trainer left no receipt of {_steps(without)}")
    why = _why(run) or ": the trainer had no such version any more, as after a resume"
    drawn = sum(one.num_unproved for one in receipts.values())
    if drawn:
        part.unproved.append(f"{_num(drawn, 'sample')} drawn for a proof could not be scored again{why}")
    # Of small batches samples are drawn in some steps alone.
    if total > now and not spots and not drawn and not run.is_supervised:
        part.unproved.append(f"no sample of lag 1 or more was scored again{_why(run)}")
    return part


def _ended_by(run: _Run) -> list[str]:
    """Returns the failed proof that has ended the run: its step changed nothing, and left no receipt."""
    found = [read(run.folder / "status" / f"{name}.json", ProgramStatus) for name in ("train", "orch")]
    messages = [one.message for one in found if one is not None and one.state == FAILED and one.message]
    start = f"{ProofFailed.__name__}: "
    return [f"the run has ended: {one.removeprefix(start)}" for one in messages if one.startswith(start)][:1]


def _refused(run: _Run) -> dict[int, Receipt]:
    """Returns the receipts of steps that were not applied, because a proof of them had failed."""
    read = [Receipt.from_json(path.read_bytes()) for path in sorted((run.folder / REFUSED).glob("step_*.json"))]
    return {one.step: one for one in read}


def _in_spots(receipt: Receipt) -> int:
    return sum(spot.num_tokens for spot in receipt.spots if spot.failed_at is None)


def _steps(steps: Sequence[int]) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {ranges(steps)}"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _failed(step: int, spot: SpotProof) -> str:
    """Returns a failed spot proof as text."""
    gap = f"{getattr(spot, spot.measure):.3g} nats ({spot.measure}) off, allowed are {spot.tolerance:.3g}"
    where = ""
    if spot.failed_at is not None:
        where = f", first at token {spot.failed_at}: trainer {spot.trained_logprob}, server {spot.served_logprob}"
    return f"step {step}: rollout {spot.rollout} of {spot.server} is not of version {spot.version}: {gap}{where}"


def _why(run: _Run) -> str:
    """Returns the reason why samples were not scored again, as far as settings tell it."""
    train = run.settings("train")
    if not train.get("proofs", {}).get("share", 1):
        return ": proofs.share is 0"
    if train.get("lora") is False:
        return ": all weights are trained (lora: false), and only the newest are kept"
    return ""


def _gradients(run: _Run) -> Part:
    part, gaps, again = Part(name="gradients"), dict[int, float](), list[int]()
    findings = {} if run.ledger is None else run.ledger.findings()
    for step in run.steps:
        expected, receipt = run.receipts.get(step, (None, None))
        kept = run.kept.get(step)
        if receipt is None or (kept is None and (expected is None or receipt.witness is None)):
            continue
        if (batch := _of_batch(run, step, receipt)) is not None:
            again.append(step)
        if expected is None or receipt.witness is None:
            assert kept is not None
            gaps[step] = gap = kept.gap if receipt.witness is None else kept_gap(kept, receipt.witness)
            if step in findings:
                part.broken.append(f"the gradients of step {step} are not those of its batch: {findings[step]}")
            elif not gap <= TOLERANCE:
                part.broken.append(f"the witness of step {step} is {gap:.3g} of its size off, as the ledger says")
            elif batch is not None and not (other := kept_gap(kept, batch.witness)) <= TOLERANCE:
                part.broken.append(
                    f"the witness in the gradient of step {step} is not that of the batch on disk: they differ by "
                    f"{other:.3g} of its size, allowed are {TOLERANCE:.2g}"
                )
            continue
        gaps[step] = gap = largest_gap(expected, receipt.witness)
        if batch is not None and not (other := largest_gap(batch.witness, expected)) <= SAME:
            part.broken.append(
                f"the ledger expects another witness of step {step} than the batch on disk gives: they differ by "
                f"{other:.3g} of its size"
            )
        if not gap <= TOLERANCE:
            part.broken.append(
                f"the witness in the gradient of step {step} differs from that of its batch by {gap:.3g} of its size, "
                f"allowed are {TOLERANCE:.2g}: {findings.get(step) or _explained(batch, receipt.witness)}"
            )
    part.facts = {"steps": len(run.steps), "gaps": gaps, "largest": max(gaps.values(), default=None), "again": again}
    right = sum(gap <= TOLERANCE for gap in gaps.values())
    part.broken = listed(part.broken)
    part.summary = f"{right:,} of {_num(len(run.steps), 'step')} bear the witness of just their batch"
    part.summary += f", at most {max(gaps.values()):.2g} of its size off" if gaps else ""
    part.summary += f"; {len(again):,} computed again from the batches on disk" if again else ""
    if without := [step for step in run.steps if step not in gaps]:
        part.unproved.append(f"there is no witness of {_steps(without)}")
    return part


def _of_batch(run: _Run, step: int, receipt: Receipt) -> Expectation | None:
    """Returns what the gradients of a step's batch must show, computed from that on disk without what the trainer has
    dropped; None where there is none, or one that is damaged, which another part of the page tells."""
    loss = run.settings("train").get("loss")
    if not loss or step not in steps_in(run.folder / "batches", part=STABLE):
        return None
    folder = step_folder(run.folder / "batches", step)
    found = _expectation(folder, _stamp(folder), run.file.run_id, step, msgspec.json.encode(loss))
    return None if found is None else (found.without(receipt.dropped) if receipt.dropped else found)


@lru_cache(maxsize=256)
def _expectation(folder: Path, _stamp: object, run_id: str, step: int, loss: bytes) -> Expectation | None:
    settings: Any = json.loads(loss, object_hook=lambda fields: SimpleNamespace(**fields))
    settings.trains_policy = settings.adv_tau or settings.teacher_tau or settings.kl_tau or settings.entropy_tau
    try:
        batches = StepStore(folder.parent, run_id=run_id).read(step, rank=0, num_ranks=1)
    except (TransportError, OSError):
        return None
    return None if batches is None else expected_witness(*unpacked(batches), settings, step=step)


def _explained(batch: Expectation | None, witness: Witness) -> str:
    return "other samples, or other weights of them" if batch is None else sentence(batch.explain(witness))


# --- rollouts, batches, code ---


def _rollouts(run: _Run) -> Part:
    part = Part(name="rollouts")
    if (ledger := run.ledger) is None:
        return part
    checks = check(run.folder, run.file, run.records, ledger, finished=run.state == FINISHED)
    fates = ledger.fates()
    states, dropped = Counter[str](), Counter[str]()
    for (state, reason), num in fates.items():
        states[state] += num
        dropped[str(reason)] += num if state == "dropped" else 0
    part.facts = {"states": dict(sorted(states.items())), "dropped": dict(sorted((+dropped).items())), "checks": checks}
    counted = ", ".join(f"{num:,} {state}" for state, num in sorted(states.items(), key=lambda one: -one[1]))
    violated = sum(map(bool, checks.values()))
    part.summary = f"{counted or 'none'}; {len(checks) - violated} of {len(checks)} checks hold"
    part.broken = [f"{name}: {one}" for name, found in checks.items() for one in found]
    return part


def _batches(run: _Run) -> Part:
    kept, broken = kept_folders(run.folder, run.file.run_id, "batches", BatchManifest)
    steps = run.receipts.keys() | set(run.steps)
    return Part(
        name="batches",
        summary=f"{len(kept):,} of {max(steps, default=0):,} on disk, as their manifests say",
        facts={"files": {step: one.digest for step, one in kept.items()}},
        broken=listed(broken),
    )


def _code(run: _Run) -> Part:
    programs, changes = run.file.programs, code_changes(run.file)
    recorded = {key: digest for one in programs.values() for key, digest in one.get("code", {}).items()}
    names = [*(key.partition(" ")[2] for key in recorded), *(name for found in changes.values() for name in found)]
    # Where the files lie on that machine is nobody's business.
    folders = [os.path.dirname(name) for name in names if os.path.isabs(name)]  # noqa: PTH117, PTH120
    above = f"{os.path.commonpath(folders)}/" if folders else "/"
    files = {key.replace(above, "", 1): digest for key, digest in recorded.items()}
    changed = {step: [name.removeprefix(above) for name in found] for step, found in changes.items()}
    base = programs.get("train", {}).get("base_model")
    libraries = {role: one.get("versions", {}) for role, one in sorted(programs.items())}
    part = Part(name="code", facts={"base_model": base, "libraries": libraries, "files": files, "changed": changed})
    versions = {f"{name} {version}" for one in libraries.values() for name, version in one.items()}
    shown = [name for name in sorted(versions) if name.startswith(("grpo", "torch ", "vllm"))]
    of_env = _num(len(files), "file") + " of the user" if files else "built-in environments"
    part.summary = f"{of_env}; {', '.join(shown) or 'libraries unknown'}; base model {base or 'unknown'}"
    for step, names_of in changed.items():
        part.unproved.append(f"changed after step {step}, so that the steps are not of one code: {', '.join(names_of)}")
    for key, digest in sorted(files.items()):
        if ":" not in digest or digest.startswith("unreadable"):
            part.unproved.append(f"{key} is known by {digest} alone")
    for env in orch_settings(run.file).get("env", []):
        if env.get("address"):
            part.unproved.append(
                f"environment {env.get('name') or env['address']} ran elsewhere, and its code is not known"
            )
    return part
