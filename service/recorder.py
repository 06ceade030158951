"""Writes each model's folder, `models/TENANT-SESSION-NUMBER`: a run of its own for the commands that look at runs, with
`run.json`, `metrics.jsonl` and `traces/`. What decides anything is in the command log; these files follow from it."""

import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from grpo.service.errors import Refused
from grpo.service.log import Answer, Command, CommandLog, Sample, StepRow, tokens_digest
from grpo.service.sampling import SampleRequest, read_sample
from grpo.service.steps import MAX_KEPT, Computed, Step, is_taught, values_of
from grpo.service.training import TrainedModel
from grpo.service.wire import Datum, sequences_of
from grpo.trainer.proofs import EAGER_STEPS, LEAST_DRAWN, MOST_STEPS, allowed, described
from grpo.transport.folders import step_folder, write_atomic
from grpo.transport.http import LoadReport
from grpo.transport.receipts import Receipt, SpotProof
from grpo.transport.records import Float32, Int32, Tolerance
from grpo.transport.run import KEY_FILE, RUN_FILE, RunFile
from grpo.transport.traces import (
    FOLDER,
    SCHEMA,
    VOCABULARY_FILE,
    make_table,
    token_key,
    trace_path,
    traced_steps,
    write_table,
)
from grpo.transport.weights.store import ADAPTER_FILE

log = logging.getLogger(__name__)

MODELS = "models"
METRICS_FILE = "metrics.jsonl"
STEP = "progress/step"
MISSING = "perf/missing_traces"
MAX_WAITING = 64
"""Traces that wait to be written."""
TRACE_BYTES = 200_000_000
"""Of one model's traces; the oldest are removed."""


class Proved(NamedTuple):
    """What the passes of a step prove of the samples in it."""

    num_tokens: int = 0
    """Tokens that the very weights had sampled by which they were computed."""
    spots: tuple[SpotProof, ...] = ()
    """Samples of earlier weights that were computed again."""
    versions: Mapping[str, int] = {}
    """The version that sampled a datum, by the datum's id."""


def model_folder(run: Path, model_id: str, tenant: str) -> Path:
    """Returns a model's folder. Example: `models/default-3f52ab01-0`"""
    session, _, number = model_id.partition(":train:")
    return run / MODELS / f"{tenant}-{session[:8]}-{number}"


