"""Proves that servers sampled what their records say: by the log-probabilities that the trainer computes itself under
the version that each record names.

Tokens that the current weights sampled are proved by the step's own passes (`Proofs.see`), which leave most samples
that teach nothing out (`loss.silent_share`). Of the others a share of
the samples is drawn, by a keyed hash that no server can foresee, and scored again under the version that sampled them
(`Proofs.score`), before the step's first pass. docs/proofs.md says how soon a fault is noticed so.

Legend: `K` loss tokens of a micro-batch.
"""

import hashlib
import json
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import Ranks
from grpo.trainer.loss import MAX_LOG_RATIO, PolicyTokens
from grpo.trainer.model import Policy
from grpo.trainer.noise import NormNoise, Norms, with_noise
from grpo.trainer.packing import PackedTokens, first_fit, pack, pack_rows
from grpo.trainer.past import PastVersions
from grpo.transport.errors import RunFolderError
from grpo.transport.receipts import SpotProof
from grpo.transport.records import Bool, MicroBatch, Tolerance
from numpy.typing import NDArray

KEY_FILE = ".proofs_key"
"""In the run's folder, for its owner alone: the secret by which samples are drawn."""
LEAST_DRAWN = 2
"""Samples that are drawn a step at least, on average, where there are as many."""
EAGER_STEPS = 8
"""Steps from each start of the trainer on which samples are drawn from every batch."""
SMALL_BATCH, MOST_STEPS = 50_000, 8
"""Tokens of a batch of whose training a pass of proofs is about 1 %. From smaller ones samples are drawn so much more
rarely, and as many more, but from one batch of so many at least."""
SMALL_SHARE = 0.1
"""Samples are not drawn so rarely that more than this share of a batch would be drawn at once."""
FEW_TOKENS = 9.0
"""In 16 bits a mean over n tokens may exceed the tolerance by so many times its 1 / √n (docs/proofs.md)."""
FAR, FLOOR, HALF_FLOOR = 10.0, 0.005, 0.1
"""A mismatch is unexplained above FAR times what the policy has moved, plus a floor in nats; the larger one where
server or trainer compute in 16 bits."""
FORGET = 0.95
"""What is left of the running estimate of how far the policy moves when a step adds to it. A step without drawn samples
adds nothing, and so forgets nothing: without an estimate no mismatch is unexplained."""
ENOUGH_TOKENS = 50
"""Proved tokens that the estimate must rest on."""
LOOKED_AT = 8
"""Samples of a rank that are scored again where a mismatch is doubtful: those that it comes from most."""
Floats = NDArray[np.floating[Any]]


class Drawn(NamedTuple):
    """A sample of this rank that is to be scored again."""

    batch: int
    sample: int


class Candidate(NamedTuple):
    """A sample that may be drawn."""

    stratum: tuple[str, int]
    """Server and adapter."""
    number: int
    """By the keyed hash; the smallest are drawn."""
    rank: int
    drawn: Drawn


@dataclass(kw_only=True)
class Found:
    """The proofs of a step, of all ranks."""

    spots: list[SpotProof] = field(default_factory=list)
    """Of samples that were scored again, and those of the step's own passes that failed."""
    num_now: int = 0
    """Tokens that the step's own passes have proved."""
    num_unproved: int = 0
    steps_since_draw: int = 0
    moved: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By lag, the sum of the k3 estimates of KL(current ‖ sampled version) on proved tokens, and their number."""
    mismatch: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By lag, the sum of the k3 estimates of KL(current ‖ server's) on tokens of the step's own passes, and their
    number."""
    is_exact: bool = True
    """False where a tolerance is that of 16 bits."""
    unexplained: dict[int, float] = field(default_factory=dict)
    """By lag, mean mismatches in nats far above what the policy has moved, that no proof explains."""
    dropped: set[str] = field(default_factory=set)
    """Rollouts that are left out of the step."""

    @property
    def failed(self) -> list[SpotProof]:
        """The proofs that do not hold."""
        return [one for one in self.spots if one.failed_at is not None]

    def metrics(self) -> dict[str, float]:
        """Returns the step's metrics, without those of samples that failed in the step's own passes."""
        tokens = sum(one.num_tokens for one in self.spots)
        mean = sum(one.mean_abs * one.num_tokens for one in self.spots) / max(1, tokens)
        moved = {f"policy/moved_kl_lag{lag}": total / num for lag, (total, num) in self.moved.items() if num}
        return {
            "proofs/tokens": float(tokens),
            "proofs/tokens_now": float(self.num_now),
            "proofs/max_abs": max((one.max_abs for one in self.spots), default=0.0),
            "proofs/mean_abs": mean,
            "proofs/failed": float(len(self.failed)),
            "proofs/unproved": float(self.num_unproved),
            "proofs/dropped": float(len(self.dropped)),
        } | moved


