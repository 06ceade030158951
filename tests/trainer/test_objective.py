"""The three streams together: against Hugging Face on single samples, and invariant to how they are packed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import by_signal, counts_of
from grpo.trainer.distributed import ONE
from grpo.trainer.loss import PolicyTokens, policy_loss
from grpo.trainer.metrics import numbers_of
from grpo.trainer.model import Policy
from grpo.trainer.objective import Objective, policy_inputs
from grpo.trainer.packing import packed_tokens
from grpo.transport.records import Int32, MicroBatch, PreferencePair
from msgspec.structs import replace

from tests.trainer.bench import on_policy
from tests.trainer.models import CPU, as_floats, hint_for, only, pair_of, tiny_batch, tiny_policy
from tests.trainer.test_attention import eager_model

SEQUENCE_LEN = 64
LENGTHS = (6, 9, 4, 20, 24)
VERSIONS = (2, 1, 2, 0, 2)
PAIRS = (
    pair_of([5, 6, 7], [8, 9], [10], references=(-7.0, -3.5)),
    pair_of([5, 6, 7], [11], [12, 13, 14], references=(-4.0, -12.0)),
    pair_of([20, 21], [22, 23], [24, 25], references=(-9.0, -8.0)),
)
ALL_ON = {
    "kl_tau": 0.1,
    "teacher_tau": 0.3,
    "alpha_sdpo": 0.7,
    "beta_replay": 0.4,
    "sdpo": {"temperature": 1.5, "beta": 0.3},
    "dpo": {"beta": 0.2},
}
POLICY_ONLY = {"kl_tau": 0.1, "teacher_tau": 0.3}
SDPO_ONLY = {"adv_tau": 0.0, "alpha_sdpo": 0.7, "sdpo": ALL_ON["sdpo"]}
DPO_ONLY = {"adv_tau": 0.0, "beta_replay": 0.4, "dpo": ALL_ON["dpo"]}


def micro_batches(whole: MicroBatch, parts: Sequence[Sequence[int]], **changes: Any) -> list[MicroBatch]:
    """The samples in these orders; the pairs are dealt out."""
    batches = []
    for index, part in enumerate(parts):
        runs = np.array([[VERSIONS[s], LENGTHS[s]] for s in part], np.int32)
        place = {"index": index, "num_micro_batches": len(parts), "pairs": PAIRS[index :: len(parts)]}
        batches.append(only(whole, part, version_runs=runs, **(place | changes)))
    return batches


@pytest.fixture(scope="module")
def step(tiny_model: Path) -> MicroBatch:
    """Samples 0 and 1 share a prompt of three tokens; three have hints; log-probabilities are near the policy's."""
    rng, total = np.random.default_rng(5), sum(LENGTHS)
    batch = tiny_batch(LENGTHS, temperatures=rng.uniform(0.7, 1.5, total).astype(np.float32), step=3)
    batch.token_ids[6:9] = batch.token_ids[:3]
    batch.loss_mask[[1, 2, 7, 8, 16]] = False
    inference, teacher = (rng.normal(0, deviation, total) * batch.loss_mask for deviation in (0.5, 1.0))
    logprobs = on_policy(batch, tiny_policy(tiny_model)).inference_logprobs
    hints = (
        (1, hint_for(batch, 1, places=(4, 5, 7), before=3, weight=0.5)),
        (3, hint_for(batch, 3, places=(6, 7, 8, 12), before=6)),
        (4, hint_for(batch, 4, places=(3, 22), before=2, weight=1.5)),
    )
    return replace(
        batch,
        hints=hints,
        inference_logprobs=(logprobs + inference).astype(np.float32),
        teacher_logprobs=(logprobs + teacher).astype(np.float32),
    )


@dataclass(frozen=True)
class Result:
    gradients: list[torch.Tensor]
    metrics: dict[str, float]


def settings_of(options: dict[str, Any]) -> LossSettings:
    settings = LossSettings.model_validate(options)
    assert not list(settings.conflicts())
    return settings


