"""Spot proofs: samples that are scored again under the version that their records name."""

import json
import os
import stat
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.checkpoint import CheckpointStore
from grpo.trainer.distributed import join_group, leave_group, local_tensor
from grpo.trainer.noise import NormNoise, with_noise
from grpo.trainer.packing import packed_tokens
from grpo.trainer.past import PastVersions
from grpo.trainer.proofs import KEY_FILE, Candidate, Drawn, Proofs, allowed, chosen
from grpo.transport.errors import ProofFailed
from grpo.transport.receipts import Receipt
from grpo.transport.records import MicroBatch, Tolerance
from grpo.transport.run import RunFolder
from msgspec.structs import replace

from tests.trainer.bench import UNMASKED, Bench
from tests.trainer.forked import run_ranks
from tests.trainer.models import CPU, files_of, tiny_batch, tiny_policy, tiny_settings

SERVER = "http://one"
EXACT = {SERVER: Tolerance(gap=1e-4, measure="max_abs")}
LENGTHS = (6, 9, 7, 8)


class Steps(Bench):
    """A trainer whose batches a perfect server samples from its versions."""

    def __init__(self, folder: Path, tmp_path: Path, **changes: Any) -> None:
        super().__init__(folder, tmp_path, **({"loss": UNMASKED} | changes))
        self.step = self.trainer.begin(None)
        self.seeds = count()

    def sampled(self, *, lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> MicroBatch:
        """A batch of the newest version, with its noise."""
        batch = tiny_batch(lengths, seed=next(self.seeds))
        names = {"servers": (SERVER,) * len(lengths), "tolerances": EXACT}
        runs = np.array([[self.step, sum(lengths)]], np.int32)
        return self.scored(replace(batch, **(names | {"version_runs": runs} | changes)))

    def scored(self, batch: MicroBatch) -> MicroBatch:
        publishing, logprobs = self.trainer._publishing, np.zeros(len(batch.token_ids), np.float32)
        weights = publishing.noise.weights(self.step)
        with torch.no_grad(), with_noise(publishing.norms if weights else {}, weights):
            logprobs[batch.loss_mask] = self.policy.logprobs(packed_tokens(batch, CPU)).numpy()
        return replace(batch, inference_logprobs=logprobs)

    def take(self, *batches: MicroBatch) -> Receipt:
        self.step += 1
        batches = tuple(replace(one, step=self.step, index=n) for n, one in enumerate(batches))
        self.trainer.update(self.step, batches)
        self.trainer.publish(self.step)
        self.trainer._publishing.flush()
        return Receipt.from_json(self.files(self.step)["receipt.json"])


def faked(batch: MicroBatch, sample: int = 0, by: float = 0.5) -> MicroBatch:
    """The batch with one sample's last token told otherwise than its version would."""
    logprobs = batch.inference_logprobs.copy()
    logprobs[batch.starts[sample] + batch.sequence_lengths[sample] - 1] -= by
    return replace(batch, inference_logprobs=logprobs)


def test_tokens_of_the_current_version_are_all_proved_and_older_ones_by_samples(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = Steps(tiny_model, tmp_path, learning_rate=0.05)
    older = steps.sampled()
    first = steps.take(steps.sampled())
    assert (first.num_tokens, first.num_proved_now, first.spots) == (26, 26, ())
    second = steps.take(older, steps.sampled())
    assert second.num_proved_now == 26
    assert [(one.version, one.server, one.failed_at) for one in second.spots] == [(0, SERVER, None)] * 2
    assert all(one.max_abs < 1e-5 for one in second.spots)
    metrics = steps.metrics(2)
    assert metrics["proofs/tokens"] == sum(one.num_tokens for one in second.spots)
    assert metrics["policy/moved_kl_lag1"] == pytest.approx(second.moved["1"])
    assert 0 < metrics["policy/moved_kl_lag1"] < 10 * metrics["policy/mismatch_kl_lag1"]
    assert (metrics["proofs/failed"], metrics["proofs/unproved"], metrics["proofs/tokens_now"]) == (0, 0, 26)
    assert steps.take(replace(steps.sampled(), tolerances={})).num_proved_now == 0


def test_scoring_again_changes_neither_weights_nor_gradients(tiny_model: Path, tmp_path: Path) -> None:
    ends = []
    for share in (0.0, 1.0):
        (tmp_path / str(share)).mkdir()
        steps = Steps(tiny_model, tmp_path / str(share), proofs={"share": share}, learning_rate=0.05)
        batches = [steps.sampled() for _ in range(3)]
        receipts = [steps.take(batch) for batch in batches]
        assert [len(one.spots) for one in receipts] == [0, 4 * share, 4 * share]
        ends.append(files_of(steps.policy)["adapter_model.safetensors"])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_sample_that_its_version_did_not_sample_stops_the_run_before_the_step(
    tiny_model: Path, tmp_path: Path, lag: int
) -> None:
    steps = Steps(tiny_model, tmp_path, proofs={"share": 1.0})
    old = steps.sampled()
    for _ in range(lag):
        steps.take(steps.sampled())
    before = files_of(steps.policy)["adapter_model.safetensors"]
    place = LENGTHS[2] - 1
    with pytest.raises(ProofFailed, match=rf"step {lag + 1}: .*rollout 0/2 .*version 0.*{SERVER}.*token {place}"):
        steps.take(faked(old, 2))
    assert files_of(steps.policy)["adapter_model.safetensors"] == before
    assert CheckpointStore(RunFolder(path=tmp_path, run_id="run")).steps() == [lag]
    [refused] = (tmp_path / "refused").iterdir()
    [spot] = Receipt.from_json(refused.read_bytes()).spots
    assert (spot.rollout, spot.failed_at) == ("0/2", place)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("action", ["drop", "warn"])
def test_failed_samples_are_dropped_exactly_or_only_warned_of(
    tiny_model: Path, tmp_path: Path, lag: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for name in ("clean", "faked"):
        (tmp_path / name).mkdir()
        steps = Steps(tiny_model, tmp_path / name, proofs={"share": 1.0, "on_failure": action}, learning_rate=0.05)
        old = steps.sampled()
        for _ in range(lag):
            steps.take(steps.sampled())
        if name == "faked":
            receipt = steps.take(faked(old, 1))
        else:  # without that sample from the start
            mask = old.loss_mask.copy()
            mask[old.starts[1] : old.starts[2]] = False
            steps.take(replace(old, loss_mask=mask))
        ends.append(files_of(steps.policy)["adapter_model.safetensors"])
    assert [one.rollout for one in receipt.spots if one.failed_at is not None] == ["0/1"]
    assert receipt.dropped == (("0/1",) if action == "drop" else ())
    assert (ends[0] == ends[1]) == (action == "drop")
    assert "rollout 0/1" in caplog.text
    assert steps.metrics(lag + 1)["proofs/dropped"] == len(receipt.dropped)


def test_each_token_is_proved_under_its_own_version_temperature_and_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapters = ("solver", "critic")
    steps = Steps(tiny_model, tmp_path, lora_adapters=adapters, proofs={"share": 1.0}, learning_rate=0.05)
    own = {"adapters": np.array([0, 1, 1, 0], np.int32), "temperatures": np.array([0.5, 1.5, 1, 0.25], np.float32)}
    first = steps.sampled(**own)
    steps.take(steps.sampled(**own))
    rest = steps.scored(first)  # the same tokens under version 1
    later = np.arange(sum(LENGTHS)) >= first.starts[1] + 4
    mixed = np.where(later, rest.inference_logprobs, first.inference_logprobs)
    runs = np.array([[0, 10], [1, sum(LENGTHS) - 10]], np.int32)
    steps.take(steps.sampled(**own))
    receipt = steps.take(replace(first, inference_logprobs=mixed, version_runs=runs))
    found = {(one.rollout, one.version): (one.num_tokens, one.adapter, one.failed_at) for one in receipt.spots}
    expected = {("0/0", 0): (5, 0), ("0/1", 0): (3, 1), ("0/1", 1): (5, 1), ("0/2", 1): (6, 1), ("0/3", 1): (7, 0)}
    assert found == {key: (*value, None) for key, value in expected.items()}
    wrong = replace(first, inference_logprobs=mixed, version_runs=np.array([[1, sum(LENGTHS)]], np.int32))
    with pytest.raises(ProofFailed, match="version 1"):
        steps.take(wrong)


def test_samples_with_noise_are_proved_with_the_noise_of_their_version(tiny_model: Path, tmp_path: Path) -> None:
    noise = {"enabled": True, "num_stages": 3, "sigma_start": 0.1}
    steps = Steps(tiny_model, tmp_path, max_steps=6, noise_scheduler=noise, proofs={"share": 1.0})
    receipts = []
    for _ in range(4):
        receipts.append(steps.take(steps.sampled()))
    assert [(one.num_proved_now, len(one.spots)) for one in receipts] == [(26, 0), (26, 0), (0, 4), (0, 4)]
    batch = steps.sampled()
    with torch.no_grad():
        clean = np.zeros(len(batch.token_ids), np.float32)
        clean[batch.loss_mask] = steps.policy.logprobs(packed_tokens(batch, CPU)).numpy()
    with pytest.raises(ProofFailed, match="version 4"):
        steps.take(replace(batch, inference_logprobs=clean))


def test_a_version_that_is_not_there_any_more_leaves_its_sample_unproved_and_one_on_disk_does_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = Steps(tiny_model, tmp_path, proofs={"share": 1.0})
    old = steps.sampled()
    steps.take(steps.sampled())
    steps.trainer._past._held.pop(0)
    published = tmp_path / "broadcasts" / "step_000000"
    published.mkdir(parents=True)
    for name, data in steps.files(0).items():
        (published / name).write_bytes(data)
    receipt = steps.take(old)
    assert (len(receipt.spots), receipt.num_unproved) == (4, 0)
    steps.trainer._past._held.pop(0)
    (published / "adapter_model.safetensors").unlink()
    receipt = steps.take(old)
    assert (len(receipt.spots), receipt.num_unproved) == (0, 4)
    assert steps.metrics(3)["proofs/unproved"] == 4


def test_of_all_weights_only_the_newest_version_is_proved(tiny_model: Path, tmp_path: Path) -> None:
    whole = {"lora": False, "weight_broadcast": {"format": "full"}}
    steps = Steps(tiny_model, tmp_path, learning_rate=1e-3, **whole)
    old = steps.sampled()
    assert steps.take(steps.sampled()).num_proved_now == 26
    receipt = steps.take(old)
    assert (receipt.num_proved_now, receipt.spots, receipt.num_unproved) == (0, (), 2)


def test_in_16_bits_a_mean_over_few_tokens_is_allowed_more_and_one_over_many_less() -> None:
    half = Tolerance(gap=0.05, measure="mean_abs")
    # 0.05 · (1 + 9 / 3) = 0.2 and 0.05 · (1 + 9 / 90) = 0.055
    assert [allowed(half, 9), allowed(half, 8100)] == [pytest.approx(0.2), pytest.approx(0.055)]
    assert allowed(EXACT[SERVER], 3) == 1e-4


@pytest.mark.parametrize(
    ("measure", "by", "nats"),
    [("max_abs", 1.0, 0.3), ("max_abs", 0.3, 0.04), ("mean_abs", 0.3, None), ("mean_abs", 1.0, 0.3)],
)
def test_a_mismatch_far_beyond_what_the_policy_moved_is_warned_of_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, measure: str, by: float, nats: float | None
) -> None:
    lengths = (20,) * 5
    tolerances = {SERVER: replace(EXACT[SERVER], measure=measure)}  # a mean in 16 bits, with a floor of 0.1 nats
    steps = Steps(tiny_model, tmp_path, proofs={"share": 0.6, "on_failure": "warn"}, learning_rate=1e-3)
    older = [steps.sampled(lengths=lengths, tolerances=tolerances) for _ in range(2)]
    steps.take(steps.sampled(tolerances=tolerances))
    healthy = steps.take(older[0])
    assert (healthy.unexplained, "mismatch_kl" in caplog.text) == ({}, False)
    strange = older[1].inference_logprobs.copy()
    strange[older[1].loss_mask] -= by
    for _ in range(2):
        receipt = steps.take(replace(older[1], inference_logprobs=strange))
    if nats is None:
        assert (receipt.unexplained, "mismatch_kl" in caplog.text) == ({}, False)
    else:
        assert receipt.unexplained["3"] > nats
        assert caplog.text.count("policy/mismatch_kl_lag") == 1


def test_a_mismatch_far_beyond_what_the_policy_moved_is_explained_where_its_samples_hold(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEY_FILE).write_text("00" * 32)
    steps = Steps(tiny_model, tmp_path, learning_rate=0.03, loss=UNMASKED | {"silent_share": 1})
    older, receipts = steps.sampled(lengths=(12,) * 12), []
    for step in range(1, 19):
        newer = steps.sampled(lengths=(12,) * 12)
        quiet = older if step > 12 else replace(older, advantages=np.zeros_like(older.advantages))
        receipts.append(steps.take(quiet))
        older = newer
    assert [one.step for one in receipts if one.unexplained] == []
    assert [one.step for one in receipts if one.spots and one.steps_since_draw]
    assert "mismatch_kl" not in caplog.text


def test_what_the_policy_moves_is_known_through_steps_in_which_no_sample_is_drawn(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a server that begins to sample from other weights between two draws is found in the same step."""
    steps = Steps(tiny_model, tmp_path, loss=UNMASKED | {"silent_share": 1})
    older = steps.sampled(lengths=(12,) * 12)
    for step in range(1, 30):
        if step == 9:
            monkeypatch.setattr(Proofs, "_is_turn", lambda self, step, num_tokens: False)
        newer = steps.sampled(lengths=(12,) * 12)
        receipt = steps.take(older)
        older = newer
    assert (receipt.spots, receipt.unexplained) == ((), {})
    strange = older.inference_logprobs.copy()
    strange[older.loss_mask] -= 2.0
    with pytest.raises(ProofFailed):
        steps.take(replace(older, inference_logprobs=strange))


def rank_worker(model: Path, out: Path, variables: dict[str, str]) -> None:
    """Writes what this rank has found of a batch, whose older samples all are the first rank's, at ZeRO 3."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = join_group(CPU, timeout_s=240)
    options: dict[str, Any] = {"zero_level": 3, "gpus": 2, "proofs": {"share": 1.0}}
    policy = tiny_policy(model, ranks=ranks, **options)
    past = PastVersions(policy, ranks, out)
    past.keep(0, num=9)
    batch = tiny_batch(LENGTHS, servers=(SERVER,) * 4, tolerances=EXACT, step=2)
    with torch.no_grad():
        batch.inference_logprobs[batch.loss_mask] = policy.logprobs(packed_tokens(batch, CPU)).numpy()
        for parameter in policy.parameters:
            local_tensor(parameter).add_(0.1)
    policy.reshard()
    past.keep(1, num=9)
    settings = tiny_settings(model, **options)
    noise = NormNoise({}, settings.noise_scheduler, seed=0, max_steps=9)
    proofs = Proofs(settings, policy, past, ranks, out, {})
    before = [local_tensor(p).clone() for p in policy.parameters]
    found = []
    for one in (batch, faked(batch, 3)):
        newer = replace(one, version_runs=np.array([[1, sum(LENGTHS)]], np.int32))
        spots = proofs.score(2, [newer if ranks.rank else one], noise).spots
        found.append(sorted((one.rollout, one.version, one.failed_at or 0) for one in spots))
    same = all(torch.equal(a, local_tensor(p)) for a, p in zip(before, policy.parameters, strict=True))
    (out / f"{ranks.rank}.json").write_text(json.dumps([found, same]))
    leave_group()


def test_ranks_score_each_others_versions_together_and_agree(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks(rank_worker, tiny_model, tmp_path, num_ranks=2)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    healthy = [[f"0/{n}", 0, 0] for n in range(4)]
    assert one == other == [[healthy, [*healthy[:3], ["0/3", 0, LENGTHS[3] - 1]]], True]


def candidate(server: str, number: int) -> Candidate:
    return Candidate((server, 0), number, 0, Drawn(0, number))


def test_servers_and_adapters_are_drawn_in_turn_by_the_smallest_numbers() -> None:
    all_of = [candidate("a", 2), candidate("a", 5), candidate("b", 3), candidate("c", 1)]
    drawn = [[(one.stratum[0], one.number) for one in chosen(all_of, 2, turn=turn)] for turn in (0, 2)]
    assert drawn == [[("a", 2), ("b", 3)], [("c", 1), ("a", 2)]]
    assert len(chosen(all_of, 9, turn=1)) == 4
    assert chosen([], 2, turn=5) == []


def test_from_small_batches_samples_are_drawn_more_rarely_and_as_many_more_but_at_first_and_of_new_servers(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = Steps(tiny_model, tmp_path, proofs={"on_failure": "warn"}, learning_rate=1e-9)
    numbers, older = list[int](), steps.sampled(lengths=(4,) * 40)
    for step in range(1, 43):
        server = "http://two" if step == 33 else SERVER
        batch = replace(older, servers=(server,) * 40, tolerances={server: EXACT[SERVER]})
        version = np.array([[max(0, step - 2), 160]], np.int32)
        receipt = steps.take(replace(batch, version_runs=version))
        numbers.append(len(receipt.spots))
        assert (receipt.steps_since_draw == 0) == (numbers[-1] > 0 or step == 1)
    assert numbers[:8] == [0, *[2] * 7]  # version 0 trains step 1
    assert numbers[32] > 0
    drawn = [step for step, number in enumerate(numbers, start=1) if number]
    assert 4 <= len([step for step in drawn if step > 8]) <= 6
    assert sum(numbers) == 2 * (drawn[-1] - 1)


def test_what_is_drawn_depends_on_a_secret_of_the_run_and_on_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    drawn = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for _ in range(2):
            steps = Steps(tiny_model, tmp_path / name, proofs={"share": 0.4})  # 10 of 25: 3e6 ways
            old = steps.sampled(lengths=(4,) * 25)
            steps.take(steps.sampled())
            drawn.append(sorted(one.rollout for one in steps.take(old).spots))
        assert stat.S_IMODE((tmp_path / name / KEY_FILE).stat().st_mode) == 0o600
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert json.loads(json.dumps(drawn))
