"""Deliberate faults in the mathematics of the objective, each of which the checks of the other tests must find.

Faults in what feeds it are in test_objective_faults.py.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer import loss_reference, test_divergence, test_logprobs, test_loss_gradients
from tests.trainer.faults import Fault, new_module, own_names, planted


def check_losses(losses: Any) -> None:
    """What test_loss_reference.py and test_loss_gradients.py check, on fewer cases."""
    for seed in range(60):
        loss_reference.check_sdpo(losses, seed)
        loss_reference.check_dpo(losses, seed)
    for name in test_loss_gradients.TAUS:
        test_loss_gradients.check_policy_gradient(losses, name)
    for case in loss_reference.random_cases()[:250]:
        loss_reference.check_policy(losses, case)


def check_logprobs(logprobs: Any) -> None:
    """What test_logprobs.py checks."""
    for size in reversed(test_logprobs.SIZES):
        test_logprobs.check_values_and_gradients(logprobs, size)
    test_logprobs.check_extremes(logprobs)
    test_logprobs.check_certain_targets(logprobs)
    test_logprobs.check_rounding_of_the_head(logprobs)
    for head_is_trained in (False, True):
        test_logprobs.check_memory(logprobs, head_is_trained)


def check_divergence(divergence: Any) -> None:
    """What test_divergence.py checks."""
    for beta in (0.0, 0.3, 1.0):
        for top_k in (None, 4):
            test_divergence.check_values(divergence, beta, top_k)
            test_divergence.check_gradients(divergence, beta, top_k)
    test_divergence.check_teacher_is_constant(divergence)
    test_divergence.check_nearly_equal(divergence)
    for beta in (1e-9, 0.5):
        test_divergence.check_extremes(divergence, beta)
    test_divergence.check_bfloat16(divergence)
    for head_is_trained in (False, True):
        test_divergence.check_memory(divergence, head_is_trained, None)


CHECKS: dict[str, Callable[[Any], None]] = {
    "loss.py": check_losses,
    "policy_metrics.py": check_losses,
    "logprobs.py": check_logprobs,
    "divergence.py": check_divergence,
}
IMPORTED_BY = {"policy_metrics.py": "loss.py"}
"""Whose functions are checked through another module."""

FAULTS = [
    # The policy loss.
    Fault("the loss has the other sign", "loss.py", "loss = -torch.where", "loss = torch.where"),
    Fault("the log-ratio has the other sign", "loss.py", "difference = trainer -", "difference = -trainer +"),
    Fault("the KL term pushes away", "loss.py", "* advantages - kl_tau", "* advantages + kl_tau"),
    Fault("the KL term is not weighted", "loss.py", "kl_tau * log_ratio", "1.0 * log_ratio"),
    Fault("the advantage is not weighted", "loss.py", "adv_tau * advantages", "1.0 * advantages"),
    Fault("the teacher term pushes away", "loss.py", "drive + teacher_tau *", "drive - teacher_tau *"),
    Fault("the teacher term is not weighted", "loss.py", "teacher_tau * teaching", "1.0 * teaching"),
    Fault("teacher and trainer are swapped", "loss.py", "teacher_logprobs - trainer\n", "trainer - teacher_logprobs\n"),
    Fault(
        "the teacher is compared with the policy that sampled", "loss.py",
        "teacher_logprobs - trainer\n", "teacher_logprobs - inference_logprobs\n",
    ),
    Fault(
        "the teacher's difference is not clamped", "loss.py",
        "teaching = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "teaching = gap",
    ),
    Fault(
        "the teacher's term stays outside the importance ratio", "loss.py",
        "ratio * drive * trainer_logprobs", "(drive + (ratio - 1) * adv_tau * advantages) * trainer_logprobs",
    ),
    Fault("no importance ratio", "loss.py", "ratio * drive *", "drive *"),
    Fault("the coefficient has a gradient", "loss.py", "trainer_logprobs.detach()", "trainer_logprobs"),
    Fault(
        "the micro-batch's own count is the normaliser", "loss.py",
        ".sum() / num_loss_tokens", ".sum() / max(1, len(trainer))",
    ),
    Fault(
        "the kept tokens' count is the normaliser", "loss.py",
        ".sum() / num_loss_tokens", ".sum() / keep.sum().clamp(min=1)",
    ),
    Fault("a mean where a sum belongs", "loss.py", "0.0).sum() /", "0.0).nan_to_num().mean() /"),
    Fault("the mask is inverted", "loss.py", "torch.where(keep,", "torch.where(~keep,"),
    Fault("nothing is masked", "loss.py", "torch.where(keep,", "torch.where(keep | True,"),
    Fault("only what all masks drop is dropped", "loss.py", ".any(dim=0)", ".all(dim=0)"),
    Fault("low token mask, other side", "loss.py", "token_ratio < token_mask_low", "token_ratio > token_mask_low"),
    Fault("high token mask, other side", "loss.py", "token_ratio > token_mask_high}", "token_ratio < token_mask_high}"),
    Fault("low geo mask, other side", "loss.py", "geo_ratio < geo_mask_low", "geo_ratio > geo_mask_low"),
    Fault("high geo mask, other side", "loss.py", "geo_ratio > geo_mask_high", "geo_ratio < geo_mask_high"),
    Fault("low sequence mask on the largest", "loss.py", "smallest < sequence_mask", "largest < sequence_mask"),
    Fault("high sequence mask on the smallest", "loss.py", "largest > sequence_mask", "smallest > sequence_mask"),
    Fault("the sum stands for the geometric mean", "loss.py", "mean_log_ratio.exp()", "log_ratio_sum.exp()"),
    Fault(
        "the arithmetic mean stands for the geometric one", "loss.py",
        "mean_log_ratio.exp()", "_sample_sum_and_mean(token_ratio, sample_ids, num_samples)[1]",
    ),
    Fault("the mean over a sample is off by one", "loss.py", "counts.clamp(min=1)", "(counts + 1)"),
    Fault(
        "samples are off by one", "loss.py",
        "_(0, sample_ids, values)\n", "_(0, (sample_ids + 1) % num_samples, values)\n",
    ),
    Fault("the sequence ratio is a mean", "loss.py", "= log_ratio_sum.clamp", "= mean_log_ratio.clamp"),
    Fault("the ratio types are swapped", "loss.py", 'ratio_type == "sequence"', 'ratio_type == "token"'),
    Fault("the ratio is not clipped", "loss.py", "return ratio.clamp(max=bound)", "return ratio"),
    Fault("the ratio is clipped from below", "loss.py", "ratio.clamp(max=bound)", "ratio.clamp(min=bound)"),
    Fault(
        "the ratio is clipped to the low bound", "loss.py",
        "(token_ratio, token_mask_high)", "(token_ratio, token_mask_low)",
    ),
    Fault("a clipped token is dropped as well", "loss.py", 'if importance == "mask":', "if True:"),
    Fault("clip is taken for mask", "loss.py", 'elif importance == "clip"', 'elif importance == "mask"'),
    Fault("log-ratios are clamped where they are usual", "loss.py", "MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 2.0"),
    # Its metrics.
    Fault("the KL estimate lacks its control variate", "policy_metrics.py", "ratio - 1) - log_ratio", "ratio - 1)"),
    Fault(
        "the KL estimate is of the reverse", "policy_metrics.py",
        "k3(log_ratio, ratio).sum()", "k3(-log_ratio, 1 / ratio).sum()",
    ),
    Fault("the teacher KL has the other sign", "policy_metrics.py", "Mean(-teaching.sum()", "Mean(teaching.sum()"),
    Fault("the teacher KL is a sum", "policy_metrics.py", "Mean(-teaching.sum(), count)", "Total(-teaching.sum())"),
    Fault("the kept share is reported as masked", "policy_metrics.py", "share(~keep, count)", "share(keep, count)"),
    Fault("the mismatch is measured after clamping", "loss.py", "by_lag(difference,", "by_lag(log_ratio,"),
    Fault("lags are off by one", "policy_metrics.py", "of_lag = lags == lag", "of_lag = lags <= lag"),
    # Self-distillation.
    Fault("hints are not weighted", "loss.py", "(weights * divergences)", "(divergences)"),
    Fault(
        "the weights' sum is the normaliser", "loss.py",
        ".sum() / num_hint_tokens", ".sum() / weights.sum().clamp(min=1e-9)",
    ),
    Fault(
        "the micro-batch's hint tokens are the normaliser", "loss.py",
        ".sum() / num_hint_tokens", ".sum() / max(1, len(weights))",
    ),
    Fault("the clip bounds from below", "loss.py", "above = plain > token_clip", "above = plain < token_clip"),
    Fault("a clipped token counts nothing", "loss.py", "(above, token_clip, divergences)", "(above, 0.0, divergences)"),
    Fault(
        "clipping keeps the gradient", "loss.py",
        "divergences = torch.where(above, token_clip, divergences)",
        "divergences = divergences + (plain.clamp(max=token_clip) - plain)",
    ),
    Fault(
        "the divergence is reported after weighting", "loss.py",
        "Mean(plain.sum(), count),\n    }\n    if", "Mean((weights * plain).sum(), count),\n    }\n    if",
    ),
    # Preferences.
    Fault("chosen and rejected are swapped", "loss.py", "beta * (chosen - rejected)", "beta * (rejected - chosen)"),
    Fault("the reference is added", "loss.py", "chosen = chosen_logprobs -", "chosen = chosen_logprobs +"),
    Fault(
        "the reference is the other side's", "loss.py",
        "= rejected_logprobs - rejected_ref", "= rejected_logprobs - chosen_ref",
    ),
    Fault("the preference is not scaled", "loss.py", "margin = beta *", "margin = 1.0 *"),
    Fault("the preference loss has the other sign", "loss.py", "loss = -logsigmoid", "loss = logsigmoid"),
    Fault("the preference loss is linear", "loss.py", "-logsigmoid(margin)", "-margin"),
    Fault(
        "the micro-batch's pairs are the normaliser", "loss.py",
        ".sum() / num_pairs", ".sum() / max(1, len(margin))",
    ),
    Fault("accuracy counts the wrong side", "loss.py", "share(plain > 0", "share(plain < 0"),
    # Log-probabilities.
    Fault("the temperature is forgotten", "logprobs.py", ".div_(temperatures)", ".mul_(1.0)"),
    Fault("the temperature multiplies", "logprobs.py", ".div_(temperatures)", ".mul_(temperatures)"),
    Fault(
        "the temperature is forgotten in the hidden state's gradient", "logprobs.py",
        "(-self._sum * self._temperatures)", "(-self._sum)",
    ),
    Fault("the temperature is forgotten in the head's gradient", "logprobs.py", "(-grad / temperatures)", "(-grad)"),
    Fault("the hidden state's gradient has the other sign", "logprobs.py", "div_(-self._sum", "div_(self._sum"),
    Fault("the head's gradient has the other sign", "logprobs.py", "(-grad / temp", "(grad / temp"),
    Fault(
        "the gradient from above is forgotten", "logprobs.py",
        "torch.mul(slopes, grad[:, None],", "torch.mul(slopes, torch.ones_like(grad)[:, None],",
    ),
    Fault(
        "what was summed up is not scaled to the new maximum", "logprobs.py",
        "self._others, scale)", "self._others, torch.ones_like(scale))",
    ),
    Fault("the mean is not scaled to the new maximum", "logprobs.py", "self._mean.mul_(scale)", "self._mean"),
    Fault(
        "the maximum is the last tile's", "logprobs.py",
        "torch.maximum(self._largest, logits.amax(dim=1, keepdim=True))", "logits.amax(dim=1, keepdim=True)",
    ),
    Fault(
        "the maximum is left out of the normaliser", "logprobs.py",
        "(self._largest + self._sum.log())", "(self._sum.log())",
    ),
    Fault(
        "the target is left out of the softmax", "logprobs.py",
        "self._sum = self._others + ", "self._sum = self._others + 0 * ",
    ),
    Fault("the target is counted twice", "logprobs.py", "torch.where(inside, -torch.inf, found))", "found)"),
    Fault(
        "the target is off by one", "logprobs.py",
        "(self._targets - tokens.start)", "(self._targets - tokens.start + 1)",
    ),
    Fault(
        "tiles do not know where they start", "logprobs.py",
        "place = targets[part] - tokens.start", "place = targets[part]",
    ),
    Fault(
        "the last token of a tile is not inside it", "logprobs.py",
        "(place < logits.shape[1])", "(place < logits.shape[1] - 1)",
    ),
    Fault(
        "the target's share of the head's gradient is forgotten", "logprobs.py",
        "-inside.to(shares.dtype)", "-0.0 * inside.to(shares.dtype)",
    ),
    Fault(
        "the last block of positions overwrites the others", "logprobs.py",
        "add_product(total, shares.T", "add_product(total.zero_(), shares.T",
    ),
    Fault(
        "the head's gradient is summed up in its own type",
        "logprobs.py",
        "add_product(total, shares.T, scaled_hidden[part])",
        "total = total.to(weight.dtype).add_(shares.T.to(weight.dtype) @ scaled_hidden[part])",
    ),
    Fault(
        "1 - p of a certain target is lost to rounding", "logprobs.py",
        "self._others, value=-1)",
        "self._sum, value=-1).add_(self._weight[self._targets] * (self._target - self._largest).exp())",
    ),
    Fault("all tokens are in one tile", "logprobs.py", "max(1, logits_at_once // rows)", "max(1, len(weight))"),
    # Divergences.
    Fault(
        "β is the student's share of the mixture", "divergence.py",
        "_log_over_mixture(gap, beta)", "_log_over_mixture(gap, 1 - beta)",
    ),
    Fault(
        "β weights the student's side", "divergence.py",
        "beta * of_teacher + (1 - beta) * of_student", "beta * of_student + (1 - beta) * of_teacher",
    ),
    Fault("β 0 is the reverse KL", "divergence.py", "return gap.mul_(p).sum(dim=1)", "return -(q * gap).sum(dim=1)"),
    Fault(
        "β 0 is the limit of the formula, which is 0", "divergence.py",
        "return gap.mul_(p).sum(dim=1)", "return gap.mul_(0 * p).sum(dim=1)",
    ),
    Fault("the reverse KL has the other sign", "divergence.py", "result = -(q * gap)", "result = (q * gap)"),
    Fault("the gradient of β 0 has the other sign", "divergence.py", "q.sub_(p)", "p.sub_(q)"),
    Fault("the gradient of β 1 does not sum to 0", "divergence.py", "gap.add_(result[:, None])", "gap"),
    Fault(
        "the gradient does not sum to 0", "divergence.py",
        "student_over_m.sub_(of_student[:, None])", "student_over_m",
    ),
    Fault("the gradient lacks the student's share", "divergence.py", ".mul_(q).mul_(1 - beta)", ".mul_(q)"),
    Fault(
        "the temperature is forgotten in the gradient", "divergence.py",
        "slopes.div_(comparison.temperature)", "slopes",
    ),
    Fault(
        "the teacher is not softened", "divergence.py",
        "(teacher_hidden, teacher_weight, comparison.temperature)", "(teacher_hidden, teacher_weight, 1.0)",
    ),
    Fault("the teacher's own head is ignored", "divergence.py", "else teacher_weight.detach()", "else weight.detach()"),
    Fault(
        "the student's likeliest tokens are compared", "divergence.py",
        "teacher, compared = teacher.topk(comparison.top_k, dim=1)\n        student = student.gather(1, compared)",
        "student, compared = student.topk(comparison.top_k, dim=1)\n        teacher = teacher.gather(1, compared)",
    ),
    Fault(
        "the student is not renormalised over the top-k", "divergence.py",
        "student = student.gather(1, compared)\n    student, teacher = student.log_softmax(dim=1),",
        "student = student.log_softmax(dim=1).gather(1, compared)\n    student, teacher = student,",
    ),
    Fault(
        "the gradient of the top-k goes to the first tokens", "divergence.py",
        "scatter_(1, compared, slopes)", "scatter_(1, compared.sort(dim=1).indices, slopes)",
    ),
    Fault(
        "the gradient from above is forgotten for the head", "divergence.py",
        "slopes.mul_(grad[part, None])", "slopes",
    ),
    Fault(
        "the head's gradient takes the teacher's hidden state", "divergence.py",
        "tokens].T, student_hidden[part])", "tokens].T, teacher_hidden[part])",
    ),
    Fault(
        "the mixture is subtracted in logarithms", "divergence.py",
        "return larger - gap.clamp(min=0), larger + gap.clamp(max=0)",
        "return (larger + 8) - (gap.clamp(min=0) + 8), (larger + 8) - (8 - gap.clamp(max=0))",
    ),
    Fault(
        "a share of the mixture may round to infinity", "divergence.py",
        "larger.clamp_(max=-math.log(min(beta, 1 - beta)))", "larger",
    ),
    Fault(
        "all positions are in one chunk", "divergence.py",
        "max(1, logits_at_once // len(weight))", "len(student_hidden)",
    ),
]  # fmt: skip


def checked(file: str, module: types.ModuleType) -> types.ModuleType:
    """What the checks of `file` take: the module, or the one that imports its functions."""
    if file not in IMPORTED_BY:
        return module
    above = new_module(IMPORTED_BY[file])
    above.__dict__.update({name: value for name, value in own_names(module).items() if name in vars(above)})
    return above


@pytest.mark.parametrize("file", CHECKS)
def test_the_checks_pass_without_a_fault(file: str) -> None:
    CHECKS[file](checked(file, new_module(file)))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_planted_fault_is_found(fault: Fault) -> None:
    faulty = checked(fault.file, planted(fault))
    with pytest.raises(AssertionError):
        CHECKS[fault.file](faulty)


@pytest.mark.parametrize("right", ["no such text", "def "])
def test_a_fault_that_does_not_fit_its_source_is_told(right: str) -> None:
    with pytest.raises(AssertionError, match=r"loss\.py has \d+ times what the fault replaces"):
        planted(Fault("", "loss.py", right, ""))


def test_no_two_faults_are_the_same() -> None:
    assert len({(fault.file, fault.right, fault.wrong) for fault in FAULTS}) == len(FAULTS)
