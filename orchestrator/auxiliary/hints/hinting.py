"""Hints for a group's rollouts: finds the answers that need one, a text from the first source that has one, its ids,
and the teacher's context."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from grpo.orchestrator.auxiliary import is_trained
from grpo.orchestrator.auxiliary.hints.advantages import HintAdvantages
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
from grpo.orchestrator.endpoints import ApiModel, Costs
from grpo.orchestrator.hooks import Hook, Opening
from grpo.orchestrator.monitoring.metrics import Figures, all_figures
from grpo.orchestrator.rollouts.records import EpisodeResult, TrainingRow
from grpo.orchestrator.rollouts.templates import ChatTemplate
from grpo.orchestrator.samples import RowKey, ScoredGroup, numbered_rows
from grpo.transport.records import Hint

BEYOND_FIRST = "beyond_first"
"""Reason: one row has more errors than hints are given for."""
NOT_WRITTEN = "not_written"
"""Reason: the model's chat template makes no message of the text."""
NO_SOURCE = "no_source"
"""Reason: no source had a text."""
WITHHELD = "withheld"
"""Reason: the rollout is not trained, because of a filter or a teacher that did not score it."""


class Hinter(Hook):
    """Gives hints. Example: ``Hinter(HintWriter(template), {"solution": from_solution}, seq_len=4096)``"""

    def __init__(
        self,
        writer: HintWriter,
        sources: Mapping[str, Source],
        *,
        seq_len: int,
        max_per_sample: int | None = None,
        model: ApiModel | None = None,
        is_trained: Callable[[], bool] = lambda: True,
        advantages: HintAdvantages | None = None,
    ) -> None:
        """`sources` by name are asked in order, until one has a text. `seq_len`: longest context that the trainer
        takes. `max_per_sample`: how many of a row's errors have hints, from its beginning; None for all. `model`: who
        is asked by one of the sources. `is_trained`: whether hints go with the next batch. `advantages`: where hints
        are one."""
        self._writer, self._sources, self._seq_len = writer, dict(sources), seq_len
        self._max_per_sample, self._model = max_per_sample, model
        self._is_trained, self._advantages, self.server_room = is_trained, advantages, int(advantages is not None)
        self._num = Counter({"errors": 0, "given": 0})

    async def before_credit(self, group: ScoredGroup) -> None:
        """Waits for the sources, each of which has its own deadline; they are asked about all errors at once, but about
        none of rollouts that are withheld."""
        if not (is_trained := self._is_trained()) and self._advantages is None:
            return
        rows = [self._hint(*one, group) for one in numbered_rows(group.results)]
        hints = {key: hint for key, hint in await asyncio.gather(*rows) if hint is not None}
        for key, hint in hints.items() if is_trained else ():
            group.fields[key]["hint"] = hint
        if self._advantages is not None:
            await self._advantages.add_to(group, hints)

    async def _hint(
        self, root: EpisodeResult, key: RowKey, result: EpisodeResult, row: TrainingRow, group: ScoredGroup
    ) -> tuple[RowKey, Hint | None]:
        """Returns the hint for the answers of a row that are marked, or with a solution for all."""
        every, is_withheld = "solution" in self._sources, root.id in group.withheld
        sites = [
            Site(rollout=result, row=row, turn=turn, step=step, group=group.results)
            for turn, step in zip(row.turns, row.steps, strict=True)
            if every or result.steps[step].error is not None
        ]
        kept = [] if is_withheld else sites[: self._max_per_sample]
        self._num["errors"] += len(sites)
        self._leave_out(WITHHELD if is_withheld else BEYOND_FIRST, num=len(sites) - len(kept))
        insertions, texts = list[Insertion](), dict[int, tuple[Site, str, str]]()
        for site, found in zip(kept, await asyncio.gather(*map(self._text, kept)), strict=True):
            if found is None:
                continue
            try:
                insertions.append(Insertion(turn=site.turn, token_ids=self._writer.ids(found[1])))
            except HintNotWritten as error:
                self._leave_out(NOT_WRITTEN, f"the model's chat template makes no message of a hint: {error}")
            else:
                texts[site.turn.index] = site, *found
        fitting, left_out = fit(insertions, max_len=self._seq_len, opens_turns=self._writer.opens_turns)
        for insertion, reason in left_out:
            length = f"{len(insertion.token_ids)} tokens for an answer that ends with token {insertion.turn.ends}"
            self._leave_out(reason, f"a hint of {length} is left out as {reason}, and seq_len is {self._seq_len}")
        for site, source, text in (texts[one.turn.index] for one in fitting):
            group.hint_texts[result.id, site.step] = text
            self._num.update(("given", f"given_{source}"))
        return key, make_hint(row, fitting) if fitting else None

    async def _text(self, site: Site) -> tuple[str, str] | None:
        """Returns the name of the first source that has a hint, and its text."""
        reasons = []
        for name, source in self._sources.items():
            if site.answer.error is None and name != "solution":
                continue
            try:
                return name, await source(site)
            except NoHint as none:
                reasons.append(none.reason)
                self._num[f"declined_{none.reason}"] += 1
                if none.problem is not None:
                    self.warn(f"hints {none.reason}", none.problem)
        error = f"error_kind {site.error.error_kind!r} with hint_template_key {site.error.hint_template_key!r}"
        self._leave_out(NO_SOURCE, f"no source has a hint for {error} ({', '.join(reasons)}); add to hints.sources")
        return None

    def _leave_out(self, reason: str, problem: str | None = None, *, num: int = 1) -> None:
        """Counts answers without a hint."""
        if num:
            self._num[f"left_out_{reason}"] += num
        if problem is not None:
            self.warn(f"hints {reason}", problem)

    def figures(self) -> Figures:
        """Returns counts as `hints/NAME`. `errors`: answers that environments marked or, with the source `solution`,
        all answers; as many as are `given` and `left_out_REASON`. `declined_REASON`: a source that was asked had no
        hint. `model_NAME`: questions to the model that writes hints."""
        counts, costs = dict[str, float](self._num), dict[str, float]()
        if self._model is not None:
            counts |= {f"model_{name}": num for name, num in {"asked": 0, "answered": 0, **self._model.num}.items()}
            costs["hints/model_cost"] = self._model.costs.spent
        own = Figures(counts={f"hints/{name}": num for name, num in counts.items()}, values=costs)
        return own if self._advantages is None else all_figures([own, self._advantages.figures()])

    async def close(self) -> None:
        """Closes the model's connections."""
        if self._model is not None:
            await self._model.close()


