"""The arithmetic of a step, counted by hand."""

from pathlib import Path

from grpo.configs.loss import LossSettings
from grpo.trainer.flops import step_flops

from tests.trainer.models import tiny_batch, tiny_policy


def test_a_steps_operations_by_hand(tiny_model: Path) -> None:
    # 2 layers, hidden 32, MLP 48, 4 heads of 8, 2 of keys and values: q, o 32·32, k, v 32·16, three of 32·48 in each
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    # samples of 6 and 9 tokens, of which 5 and 8 carry loss; 64 words
    attention, tokens, targets = 6 * 2 * 32 * (36 + 81), 15, 13
    batches, settings = [tiny_batch((6,)), tiny_batch((9,))], LossSettings()
    policy, whole = tiny_policy(tiny_model), tiny_policy(tiny_model, lora=False, moved=False)
    assert step_flops(policy, batches, settings) == 4 * (weights * tokens + 64 * 32 * targets) + attention
    assert step_flops(whole, batches, settings) == 6 * (weights * tokens + 64 * 32 * targets) + attention
    # nothing to learn from the longer one: forward only
    batches[1].advantages[:] = 0.0
    forward = 2 * (weights * 9 + 64 * 32 * 8) + 2 * 2 * 32 * 81
    assert step_flops(policy, batches, settings) == 4 * (weights * 6 + 64 * 32 * 5) + 6 * 2 * 32 * 36 + forward