def accumulated(
    policy: Policy, batches: Sequence[MicroBatch], options: dict[str, Any], *, sequence_len: int = SEQUENCE_LEN
) -> Result:
    """Gradients (zeros where there are none) and metrics of one step, from clear gradients."""
    for parameter in policy.parameters:
        parameter.grad = None
    objective = Objective(policy, settings_of(options), ONE, pack_tokens=sequence_len)
    metrics = numbers_of(objective.accumulate(batches, step=batches[0].step))
    return Result([torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters], metrics)


def assert_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, tolerance: float = 1e-5) -> None:
    """To a share of the largest element of all."""
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    assert largest > 1e-3
    gaps = [float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True)]
    assert max(gaps) <= tolerance * largest, (max(gaps), largest)


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# A naive computation: Hugging Face's own attention on one sample at a time, all logits, formulas written out.


def logits_of(model: torch.nn.Module, token_ids: Int32) -> torch.Tensor:
    """[L, V]; row t predicts token t + 1."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def naive_policy(model: torch.nn.Module, batch: MicroBatch, settings: LossSettings) -> torch.Tensor:
    terms = []
    for start, length in zip(batch.starts.tolist(), batch.sequence_lengths.tolist(), strict=True):
        logits = logits_of(model, batch.token_ids[start : start + length])
        for t in range(start + 1, start + length):
            if not batch.loss_mask[t]:
                continue
            scaled = logits[t - start - 1] / float(batch.temperatures[t])
            logprob = scaled.log_softmax(-1)[int(batch.token_ids[t])]
            log_ratio = logprob.item() - float(batch.inference_logprobs[t])
            assert settings.token_mask_low < np.exp(log_ratio) < settings.token_mask_high
            drive = settings.adv_tau * float(batch.advantages[t]) - settings.kl_tau * log_ratio
            assert batch.teacher_logprobs is not None
            drive += settings.teacher_tau * (float(batch.teacher_logprobs[t]) - logprob.item())
            terms.append(np.exp(log_ratio) * drive * logprob)
    return -torch.stack(terms).sum() / len(terms)


def naive_sdpo(
    model: torch.nn.Module, step: MicroBatch, settings: LossSettings, teacher: torch.nn.Module | None = None
) -> torch.Tensor:
    """The mixture M and both divergences by the definition of GKD, token by token."""
    beta, terms = settings.sdpo.beta, []
    for sample, hint in step.hints:
        student_logits = logits_of(model, only(step, [sample]).token_ids)
        with torch.no_grad():
            teacher_logits = logits_of(teacher or model, hint.teacher_token_ids)
        for mine, theirs in zip(hint.student_index, hint.teacher_index, strict=True):
            q = (student_logits[mine - 1] / settings.sdpo.temperature).softmax(-1)
            p = (teacher_logits[theirs - 1] / settings.sdpo.temperature).softmax(-1)
            m = beta * p + (1 - beta) * q
            divergence = beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()
            terms.append(hint.weight * divergence)
    return torch.stack(terms).sum() / len(terms)


def naive_dpo(model: torch.nn.Module, step: MicroBatch, settings: LossSettings) -> torch.Tensor:
    def logprob(pair: PreferencePair, continuation: Int32) -> torch.Tensor:
        logprobs = logits_of(model, np.concatenate([pair.prompt_ids, continuation])).log_softmax(-1)
        first = len(pair.prompt_ids)
        return torch.stack([logprobs[first + i - 1, int(token)] for i, token in enumerate(continuation)]).sum()

    terms = []
    for pair in PAIRS:
        chosen = logprob(pair, pair.chosen_ids) - pair.chosen_ref_logprob
        rejected = logprob(pair, pair.rejected_ids) - pair.rejected_ref_logprob
        terms.append(-(settings.dpo.beta * (chosen - rejected)).sigmoid().log())
    return torch.stack(terms).sum() / len(PAIRS)


Naive = Callable[[torch.nn.Module, MicroBatch, LossSettings], torch.Tensor]


@pytest.mark.parametrize(
    ("options", "naive", "name", "weight"),
    [
        (POLICY_ONLY, naive_policy, "policy", 1.0),
        (SDPO_ONLY, naive_sdpo, "sdpo", 0.7),
        (SDPO_ONLY | {"sdpo": {"beta": 0.5}}, naive_sdpo, "sdpo", 0.7),
        (DPO_ONLY, naive_dpo, "dpo", 0.4),
    ],
)
def test_each_stream_alone_is_what_hugging_face_gives_on_single_samples(
    tiny_model: Path, step: MicroBatch, options: dict[str, Any], naive: Naive, name: str, weight: float
) -> None:
    policy, teacher = tiny_policy(tiny_model), options.get("teacher_tau")
    changes = {} if teacher else {"teacher_logprobs": None}
    ours = accumulated(policy, micro_batches(step, [range(5)], **changes), options)
    loss = naive(eager_model(policy), step, settings_of(options))
    theirs = torch.autograd.grad(weight * loss, policy.parameters)
    assert ours.metrics[f"loss/{name}"] == pytest.approx(loss.item(), rel=1e-4)
    assert ours.metrics["loss/total"] == pytest.approx(weight * loss.item(), rel=1e-4)
    assert_close(ours.gradients, theirs, tolerance=1e-4)


def test_the_streams_add_up_and_each_ones_norm_and_share_are_told(tiny_model: Path, step: MicroBatch) -> None:
    policy, batches = tiny_policy(tiny_model), micro_batches(step, [[0, 1, 2], [3, 4]])
    together = accumulated(policy, batches, ALL_ON)
    alone = {
        name: accumulated(policy, batches, options)
        for name, options in (("policy", POLICY_ONLY), ("sdpo", SDPO_ONLY), ("dpo", DPO_ONLY))
    }
    sums = [torch.stack(parts).sum(0) for parts in zip(*(one.gradients for one in alone.values()), strict=True)]
    assert_close(together.gradients, sums, tolerance=1e-6)
    metrics = together.metrics
    norms = {name: float(torch.cat([g.flatten() for g in one.gradients]).norm()) for name, one in alone.items()}
    for name, one in alone.items():
        assert metrics[f"loss/{name}"] == one.metrics[f"loss/{name}"]
        assert metrics[f"optim/grad_norm_{name}"] == pytest.approx(norms[name], rel=1e-5)
        assert metrics[f"optim/grad_share_{name}"] == pytest.approx(norms[name] / sum(norms.values()), rel=1e-5)
        assert not [key for key in one.metrics if key.startswith("optim/")]
    # policy + 0.7 · sdpo + 0.4 · dpo
    total = metrics["loss/policy"] + 0.7 * metrics["loss/sdpo"] + 0.4 * metrics["loss/dpo"]
    assert metrics["loss/total"] == pytest.approx(total)


@pytest.mark.parametrize(("number", "share"), [(1, 0.5), (3, 1.0), (5, 0.5), (9, 0.0)])
def test_weights_of_hints_and_pairs_rise_and_fall_by_the_step(
    tiny_model: Path, step: MicroBatch, number: int, share: float
) -> None:
    policy, batches = tiny_policy(tiny_model), micro_batches(step, [[0, 1, 2], [3, 4]], step=number)
    steps = {"warmup_steps": 2, "decay_steps": 4}  # 1 - (number - 3) / 4 from the third on
    falling = {name: {**ALL_ON.get(name, {}), **steps} for name in ("sdpo", "dpo")}
    scaled = {name: share * ALL_ON[name] for name in ("alpha_sdpo", "beta_replay")}
    ours, theirs = accumulated(policy, batches, ALL_ON | falling), accumulated(policy, batches, ALL_ON | scaled)
    assert_close(ours.gradients, theirs.gradients, tolerance=1e-6)


@pytest.mark.parametrize(
    "parts",
    [[[4, 2, 0, 3, 1]], [[0, 1, 2], [3, 4]], [[3], [1], [4], [0], [2]]],
    ids=["another order", "two micro-batches", "one each"],
)
def test_the_gradients_do_not_depend_on_order_or_micro_batches(
    tiny_model: Path, step: MicroBatch, parts: list[list[int]]
) -> None:
    policy = tiny_policy(tiny_model)
    one = accumulated(policy, micro_batches(step, [range(5)]), ALL_ON)
    other = accumulated(policy, micro_batches(step, parts), ALL_ON)
    assert_close(one.gradients, other.gradients)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)


def test_packs_of_hints_and_pairs_may_be_split_further(tiny_model: Path, step: MicroBatch) -> None:
    policy, batches = tiny_policy(tiny_model), micro_batches(step, [range(5)])
    whole, split = (accumulated(policy, batches, ALL_ON, sequence_len=length) for length in (64, 26))
    assert_close(whole.gradients, split.gradients)
    assert whole.metrics == pytest.approx(split.metrics, rel=1e-4, abs=1e-6)
    with forwards(policy) as passes:
        accumulated(policy, batches, ALL_ON, sequence_len=26)
    # the policy's micro-batch; contexts of 11, 16 and 26 tokens as [11], [16], [26], since 11 + 16 > 26, each for
    # student and teacher; pairs of 6, 7 and 6 tokens in one pack
    assert len(passes) == 1 + 2 * 3 + 1


@contextmanager
def forwards(policy: Policy) -> Iterator[list[int]]:
    """As many as the forward passes of a policy's network within."""
    passes: list[int] = []
    handle = policy.causal_lm.base_model.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    handle.remove()


