"""A group's rollouts to hints: which answers need one, a text from the first source that has one, its ids, and the
teacher's context."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from configs.auxiliary import ApiSettings
from configs.orch import OrchSettings
from orchestrator.hints.contexts import NO_BOUNDARY, TOO_LONG, Insertion, context_len, fit, make_hint
from orchestrator.hints.sources import (
    OFF_TEMPLATE,
    NoHint,
    Site,
    Source,
    from_environment,
    from_model,
    from_siblings,
    from_solution,
    from_templates,
    of_errors,
    sites_of,
)
from orchestrator.hints.templates import HintTemplates
from orchestrator.hints.writing import HintNotWritten, HintWriter
from orchestrator.preferences.teachers import Api, Costs
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.engine import RolloutEngine
from orchestrator.rollouts.records import EpisodeResult, Message
from orchestrator.rollouts.state import StepError
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
    error: StepError | None
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
    """Answers that environments marked; with the source `solution`, all answers."""
    declined: Mapping[str, int] = field(default_factory=dict)
    """How often a source that was asked had no hint, by reason: `off_template` where no template is for the error."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Errors without a hint, by reason."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """For people: of what went wrong, one case and how to mend it, by one of those reasons."""


NO_HINTS = HintedGroup(hints={}, given=(), num_errors=0)


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


class Hinter:
    """Gives hints. Example: ``Hinter(HintWriter.of(template), {"solution": from_solution}, seq_len=4096)``"""

    def __init__(
        self,
        writer: HintWriter,
        sources: Mapping[str, Source],
        *,
        seq_len: int,
        max_per_sample: int | None = None,
        until_end: bool = False,
        model: Api | None = None,
    ) -> None:
        """`sources` by name are asked in order, until one has a text. `seq_len`: longest context that the trainer
        takes. `max_per_sample`: how many of a row's errors have hints, from its beginning; None for all. `until_end`:
        compares what was sampled after a hinted turn too. `model`: who is asked by one of the sources."""
        self._writer, self._sources, self._seq_len = writer, dict(sources), seq_len
        self._max_per_sample, self._until_end, self._model = max_per_sample, until_end, model
        self._told: Counter[str] = Counter()

    async def of_group(self, results: Sequence[EpisodeResult], *, withheld: Collection[str] = ()) -> HintedGroup:
        """Of all rows of a group's rollouts and of those that they spawned, but of those that are `withheld` from
        training, about which nobody is asked. Waits for the sources, each of which has its own deadline; they are asked
        about all errors at once."""
        marked, lost = "solution" not in self._sources, _Lost()
        rows = [
            (root.id, (result.id, number), sites)
            for root in results
            for result in root.walk()
            for number, one in enumerate(result.rows)
            if (sites := sites_of(result, one, results, marked=marked))
        ]
        num_errors = sum(len(sites) for _, _, sites in rows)
        lost.left_out[WITHHELD] = sum(len(sites) for root, _, sites in rows if root in withheld)
        kept = [(key, sites[: self._max_per_sample]) for root, key, sites in rows if root not in withheld]
        lost.left_out[BEYOND_FIRST] = num_errors - lost.left_out[WITHHELD] - sum(len(sites) for _, sites in kept)
        texts = await asyncio.gather(*(self._texts(sites, lost) for _, sites in kept))
        hints: dict[tuple[str, int], Hint] = {}
        given: list[GivenHint] = []
        for (key, _), written in zip(kept, texts, strict=True):
            hint, used = self._of_row(written, lost)
            given += used
            if hint is not None:
                hints[key] = hint
        return HintedGroup(
            hints=hints,
            given=given,
            num_errors=num_errors,
            declined=dict(lost.declined),
            left_out={reason: num for reason, num in lost.left_out.items() if num},
            problems=lost.problems,
        )

    def metrics(self) -> dict[str, float]:
        """Of the model that writes hints, counts since the last call as `hints/model_NAME`: questions that were
        `asked`, `answered` or not, by reason; `requests` with retries; and the `cost` since this process began."""
        if self._model is None:
            return {}
        now = Counter({"asked": 0, "answered": 0}) + self._model.num
        now["requests"] = self._model.num_requests
        told, self._told = self._told, now
        counts = {f"hints/model_{name}": float(now[name] - told[name]) for name in {"asked", "answered", *now}}
        return counts | {"hints/model_cost": self._model.costs.total}

    async def close(self) -> None:
        """Closes the model's connections."""
        if self._model is not None:
            await self._model.close()

    async def _texts(self, sites: Sequence[Site], lost: _Lost) -> list[tuple[Site, str, str]]:
        """(site, name of its source, text) of those that have one."""
        found = await asyncio.gather(*(self._text(site, lost) for site in sites))
        return [(site, *one) for site, one in zip(sites, found, strict=True) if one is not None]

    async def _text(self, site: Site, lost: _Lost) -> tuple[str, str] | None:
        reasons = []
        for name, source in self._sources.items():
            try:
                return name, await source(site)
            except NoHint as none:
                reasons.append(none.reason)
                lost.declined[none.reason] += 1
                if none.problem is not None:
                    lost.problems.setdefault(none.reason, none.problem)
        lost.leave_out(NO_SOURCE, _without_source(site, reasons))
        return None

    def _of_row(self, texts: Sequence[tuple[Site, str, str]], lost: _Lost) -> tuple[Hint | None, list[GivenHint]]:
        insertions, given = [], {}
        for site, source, text in texts:
            try:
                ids = self._writer.ids(text)
            except HintNotWritten as error:
                lost.leave_out(NOT_WRITTEN, f"{_named(site)}: the model's chat template makes no message: {error}")
                continue
            insertions.append(Insertion(turn=site.turn, token_ids=ids))
            given[site.turn.index] = (
                site,
                GivenHint(rollout_id=site.rollout.id, step=site.step, error=site.error, source=source, text=text),
            )
        if not insertions:
            return None, []
        row, until_end = texts[0][0].row, self._until_end
        fitted = fit(row, insertions, max_len=self._seq_len, until_end=until_end, opens_turns=self._writer.opens_turns)
        for one, reason in fitted.left_out:
            lost.leave_out(reason, self._unfit(given[one.turn.index][0], one, reason))
        if not fitted.kept:
            return None, []
        hint = make_hint(row, fitted.kept, until_end=until_end)
        return hint, [given[one.turn.index][1] for one in fitted.kept]

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


