"""The witness in the gradient: what the trainer's real passes leave there, against what the orchestrator expects of the
samples before they are packed."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import PRESETS, LossSettings
from grpo.orchestrator.witness import TOLERANCE, Expectation, differs, expected_witness, kept_gap, kept_of, placed
from grpo.trainer import objective as objectives
from grpo.trainer.batch import by_signal
from grpo.trainer.distributed import ONE
from grpo.trainer.metrics import numbers_of
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective
from grpo.transport.receipts import RECEIPT_FILE, Receipt, Witness
from grpo.transport.records import MicroBatch, TrainingSample
from msgspec.structs import replace

from benchmarks.seam.silent_faults import Patch, by_name
from tests.trainer.bench import Bench
from tests.trainer.forked import run_ranks
from tests.trainer.models import save_tiny_model, tiny_policy
from tests.trainer.witness_cases import LOSS, OPTIONS, PAIRS, found, packed, samples, worker


def expected(
    chosen: Sequence[TrainingSample], loss: LossSettings, batches: Sequence[Sequence[MicroBatch]], *, step: int = 1
) -> Expectation:
    pairs = [pair for of_rank in batches for batch in of_rank for pair in batch.pairs]
    return with_fields(expected_witness(chosen, pairs, loss, step=step), places=placed(batches))


def gap(expectation: Expectation, witness: Witness) -> float:
    """The largest difference, as a share of the largest that rounding may make."""
    one, other = expectation.witness, witness
    gaps = [np.subtract(one.presence, other.presence), np.subtract(one.content, other.content)]
    sizes = one.presence_size, one.content_size
    return max(float(np.abs(own).max()) / (TOLERANCE * size) for own, size in zip(gaps, sizes, strict=True) if size)


def in_64_bytes(expectation: Expectation, witness: Witness) -> bool:
    """Whether what a ledger keeps of a witness tells the expected one from this one."""
    right = Witness(presence=expectation.witness.presence, content=expectation.witness.content)
    kept = kept_of(expectation.witness, right)
    assert len(kept.components) == 64
    assert kept_gap(kept, right) < TOLERANCE / 16
    return not kept_gap(kept, witness) <= TOLERANCE


def differ_after_two_steps(bench: Bench) -> list[bool]:
    """Trains two steps, and returns for each whether its receipt's witness is another than the expected one."""
    steps = [[replace(one, teacher_logprobs=None) for one in samples(12, step=step)] for step in (1, 2)]
    for step, chosen in enumerate(steps, start=1):
        bench.send(step, *packed(chosen, step=step)[0])
    bench.channel.finish(2)
    bench.trainer.train()
    bench.trainer.close()
    found = list[bool]()
    for step, chosen in enumerate(steps, start=1):
        expectation = expected(chosen, bench.settings.loss, packed(chosen, step=step), step=step)
        witness = Receipt.from_json(bench.files(step)[RECEIPT_FILE]).witness
        assert witness is not None
        found.append(bool(differs(expectation.witness, witness)))
    return found


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    return tiny_policy(tiny_model)


SETTINGS = {
    **{name: {"name": name} for name in PRESETS},
    "sequence": {"normaliser": "sequence"},
    "constant": {"normaliser": "constant", "constant_tokens": 7},
    "teacher and entropy": {"teacher_tau": 0.3, "entropy_tau": 0.1},
    "no advantage": {"adv_tau": 0.0, "kl_tau": 0.5},
    "hints and pairs": {"alpha_sdpo": 0.5, "beta_replay": 0.2, "sdpo": {"warmup_steps": 3, "teacher": "ema"}},
    "hints alone": {"adv_tau": 0.0, "alpha_sdpo": 0.5},
    "hints that have ended": {"alpha_sdpo": 0.5, "beta_replay": 0.2, "sdpo": {"decay_steps": 1}},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [100, 1])