class Proofs:
    """The proofs of one rank's samples; all ranks must call its methods alike."""

    def __init__(
        self, settings: TrainSettings, policy: Policy, past: PastVersions, ranks: Ranks, run: Path, norms: Norms
    ) -> None:
        """Takes the run's folder `run`, and the `norms` of the hidden state, where versions have noise. Collective.
        Raises `RunFolderError` where the run's secret can be neither read nor written."""
        self._policy, self._past, self._ranks, self._norms = policy, past, ranks, norms
        self._share, self._pack_tokens = settings.proofs.share, settings.pack_tokens
        self._sees = bool(settings.proofs.share) and settings.loss.trains_policy
        # What the step's own passes compute is what a server computes.
        self._own_passes = settings.loss.trains_policy and settings.low_precision is None
        self._key = bytes.fromhex(ranks.broadcast(_secret(run).hex() if ranks.is_main else None))
        self._num_steps, self._owed_steps, self._owed_samples = 0, 0, 0
        """Steps of this start, and steps and samples since the last draw."""
        self._drawn_from: set[tuple[str, int]] = set()
        """Servers and adapters that samples have been drawn of."""
        self._sums = 0.0, 0.0
        """Running sums of the proved tokens' k3 estimates, each over its lag squared, and of the tokens' number."""
        self._scored: dict[tuple[str, bytes], tuple[Floats, NDArray[np.int64]]] = {}
        """By rollout and token ids, the trainer's log-probabilities under the versions that sampled, and the places."""
        self._seen: list[tuple[MicroBatch, torch.Tensor]] = []

    # --- samples of earlier versions, before the step ---

    def score(self, step: int, batches: Sequence[MicroBatch], noise: NormNoise) -> Found:
        """Draws samples of a step and scores them again under the versions that sampled them. Collective."""
        self._scored, self._seen, found = {}, [], Found()
        if not self._share:
            return found
        is_free = self._is_free(step, noise)
        drawn = self._draw(step, batches, is_free=is_free)
        samples = [_Sample.of(batches[batch], sample) for batch, sample in drawn]
        told = self._scored_again(samples, step - 1 if is_free else step, noise)
        found = self._agreed(told)
        found.steps_since_draw = self._owed_steps
        return found

    def _scored_again(self, samples: Sequence["_Sample"], before: int, noise: NormNoise) -> "_Told":
        """Returns proofs of this rank's samples, under the versions below `before` that sampled them. Collective."""
        told = _Told()
        for version in self._versions(samples, before):
            own = [(sample, places) for sample in samples if len(places := sample.places_of(version))]
            if not self._past.has(version):
                told.num_unproved += len(own)
                continue
            with self._past.in_place(version):
                logprobs = self._logprobs(
                    [(sample.batch, sample.index, places) for sample, places in own], version, noise
                )
            for (sample, places), values in zip(own, logprobs, strict=True):
                told.add(sample.proof(version, places, values))
                self._remember(sample, places, values)
        return told

    def _is_free(self, step: int, noise: NormNoise) -> bool:
        """Returns whether the step's own passes prove what the version before it has sampled."""
        return self._own_passes and not noise.is_noisy(step - 1)

    def _versions(self, samples: Sequence["_Sample"], before: int) -> list[int]:
        """Returns the versions below `before` that sampled any rank's samples, ascending. Collective."""
        own = sorted({int(one) for sample in samples for one in sample.versions if one < before})
        parts = self._ranks.all_gather(json.dumps(own).encode())
        return sorted({version for part in parts for version in json.loads(part)})

    def _draw(self, step: int, batches: Sequence[MicroBatch], *, is_free: bool) -> list[Drawn]:
        """Returns this rank's samples among those that are drawn of all ranks': `share` of them on average, each server
        and adapter in turn. Collective."""
        samples = [_eligible(step, batch, is_free=is_free) for batch in batches]
        strata = {
            (batch.servers[sample], _adapter(batch, sample))
            for batch, eligible in zip(batches, samples, strict=True)
            for sample in eligible
        }
        total, num_tokens, num_new = self._ranks.all_reduce_sum(
            [sum(map(len, samples)), sum(len(batch.token_ids) for batch in batches), len(strata - self._drawn_from)]
        )
        self._num_steps += 1
        self._owed_steps, self._owed_samples = self._owed_steps + bool(total), self._owed_samples + total
        if not total or not (num_new or self._num_steps <= EAGER_STEPS or self._is_turn(step, num_tokens)):
            return []
        num = max(LEAST_DRAWN * self._owed_steps, math.ceil(self._share * self._owed_samples))
        self._drawn_from |= strata
        self._owed_steps = self._owed_samples = 0
        candidates = [
            self._candidate(step, batch, Drawn(index, sample))
            for index, batch in enumerate(batches)
            for sample in samples[index]
        ]
        if self._ranks.size > 1:
            best = sorted(candidates, key=lambda one: one.number)
            by_stratum: defaultdict[tuple[str, int], list[Candidate]] = defaultdict(list)
            for one in best:
                by_stratum[one.stratum].append(one)
            own = [one for of_one in by_stratum.values() for one in of_one[:num]]
            parts = self._ranks.all_gather(msgspec.json.encode(own))
            candidates = [one for part in parts for one in msgspec.json.decode(part, type=list[Candidate])]
        return [one.drawn for one in chosen(candidates, num, turn=step * num) if one.rank == self._ranks.rank]

    def _is_turn(self, step: int, num_tokens: int) -> bool:
        """Returns whether samples are drawn from a batch of so many tokens: one of each 1, 2, 4 or 8 steps by the keyed
        hash, more of smaller batches."""
        every: int = min(MOST_STEPS, 2 ** math.ceil(math.log2(max(1.0, SMALL_BATCH / num_tokens))))
        if self._share * every > SMALL_SHARE:
            return True
        digest = hashlib.blake2b(f"{step // every}/{every}".encode(), digest_size=7, key=self._key).digest()
        return step % every == int.from_bytes(digest) % every

    def _candidate(self, step: int, batch: MicroBatch, drawn: Drawn) -> Candidate:
        sample = drawn.sample
        text = f"{step}/{batch.rollout_ids[sample]}/{batch.sequence_lengths[sample]}".encode()
        digest = hashlib.blake2b(text, digest_size=7, key=self._key).digest()
        stratum = batch.servers[sample], _adapter(batch, sample)
        return Candidate(stratum, int.from_bytes(digest), self._ranks.rank, drawn)

    @torch.no_grad()
    def _logprobs(
        self, rows: Sequence[tuple[MicroBatch, int, NDArray[np.int64]]], version: int, noise: NormNoise
    ) -> list[Floats]:
        """Returns the log-probabilities of the tokens at these places of samples, with the version's noise, and takes
        part in other ranks' passes. Collective."""
        ends = [int(places[-1]) + 1 for _, _, places in rows]
        bins = first_fit(ends, capacity=self._pack_tokens)
        number = self._ranks.all_reduce_max(len(bins))
        weights, found = noise.weights(version), dict[int, Floats]()
        with with_noise(self._norms, weights) if weights else nullcontext():
            for index in range(number):
                if index >= len(bins):
                    self._policy.logprobs(pack_rows([(np.ones(2, np.int32), np.array([1]))], [0], self._policy.device))
                    continue
                values = self._policy.logprobs(self._packed([rows[one] for one in bins[index]])).cpu().numpy()
                sizes = [len(rows[one][2]) for one in bins[index]]
                found |= dict(zip(bins[index], np.split(values, np.cumsum(sizes)[:-1]), strict=True))
        return [found[index] for index in range(len(rows))]

    def _packed(self, rows: Sequence[tuple[MicroBatch, int, NDArray[np.int64]]]) -> PackedTokens:
        parts = []
        for batch, sample, places in rows:
            start, length = int(batch.starts[sample]), int(places[-1]) + 1
            mask: Bool = np.zeros(length, np.bool_)
            mask[places] = True
            temperatures = batch.per_token(batch.temperatures)[start : start + length]
            parts.append((batch.token_ids[start : start + length], mask, temperatures, _adapter(batch, sample)))
        adapters = np.array([adapter for *_, adapter in parts], np.int32)
        return pack(
            np.concatenate([ids for ids, *_ in parts]),
            np.array([len(ids) for ids, *_ in parts], np.int32),
            loss_mask=np.concatenate([mask for _, mask, *_ in parts]),
            temperatures=np.concatenate([temperatures for _, _, temperatures, _ in parts]),
            adapters=adapters if adapters.any() else None,
            device=self._policy.device,
        )

    def _remember(self, sample: "_Sample", places: NDArray[np.int64], values: Floats) -> None:
        earlier, at = self._scored.get(sample.key, (np.empty(0, np.float32), np.empty(0, np.int64)))
        self._scored[sample.key] = np.concatenate([earlier, values]), np.concatenate([at, places])

    # --- the step's own passes ---

    def see(self, batch: MicroBatch, tokens: PolicyTokens) -> None:
        """Takes notice of a pass under the weights that the step begins with."""
        if self._sees:
            self._seen.append((batch, tokens.logprobs.detach()))

    def seen(self, step: int, noise: NormNoise) -> Found:
        """Returns what the passes since `score` prove, and how far the policy has moved. A mismatch far beyond that is
        looked at: the samples that it comes from are scored again under their versions. Collective."""
        seen, self._seen, own = self._seen, [], _Told()
        is_free, scored = self._is_free(step, noise), {rollout for rollout, _ in self._scored}
        sizes = np.cumsum([len(logprobs) for _, logprobs in seen])[:-1]
        values = np.split(torch.cat([one for _, one in seen]).cpu().numpy(), sizes) if seen else []
        passes = [_Pass(batch, of_batch, step - 1) for (batch, _), of_batch in zip(seen, values, strict=True)]
        moved = defaultdict[int, list[Floats]](list)
        for one in passes:
            batch = one.batch
            if is_free and batch.tolerances and batch.servers:
                self._prove_now(step - 1, batch, one.current, own)
            own.is_exact &= all(tolerance.measure == "max_abs" for tolerance in batch.tolerances.values())
            lags, of_tokens = np.unique(one.lags[batch.loss_mask], return_inverse=True)
            sums = np.bincount(of_tokens, one.estimates[batch.loss_mask])
            for lag, of_lag, count in zip(lags.tolist(), sums.tolist(), np.bincount(of_tokens).tolist(), strict=True):
                total, num = own.mismatch.get(lag, (0.0, 0))
                own.mismatch[lag] = total + of_lag, num + count
            if not scored:
                continue
            for index in [number for number, rollout in enumerate(batch.rollout_ids) if rollout in scored]:
                sample = _Sample.of(batch, index)
                if (known := self._scored.get(sample.key)) is not None:
                    logprobs, places = known
                    lags = sample.cut(one.lags)[places]
                    for lag in np.unique(lags).tolist():
                        moved[lag].append((sample.cut(one.current)[places] - logprobs)[lags == lag])
        own.moved = {
            lag: (float(_k3(all_of := np.concatenate(parts)).sum()), len(all_of)) for lag, parts in moved.items()
        }
        found = self._agreed(own)
        found.spots = found.failed
        found.unexplained = self._unexplained(found)
        if found.unexplained:
            self._look(step, passes, noise, found)
        return found

    def _look(self, step: int, passes: Sequence["_Pass"], noise: NormNoise, found: Found) -> None:
        """Scores the samples again that the unexplained mismatches come from most, and adds their proofs to `found`.
        Where all of them hold, the policy has really moved so far, and nothing is unexplained. Collective."""
        largest = list[tuple[float, _Sample]]()
        for one in passes:
            doubtful = one.batch.loss_mask & np.isin(one.lags, list(found.unexplained))
            sums = np.add.reduceat(np.where(doubtful, one.estimates, 0.0), one.batch.starts)
            samples = [_Sample.of(one.batch, index) for index in np.flatnonzero(sums) if one.batch.servers]
            largest += [(float(sums[sample.index]), sample) for sample in samples if sample.tolerance is not None]
        largest.sort(key=lambda each: each[0], reverse=True)
        told = self._scored_again([sample for _, sample in largest[:LOOKED_AT]], step - 1, noise)
        looked = self._agreed(told)
        found.spots += looked.spots
        if looked.spots and not looked.failed and not looked.num_unproved:
            found.unexplained = {}

    def _prove_now(self, version: int, batch: MicroBatch, current: Floats, own: "_Told") -> None:
        """Compares a micro-batch's tokens of the current version with `current` [T]. Adds their figures to `own`, and
        the proofs of samples that may fail."""
        if version not in batch.version_runs[:, 0]:
            return
        tolerances = [batch.tolerances.get(server) for server in batch.servers]
        known = np.array([one is not None for one in tolerances])
        now = batch.loss_mask & (batch.policy_versions == version) & np.repeat(known, batch.sequence_lengths)
        counts = np.add.reduceat(now.astype(np.int64), batch.starts)
        if not counts.any():
            return
        own.num_now += int(counts.sum())
        colder = np.minimum(1.0, batch.per_token(batch.temperatures))
        gaps = np.where(now, np.abs(current.astype(np.float64) - batch.inference_logprobs) * colder, 0.0)
        largest, sums = np.maximum.reduceat(gaps, batch.starts), np.add.reduceat(gaps, batch.starts)
        worst = dict[str, tuple[float, int]]()
        for sample in np.flatnonzero(counts).tolist():
            tolerance, count = tolerances[sample], int(counts[sample])
            assert tolerance is not None
            if tolerance.measure == "max_abs":
                doubtful = not largest[sample] <= tolerance.gap
            else:
                mean, pool = sums[sample] / count, f"{batch.servers[sample]} {_adapter(batch, sample)}"
                earlier = own.pools.get(pool, (0.0, 0, tolerance.gap))
                own.pools[pool] = earlier[0] + sums[sample], earlier[1] + count, tolerance.gap
                doubtful = not mean <= allowed(tolerance, count)
                if not doubtful and mean >= worst.get(pool, (0.0, 0))[0]:
                    worst[pool] = mean, sample
            if doubtful:
                self._add_now(version, batch, sample, current, own)
        for _, sample in worst.values():
            self._add_now(version, batch, sample, current, own)

    def _add_now(self, version: int, batch: MicroBatch, index: int, current: Floats, own: "_Told") -> None:
        sample = _Sample.of(batch, index)
        places = sample.places_of(version)
        own.proofs.append(sample.proof(version, places, sample.cut(current)[places]))

    def _unexplained(self, found: Found) -> dict[int, float]:
        """Adds the step to the estimate of how far the policy moves, in l steps l² times as far as in one. Returns the
        mean mismatches by lag, in nats between server and trainer, that lie far outside of it."""
        moved = {lag: of_lag for lag, of_lag in found.moved.items() if lag}
        if moved:
            total = FORGET * self._sums[0] + sum(of_lag / lag**2 for lag, (of_lag, _) in moved.items())
            self._sums = total, FORGET * self._sums[1] + sum(num_of for _, num_of in moved.values())
        total, num = self._sums
        if num < ENOUGH_TOKENS:
            return {}
        floor = FLOOR if found.is_exact else HALF_FLOOR
        means = {lag: of_lag / num_of for lag, (of_lag, num_of) in found.mismatch.items()}
        return {lag: mean for lag, mean in means.items() if lag and not mean <= FAR * lag**2 * total / num + floor}

    # --- all ranks ---

    def _agreed(self, own: "_Told") -> Found:
        """Returns what all ranks have found, with a verdict on each proof. Collective."""
        parts = [own]
        if self._ranks.size > 1:
            encoded = self._ranks.all_gather(msgspec.json.encode(own))
            parts = [msgspec.json.decode(part, type=_Told) for part in encoded]
        moved, mismatch = dict[int, tuple[float, int]](), dict[int, tuple[float, int]]()
        pools = dict[str, tuple[float, int, float]]()
        for part in parts:
            for sums, of_part in ((moved, part.moved), (mismatch, part.mismatch)):
                for lag, (total, num) in of_part.items():
                    earlier = sums.get(lag, (0.0, 0))
                    sums[lag] = earlier[0] + total, earlier[1] + num
            for pool, (total, num, gap) in part.pools.items():
                before = pools.get(pool, (0.0, 0, gap))
                pools[pool] = before[0] + total, before[1] + num, gap
        return Found(
            spots=verdicts([proof for part in parts for proof in part.proofs], pools),
            num_now=sum(part.num_now for part in parts),
            num_unproved=sum(part.num_unproved for part in parts),
            moved=moved,
            mismatch=mismatch,
            is_exact=all(part.is_exact for part in parts),
        )