def _named(site: Site) -> str:
    return f"the hint for answer {site.step + 1} of a rollout of {site.rollout.task.env} is left out"


def _without_source(site: Site, reasons: Sequence[str]) -> str | None:
    """Nothing went wrong where siblings, say, might have had a text and have none."""
    if site.error is None or OFF_TEMPLATE not in reasons:
        return None
    return (
        f"{_named(site)}: no source has a text for error_kind {site.error.error_kind!r} with hint_template_key "
        f"{site.error.hint_template_key!r} ({', '.join(reasons)}); write one in the file hints.templates, or add to "
        "hints.sources"
    )


def open_hinter(
    settings: OrchSettings, renderer: ChatRenderer, engine: RolloutEngine, open_api: Callable[[ApiSettings, Costs], Api]
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
            "loss.alpha_sdpo of the trainer is above 0, and no environment marks errors: all are single questions; set "
            "it to 0, train on an environment of episodes, or add solution to hints.sources"
        )
    model = None if chosen.model is None else open_api(chosen.model, Costs())
    templates = HintTemplates.loaded(chosen.templates) if "templates" in chosen.sources else HintTemplates()
    sources: dict[str, Source] = {
        "templates": of_errors(from_templates(templates, max_chars=chosen.max_chars)),
        "environment": of_errors(from_environment(max_chars=chosen.max_chars)),
        "sibling": of_errors(from_siblings(min_reward=chosen.sibling_reward)),
        "solution": from_solution,
    }
    if model is not None:

        async def ask(messages: Sequence[Message]) -> str:
            return (await model.ask(messages)).text

        sources["model"] = from_model(ask, renderer, max_chars=chosen.max_chars)
    return Hinter(
        HintWriter.of(engine.templates.of(None), chosen.role),
        {name: sources[name] for name in chosen.sources},
        seq_len=settings.seq_len,
        max_per_sample=chosen.max_per_sample,
        until_end=chosen.until_end,
        model=model,
    )
