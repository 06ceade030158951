"""The witness that a batch's gradients must show, and which samples differ where they show another (docs/proofs.md).

Legend: `N` samples of a batch by id (rollouts, hints, preference pairs), `K` loss tokens. Pure: no I/O.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from grpo.transport.receipts import NOT_FINITE, ExpectedWitness, KeptWitness, Witness
from grpo.transport.records import MicroBatch, PreferencePair, TrainingSample
from grpo.transport.witness import TOLERANCE, hint_id, pair_id, ramped, signs, token_values
from numpy.typing import NDArray

if TYPE_CHECKING:  # who checks a run's folder has no pydantic
    from grpo.configs.loss import LossSettings

Numbers = NDArray[np.float64]
KEPT = 8
"""Components of presence, and of content, that a ledger keeps: 64 bytes together."""
_NAMED = 8
"""Samples that a sentence names."""


def expected_witness(
    samples: Sequence[TrainingSample], pairs: Sequence[PreferencePair], settings: "LossSettings", *, step: int
) -> "Expectation":
    """Returns what the gradients of these samples must show, by the trainer's settings of the loss."""
    parts: list[_Tokens] = []
    if settings.trains_policy and samples:
        parts.append(_policy_tokens(samples, settings))
    hinted = [sample for sample in samples if sample.hint is not None]
    if hinted and ramped(settings.alpha_sdpo, step, settings.sdpo.warmup_steps, settings.sdpo.decay_steps):
        parts += _hint_tokens(hinted)
    if pairs and ramped(settings.beta_replay, step, settings.dpo.warmup_steps, settings.dpo.decay_steps):
        parts += [_pair_tokens(pair, 1 / len(pairs)) for pair in pairs]
    sums: defaultdict[str, Numbers] = defaultdict(lambda: np.zeros(3))
    for part in parts:
        for row, one in enumerate(part.ids):
            sums[one] += part.sums[:, row]
    kept = np.stack(list(sums.values())) if sums else np.zeros((0, 3))
    sizes = sum(part.sizes[0] for part in parts), sum(part.sizes[1] for part in parts)
    ids, of_samples = tuple(sums), kept[:, :2]
    return Expectation(witness=_witness(ids, of_samples, sizes), ids=ids, sums=of_samples, shares=kept[:, 2])


def _witness(ids: Sequence[str], sums: Numbers, sizes: tuple[float, float]) -> ExpectedWitness:
    presence, content = (tuple(float(f"{value:.9g}") for value in row) for row in (sums.T @ signs(ids)).tolist())
    return ExpectedWitness(presence=presence, content=content, presence_size=sizes[0], content_size=sizes[1])


class _Tokens(NamedTuple):
    """The sums over the tokens of some samples."""

    ids: Sequence[str]
    """[n]"""
    sums: Numbers
    """[3, n] presence, content, and the samples' shares of the normaliser, which add up to 1 over a loss term."""
    sizes: tuple[float, float]
    """Sums of |weight| and of |weight · advantage| of all their tokens."""


def _policy_tokens(samples: Sequence[TrainingSample], settings: "LossSettings") -> _Tokens:
    lengths = np.array([len(sample.token_ids) for sample in samples])
    token_ids = np.concatenate([sample.token_ids for sample in samples]).astype(np.int64)
    targets = np.flatnonzero(np.concatenate([sample.loss_mask for sample in samples]))
    of_tokens = np.repeat(np.arange(len(samples)), lengths)[targets]
    num_tokens = np.bincount(of_tokens, minlength=len(samples))
    num_samples = int(np.count_nonzero(num_tokens))
    if settings.normaliser == "token":
        weights = np.full(len(samples), 1 / max(1, len(targets)))
    elif settings.normaliser == "constant":
        weights = np.full(len(samples), 1 / max(1, num_samples * settings.constant_tokens))
    else:
        weights = 1 / np.maximum(1, num_samples * num_tokens)
    advantages = np.concatenate([_per_token(one.advantages, len(one.token_ids)) for one in samples])[targets]
    places = targets - (np.cumsum(lengths) - lengths)[of_tokens]
    adapters = np.array([sample.adapter for sample in samples])[of_tokens]
    of_ids = token_values(token_ids[targets], token_ids[targets - 1], places - 1, adapters)
    values = weights[of_tokens] * advantages
    content = np.bincount(of_tokens, values * of_ids, minlength=len(samples))
    shares = num_tokens if settings.normaliser == "token" else num_tokens > 0
    return _Tokens(
        [sample.rollout_id for sample in samples],
        np.stack([weights * num_tokens, content, shares / max(1, shares.sum())]),
        (float(weights @ num_tokens), float(np.abs(values).sum())),
    )


