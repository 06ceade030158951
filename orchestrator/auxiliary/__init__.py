"""The auxiliary losses: what the policy learns from besides rewards. A teacher's log-probabilities, hints (SDPO), and
preferences (DPO). Each is a hook that its own settings open."""

from grpo.configs.loss import DpoSettings, SdpoSettings


def is_trained(weight: float, term: SdpoSettings | DpoSettings, *, num_shipped: int) -> bool:
    """Returns whether the loss of the batch after `num_shipped` has the term: its weight is not 0, and has not fallen
    to 0 yet."""
    return weight > 0 and (term.decay_steps is None or num_shipped < term.warmup_steps + term.decay_steps)