class Recorder:
    """Tells of steps, in the thread that trains, and writes traces in a thread of its own."""

    def __init__(self, run: Path, commands: CommandLog, *, share: float) -> None:
        """`run` is the service's folder, `share` that of the samples that are computed again."""
        self._run, self._log, self._share = run, commands, share
        self._key = bytes.fromhex((run / KEY_FILE).read_text())
        self._made: dict[str, Path] = {}
        self._proved = Proved()
        self._writer, self._waiting = ThreadPoolExecutor(1, "traces"), deque[Future[None]]()
        self._sizes: dict[Path, dict[int, int]] = {}
        self._num_missing = Counter[str]()
        """Traces of each model that were not written, since the start."""

    def start(self, vocabulary: Callable[[], Sequence[str]]) -> None:
        """Completes what a killed service has left, and writes the text of each token id."""
        for model_id, tenant in self._log.tenants_of_models().items():
            if steps := self._log.steps(model_id):
                self._complete(self._folder(model_id, tenant), [(step, metrics) for step, _, _, metrics in steps])
        self._writer.submit(self._guarded, self._write_vocabulary, vocabulary)

    def close(self) -> None:
        """Returns once all is written."""
        self._writer.shutdown()

    # --- the end of a step ---

    def prove(self, command: Command, model: TrainedModel, *, again: bool) -> None:
        """Compares the log-probabilities of samples of ours with the trainer's, before the step that trains them: of
        all that the same weights have sampled with those of its passes, and of a share of the others, unless the step
        is done `again`, with those under the version that sampled them. Raises `Refused` for a sample that is not of
        its version."""
        now, versions, later = 0, dict[str, int](), list[_Later]()
        for part in model.computed:
            for datum, logprobs in zip(part.data, part.logprobs, strict=True):
                for sample in self._samples(command.target, datum):
                    if sample.version is None or (report := self._log.canary(sample.version)) is None:
                        continue
                    versions[datum.id] = sample.version
                    lag = self._log.lag(sample.version, command.target, int(datum.id.partition("/")[0]))
                    if lag:
                        later.append(_Later(sample.version, datum, sample, LoadReport.from_json(report.encode())))
                    elif lag == 0:
                        _hold(_spot(datum, logprobs, sample, LoadReport.from_json(report.encode())))
                        now += sample.num_tokens
        drawn = [] if again else self._drawn(command, later)
        spots = []
        for version in sorted({one.version for one in drawn}):
            of_version = [one for one in drawn if one.version == version]
            found = model.logprobs_under(self._adapter(version), [one.datum for one in of_version])
            spots += [_spot(one.datum, found[at], one.sample, one.report) for at, one in enumerate(of_version)]
        for spot in spots:
            _hold(spot)
        self._proved = Proved(now, tuple(spots), versions)

    def _adapter(self, version: int) -> Path:
        return step_folder(self._run / "broadcasts", version) / ADAPTER_FILE

    def _drawn(self, command: Command, later: Sequence["_Later"]) -> list["_Later"]:
        """Returns `proofs.share` of the samples of earlier weights, by a keyed hash that no server can foresee; two at
        least in each of a model's first steps, and in one of `MOST_STEPS` later ones."""

        def drawn(text: str) -> float:
            digest = hashlib.blake2b(f"{command.target}/{text}".encode(), digest_size=7, key=self._key).digest()
            return int.from_bytes(digest) / 2**56

        there = [one for one in later if self._adapter(one.version).exists()]
        in_order = sorted(there, key=lambda one: drawn(one.datum.id))
        num = sum(drawn(one.datum.id) < self._share for one in there)
        before = self._log.last_step(command.target)
        if self._share and (before is None or before[0] < EAGER_STEPS or drawn(f"{command.seq}") < 1 / MOST_STEPS):
            num = max(num, LEAST_DRAWN)
        return in_order[:num]

    def _samples(self, target: str, datum: Datum) -> Sequence[Sample]:
        """Returns the sample of ours that the datum is, with its log-probabilities; none where it is none. Of equal
        ones, such as short answers of models that have not learned yet, it is one of this model."""
        if "logprobs" not in datum.inputs:
            return []
        ids = np.append(datum.token_ids, datum.targets[-1:]).astype("<i4").tobytes()
        served = datum.inputs["logprobs"].astype("<f4")
        found = (one for one in self._log.sample(tokens_digest(ids), target) if 0 < one.num_tokens <= len(served))
        return [one for one in found if tokens_digest(served[-one.num_tokens :].tobytes()) == one.logprobs][:1]

    def row(self, command: Command, model: TrainedModel | None, answer: Answer) -> StepRow | None:
        """Returns what the log is to keep of the end of a command, an `optim_step` that has used up its gradients."""
        if command.kind != "optim_step" or model is None:
            return None
        if answer.state != "done":
            return None if model.has_gradients else StepRow(step=None)
        if (step := model.last_step) is None:
            return None
        before, now_s = self._log.last_step(command.target), time.time()
        number = before[0] + 1 if before is not None else 1
        since_s = before[1] if before is not None else self._log.created_at(command.target)
        metrics = {STEP: number, **step.metrics(), "time/step_s": now_s - since_s}
        if self._proved.versions:
            metrics["proofs/tokens_now"] = self._proved.num_tokens
            metrics["proofs/tokens"] = sum(spot.num_tokens for spot in self._proved.spots)
        if missing := self._num_missing[command.target]:
            metrics[MISSING] = missing
        receipt = Receipt(
            step=number,
            num_tokens=step.num_tokens,
            num_proved_now=self._proved.num_tokens,
            witness=step.witness,
            spots=self._proved.spots,
        )
        return StepRow(
            step=number,
            metrics=json.dumps(metrics),
            expected=step.expected.to_json().decode(),
            receipt=receipt.to_json().decode(),
        )

    def stepped(self, command: Command, model: TrainedModel, row: StepRow | None) -> None:
        """Writes the metrics of a step that is in the log as `row`, and its trace; only a missing trace for a step that
        is done again (None)."""
        step, model.last_step = model.last_step, None
        if step is None or (number := row.step if row else self._number(command)) is None:
            return
        folder, versions = self._folder(command.target, command.tenant), self._proved.versions
        try:
            if row is not None:
                with (folder / METRICS_FILE).open("a") as file:
                    file.write(f"{row.metrics}\n")
        except OSError as error:
            log.warning("%s is not written, and will be at the next start: %s", folder / METRICS_FILE, error)
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if row is None and trace_path(folder, number).exists():
            return
        if len(self._waiting) >= MAX_WAITING:
            self._num_missing[command.target] += 1
            return
        self._waiting.append(self._writer.submit(self._trace, command, folder, number, step, versions))

    def _number(self, command: Command) -> int | None:
        found = self._log.last_step(command.target, seq=command.seq)
        return None if found is None else found[0]

    # --- files ---

    def _folder(self, model_id: str, tenant: str) -> Path:
        """Returns the model's folder, made where it is not there."""
        if (folder := self._made.get(model_id)) is None:
            folder = self._made[model_id] = model_folder(self._run, model_id, tenant)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / RUN_FILE).exists():
                about = {"tenant": tenant, "model": model_id, "settings": self._log.model(model_id, tenant)}
                created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                run = RunFile(run_id=model_id, created=created, programs={"service": about})
                write_atomic(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(run), indent=1), private=True)
        return folder

    def _complete(self, folder: Path, steps: Sequence[tuple[int, str]]) -> None:
        """Writes `metrics.jsonl` anew where it is not just the lines of these steps, as after a kill."""
        lines = "".join(f"{metrics}\n" for _, metrics in steps).encode()
        path = folder / METRICS_FILE
        if not path.exists() or path.read_bytes() != lines:
            write_atomic(path, lines)

    def _trace(self, command: Command, *arguments: Any) -> None:
        if not self._guarded(self._write_trace, command, *arguments):
            self._num_missing[command.target] += 1

    def _guarded(self, write: Callable[..., None], *arguments: Any) -> bool:
        """Returns whether it was written."""
        try:
            write(*arguments)
        except Exception as error:  # nobody's step may fail for it
            log.warning("a trace is missing: %s: %s", type(error).__name__, error)
            return False
        return True

    def _write_vocabulary(self, vocabulary: Callable[[], Sequence[str]]) -> None:
        path = self._run / FOLDER / VOCABULARY_FILE
        if not path.exists():
            texts = vocabulary()
            ids = pa.array(range(len(texts)), pa.int32())
            write_table(pa.table({"id": ids, "text": pa.array(texts, pa.string())}), path)

    def _write_trace(
        self, command: Command, folder: Path, number: int, step: Step, versions: Mapping[str, int]
    ) -> None:
        rows = [
            _row(number, part, datum, logprobs, versions.get(datum.id))
            for part in step.parts
            for datum, logprobs in zip(part.data, part.logprobs, strict=True)
        ]
        rows += self._untrained(command, number, {row["key"] for row in rows})
        path, own = trace_path(folder, number), folder / FOLDER / VOCABULARY_FILE
        write_table(make_table(rows, SCHEMA), path)
        if not own.exists() and (self._run / FOLDER / VOCABULARY_FILE).exists():
            own.hardlink_to(self._run / FOLDER / VOCABULARY_FILE)
        if (sizes := self._sizes.get(folder)) is None:
            there = traced_steps(folder)
            sizes = self._sizes[folder] = {one: trace_path(folder, one).stat().st_size for one in there}
        sizes[number] = path.stat().st_size
        while len(sizes) > 1 and sum(sizes.values()) > TRACE_BYTES:
            sizes.pop(oldest := min(sizes))
            trace_path(folder, oldest).unlink(missing_ok=True)

    def _untrained(self, command: Command, number: int, trained: Set[int]) -> list[dict[str, Any]]:
        """Returns the rows of what was sampled from the model since the step before, and is none of this step's datums,
        by their `trained` keys."""
        rows, num_tokens = list[dict[str, Any]](), 0
        for request_id, body, answer, version in self._log.sampled(command.target, command.seq):
            asked = read_sample(body)
            for index, (tokens, logprobs) in enumerate(sequences_of(answer)):
                row = _sample_row(number, request_id, index, asked, tokens, logprobs, version)
                num_tokens += len(row["token_ids"])
                if row["key"] not in trained and len(tokens) and num_tokens <= MAX_KEPT:
                    rows.append(row)
        return rows