def test_the_gradient_has_the_witness_of_the_samples(policy: Policy, name: str, size: int) -> None:
    loss = LossSettings.model_validate(SETTINGS[name])
    chosen = samples(hints=bool(loss.alpha_sdpo))
    if not loss.teacher_tau:
        chosen = [replace(one, teacher_logprobs=None) for one in chosen]
    step = 2
    batches = packed(chosen, pairs=PAIRS if loss.beta_replay else (), step=step)
    expectation = expected(chosen, loss, batches, step=step)
    assert expectation.witness.presence_size > 0
    witness = found(policy, batches[0], loss, size=size)
    assert not differs(expectation.witness, witness)
    assert expectation.explain(witness) == []
    assert gap(expectation, witness) < 0.5


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_samples_that_teach_nothing_and_are_not_computed_count_too(policy: Policy, normaliser: str) -> None:
    loss = LossSettings.model_validate({"normaliser": normaliser, "silent_share": 0.1})
    chosen = [replace(one, teacher_logprobs=None) for one in samples()]
    chosen = [replace(one, advantages=0 * one.advantages) if number % 4 else one
              for number, one in enumerate(chosen)]  # fmt: skip
    batches = packed(chosen)
    assert by_signal(batches[0], loss).skipped
    expectation = expected(chosen, loss, batches)
    assert expectation.explain(found(policy, batches[0], loss)) == []