def _per_token(values: NDArray[np.float32] | float, length: int) -> Numbers:
    return np.broadcast_to(np.asarray(values, np.float32), (length,)).astype(np.float64)


def _hint_tokens(hinted: Sequence[TrainingSample]) -> Iterator[_Tokens]:
    """Yields each hint's aligned tokens, which count once for presence and in both contexts for content."""
    num_tokens = sum(len(sample.hint.student_index) for sample in hinted if sample.hint is not None)
    for sample in hinted:
        hint = sample.hint
        assert hint is not None
        weight, count = float(np.float32(hint.weight)) / num_tokens, len(hint.student_index)
        both = (sample.token_ids, hint.student_index), (hint.teacher_token_ids, hint.teacher_index)
        content = weight * sum(_value_sum(ids, places, sample.adapter) for ids, places in both)
        sizes = abs(weight) * count, 2 * abs(weight) * count
        sums = np.array([[weight * count], [content], [count / num_tokens]])
        yield _Tokens([hint_id(sample.rollout_id)], sums, sizes)


def _pair_tokens(pair: PreferencePair, weight: float) -> _Tokens:
    """Returns the tokens of both continuations, those of the rejected one with the other sign."""
    content, num_tokens = 0.0, 0
    for factor, continuation in ((1, pair.chosen_ids), (-1, pair.rejected_ids)):
        ids = np.concatenate([pair.prompt_ids, continuation])
        content += factor * _value_sum(ids, np.arange(len(pair.prompt_ids), len(ids)), pair.adapter)
        num_tokens += len(continuation)
    sums = np.array([[weight * num_tokens], [weight * content], [weight]])
    return _Tokens([pair_id(pair)], sums, (weight * num_tokens, weight * num_tokens))


def _value_sum(token_ids: NDArray[np.int32], places: NDArray[np.integer], adapter: int) -> float:
    ids, at = token_ids.astype(np.int64), places.astype(np.int64)
    return float(token_values(ids[at], ids[at - 1], at - 1, adapter).sum())


# --- what was found instead ---


def differs(expected: ExpectedWitness, found: Witness) -> bool:
    """Returns whether the gradients show another batch than was expected, beyond rounding."""
    gaps, limits = _gaps(expected, found)
    return not bool((np.abs(gaps) <= limits[:, None]).all())  # what is not a number differs


def largest_gap(expected: ExpectedWitness, found: Witness) -> float:
    """Returns the largest difference of a component as a share of its size; infinite where it is of nothing."""
    gaps, limits = _gaps(expected, found)
    return _largest(gaps, limits / TOLERANCE)


def kept_of(expected: ExpectedWitness, found: Witness) -> KeptWitness:
    """Returns what is kept of a witness that agrees with the one that was expected."""
    first = np.array([found.presence[:KEPT], found.content[:KEPT]], "<f4")
    return KeptWitness(
        components=first.tobytes(),
        presence_size=expected.presence_size,
        content_size=expected.content_size,
        gap=largest_gap(expected, found),
    )


def kept_gap(kept: KeptWitness, other: Witness) -> float:
    """Returns the largest difference between what was kept of a witness and another one, as a share of its size.
    Rounding to float32 makes up to 2^-24."""
    own = np.frombuffer(kept.components, "<f4").reshape(2, -1).astype(np.float64)
    gaps = own - np.array([other.presence[: own.shape[1]], other.content[: own.shape[1]]])
    return _largest(gaps, np.array([kept.presence_size, kept.content_size]))


