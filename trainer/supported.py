"""Which base models the packed forward pass computes as a server does: refused by their config, or by a trial.

A layer that carries state from token to token, recurrent or convolutional, ignores where samples end. Not every such
layer is named in a config, so each model that was loaded has to show that it keeps samples apart.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.batch import PackedTokens, pack
from trainer.errors import ModelError

Ids = NDArray[np.int64]
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = 0.1
"""By how much a hidden state may differ, relative to its norm, on average over the tokens compared. See
`check_samples_kept_apart`."""
_BUILT_OTHERWISE = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
_PROMPT, _ANSWER = 4, 4
"""Tokens of the trial's samples; those after the prompt are wanted."""


def check_config(config: Any, sequence_len: int) -> None:
    """Refuses what a config.json tells to be computed otherwise than by full attention over `sequence_len` tokens.
    Raises `ModelError`."""
    kind = config.model_type
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"{kind} is a model of more than text, whose part for text is a {text.model_type}, and the trainer trains "
            "language models alone; use a text checkpoint"
        )
    types = getattr(config, "layer_types", None)
    if others := sorted(set(types or ()) - _ATTENTION):
        raise ModelError(
            f"{kind} has layers of the types {others}, and the trainer computes full attention only: other layers do "
            "not keep apart the samples that are packed together; use a model whose layers are all full attention"
        )
    window = getattr(config, "sliding_window", None)
    slides = getattr(config, "use_sliding_window", True) if types is None else "sliding_attention" in types
    if slides and window is not None:
        check_window(window, sequence_len, kind)


def check_window(window: int, longest: int, who: str) -> None:
    """Refuses a window in which sequences of `longest` tokens do not attend to all of themselves. Raises
    `ModelError`."""
    if window < longest:
        raise ModelError(
            f"{who} attends within a sliding window of {window} tokens, which the trainer does not compute; set "
            f"sequence_len (now {longest}) to at most {window}"
        )


@contextmanager
def named(model_type: str, kinds: tuple[type[Exception], ...] = _BUILT_OTHERWISE) -> Iterator[None]:
    """Turns what a model fails with that is built otherwise than the trainer takes models to be into a `ModelError`
    that names its type. Errors of other `kinds`, as those of the machine, are left as they are."""
    try:
        yield
    except ModelError:
        raise
    except kinds as error:
        said = " ".join(str(error).split())
        raise ModelError(
            f"models of type {model_type} cannot be trained, they are built otherwise than the trainer expects; use "
            f"another model ({type(error).__name__}: {said})"
        ) from error


@torch.no_grad()
def check_samples_kept_apart(
    hidden_of: Callable[[PackedTokens], torch.Tensor],
    *,
    model_type: str,
    num_layers: int,
    vocab_size: int,
    sequence_len: int,
    device: torch.device,
) -> None:
    """Computes a sample behind others, one of which has the same prompt, and once as the first. Raises `ModelError`
    where the hidden states of its answer differ, where the trainer's attention is called less than `num_layers` times,
    or where it refuses sequences of `sequence_len`.

    Both passes have as many tokens, so that what keeps samples apart gives nearly the same numbers in 16 bits, too:
    0 was seen on a CPU, and 0.5 to 1.4 where layers carry state and their weights matter. A small difference proves
    nothing where weights are small; the calls do not depend on them.
    """
    draw = np.random.default_rng(0)
    prompt, other_prompt = (draw.integers(vocab_size, size=_PROMPT) for _ in range(2))
    answer, other_answer, third = (draw.integers(vocab_size, size=_ANSWER) for _ in range(3))
    sample, sibling = np.concatenate([prompt, answer]), np.concatenate([prompt, other_answer])
    unrelated = np.concatenate([other_prompt, third])

    num_calls = list[int]()

    def hidden(*samples: Ids) -> torch.Tensor:
        tokens, attended = _packed(samples, sequence_len, device), list[str]()
        states = hidden_of(replace(tokens, layout=replace(tokens.layout, attended=attended)))
        num_calls.append(len(attended))
        return states.float()

    behind, alone = hidden(unrelated, sibling, sample)[-_ANSWER:], hidden(sample, other_prompt, unrelated)[:_ANSWER]
    norms = alone.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = float(((behind - alone).norm(dim=1) / norms).mean())
    if not math.isfinite(difference):
        raise ModelError(f"the hidden states of this {model_type} are not finite; see whether its weights are")
    if difference > _TOLERANCE:
        raise ModelError(
            f"{model_type} does not keep apart the samples that are packed together: the hidden states of one change "
            f"by {difference:.0%} with what is packed before it, as those of recurrent and convolutional layers do; "
            "use a model whose layers are all full attention"
        )
    if min(num_calls) < num_layers:
        raise ModelError(
            f"the {num_layers} layers of this {model_type} call the trainer's attention {min(num_calls)} times, and "
            "only that keeps apart the samples that are packed together; use a model whose layers all take their "
            "attention from transformers' attention interface"
        )


def _packed(samples: Sequence[Ids], sequence_len: int, device: torch.device) -> PackedTokens:
    """In a layout that allows for samples of `sequence_len` tokens."""
    positions = np.concatenate([np.arange(len(sample), dtype=np.int32) for sample in samples])
    tokens = pack(
        np.concatenate(samples).astype(np.int32),
        np.array([len(sample) for sample in samples], dtype=np.int32),
        loss_mask=positions >= _PROMPT,
        position_ids=positions,
        temperatures=np.ones(len(positions), dtype=np.float32),
        device=device,
    )
    return replace(tokens, layout=replace(tokens.layout, longest=max(tokens.layout.longest, sequence_len)))