class _Later(NamedTuple):
    """A sample of weights that have changed since."""

    version: int
    datum: Datum
    sample: Sample
    report: LoadReport


def _spot(datum: Datum, logprobs: Float32, sample: Sample, report: LoadReport) -> SpotProof:
    """Returns how far the trainer's log-probabilities [K] are from the server's, with the token that differs most where
    that is too far."""
    num, canary = sample.num_tokens, report.canary
    served = datum.inputs["logprobs"][-num:]
    gaps = np.abs(logprobs[-num:].astype(np.float64) - served)
    limit = allowed(Tolerance(gap=canary.tolerance, measure=canary.measure), num)
    largest, mean, at = float(gaps.max()), float(gaps.mean()), int(gaps.argmax())
    spot = SpotProof(
        rollout=datum.id,
        server="grpo-infer",
        version=report.version,
        num_tokens=num,
        max_abs=largest,
        mean_abs=mean,
        tolerance=limit,
        measure=canary.measure,
    )
    if (largest if canary.measure == "max_abs" else mean) <= limit:
        return spot
    trained, own = float(logprobs[-num:][at]), float(served[at])
    place = len(logprobs) - num + 1 + at
    return msgspec.structs.replace(spot, failed_at=place, trained_logprob=trained, served_logprob=own)