@pytest.mark.parametrize(
    ("options", "forwards_expected", "keys"),
    [
        (POLICY_ONLY, 1, {"loss/policy"}),
        (SDPO_ONLY, 2, {"loss/sdpo"}),
        (DPO_ONLY, 1, {"loss/dpo"}),
        (ALL_ON, 4, {"loss/policy", "loss/sdpo", "loss/dpo"}),
    ],
    ids=["policy", "sdpo", "dpo", "all"],
)
def test_a_stream_of_weight_zero_makes_no_forward_pass_and_changes_no_bit(
    tiny_model: Path, step: MicroBatch, options: dict[str, Any], forwards_expected: int, keys: set[str]
) -> None:
    policy, batches = tiny_policy(tiny_model), micro_batches(step, [range(5)])
    with forwards(policy) as passes:
        result = accumulated(policy, batches, options)
    assert len(passes) == forwards_expected
    assert {key for key in result.metrics if key.startswith("loss/")} == keys | {"loss/total"}
    # what only the other streams would use is gone
    stripped = batches[0]
    if "loss/sdpo" not in keys:
        stripped = replace(stripped, hints=())
    if "loss/dpo" not in keys:
        stripped = replace(stripped, pairs=())
    if "loss/policy" not in keys:
        stripped = replace(stripped, loss_mask=np.zeros_like(stripped.loss_mask))
    without = accumulated(policy, [stripped], options)
    assert_equal(result.gradients, without.gradients)
    assert result.metrics == without.metrics