class _Proof(msgspec.Struct, frozen=True):
    """Figures of a sample's tokens of one version, at temperature 1 where theirs is lower."""

    spot: SpotProof
    """As if it failed: with its first token that differs by more than is allowed, or by most."""
    holds: bool
    """By itself."""
    gap: float
    """The server's tolerance."""


class _Told(msgspec.Struct, kw_only=True):
    """What a rank tells the others."""

    proofs: list[_Proof] = []
    pools: dict[str, tuple[float, int, float]] = {}
    """In 16 bits, by server and adapter, the sum of all differences, their number, and the tolerance."""
    num_now: int = 0
    num_unproved: int = 0
    moved: dict[int, tuple[float, int]] = {}
    mismatch: dict[int, tuple[float, int]] = {}
    is_exact: bool = True

    def add(self, proof: _Proof) -> None:
        """Adds a proof, and its tokens to their pool."""
        self.proofs.append(proof)
        if (spot := proof.spot).measure == "mean_abs":
            total, num, _ = self.pools.get(pool := f"{spot.server} {spot.adapter}", (0.0, 0, 0.0))
            self.pools[pool] = total + spot.mean_abs * spot.num_tokens, num + spot.num_tokens, proof.gap


class _Pass:
    """A micro-batch of which the step's own pass has computed the log-probabilities."""

    def __init__(self, batch: MicroBatch, logprobs: Floats, newest: int) -> None:
        """Takes the log-probabilities of its loss tokens [K], and the version that computed them."""
        self.batch = batch
        self.lags = newest - batch.policy_versions.astype(np.int64)
        """[T]"""
        self.current = np.zeros(len(batch.token_ids), np.float32)
        """[T], 0 but of loss tokens."""
        self.current[batch.loss_mask] = logprobs
        self.estimates = np.zeros(len(batch.token_ids))
        """[T] k3 of server and trainer, 0 but of loss tokens."""
        self.estimates[batch.loss_mask] = _k3(logprobs - batch.inference_logprobs[batch.loss_mask])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A sample of a micro-batch."""

    batch: MicroBatch
    index: int
    start: int
    length: int
    tolerance: Tolerance | None

    @classmethod
    def of(cls, batch: MicroBatch, index: int) -> "_Sample":
        start, length = int(batch.starts[index]), int(batch.sequence_lengths[index])
        tolerance = batch.tolerances.get(batch.servers[index])
        return cls(batch=batch, index=index, start=start, length=length, tolerance=tolerance)

    def cut(self, stream: NDArray[Any]) -> NDArray[Any]:
        """Returns its part of a micro-batch's stream."""
        return stream[self.start : self.start + self.length]

    @property
    def key(self) -> tuple[str, bytes]:
        """Tells it from others, also in a micro-batch of some of the samples."""
        return self.batch.rollout_ids[self.index], self.cut(self.batch.token_ids).tobytes()

    @property
    def all_versions(self) -> NDArray[np.int64]:
        """[L] of each token."""
        return self.cut(self.batch.policy_versions).astype(np.int64)

    @property
    def versions(self) -> list[int]:
        """Versions that sampled any of its loss tokens."""
        found: list[int] = np.unique(self.all_versions[self.cut(self.batch.loss_mask)]).tolist()
        return found

    def places_of(self, version: int) -> NDArray[np.int64]:
        """Returns the places of its loss tokens that a version sampled."""
        return np.flatnonzero(self.cut(self.batch.loss_mask) & (self.all_versions == version))

    def proof(self, version: int, places: NDArray[np.int64], logprobs: Floats) -> _Proof:
        """Returns how far the server's log-probabilities at these places are from the trainer's [K]."""
        assert self.tolerance is not None
        served = self.cut(self.batch.inference_logprobs)[places]
        temperatures = np.minimum(1.0, self.cut(self.batch.per_token(self.batch.temperatures))[places])
        gaps = np.abs(logprobs.astype(np.float64) - served) * temperatures
        limit, measure = allowed(self.tolerance, len(gaps)), self.tolerance.measure
        figures = float(gaps.max()), float(gaps.mean())
        outside = np.flatnonzero(~(gaps <= limit))
        at = int(outside[0]) if len(outside) else int(gaps.argmax())
        spot = SpotProof(
            rollout=self.batch.rollout_ids[self.index],
            server=self.batch.servers[self.index],
            adapter=_adapter(self.batch, self.index),
            version=version,
            num_tokens=len(gaps),
            max_abs=_finite(figures[0]),
            mean_abs=_finite(figures[1]),
            tolerance=limit,
            measure=measure,
            failed_at=int(places[at]),
            trained_logprob=_finite(float(logprobs[at])),
            served_logprob=float(served[at]),
        )
        return _Proof(spot, bool(figures[measure == "mean_abs"] <= limit), self.tolerance.gap)


