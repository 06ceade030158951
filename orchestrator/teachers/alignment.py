"""Rows of tokens to requests, and log-probabilities back to their tokens. No I/O.

Legend: `L` tokens of one sample or row, `R` rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from transport.records import Float32, Int32, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: a row, and those of the same temperature that are its beginning, whose answers are the beginning of
    its answer.

    Example: of the rows ``[[5, 6], [5, 6, 7], [5, 6]]``, ``Asked(row=1, covers=(0, 1, 2))``
    """

    row: int
    """Index of the row that is asked about."""
    covers: tuple[int, ...]
    """Indices of all rows that its answer answers, itself included, ascending."""


def plan(rows: Sequence[Int32], temperatures: Sequence[float]) -> list[Asked]:
    """As few requests as answer all rows, in an order in which rows with a common beginning follow each other.

    A model reads from left to right, so the log-probabilities of a row are those of the beginning of any longer row
    that continues it. The answers of a group are often equal, and these are asked about once. The order is for servers
    that reuse prefixes; vLLM computes requests for `prompt_logprobs` whole (`skip_reading_prefix_cache` in its
    SamplingParams), so there it saves nothing.
    """
    keys = [
        (temperature, np.asarray(row, ">u4").tobytes()) for row, temperature in zip(rows, temperatures, strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda index: keys[index])
    groups: list[list[int]] = []
    for index in reversed(order):
        if groups and _begins(keys[groups[-1][0]], keys[index]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [Asked(row=group[0], covers=tuple(sorted(group))) for group in reversed(groups)]


def _begins(longer: tuple[float, bytes], shorter: tuple[float, bytes]) -> bool:
    return longer[0] == shorter[0] and longer[1].startswith(shorter[1])


def temperatures_of(sample: TrainingSample) -> tuple[float, ...]:
    """The temperatures that the sample's loss tokens were sampled at, ascending; one, but in conversations during which
    it changed. None where it has no loss tokens."""
    if not sample.loss_mask.any():
        return ()
    if isinstance(sample.temperatures, np.ndarray):
        return tuple(float(one) for one in np.unique(sample.temperatures[sample.loss_mask]))
    return (float(sample.temperatures),)


def combined(sample: TrainingSample, by_temperature: Mapping[float, Float32]) -> Float32:
    """[L] each loss token's log-probability at the temperature that it was sampled at; 0 elsewhere. `by_temperature`
    has [L] for each of `temperatures_of(sample)`; KeyError where one is missing."""
    result = np.zeros(len(sample.token_ids), np.float32)
    for temperature in temperatures_of(sample):
        places = sample.loss_mask & (np.asarray(sample.temperatures, np.float64) == temperature)
        result[places] = by_temperature[temperature][places]
    return result


def with_teacher(sample: TrainingSample, logprobs: Float32) -> TrainingSample:
    """The sample with the teacher's log-probabilities [L] of its loss tokens, and 0 on all others, where the trainer
    reads none. Raises ValueError for another length, and where a loss token's is no finite number up to 0."""
    length = len(sample.token_ids)
    if logprobs.shape != (length,):
        raise ValueError(
            f"rollout {sample.rollout_id}: the teacher's log-probabilities are {list(logprobs.shape)}, expected "
            f"[{length}], one for each token"
        )
    if (problem := problem_in(logprobs[sample.loss_mask])) is not None:
        raise ValueError(f"rollout {sample.rollout_id}: among the teacher's log-probabilities of loss tokens {problem}")
    placed = np.where(sample.loss_mask, logprobs, np.float32(0)).astype(np.float32)
    return replace(sample, teacher_logprobs=placed)


HIGHEST = 1e-3
"""Log-probabilities are at most 0; so far above it rounding may bring one."""
LOWEST = -9999.0
"""What vLLM's OpenAI routes say for minus infinity."""


def problem_in(logprobs: Float32) -> str | None:
    """What is wrong with numbers that are to be log-probabilities; None where nothing is."""
    if not len(logprobs):
        return None
    if not np.isfinite(logprobs).all():
        return "is one that is not finite"
    if (highest := float(logprobs.max())) > HIGHEST:
        return (
            f"is {highest:g}, expected at most 0: these are no log-probabilities; a vLLM server must not run with "
            "--logprobs-mode raw_logits or processed_logits"
        )
    if float(logprobs.min()) <= LOWEST:
        return f"is {float(logprobs.min()):g}, which stands for minus infinity: a token that the teacher rules out"
    return None