EMA = SDPO_ONLY | {"sdpo": {"temperature": 1.5, "beta": 0.3, "teacher": "ema", "ema_decay": 0.75}}


@pytest.mark.parametrize("lora", [True, False], ids=["an adapter", "all weights"])
def test_a_moving_average_teaches_what_its_weights_say_and_not_what_the_current_ones_do(
    tiny_model: Path, step: MicroBatch, lora: bool
) -> None:
    """With its own head where that is trained too."""
    policy, averaged = (tiny_policy(tiny_model, moved=lora, lora=lora) for _ in range(2))
    batches = micro_batches(step, [range(5)])
    objective = Objective(policy, settings_of(EMA), ONE, pack_tokens=SEQUENCE_LEN)
    current = accumulated(policy, batches, SDPO_ONLY)
    for parameter in policy.parameters:
        parameter.grad = None
    # before the first step the average is the policy itself
    assert numbers_of(objective.accumulate(batches, step=3)) == current.metrics
    assert_equal([p.grad for p in policy.parameters if p.grad is not None], current.gradients)

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter, average in zip(policy.parameters, averaged.parameters, strict=True):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            average.copy_(0.75 * average + 0.25 * parameter)
    after = [p.detach().clone() for p in policy.parameters]
    objective.after_step()
    assert objective.average is not None
    for found, expected in zip(objective.average.averages.values(), averaged.parameters, strict=True):
        torch.testing.assert_close(found, expected.detach(), atol=1e-7, rtol=1e-6)

    for parameter in policy.parameters:
        parameter.grad = None
    metrics = numbers_of(objective.accumulate(batches, step=3))
    gradients = [p.grad for p in policy.parameters if p.grad is not None]
    assert_equal([p.detach() for p in policy.parameters], after)
    loss = naive_sdpo(eager_model(policy), step, settings_of(EMA), teacher=eager_model(averaged))
    assert metrics["loss/sdpo"] == pytest.approx(loss.item(), rel=1e-4)
    assert_close(gradients, torch.autograd.grad(0.7 * loss, policy.parameters), tolerance=1e-4)
    assert metrics["loss/sdpo"] != pytest.approx(naive_sdpo(policy.causal_lm, step, settings_of(EMA)).item(), rel=1e-2)