def _hold(spot: SpotProof) -> None:
    """Raises `Refused` for a proof that does not hold."""
    if spot.failed_at is not None:
        raise Refused(
            f"{described(spot)} (the rollout is seq_id/number of the datum). The gradient was dropped, and the weights "
            "are as before; this is a fault of the service or its server, none of yours"
        )


def _row(number: int, part: Computed, datum: Datum, logprobs: Float32, version: int | None) -> dict[str, Any]:
    """Returns a datum as a row of the trace. Values of a target stand at its place in the sequence, one after that of
    the token before it; where a target is no context, it is what is shown there."""
    request, number_of = datum.id.split("/")
    if datum.candidates > 1:  # the first of each token's stands for all
        first = slice(None, None, datum.candidates)
        inputs = {name: values[first] for name, values in datum.inputs.items()}
        datum, logprobs = replace(datum, targets=datum.targets[first], candidates=1, inputs=inputs), logprobs[first]
    mask, values = is_taught(datum), values_of(datum.inputs)
    ids = np.append(datum.token_ids, datum.targets[-1:])
    ids[1:][mask] = datum.targets[mask]
    served, count = datum.inputs.get("logprobs"), max(1, int(mask.sum()))
    log_ratio = (logprobs - served)[mask] if served is not None else np.zeros(0, np.float32)

    def placed(array: Any, dtype: Any) -> Any:
        return np.concatenate([np.zeros(1, dtype), np.where(mask, array, 0).astype(dtype)])

    return {
        "step": number,
        "group": int(request),
        "rollout": datum.id,
        "row": 0,
        "env": part.loss_fn,
        "example": int(number_of),
        "trained": True,
        "rewards": "{}",
        "measures": json.dumps({"logprob_mean": float(logprobs[mask].sum()) / count}),
        "advantage": float(values[mask].sum()) / count,
        "num_tokens": int(mask.sum()),
        "max_log_ratio": float(log_ratio[np.abs(log_ratio).argmax()]) if log_ratio.size else None,
        "num_masked": 0,
        "temperature": 1.0 if served is not None else None,
        "messages": "[]",
        "key": token_key(ids),
        "token_ids": ids,
        "loss_mask": placed(mask, np.bool_),
        "versions": np.full(len(ids), -1 if version is None else version, np.int32),
        "logprobs": placed(logprobs if served is None else served, np.float32),
        "advantages": placed(values, np.float32),
        "trainer_logprobs": placed(logprobs, np.float32),
        "masked": np.zeros(len(ids), np.int8),
    }


def _sample_row(
    number: int,
    request_id: str,
    index: int,
    asked: SampleRequest,
    tokens: Int32,
    logprobs: Float32,
    version: int,
) -> dict[str, Any]:
    """Returns an answer that was not trained as a row of the trace of the step after it."""
    ids = np.append(np.array(asked.token_ids, np.int32), tokens)
    before, (_, _, name) = np.zeros(len(ids) - len(tokens), np.float32), request_id.partition(":")
    return {
        "step": number,
        "group": int(name.rpartition(":")[2]),
        "rollout": f"{name}/{index}",
        "row": 0,
        "env": "sample",
        "example": index,
        "trained": False,
        "drop_reason": "not among the step's datums",
        "rewards": "{}",
        "measures": json.dumps({"logprob_mean": float(logprobs.sum()) / max(1, len(tokens))}),
        "num_tokens": len(tokens),
        "num_masked": 0,
        "temperature": asked.sampling_params.temperature,
        "messages": "[]",
        "key": token_key(ids),
        "token_ids": ids,
        "loss_mask": np.append(before, np.ones_like(logprobs)).astype(np.bool_),
        "versions": np.full(len(ids), version, np.int32),
        "logprobs": np.append(before, logprobs),
        "advantages": np.zeros(len(ids), np.float32),
        "masked": np.zeros(len(ids), np.int8),
    }