def _largest(gaps: Numbers, sizes: Numbers) -> float:
    largest = np.abs(gaps).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(largest == 0, 0.0, largest / sizes).max())


def _gaps(expected: ExpectedWitness, found: Witness) -> tuple[Numbers, Numbers]:
    """Returns [2, 64] found minus expected, and [2] the largest differences by rounding."""
    gaps = np.array([found.presence, found.content]) - np.array([expected.presence, expected.content])
    return gaps, TOLERANCE * np.array([expected.presence_size, expected.content_size])


Kind = Literal["missing", "repeated", "weighted", "content", "unknown", "unexplained"]


class Finding(NamedTuple):
    """A difference between a batch and its gradients. Example: ``Finding("missing", "rollout 17/3", 0.0)``"""

    kind: Kind
    """The samples are missing, are there several times, count more or less than they should, have other tokens, places
    or advantages; samples of no batch that is known are there; or there is no explanation."""
    who: str
    factor: float = 1.0
    """How often they count."""

    def __str__(self) -> str:
        match self.kind:
            case "missing":
                return f"{self.who}: missing"
            case "repeated" | "weighted":
                return f"{self.who}: counted {self.factor:.4g} times"
            case "content":
                return f"{self.who}: with other tokens, places or advantages"
            case "unknown":
                return f"{self.who}: not of this batch, but in its gradients"
        return self.who


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A batch's witness with what its samples contribute, by which a difference is explained."""

    witness: ExpectedWitness
    ids: tuple[str, ...]
    """[N]"""
    sums: Numbers
    """[N, 2] presence and content of each sample: its signs times these are its part of the witness."""
    shares: Numbers
    """[N] each sample's share of the normaliser of its loss term."""
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Rank and micro-batch by id, of those that are in one alone."""

    def without(self, rollouts: Sequence[str]) -> "Expectation":
        """Returns what the gradients must show where the trainer has left out these rollouts, and their hints: the
        others have the more weight."""
        left_out = np.array([one.removeprefix(hint_id("")) in set(rollouts) for one in self.ids], np.bool_)
        hints = np.array([one.startswith(hint_id("")) for one in self.ids], np.bool_)
        sums = self.sums.copy()
        for of_term in (hints, ~hints & np.array([not one.startswith("pair ") for one in self.ids], np.bool_)):
            rest = 1 - self.shares[of_term & left_out].sum()
            sums[of_term] /= rest if rest > 1e-9 else 1.0
        sums[left_out] = 0.0
        sizes = self.witness.presence_size, self.witness.content_size
        return replace(self, sums=sums, witness=_witness(self.ids, sums, sizes))

    def explain(self, found: Witness, *, others: Sequence[str] = ()) -> list[Finding]:
        """Returns how the gradients differ, by the samples' signs: first whether whole samples count otherwise (all,
        those of a rank, of a micro-batch, of a group, or single ones), then how weights and contents differ on their
        own. `others` are ids of samples of other batches. Nothing where the gradients do not differ."""
        if not differs(self.witness, found):
            return []
        gaps, limits = _gaps(self.witness, found)
        if not (np.abs(gaps) < NOT_FINITE / 2).all():
            return [Finding("unexplained", "the witness is not finite")]
        scale = np.maximum(limits, 1e-30) / TOLERANCE
        own = signs(self.ids)
        atoms = (self.sums / scale)[:, :, None] * own[:, None, :]  # [N, 2, 64], so that TOLERANCE is the limit of both
        residual = (gaps / scale[:, None]).ravel()
        for names in self._levels():
            sums = _summed(atoms, names)
            if fit := _fit(residual, np.array(list(sums.values())).reshape(len(sums), -1)):
                return list(_counts(fit, list(sums)))
        return self._apart(gaps / scale[:, None], atoms, own, others) or [
            Finding("unexplained", "more samples differ than their signs tell apart")
        ]

    def _levels(self) -> Iterator[Sequence[str]]:
        """Yields [N] names of what samples belong to, from the whole batch to single samples."""
        titles = [one if one.startswith(("hint ", "pair ")) else f"rollout {one}" for one in self.ids]
        placed = [self.places.get(one.removeprefix("hint of ")) for one in self.ids]
        groups = [one.removeprefix("hint of ").partition("/")[0] for one in self.ids]
        whole = ["the whole batch"] * len(self.ids)
        ranks = [title if at is None else f"rank {at[0]}" for title, at in zip(titles, placed, strict=True)]
        batches = [
            title if at is None else f"micro-batch {at[1]} of rank {at[0]}"
            for title, at in zip(titles, placed, strict=True)
        ]
        of_groups = [f"group {group}" for group in groups]
        for names in (whole, ranks, batches, of_groups):
            if len(set(names)) < len(self.ids) or names is whole:
                yield names
        yield titles

    def _apart(self, gaps: Numbers, atoms: Numbers, own: Numbers, others: Sequence[str]) -> list[Finding]:
        """Returns what weights and contents say, each for itself; nothing where they say too much."""
        fit, titles = None, list[str]()
        for titles in map(list, self._levels()):
            sums = _summed(atoms[:, 0], titles)
            if fit := _fit(gaps[0], np.array(list(sums.values()))):
                found = list(_counts(fit, list(sums)))
                break
        else:
            strange = signs(others) * float(np.abs(atoms[:, 0]).max(initial=TOLERANCE))
            if (fit := _fit(gaps[0], np.concatenate([atoms[:, 0], strange]))) is None:
                return []
            names = [*titles, *(f"rollout {one}" for one in others)]
            found = list(_counts(fit, names, num_known=len(titles)))
        titles = [*list(self._levels())[-1], *(one.who for one in found if one.kind == "unknown")]
        own = np.concatenate([own, signs([one.removeprefix("rollout ") for one in titles[len(own) :]])])
        # Content beside that of samples that count otherwise.
        known = atoms[:, 1].sum(axis=0)
        rest = (known + gaps[1]) / (1 + fit.common) - known
        if np.abs(rest).max() > TOLERANCE:
            contents = _fit(rest, own, units=True)
            if contents is None:
                return [*found, Finding("content", "more samples than their signs tell apart")]
            named = {one.who for one in found}
            found += [
                Finding("content", title)
                for title, factor in zip(titles, contents.factors, strict=True)
                if abs(factor) > 8 * TOLERANCE and title not in named
            ]
        return found


def unpacked(batches: Sequence[MicroBatch]) -> tuple[list[TrainingSample], list[PreferencePair]]:
    """Returns samples and preference pairs that give the same witness as those that were packed into these."""
    samples = []
    for batch in batches:
        hints, advantages = dict(batch.hints), batch.per_token(batch.advantages)
        for index, start in enumerate(batch.starts.tolist()):
            length = int(batch.sequence_lengths[index])
            own = slice(start, start + length)
            samples.append(
                TrainingSample(
                    token_ids=batch.token_ids[own],
                    loss_mask=batch.loss_mask[own],
                    inference_logprobs=batch.inference_logprobs[own],
                    advantages=advantages[own],
                    temperatures=1.0,
                    policy_versions=((0, length),),
                    hint=hints.get(index),
                    env="",
                    group_id="",
                    rollout_id=batch.rollout_ids[index],
                    reward=0.0,
                    stop_reason="",
                    adapter=0 if batch.adapters is None else int(batch.adapters[index]),
                )
            )
    return samples, [pair for batch in batches for pair in batch.pairs]


def placed(batches: Sequence[Sequence[MicroBatch]]) -> dict[str, tuple[int, int]]:
    """Returns rank and micro-batch of each rollout that is in one alone, by id."""
    found, several = dict[str, tuple[int, int]](), set[str]()
    for of_rank in batches:
        for batch in of_rank:
            own = dict.fromkeys(batch.rollout_ids, (batch.rank, batch.index))
            several.update(own.keys() & found.keys())
            found |= own
    return {rollout: place for rollout, place in found.items() if rollout not in several} if several else found


def sentence(findings: Sequence[Finding]) -> str:
    """Returns the first findings as text, and the number of further ones."""
    more = f"; and {len(findings) - _NAMED} more" if len(findings) > _NAMED else ""
    return "; ".join(map(str, findings[:_NAMED])) + more


def _summed(atoms: Numbers, names: Sequence[str]) -> dict[str, Numbers]:
    sums: dict[str, Numbers] = {}
    for name, atom in zip(names, atoms, strict=True):
        sums[name] = sums[name] + atom if name in sums else atom
    return sums


class _Fit(NamedTuple):
    """A residual as multiples of atoms: `common` of all of them, and further `factors` [n] of each one. Each factor is
    known to about `noise` [n]."""

    common: float
    factors: Numbers
    noise: Numbers


def _fit(residual: Numbers, atoms: Numbers, *, units: bool = False) -> _Fit | None:
    """Returns `residual` [d] as multiples of `atoms` [n, d], to within rounding, or None: by least squares if the atoms
    are fewer than the equations, and otherwise by orthogonal matching pursuit (Pati et al. 1993), which finds a few
    atoms among many. `units`: the atoms' own multiples mean nothing, so they have none in common."""
    num, size = atoms.shape
    sizes = np.maximum(np.linalg.norm(atoms, axis=1), 1e-30)
    noise: Numbers = np.asarray(8 * TOLERANCE * np.sqrt(size) / sizes, np.float64)
    if num <= 0.85 * size:
        factors = np.linalg.lstsq(atoms.T, residual, rcond=None)[0].astype(np.float64)
        if np.abs(residual - factors @ atoms).max() > 2 * TOLERANCE:
            return None
        usual = float(np.median(factors))
        shared = not units and np.count_nonzero(np.abs(factors - usual) <= noise) > num / 2 and num > 1
        changed = abs(usual) > float(np.median(noise)) and abs(1 + usual) > 1e-3  # most may be missing
        common = usual if shared and changed else 0.0
        return _Fit(common, factors - common, noise)
    together = atoms if units else np.concatenate([atoms, atoms.sum(axis=0)[None]])
    norms = np.maximum(np.linalg.norm(together, axis=1), 1e-30)
    chosen: list[int] = []
    rest, some = residual, np.zeros(0)
    while np.abs(rest).max() > 2 * TOLERANCE:
        if len(chosen) == size // 4:
            return None
        likeness = np.abs(together @ rest) / norms
        likeness[chosen] = -1.0
        chosen.append(int(likeness.argmax()))
        some = np.linalg.lstsq(together[chosen].T, residual, rcond=None)[0]
        rest = residual - some @ together[chosen]
    sparse: Numbers = np.zeros(len(together))
    sparse[chosen] = some
    return _Fit(0.0 if units else float(sparse[num]), sparse[:num], noise)


def _counts(fit: _Fit, names: Sequence[str], *, num_known: int | None = None) -> Iterator[Finding]:
    """Yields the samples that count otherwise than the rest, and the rest if that counts otherwise than it should. From
    `num_known` on they are not of the batch."""
    for number, (name, factor, noise) in enumerate(zip(names, fit.factors, fit.noise, strict=True)):
        if abs(factor) <= noise:
            continue
        if num_known is not None and number >= num_known:
            yield Finding("unknown", name)
            continue
        times = (1 + fit.common + factor) / (1 + fit.common)
        close = 2 * noise + 1e-3
        if abs(times) <= close:
            yield Finding("missing", name, 0.0)
        elif times > 1.5 and abs(times - round(times)) <= close:
            yield Finding("repeated", name, times)
        else:
            yield Finding("weighted", name, times)
    if fit.common:
        yield Finding("weighted", "all others", 1 + fit.common)