# --- samples that teach nothing ---


def plainly(policy: Policy, batches: Sequence[MicroBatch], options: dict[str, Any]) -> Result:
    """The policy loss of whole micro-batches, forward and backward."""
    settings, counts, metrics = settings_of(options), counts_of(batches), []
    for parameter in policy.parameters:
        parameter.grad = None
    for batch in batches:
        logprobs, entropies = policy.logprobs_and_entropy(packed_tokens(batch, CPU))
        tokens = PolicyTokens(logprobs=logprobs, entropies=entropies, **policy_inputs(batch, CPU))
        loss, measured = policy_loss(tokens, settings, counts)
        loss.backward()
        metrics.append(measured)
    return Result([p.grad for p in policy.parameters if p.grad is not None], as_floats(*metrics))


@contextmanager
def backwards(policy: Policy) -> Iterator[list[int]]:
    """Tokens of each backward pass through a policy's network within."""
    tokens: list[int] = []

    def watch(_: torch.nn.Module, __: Any, output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda grad: tokens.append(grad.shape[1]))

    handle = policy.causal_lm.base_model.register_forward_hook(watch)
    yield tokens
    handle.remove()


@pytest.mark.parametrize(
    ("silent", "expected"),
    [((3, 4), [16]), ((0, 3), [13, 24]), ((0, 1, 2, 3, 4), [2])],  # the last is a dummy pass
    ids=["whole micro-batches", "some of each", "all"],
)
@pytest.mark.parametrize("name", ["aipo", "gspo", "grpo"])
def test_samples_without_an_advantage_have_no_backward_pass_and_the_same_gradients_and_metrics(
    tiny_model: Path, step: MicroBatch, silent: tuple[int, ...], expected: list[int], name: str
) -> None:
    policy = tiny_policy(tiny_model)
    advantages = step.advantages * ~np.isin(np.repeat(range(5), LENGTHS), silent)
    changes = {"pairs": (), "hints": (), "teacher_logprobs": None, "advantages": advantages.astype(np.float32)}
    batches = micro_batches(replace(step, **changes), [[0, 1, 2], [3, 4]], pairs=())
    with backwards(policy) as tokens:
        ours = accumulated(policy, batches, {"name": name, "silent_share": 1.0})
    # samples 0 and 1 share a prompt of 3 tokens: 6 + 9 - 3 + 4 are computed for the first micro-batch
    assert tokens == expected
    theirs = plainly(policy, batches, {"name": name})
    if silent == (0, 3):
        assert_close(ours.gradients, theirs.gradients, tolerance=1e-6)
    else:
        assert_equal(ours.gradients, theirs.gradients)
    counts = {"loss/total", "policy/slope", "policy/tokens", *(f"policy/tokens_lag{lag}" for lag in (0, 1, 2))}
    metrics = {key: value for key, value in ours.metrics.items() if key not in counts}
    assert metrics == pytest.approx(theirs.metrics, rel=1e-6, abs=1e-8)


