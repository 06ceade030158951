"""A group's rollouts to hints: which answers need one, a text from the first source that has one, its ids, and the
teacher's context."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpo.configs.auxiliary import ApiSettings
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.auxiliary.hints.contexts import HintNotWritten, HintWriter, Insertion, fit, make_hint
from grpo.orchestrator.auxiliary.hints.sources import (
    NoHint,
    Site,
    Source,
    from_environment,
    from_model,
    from_siblings,
    from_solution,
    from_templates,
    load_templates,
)
from grpo.orchestrator.endpoints import Costs, Endpoint
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.transport.records import Hint

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
    source: str
    """Name of the source that it is from."""
    text: str


Hints = Mapping[tuple[str, int], Hint]
"""By rollout (the one that the errors are of, which others may have spawned) and the index of its row."""


@dataclass(slots=True, kw_only=True, eq=False)
class HintedGroup:
    """What became of a group's errors: `errors` are as many as are given and all that are left out together."""

    hints: dict[tuple[str, int], Hint] = field(default_factory=dict)
    given: list[GivenHint] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """`errors`: answers that environments marked, or, with the source `solution`, all answers; `declined_REASON`: a
    source that was asked had no hint; `left_out_REASON`: answers without a hint."""
    problems: dict[str, str] = field(default_factory=dict)
    """For people: of what went wrong, one case and how to mend it, by its reason."""

    def leave_out(self, reason: str, problem: str | None = None, num: int = 1) -> None:
        """Counts answers without a hint."""
        self.counts[f"left_out_{reason}"] += num
        if problem is not None:
            self.problems.setdefault(reason, problem)


NO_HINTS = HintedGroup()


class Hinter:
    """Gives hints. Example: ``Hinter(HintWriter(template), {"solution": from_solution}, seq_len=4096)``"""

    def __init__(
        self,
        writer: HintWriter,
        sources: Mapping[str, Source],
        *,
        seq_len: int,
        max_per_sample: int | None = None,
        model: Endpoint | None = None,
    ) -> None:
        """`sources` by name are asked in order, until one has a text. `seq_len`: longest context that the trainer
        takes. `max_per_sample`: how many of a row's errors have hints, from its beginning; None for all. `model`: who
        is asked by one of the sources."""
        self._writer, self._sources, self._seq_len = writer, dict(sources), seq_len
        self._max_per_sample, self._model = max_per_sample, model
        self._told: Counter[str] = Counter()

    async def of_group(self, results: Sequence[EpisodeResult], *, withheld: Collection[str] = ()) -> HintedGroup:
        """Of all rows of a group's rollouts and of those that they spawned, but of those that are `withheld` from
        training, about which nobody is asked. Waits for the sources, each of which has its own deadline; they are asked
        about all errors at once."""
        made = HintedGroup()
        rows = [
            self._of_row(result, number, results, made, withheld=root.id in withheld)
            for root in results
            for result in root.walk()
            for number in range(len(result.rows))
        ]
        await asyncio.gather(*rows)
        made.counts = +made.counts
        return made

    async def _of_row(
        self, result: EpisodeResult, number: int, group: Sequence[EpisodeResult], made: HintedGroup, *, withheld: bool
    ) -> None:
        """Hints for the answers of a row that are marked, or with a solution for all."""
        row, every = result.rows[number], "solution" in self._sources
        sites = [
            Site(rollout=result, row=row, turn=turn, step=step, group=group)
            for turn, step in zip(row.turns, row.steps, strict=True)
            if every or result.steps[step].error is not None
        ]
        kept = [] if withheld else sites[: self._max_per_sample]
        made.counts["errors"] += len(sites)
        made.leave_out(WITHHELD if withheld else BEYOND_FIRST, num=len(sites) - len(kept))
        insertions, given = [], {}
        for site, one in zip(kept, await asyncio.gather(*(self._text(site, made) for site in kept)), strict=True):
            if one is None:
                continue
            try:
                insertions.append(Insertion(turn=site.turn, token_ids=self._writer.ids(one.text)))
            except HintNotWritten as error:
                made.leave_out(NOT_WRITTEN, f"the model's chat template makes no message of a hint: {error}")
            else:
                given[site.turn.index] = one
        fitting, left_out = fit(insertions, max_len=self._seq_len, opens_turns=self._writer.opens_turns)
        for insertion, reason in left_out:
            length = f"{len(insertion.token_ids)} tokens for an answer that ends with token {insertion.turn.ends}"
            made.leave_out(reason, f"a hint of {length} is left out as {reason}, and seq_len is {self._seq_len}")
        if fitting:
            made.hints[result.id, number] = make_hint(row, fitting)
            made.given += [given[one.turn.index] for one in fitting]

    async def _text(self, site: Site, made: HintedGroup) -> GivenHint | None:
        reasons = []
        for name, source in self._sources.items():
            if site.answer.error is None and name != "solution":
                continue
            try:
                return GivenHint(rollout_id=site.rollout.id, step=site.step, source=name, text=await source(site))
            except NoHint as none:
                reasons.append(none.reason)
                made.counts[f"declined_{none.reason}"] += 1
                if none.problem is not None:
                    made.problems.setdefault(none.reason, none.problem)
        told = f"error_kind {site.error.error_kind!r} with hint_template_key {site.error.hint_template_key!r}"
        made.leave_out(NO_SOURCE, f"no source has a hint for {told} ({', '.join(reasons)}); add to hints.sources")
        return None

    def metrics(self) -> dict[str, float]:
        """Of the model that writes hints, counts since the last call as `hints/model_NAME`: questions that were
        `asked`, `answered` or not, by reason; and the `cost` since this process began."""
        if self._model is None:
            return {}
        now = Counter({"asked": 0, "answered": 0})
        now.update(self._model.num)
        told, self._told = self._told, now
        counts = {f"hints/model_{name}": float(num - told[name]) for name, num in now.items()}
        return counts | {"hints/model_cost": self._model.costs.spent}

    async def close(self) -> None:
        """Closes the model's connections."""
        if self._model is not None:
            await self._model.close()


def open_hinter(
    settings: OrchSettings, engine: RolloutEngine, open_api: Callable[[ApiSettings, Costs], Endpoint]
) -> Hinter:
    """From settings. Raises ValueError for what cannot be honoured."""
    chosen = settings.hints
    if "solution" in chosen.sources and not any(engine.has_solutions(env.label) for env in settings.env):
        raise ValueError(
            "hints.sources names solution, and no training environment has examples with a `solution`; give them one, "
            "or remove it"
        )
    if "solution" not in chosen.sources and all(engine.is_single_turn(env.label) for env in settings.env):
        raise ValueError(
            "loss.alpha_sdpo of the trainer or hints.advantage_weight is above 0, and no environment marks errors: all "
            "are single questions; set it to 0, train on an environment of episodes, or add solution to hints.sources"
        )
    template = engine.templates.of(None)
    model = None if chosen.model is None else open_api(chosen.model, Costs())
    sources: dict[str, Source] = {
        "templates": from_templates(load_templates(chosen.templates)),
        "environment": from_environment,
        "sibling": from_siblings,
        "solution": from_solution,
    }
    if model is not None:
        sources["model"] = from_model(model, template.renderer)
    return Hinter(
        HintWriter(template),
        {name: sources[name] for name in chosen.sources},
        seq_len=settings.seq_len,
        max_per_sample=chosen.max_per_sample,
        model=model,
    )
