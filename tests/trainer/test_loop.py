"""The loop on in-memory channels, with a tiny random model."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.checkpoint import CheckpointStore
from grpo.trainer.errors import EndedEarly, NonFiniteError
from grpo.trainer.packing import packed_tokens
from grpo.transport.errors import DeadlineError, PeerFailed, StorageError
from grpo.transport.records import Canary, PolicyManifest
from grpo.transport.run import RunFolder
from grpo.transport.status import StatusFile, read_status
from msgspec.structs import replace
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from tests.infer.published import logprobs_of
from tests.memory_channels import MemoryPolicies
from tests.trainer.bench import UNMASKED, Bench, on_policy
from tests.trainer.models import CPU, TARGETS, files_of, only, pair_of, tiny_batch, tiny_policy, write_files


def test_two_steps_publish_three_versions_whose_canaries_hugging_face_confirms(
    tiny_model: Path, tmp_path: Path
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=2)
    bench.train(*[on_policy(tiny_batch((6, 9, 4)), bench.policy)] * 2)
    assert sorted(bench.policies.versions) == [0, 1, 2]
    assert read_status(bench.status_path)["state"] == "finished"  # type: ignore[index]
    earlier = None
    for version in (0, 1, 2):
        files = bench.files(version)
        canary = Canary.from_json(files["canary.json"])
        assert (canary.version, canary.is_zero, canary.dtype) == (version, version == 0, "float32")
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
        assert canary.base_logprobs == pytest.approx(logprobs_of(base, canary.token_ids), abs=1e-5)
        folder = tmp_path / str(version)
        folder.mkdir()
        served = PeftModel.from_pretrained(base, write_files(files, folder))
        assert canary.logprobs == pytest.approx(logprobs_of(served, canary.token_ids), abs=1e-5)
        assert canary.logprobs != earlier
        earlier = canary.logprobs


def test_the_metrics_of_an_on_policy_step_show_no_mismatch(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=1)
    bench.train(on_policy(tiny_batch((6, 9, 4)), bench.policy))
    metrics = bench.metrics(1)
    assert metrics["policy/mismatch_max_lag0"] < 1e-5
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert (metrics["policy/tokens"], metrics["perf/train_tokens"]) == (16, 19)
    assert metrics["optim/learning_rate"] == 1e-2
    assert metrics["optim/grad_norm"] > 0
    timed = {"time/wait_batch_s", "time/train_s", "time/publish_s", "perf/train_tokens_per_s"}
    assert timed <= metrics.keys()
    assert {key.split("/")[0] for key in metrics} <= {"loss", "policy", "optim", "perf", "proofs", "time"}
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("little", "factor"), [(0.5, math.sqrt(5 / 13 / 0.5)), (0.25, 1.0), (0.0, 1.0)])
def test_a_batch_with_little_to_teach_moves_less_and_one_with_nothing_not_at_all(
    tiny_model: Path, tmp_path: Path, little: float, factor: float
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=3, learning_rate=1e-3, little_signal=little)
    batch = on_policy(tiny_batch((6, 9)), bench.policy)  # of which 5 and 8 tokens carry loss
    half, none = batch.advantages.copy(), np.zeros_like(batch.advantages)
    half[6:] = 0.0
    bench.train(*(replace(batch, advantages=advantages) for advantages in (batch.advantages, half, none)))
    weights = [load(bench.files(version)["adapter_model.safetensors"]) for version in (2, 3)]
    moved = any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert moved == (little == 0)  # by the momentum of the batches before
    assert [bench.metrics(step)["optim/signal"] for step in (1, 2, 3)] == [1.0, 5 / 13, 0.0]
    assert bench.metrics(2)["optim/learning_rate"] == pytest.approx(1e-3 * factor)


def test_several_optimizer_steps_a_batch_are_those_of_a_plain_loop_and_make_one_version(
    tiny_model: Path, tmp_path: Path
) -> None:
    more = {"gradient_accumulation_steps": 2, "ppo_epochs": 3, "optimizer": "adamw", "weight_decay": 0.0}
    bench = Bench(tiny_model, tmp_path, max_steps=1, loss={"name": "grpo"}, **more)
    plain = tiny_policy(tiny_model, moved=False)
    whole = on_policy(tiny_batch((6, 9, 4, 5)), bench.policy)
    parts = [only(whole, part, index=n, num_micro_batches=3) for n, part in enumerate([[0], [1, 2], [3]])]
    bench.send(1, *parts)
    bench.trainer.train()
    adamw, norms, clipped = torch.optim.AdamW(plain.parameters, lr=1e-2, weight_decay=0.0), [], []
    for _ in range(3):
        for chosen in (parts[:2], parts[2:]):
            samples = []
            for batch in chosen:
                mask, logprobs = batch.loss_mask, plain.logprobs(packed_tokens(batch, CPU))
                ratio = (logprobs - torch.from_numpy(batch.inference_logprobs[mask])).exp()
                advantages = torch.from_numpy(batch.advantages[mask])
                surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                clipped.append(surrogate < ratio * advantages)
                samples += [one.mean() for one in surrogate.split((batch.sequence_lengths - 1).tolist())]
            (-torch.stack(samples).mean()).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters, 1.0)))
            adamw.step()
            adamw.zero_grad()
    assert torch.cat(clipped).any(), "the bound does not matter"
    assert sorted(bench.policies.versions) == [0, 1]
    for ours, theirs in zip(bench.policy.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    metrics = bench.metrics(1)
    assert (metrics["policy/tokens"], metrics["perf/train_tokens"]) == (20, 24)
    assert metrics["optim/grad_norm"] == pytest.approx(np.mean(norms[-2:]), rel=1e-3)
    assert metrics["policy/mismatch_max_lag0"] < 1e-5 < metrics["policy/kl"]
    assert metrics["policy/clipped"] == pytest.approx(torch.cat(clipped[-3:]).float().mean().item())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_a_step_without_the_pairs_that_alone_have_a_weight_changes_nothing(
    tiny_model: Path, tmp_path: Path, optimizer: str
) -> None:
    loss = {"adv_tau": 0.0, "beta_replay": 1.0}
    bench = Bench(tiny_model, tmp_path, max_steps=3, optimizer=optimizer, weight_decay=0.1, loss=loss)
    batch = tiny_batch((6, 9))
    bench.train(batch, replace(batch, pairs=(pair_of([1, 2], [3, 4], [5]),)), batch)
    weights = [load(bench.files(version)["adapter_model.safetensors"]) for version in range(4)]
    moved = [any(not torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(weights)]
    assert moved == [False, True, False]
    assert [bench.metrics(version)["optim/grad_norm"] > 0 for version in (1, 2, 3)] == moved
    assert bench.metrics(1)["loss/total"] == 0.0


def test_a_batch_that_never_comes_is_an_error_that_says_who_owes_it(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, wait_timeout_s=0.05)
    with pytest.raises(DeadlineError, match="batch 1"):
        bench.trainer.train()
    assert read_status(bench.status_path)["waiting_for"] == "orchestrator: batch 1"  # type: ignore[index]


def test_a_step_that_is_not_finite_is_not_applied_and_not_published(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=2)
    batch = on_policy(tiny_batch((6, 9)), bench.policy)
    # a finite advantage, but 3e38 · 2 is beyond float32
    with pytest.raises(NonFiniteError, match="batches/step_000002"):
        bench.train(batch, replace(batch, advantages=np.full(15, 3e38, np.float32)))
    bench.trainer.close()
    assert sorted(bench.policies.versions) == [0, 1]
    assert CheckpointStore(RunFolder(path=tmp_path, run_id="run")).steps() == [1]
    assert files_of(bench.policy)["adapter_model.safetensors"] == bench.files(1)["adapter_model.safetensors"]


@pytest.mark.parametrize("kind", ["merged", "full"])
def test_versions_of_whole_weights_load_into_hugging_face_and_fit_their_canaries(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=1, lora=kind == "merged", weight_broadcast={"format": kind})
    bench.train(on_policy(tiny_batch((6, 9, 4)), bench.policy))
    for version in (0, 1):
        manifest, files = bench.policies.versions[version]
        assert manifest.spec.kind == kind
        assert "adapter_model.safetensors" not in files
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
        index = json.loads(files["model.safetensors.index.json"])
        weights = {name: load(files[shard])[name] for name, shard in index["weight_map"].items()}
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
        assert kind == "full" or {name.split(".")[-2] for name in weights} == set(TARGETS)
        canary = Canary.from_json(files["canary.json"])
        assert canary.is_zero == (version == 0)
        assert canary.logprobs == pytest.approx(logprobs_of(model, canary.token_ids), abs=1e-5)


class FullDisk(MemoryPolicies):
    """Publishes nothing."""

    def publish(self, **_: Any) -> PolicyManifest:
        raise StorageError("broadcasts/step_000000 cannot be written: No space left on device")


def test_a_version_that_cannot_be_published_ends_the_run_with_its_own_error(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, policies=FullDisk(run_id="run"), max_steps=3, wait_timeout_s=250.0)
    with pytest.raises(StorageError):
        bench.trainer.train()


def test_a_trainer_that_is_told_to_end_keeps_the_step_that_it_has_made(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=3, ckpt={"interval": 10}, loss=UNMASKED)
    publish = bench.trainer.publish

    def told_after_one(step: int) -> None:
        publish(step)
        if step == 1:
            bench.trainer.end_early()

    bench.trainer.publish = told_after_one  # type: ignore[method-assign]
    with pytest.raises(EndedEarly, match="step 1"):
        bench.train(tiny_batch((6, 9), seed=1), tiny_batch((6, 9), seed=2))
    store = CheckpointStore(RunFolder(path=tmp_path, run_id="run"))
    assert (store.steps(), sorted(bench.policies.versions)) == ([1], [0, 1])
    kept = store.read(1)[1]["weights"]
    assert all(torch.equal(kept[name], parameter) for name, parameter in bench.policy.named_parameters.items())


def test_an_orchestrator_that_failed_is_not_waited_for(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=3, wait_timeout_s=250.0)
    StatusFile(tmp_path / "orch.json").failed(ValueError("no such column: colour"))
    with pytest.raises(PeerFailed, match="grpo-orch"):
        bench.trainer.train()


def test_a_step_that_changes_nothing_although_it_has_a_gradient_is_told(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=2, learning_rate=1e-60, weight_decay=0.0)
    batch = on_policy(tiny_batch((6, 9)), bench.policy)
    bench.train(batch, replace(batch, advantages=np.zeros_like(batch.advantages)))
    assert [record.args[0] for record in caplog.records if "changed nothing" in record.message] == [1]


def test_a_matrix_that_alone_has_no_gradient_is_told_by_name_once(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=3)
    batch = on_policy(tiny_batch((6, 9, 4)), bench.policy)
    [frozen] = [one for name, one in bench.policy.named_parameters.items() if "1.mlp.up_proj.lora_B" in name]
    frozen.register_hook(torch.zeros_like)
    bench.train(batch, batch, batch)
    told = [record.getMessage() for record in caplog.records if "exactly zero" in record.getMessage()]
    # Its B stays zero, so from the second step on its A has no gradient either. Each is told once.
    assert ["1.mlp.up_proj.lora_B" in message for message in told] == [True, False]
    assert ["1.mlp.up_proj.lora_A" in message for message in told] == [False, True]


def test_matrices_that_have_no_gradient_all_of_them_are_told_once_there_should_be_one(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first step every B is zero, and so is the gradient of every A."""
    bench = Bench(tiny_model, tmp_path, max_steps=2)
    batch = on_policy(tiny_batch((6, 9, 4)), bench.policy)
    for name, parameter in bench.policy.named_parameters.items():
        if "lora_A" in name:
            parameter.register_hook(torch.zeros_like)
    bench.train(batch, batch)
    [told] = [record.getMessage() for record in caplog.records if "exactly zero" in record.getMessage()]
    assert "lora_A" in told
    assert "in step 2" in told
