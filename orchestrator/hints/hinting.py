"""A group's rollouts to hints: where they went wrong, a text from the first source that has one, its ids, and the pair
of contexts."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.episodes.records import EpisodeResult, walk_all
from orchestrator.episodes.state import StepError
from orchestrator.hints.pairs import NO_BOUNDARY, TOO_LONG, Insertion, context_len, fit, pair
from orchestrator.hints.sources import OFF_TEMPLATE, HintSource, NoHint, Site, sites_of
from orchestrator.hints.writing import HintNotWritten, HintWriter
from transport.records import Hint

BEYOND_FIRST = "beyond_first"
"""More errors in one row than hints are given for."""
NOT_WRITTEN = "not_written"
"""The model's chat template makes no message of the text."""
NO_SOURCE = "no_source"
"""No source had a text."""
WITHHELD = "withheld"
"""The rollout is not trained, by a filter or for lack of a teacher's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenHint:
    """A hint that is trained, for logs."""

    rollout_id: str
    step: int
    """Index of the answer that it is for, among the rollout's steps."""
    error: StepError
    source: str
    """Name of the source that it is from."""
    text: str


Hints = Mapping[tuple[str, int], Hint]
"""By rollout (the one that the errors are of, which others may have spawned) and the index of its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintedGroup:
    """What became of a group's errors: `num_errors` are as many as `given` and all of `left_out` together."""

    hints: Hints
    given: Sequence[GivenHint]
    num_errors: int
    """Answers that environments marked."""
    declined: Mapping[str, int] = field(default_factory=dict)
    """How often a source that was asked had no hint, by reason: `off_template` where no template is for the error."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Errors without a hint, by reason."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """For people: of what went wrong, one case and how to mend it, by one of those reasons."""


NO_HINTS = HintedGroup(hints={}, given=(), num_errors=0)


@dataclass(frozen=True, slots=True)
class _Written:
    """A text for a site, and where it is from."""

    site: Site
    source: str
    text: str


class Hinter:
    """Gives hints.

    Example: ``Hinter(HintWriter.of(template), [FromTemplates(HintTemplates.loaded())], seq_len=4096)``
    """

    def __init__(
        self,
        writer: HintWriter,
        sources: Sequence[HintSource],
        *,
        seq_len: int,
        first: int | None = None,
        until_end: bool = False,
        weight: float = 1.0,
    ) -> None:
        """`sources` are asked in order, until one has a text. `seq_len`: longest context that the trainer takes.
        `first`: how many of a row's errors have hints, from its beginning; None for all. `until_end`: compares what was
        sampled after a hinted turn too. `weight`: of each hint in the loss. Raises ValueError."""
        names = [source.name for source in sources]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"hints come from {names}, expected one source or several different ones")
        if seq_len < 1 or (first is not None and first < 1):
            raise ValueError(f"seq_len is {seq_len} and first is {first}, expected numbers from 1")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"hints have weight {weight}, expected a finite number above 0; without hints, make none")
        self._writer, self._sources, self._seq_len = writer, tuple(sources), seq_len
        self._first, self._until_end, self._weight = first, until_end, weight

    async def of_group(self, results: Sequence[EpisodeResult]) -> HintedGroup:
        """Of all rows of a group's rollouts and of those that they spawned. Waits for the sources, each of which has
        its own deadline; they are asked about all errors at once."""
        rows = [
            (result.id, number, sites)
            for result in walk_all(results)
            for number, one in enumerate(result.rows)
            if (sites := sites_of(result, one, results))
        ]
        chosen = [site for _, _, sites in rows for site in sites[: self._first]]
        lost = _Lost()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._ask(site, lost)) for site in chosen]
        texts = dict(zip(map(_place, chosen), (one.result() for one in asked), strict=True))
        hints: dict[tuple[str, int], Hint] = {}
        given: list[GivenHint] = []
        for rollout_id, number, sites in rows:
            lost.left_out[BEYOND_FIRST] += len(sites) - len(sites[: self._first])
            hint, used = self._of_row([texts[_place(site)] for site in sites[: self._first]], lost)
            given += used
            if hint is not None:
                hints[rollout_id, number] = hint
        return HintedGroup(
            hints=hints,
            given=given,
            num_errors=sum(len(sites) for _, _, sites in rows),
            declined=dict(lost.declined),
            left_out={reason: num for reason, num in lost.left_out.items() if num},
            problems=lost.problems,
        )

    async def _ask(self, site: Site, lost: "_Lost") -> _Written | None:
        reasons = []
        for source in self._sources:
            try:
                return _Written(site, source.name, await source.text(site))
            except NoHint as none:
                reasons.append(none.reason)
                lost.declined[none.reason] += 1
                if none.problem is not None:
                    lost.problems.setdefault(none.reason, none.problem)
        lost.leave_out(NO_SOURCE, _without_source(site, reasons))
        return None

    def _of_row(self, texts: Sequence[_Written | None], lost: "_Lost") -> tuple[Hint | None, list[GivenHint]]:
        insertions, by_turn = [], {}
        for written in texts:
            if written is None:
                continue
            try:
                ids = self._writer.ids(written.text)
            except HintNotWritten as error:
                lost.leave_out(
                    NOT_WRITTEN, f"{_named(written.site)}: the model's chat template makes no message: {error}"
                )
                continue
            insertions.append(Insertion(turn=written.site.turn, token_ids=ids))
            by_turn[written.site.turn.index] = written
        if not insertions:
            return None, []
        row = next(iter(by_turn.values())).site.row
        fitted = fit(
            row,
            insertions,
            max_len=self._seq_len,
            until_end=self._until_end,
            opens_turns=self._writer.opens_turns,
        )
        for one, reason in fitted.left_out:
            lost.leave_out(reason, self._unfit(by_turn[one.turn.index].site, one, reason))
        if not fitted.kept:
            return None, []
        hint = pair(row, fitted.kept, weight=self._weight, until_end=self._until_end)
        return hint, [_given(by_turn[one.turn.index]) for one in fitted.kept]

    def _unfit(self, site: Site, one: Insertion, reason: str) -> str | None:
        if reason == NO_BOUNDARY:
            return f"{_named(site)}: where the policy's turn opens cannot be told from the tokens before it"
        if reason != TOO_LONG:
            return None
        alone = context_len(site.row, [one], until_end=self._until_end)
        return (
            f"{_named(site)}: {len(one.token_ids)} tokens make the context {alone} tokens long, other hints aside, "
            f"and seq_len is {self._seq_len}; shorten the hint (hints.templates, hints.max_chars), give fewer "
            "(hints.max_per_sample), or raise seq_len and the trainer's sequence_len"
        )


@dataclass(slots=True)
class _Lost:
    """What comes to nothing, as it is counted."""

    declined: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)

    def leave_out(self, reason: str, problem: str | None) -> None:
        self.left_out[reason] += 1
        if problem is not None:
            self.problems.setdefault(reason, problem)


def _named(site: Site) -> str:
    return f"the hint for answer {site.step + 1} of a rollout of {site.rollout.task.env} is left out"


def _without_source(site: Site, reasons: Sequence[str]) -> str | None:
    """Nothing went wrong where siblings, say, might have had a text and have none."""
    if OFF_TEMPLATE not in reasons:
        return None
    error = site.error
    return (
        f"{_named(site)}: no source has a text for error_kind {error.error_kind!r} with hint_template_key "
        f"{error.hint_template_key!r} ({', '.join(reasons)}); write one in the file hints.templates, or add to "
        "hints.sources"
    )


def _place(site: Site) -> tuple[str, int]:
    return site.rollout.id, site.step


def _given(written: _Written) -> GivenHint:
    site = written.site
    return GivenHint(
        rollout_id=site.rollout.id, step=site.step, error=site.error, source=written.source, text=written.text
    )