def allowed(tolerance: Tolerance, num_tokens: int) -> float:
    """Returns the difference that is allowed over so many tokens: the tolerance of the largest one, and for a mean
    tolerance · (1 + FEW_TOKENS / √n), since the mean over few tokens lies further from what it is over many."""
    if tolerance.measure == "max_abs":
        return tolerance.gap
    return tolerance.gap * (1 + FEW_TOKENS / math.sqrt(num_tokens))


def verdicts(proofs: Sequence[_Proof], pools: Mapping[str, tuple[float, int, float]]) -> list[SpotProof]:
    """Returns the proofs, of which those that fail keep the token that shows it. In 16 bits a server's tokens of one
    adapter are a pool: where the mean of all is more than is allowed over so many, the proof with the largest mean
    fails."""
    failed = {index for index, one in enumerate(proofs) if not one.holds}
    for pool, (total, num, gap) in pools.items():
        if not total / num <= allowed(Tolerance(gap=gap, measure="mean_abs"), num):
            own = [index for index, one in enumerate(proofs) if f"{one.spot.server} {one.spot.adapter}" == pool]
            failed.add(max(own, key=lambda index: proofs[index].spot.mean_abs))
    nothing = {"failed_at": None, "trained_logprob": None, "served_logprob": None}
    return [
        one.spot if index in failed else msgspec.structs.replace(one.spot, **nothing)
        for index, one in enumerate(proofs)
    ]