def test_a_share_of_the_samples_that_teach_nothing_stands_for_all_of_them(tiny_model: Path) -> None:
    policy, parts = tiny_policy(tiny_model), list[MicroBatch]()
    for name in "ab":
        batch = on_policy(tiny_batch((5,) * 20), policy)  # of which 4 tokens each carry loss
        batch.advantages[5:] = 0.0  # all but the first sample's
        shifted = np.where(np.arange(100) < 5, 0, np.float32(0.1))
        ids = tuple(f"{name}{number}" for number in range(20))
        parts.append(replace(batch, rollout_ids=ids, inference_logprobs=batch.inference_logprobs - shifted))
    computed = list[list[str]]()
    for number in range(1, 17):
        split = by_signal([replace(part, step=number) for part in parts], LossSettings())
        assert [part.rollout_ids for part in split.teaching] == [("a0",), ("b0",)]
        computed.append([name for part in split.silent for name in part.rollout_ids])
    assert {len(names) for names in computed} == {4, 5}  # 38 / 8
    assert len({name for names in computed for name in names}) == 38
    metrics = accumulated(policy, parts, {}).metrics
    assert metrics["policy/tokens"] == metrics["policy/tokens_lag0"] == 160
    # 152 tokens, of which a few were computed, whose log ratio is 0.1, and 8 tokens at 0
    assert metrics["policy/ratio_mean"] == pytest.approx((152 * np.exp(0.1) + 8) / 160, rel=1e-4)


def test_where_few_samples_teach_nothing_one_is_computed(tiny_model: Path, step: MicroBatch) -> None:
    batch = replace(step, hints=(), pairs=(), teacher_logprobs=None, advantages=np.zeros_like(step.advantages))
    teaching, [silent], weight, _ = by_signal([batch], LossSettings())
    assert (teaching, len(silent.rollout_ids)) == ([], 1)
    assert weight == pytest.approx(batch.loss_mask.sum() / silent.loss_mask.sum())


def test_a_sample_that_teaches_nothing_and_is_not_finite_still_refuses_its_step(
    tiny_model: Path, step: MicroBatch
) -> None:
    batch = replace(step, hints=(), teacher_logprobs=None, advantages=np.zeros_like(step.advantages))
    batch = replace(batch, inference_logprobs=np.where(np.arange(len(batch.token_ids)) == 3, np.float32("nan"), 0))
    assert np.isnan(accumulated(tiny_policy(tiny_model), [batch], {"silent_share": 1.0}).metrics["loss/total"])


def test_the_weight_of_the_entropy_falls_by_the_same_factor_at_each_step(tiny_model: Path, step: MicroBatch) -> None:
    batch, falling = replace(step, hints=()), {"entropy_tau_end": 0.1, "entropy_decay_steps": 2}
    # From 0.4 over two steps to 0.1: 0.4, 0.2, 0.1, and 0.1 from there on.
    for number, weight in ((1, 0.4), (2, 0.2), (3, 0.1), (9, 0.1)):
        own = accumulated(tiny_policy(tiny_model), [replace(batch, step=number)], {"entropy_tau": 0.4, **falling})
        plain = accumulated(tiny_policy(tiny_model), [replace(batch, step=number)], {"entropy_tau": weight})
        assert_close(own.gradients, plain.gradients, tolerance=1e-6)


@pytest.mark.parametrize("options", [{"kl_tau": 0.1}, {"teacher_tau": 0.1}, {"entropy_tau": 0.1}])
def test_a_sample_without_an_advantage_teaches_by_what_else_has_a_weight(
    tiny_model: Path, step: MicroBatch, options: dict[str, Any]
) -> None:
    batch = replace(step, hints=(), advantages=np.zeros_like(step.advantages))
    if "teacher_tau" not in options:
        batch = replace(batch, teacher_logprobs=None)
    result = accumulated(tiny_policy(tiny_model), [batch], options)
    assert max(float(gradient.abs().max()) for gradient in result.gradients) > 1e-3
