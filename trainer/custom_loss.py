"""A user's own policy loss, by `loss.import_path`: a function of `PolicyTokens` that gives a loss for each token."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import StepCounts
from grpo.trainer.errors import LossError
from grpo.trainer.loss import Loss, PolicyTokens, mismatch_metrics, number_of, token_weights
from grpo.trainer.metrics import Mean, Sum
from grpo.transport.errors import UserError
from grpo.transport.importing import load_object


def loss_function(import_path: str) -> Callable[[PolicyTokens], Any]:
    """Returns the function that `loss.import_path` names. Raises `LossError` if that is no function."""
    try:
        found = load_object(import_path, setting="loss.import_path")
    except UserError as error:
        raise LossError(str(error)) from error
    except Exception as error:
        raise LossError(f"loss.import_path = {import_path!r} cannot be imported: {_where(error)}") from error
    if not callable(found):
        raise LossError(f"loss.import_path = {import_path!r} is {found!r}, expected a function of the step's tokens")
    return found  # type: ignore[no-any-return]


def custom_loss(
    function: Callable[[PolicyTokens], Any], tokens: PolicyTokens, settings: LossSettings, counts: StepCounts
) -> Loss:
    """Returns -Σ w · (-loss_t + entropy_tau · entropy_t) of the user's `loss_t` [K], with `token_weights` for w, and
    metrics, the user's own among them as means over the loss tokens. Raises `LossError` if the function returns other
    shapes, or a loss that does not depend on the log-probabilities."""
    who = f"loss.import_path = {settings.import_path!r}"
    try:
        returned = function(tokens)
    except Exception as error:
        raise LossError(f"{who} raised {_where(error)}") from error
    losses, own = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(own, Mapping) or not all(str(name).isidentifier() for name in own):
        raise LossError(f"{who} returned {own!r:.80} as metrics, expected a dict of names like `my_kl` to tensors")
    for name, values in {"its loss": losses, **{f"its metric {name}": values for name, values in own.items()}}.items():
        if not isinstance(values, torch.Tensor) or values.shape != tokens.logprobs.shape:
            shown = f"a tensor of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)[:80]
            raise LossError(
                f"{who}: {name} is {shown}, expected one number for each token, shape {list(tokens.logprobs.shape)}; "
                "return losses before they are summed"
            )
    if not losses.requires_grad:
        raise LossError(
            f"{who} returned a loss without gradient, which would train nothing; compute it from tokens.logprobs, not "
            "detached"
        )
    per_token = losses - settings.entropy_tau * tokens.entropies if settings.entropy_tau else losses
    loss = (token_weights(tokens, counts, settings) * per_token).sum()
    count = number_of(tokens.logprobs)
    metrics = {f"policy/custom_{name}": Mean(values.detach().sum(), count) for name, values in own.items()}
    return loss, metrics | {"loss/policy": Sum(loss.detach())} | mismatch_metrics(tokens)


def _where(error: Exception) -> str:
    """Returns the error with the line of the user's file that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