async def open(opening: Opening) -> Hinter:
    """Returns the hook of `hints`. Raises ValueError for what cannot be honoured."""
    settings, chosen, loss = opening.settings, opening.settings.hints, opening.trainer.loss
    pools = [opening.environments[env.label] for env in settings.env]
    if "solution" in chosen.sources and not any(pool.solutions for pool in pools):
        raise ValueError(
            "hints.sources names solution, and no training environment has examples with a `solution`; give them one, "
            "or remove it"
        )
    if "solution" not in chosen.sources and all(pool.loaded.single_turn for pool in pools):
        raise ValueError(
            "loss.alpha_sdpo of the trainer or hints.advantage_weight is above 0, and no environment marks errors: all "
            "are single questions; set it to 0, train on an environment of episodes, or add solution to hints.sources"
        )
    writer = HintWriter(ChatTemplate.of(opening.ready.renderer))
    model = None if chosen.model is None else opening.endpoint(chosen.model, Costs())
    sources: dict[str, Source] = {
        "templates": from_templates(load_templates(chosen.templates)),
        "environment": from_environment,
        "sibling": from_siblings,
        "solution": from_solution,
    }
    if model is not None:
        sources["model"] = from_model(model, opening.ready.renderer)
    weight, score = chosen.advantage_weight, opening.client.score
    return Hinter(
        writer,
        {name: sources[name] for name in chosen.sources},
        seq_len=settings.seq_len,
        max_per_sample=chosen.max_per_sample,
        model=model,
        is_trained=lambda: is_trained(loss.alpha_sdpo, loss.sdpo, num_shipped=opening.scheduler.shipped),
        advantages=HintAdvantages(weight, score, adapters=settings.model.lora_adapters) if weight else None,
    )