def test_the_witness_changes_no_gradient_by_a_bit(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    chosen = samples(hints=True)
    batches = packed(chosen, pairs=PAIRS)[0]

    def gradients() -> list[torch.Tensor]:
        for parameter in policy.parameters:
            parameter.grad = None
        objective = Objective(policy, LOSS, ONE, pack_tokens=48)
        objective.accumulate(batches, step=1)
        policy.witness.zeros.grad = None
        return [parameter.grad.clone() for parameter in policy.parameters if parameter.grad is not None]

    with_witness = gradients()
    monkeypatch.setattr(type(policy.witness), "forward", lambda self, sums: torch.zeros(()))
    assert all(torch.equal(one, other) for one, other in zip(with_witness, gradients(), strict=True))
    assert len(with_witness) == len(policy.parameters)


def test_several_optimizer_steps_epochs_and_a_loss_of_ones_own_leave_the_batchs_witness(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def loss(tokens):\n    return -tokens.advantages * tokens.logprobs\n")
    loss = {"import_path": f"{tmp_path}/own.py:loss", "normaliser": "sequence"}
    more = {"gradient_accumulation_steps": 2, "ppo_epochs": 3, "max_steps": 2, "learning_rate": 1e-4}
    bench = Bench(tiny_model, tmp_path, loss=loss, **more)
    assert differ_after_two_steps(bench) == [False, False]
    assert RECEIPT_FILE not in bench.files(0)


# --- faults ---

Change = Callable[[list[MicroBatch]], list[MicroBatch]]


def _rows(batch: MicroBatch, sample: int) -> slice:
    start = int(batch.starts[sample])
    return slice(start, start + int(batch.sequence_lengths[sample]))


def _of(batch: MicroBatch, chosen: Sequence[int]) -> MicroBatch:
    rows = np.concatenate([np.arange(len(batch.token_ids))[_rows(batch, sample)] for sample in chosen])
    streams = ("token_ids", "loss_mask", "inference_logprobs", "advantages", "temperatures")
    taken: dict[str, Any] = {name: batch.per_token(getattr(batch, name))[rows] for name in streams}
    return replace(
        batch,
        sequence_lengths=batch.sequence_lengths[list(chosen)],
        rollout_ids=tuple(batch.rollout_ids[sample] for sample in chosen),
        envs=tuple(batch.envs[sample] for sample in chosen),
        version_runs=np.array([[0, len(rows)]], np.int32),
        **taken,
    )


def _place(batches: Sequence[MicroBatch], rollout: str) -> tuple[int, int]:
    return next((n, one.rollout_ids.index(rollout)) for n, one in enumerate(batches) if rollout in one.rollout_ids)


def _missing(batches: list[MicroBatch]) -> list[MicroBatch]:
    n, sample = _place(batches, "12/1")
    batches[n] = _of(batches[n], [s for s in range(len(batches[n].rollout_ids)) if s != sample])
    return batches


def _twice(batches: list[MicroBatch]) -> list[MicroBatch]:
    n, sample = _place(batches, "12/1")
    batches[n] = _of(batches[n], [*range(len(batches[n].rollout_ids)), sample])
    return batches


def _cut(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Its last three tokens carry no loss any more."""
    n, sample = _place(batches, "12/1")
    mask = batches[n].loss_mask.copy()
    mask[_rows(batches[n], sample)][-3:] = False
    batches[n] = replace(batches[n], loss_mask=mask)
    return batches


def _of_another_batch(batches: list[MicroBatch]) -> list[MicroBatch]:
    n, sample = _place(batches, "12/1")
    ids = [*batches[n].rollout_ids]
    ids[sample] = "77/3"
    batches[n] = replace(batches[n], rollout_ids=tuple(ids))
    return batches


def _exchanged(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The tokens of two samples of equal length, of two groups."""
    (n, one), (m, other) = _place(batches, "11/0"), _place(batches, "13/1")
    first, second = batches[n].token_ids.copy(), batches[m].token_ids.copy()
    if n == m:
        second = first
    rows, theirs = _rows(batches[n], one), _rows(batches[m], other)
    first[rows], second[theirs] = second[theirs].copy(), first[rows].copy()
    batches[n] = replace(batches[n], token_ids=first)
    batches[m] = replace(batches[m], token_ids=second)
    return batches


def _shifted(batches: list[MicroBatch]) -> list[MicroBatch]:
    n, sample = _place(batches, "12/1")
    mask = batches[n].loss_mask.copy()
    rows = _rows(batches[n], sample)
    mask[rows] = np.append(mask[rows][1:], mask[rows][0])
    batches[n] = replace(batches[n], loss_mask=mask)
    return batches


def _neighbours_advantage(batches: list[MicroBatch]) -> list[MicroBatch]:
    n, sample = _place(batches, "12/1")
    advantages = batches[n].per_token(batches[n].advantages).copy()
    advantages[_rows(batches[n], sample)] = 1.25
    batches[n] = replace(batches[n], advantages=advantages)
    return batches


def _retokenised(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The prompt's last token, before the first loss token, is another."""
    n, sample = _place(batches, "12/1")
    ids = batches[n].token_ids.copy()
    ids[_rows(batches[n], sample)][3] ^= 1
    batches[n] = replace(batches[n], token_ids=ids)
    return batches


@pytest.mark.parametrize(("num", "normaliser"), [(240, "token"), (12, "sequence"), (12, "constant")])
@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (_missing, {("missing", "rollout 12/1")}),
        (_twice, {("repeated", "rollout 12/1")}),
        (_cut, {("weighted", "rollout 12/1")}),
        (_of_another_batch, {("missing", "rollout 12/1"), ("unknown", "rollout 77/3")}),
        (_exchanged, {("content", "rollout 11/0"), ("content", "rollout 13/1")}),
        (_shifted, {("content", "rollout 12/1")}),
        (_neighbours_advantage, {("content", "rollout 12/1")}),
        (_retokenised, {("content", "rollout 12/1")}),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else "",
)
def test_a_fault_is_found_and_its_sample_named(
    policy: Policy, change: Change, findings: set[tuple[str, str]], normaliser: str, num: int
) -> None:
    loss = LossSettings.model_validate({"normaliser": normaliser})
    chosen = [replace(one, teacher_logprobs=None) for one in samples(num)]
    lengths = {one.rollout_id: len(one.token_ids) for one in chosen}
    assert lengths["11/0"] == lengths["13/1"]
    batches = packed(chosen)
    expectation = expected(chosen, loss, batches)
    witness = found(policy, change(list(batches[0])), loss)
    assert differs(expectation.witness, witness)
    assert in_64_bytes(expectation, witness)
    named = {(one.kind, one.who) for one in expectation.explain(witness, others=["77/2", "77/3"])}
    if change is _cut and normaliser == "sequence":  # where the mean is of fewer tokens, and each counts more
        findings = {("content", "rollout 12/1")}
    assert {one for one in named if one[1] != "all others"} == findings


def test_one_token_of_the_batch_is_seen(policy: Policy) -> None:
    loss, chosen = LossSettings(), [replace(one, teacher_logprobs=None) for one in samples(400)]
    batches = packed(chosen)
    expectation = expected(chosen, loss, batches)
    last = batches[0][-1]
    ids = last.token_ids.copy()
    with_advantage = last.loss_mask & (last.per_token(last.advantages) != 0)
    ids[np.flatnonzero(with_advantage)[0]] ^= 1
    witness = found(policy, [*batches[0][:-1], replace(last, token_ids=ids)], loss)
    assert differs(expectation.witness, witness)
    assert in_64_bytes(expectation, witness)


def test_a_micro_batch_that_is_dropped_or_overwritten_is_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LossSettings.model_validate({"normaliser": "sequence"})
    chosen = [replace(one, teacher_logprobs=None, advantages=1.0) for one in samples(240)]
    batches = packed(chosen)
    expectation = expected(chosen, loss, batches)
    [finding, rest] = expectation.explain(found(policy, batches[0][1:], loss))
    assert (finding.kind, finding.who) == ("missing", "micro-batch 0 of rank 0")
    assert (rest.who, rest.factor) == ("all others", pytest.approx(240 / (240 - len(batches[0][0].rollout_ids))))

    real = policy.sync_gradients

    def reset(*, last: bool) -> None:
        """Clears what the passes before the last one have accumulated."""
        if last:
            for parameter in (*policy.parameters, policy.witness.zeros):
                parameter.grad = None
        real(last=last)

    monkeypatch.setattr(policy, "sync_gradients", reset)
    reset_witness = found(policy, batches[0], loss)
    assert in_64_bytes(expectation, reset_witness)
    findings = expectation.explain(reset_witness)
    assert {one.who for one in findings if one.kind == "missing"} == {
        f"micro-batch {n} of rank 0" for n in range(len(batches[0]) - 1)
    }


def test_a_wrong_weight_is_named_with_its_size(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = LossSettings()
    chosen = [replace(one, teacher_logprobs=None, advantages=1.0) for one in samples(4)]
    batches = packed(chosen)
    expectation = expected(chosen, loss, batches)
    real = objectives.token_weights

    def wrong(tokens: Any, *rest: Any) -> torch.Tensor:
        return real(tokens, *rest) * torch.where(tokens.sample_ids == 1, 3.5, 1.0)

    monkeypatch.setattr(objectives, "token_weights", wrong)
    [finding] = expectation.explain(found(policy, batches[0], loss))
    assert (finding.kind, finding.who) == ("weighted", f"rollout {batches[0][0].rollout_ids[1]}")
    assert finding.factor == pytest.approx(3.5, rel=1e-3)
    monkeypatch.setattr(objectives, "token_weights", lambda *of: real(*of) / 2)
    [finding] = expectation.explain(found(policy, batches[0], loss))
    assert (finding.kind, finding.who, finding.factor) == ("weighted", "the whole batch", pytest.approx(0.5))


# --- ranks ---


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Witness]:
    folder = tmp_path_factory.mktemp("ranks")
    model = save_tiny_model(folder / "model", tie_word_embeddings=True)
    run_ranks(worker, model, folder, num_ranks=2)
    return {name: Witness.from_json(data) for name, data in json.loads((folder / "witnesses.json").read_text()).items()}


def of_two_ranks(*, adapters: int = 1) -> Expectation:
    chosen = samples(12, hints=True, adapters=adapters)
    pairs = [replace(pair, adapter=number % adapters) for number, pair in enumerate(PAIRS)]
    return expected(chosen, LOSS, packed(chosen, pairs=pairs, num_ranks=2))


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_sum_the_witness_at_every_level_of_sharding(of_ranks: dict[str, Witness], name: str) -> None:
    expectation = of_two_ranks(adapters=2 if name == "several adapters" else 1)
    parts = packed(samples(12, hints=True), pairs=PAIRS, num_ranks=2)
    assert LOSS.silent_share < 1
    assert any(by_signal(part, LOSS).skipped for part in parts)  # samples that teach nothing are left out
    for case in (name, f"{name}, an optimizer step a micro-batch"):
        assert not differs(expectation.witness, of_ranks[case]), case


def test_what_ranks_do_wrong_is_named(of_ranks: dict[str, Witness]) -> None:
    expectation = of_two_ranks()
    assert all(
        in_64_bytes(expectation, of_ranks[name]) for name in ("reduced twice", "not reduced", "a micro-batch dropped")
    )
    [twice] = expectation.explain(of_ranks["reduced twice"])
    assert (twice.kind, twice.who, twice.factor) == ("repeated", "the whole batch", pytest.approx(2))
    alone = expectation.explain(of_ranks["not reduced"])
    assert ("missing", "rank 1") in {(one.kind, one.who) for one in alone}
    dropped = expectation.explain(of_ranks["a micro-batch dropped"])
    assert ("missing", "micro-batch 0 of rank 1") in {(one.kind, one.who) for one in dropped}


def test_many_samples_with_other_advantages_are_all_there(policy: Policy) -> None:
    chosen = [replace(one, teacher_logprobs=None) for one in samples(80)]
    shifted = [replace(one, advantages=1.5) for one in chosen]
    expectation = expected(chosen, LossSettings(), packed(chosen))
    witness = found(policy, packed(shifted)[0], LossSettings())
    [finding] = expectation.explain(witness)
    assert finding.kind == "content"
    assert in_64_bytes(expectation, witness)


def break_by(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies a fault of the benchmark's within a test."""
    patch: Patch
    for patch in by_name()[fault].patches:
        owner, name = patch.place(importlib.import_module(patch.module))
        monkeypatch.setattr(owner, name, patch.make(getattr(owner, name)))
        if hasattr(objectives, name):
            monkeypatch.setattr(objectives, name, getattr(owner, name))


@pytest.mark.parametrize(
    ("fault", "wrong_steps"), [("accumulation-reset", [1, 2]), ("gradients-of-before", [2]), ("loss-negated", [])]
)
def test_what_happens_to_the_gradients_happens_to_the_witness(
    fault: str,
    wrong_steps: list[int],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_by(fault, monkeypatch)
    found = differ_after_two_steps(Bench(tiny_model, tmp_path, max_steps=2, learning_rate=1e-4))
    assert found == [step in wrong_steps for step in (1, 2)]
    # The witness is a term beside the loss: whose sign is seen by its own gradient.
    assert ("policy/slope" in caplog.text) == (fault == "loss-negated")


@pytest.mark.parametrize("name", SETTINGS)
def test_the_losss_own_gradient_is_what_its_coefficients_say(policy: Policy, name: str) -> None:
    loss = LossSettings.model_validate(SETTINGS[name])
    chosen = samples(hints=bool(loss.alpha_sdpo))
    if not loss.teacher_tau:
        chosen = [replace(one, teacher_logprobs=None) for one in chosen]
    objective = Objective(policy, loss, ONE, pack_tokens=48)
    states = objective.accumulate(packed(chosen, pairs=PAIRS if loss.beta_replay else ())[0], step=1)
    for parameter in (*policy.parameters, policy.witness.zeros):
        parameter.grad = None
    if loss.trains_policy:
        assert numbers_of(states)["policy/slope"] == pytest.approx(1, abs=1e-5)