def chosen(candidates: Iterable[Candidate], num: int, *, turn: int) -> list[Candidate]:
    """Returns `num` candidates, or all: the strata take turns, from the one whose `turn` it is, and give their smallest
    numbers. Example: strata a with 2 and 5, b with 3, num 2 and turn 1: b's 3, then a's 2."""
    strata: defaultdict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for one in sorted(candidates, key=lambda one: (one.stratum, one.number, one.rank, one.drawn)):
        strata[one.stratum].append(one)
    queues = list(strata.values())
    queues = queues[turn % len(queues) :] + queues[: turn % len(queues)] if queues else []
    longest = max(map(len, queues), default=0)
    return [queue[place] for place in range(longest) for queue in queues if place < len(queue)][:num]


def without(batches: Sequence[MicroBatch], rollouts: Set[str]) -> list[MicroBatch]:
    """Returns the micro-batches with no loss on the samples of these rollouts."""
    return [_without(batch, rollouts) if rollouts & set(batch.rollout_ids) else batch for batch in batches]


def _without(batch: MicroBatch, rollouts: Set[str]) -> MicroBatch:
    kept = np.array([rollout not in rollouts for rollout in batch.rollout_ids])
    hints = tuple((index, hint) for index, hint in batch.hints if kept[index])
    loss_mask = batch.loss_mask & np.repeat(kept, batch.sequence_lengths)
    return msgspec.structs.replace(batch, loss_mask=loss_mask, hints=hints)


def described(proof: SpotProof) -> str:
    """Returns a sentence on a proof that does not hold."""
    return (
        f"a spot proof does not hold: rollout {proof.rollout} was not sampled from version {proof.version}, as "
        f"{proof.server} says. Of its token {proof.failed_at} the server gives the log-probability "
        f"{proof.served_logprob:.4g}, the trainer under that version {proof.trained_logprob:.4g}; its "
        f"{proof.num_tokens} tokens differ by up to {proof.max_abs:.3g} nats, {proof.mean_abs:.3g} on average; allowed "
        f"are {proof.tolerance:.3g} ({proof.measure})"
    )


def _eligible(step: int, batch: MicroBatch, *, is_free: bool) -> list[int]:
    """Returns the samples that only a pass of their own can prove; `is_free`: those of the current version are proved
    by the step's own."""
    if not batch.servers:
        return []
    wanted = batch.loss_mask & (batch.policy_versions != step - 1) if is_free else batch.loss_mask
    has_any = np.flatnonzero(np.logical_or.reduceat(wanted, batch.starts)).tolist()
    return [sample for sample in has_any if batch.servers[sample] in batch.tolerances]


def _adapter(batch: MicroBatch, sample: int) -> int:
    return 0 if batch.adapters is None else int(batch.adapters[sample])


def _k3(log_ratio: Floats) -> Floats:
    """Returns Schulman's k3 of each, exact near 0."""
    wide = log_ratio.astype(np.float64)
    found: Floats = np.expm1(np.clip(wide, -MAX_LOG_RATIO, MAX_LOG_RATIO)) - wide
    return found


def _finite(number: float) -> float:
    """Returns the number, or the largest one in place of what is none, which JSON does not hold."""
    return number if math.isfinite(number) else math.copysign(1e30, number if number == number else 1.0)


def _secret(run: Path) -> bytes:
    """Returns the run's secret, which is made at its first start."""
    path = run / KEY_FILE
    try:
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        return bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path}, by which samples are drawn for proofs, cannot be used: {error}; remove it"
        ) from error
