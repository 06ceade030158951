"""From settings to the channel of teachers' disagreement, and to the model that writes hints."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from configs.channels import ApiSettings, PreferenceSettings
from orchestrator.disagreement.actions import AgreementOf, agreement_of
from orchestrator.disagreement.asked import AskedForHints, AskedJudge
from orchestrator.disagreement.asking import Asker
from orchestrator.disagreement.budget import Budget, Price
from orchestrator.disagreement.channel import DisagreementChannel
from orchestrator.disagreement.choosing import Chooser
from orchestrator.disagreement.pairs import ReferenceScorer
from orchestrator.disagreement.ready import ReadyPairs, waiting_again
from orchestrator.disagreement.teachers import Addresses, TeacherEndpoint
from orchestrator.disagreement.turns import Tools
from orchestrator.episodes.templates import ChatTemplate

MAX_READY = 4096
"""Pairs that wait for a batch."""


def open_channel(
    settings: PreferenceSettings,
    *,
    own_servers: Addresses,
    own_api_key_var: str,
    base_model_name: str,
    base_model: str,
    reference: ReferenceScorer,
    template_of: Callable[[Tools], ChatTemplate],
    sequence_len: int,
    seed: int,
    path: Path | None,
    budget_state: Mapping[str, Any] | None = None,
    pairs_state: Mapping[str, Any] | None = None,
    has_left: Callable[[str], bool] = lambda rollout_id: False,
    step: int = 0,
) -> DisagreementChannel:
    """To be called where an event loop runs, for settings with teachers.

    Teachers without a `base_url` are the run's `own_servers`, with or without `/v1`, which serve the base model as
    `base_model_name`, and have the key in the environment variable `own_api_key_var` if that is set. `base_model` is
    the identity of that model, `sequence_len` what the trainer takes for a pair, `path` that of `pairs.jsonl`,
    `budget_state` and `pairs_state` what an earlier process of the run kept, the latter with batch `step`, after which
    the run goes on; `has_left` says of a rollout's id whether its group is in a batch up to that. Raises ValueError
    where a key is missing.
    """
    own = _Own(own_servers, own_api_key_var, base_model_name)
    prices = {one.name: _price(one) for one in settings.teachers}
    if settings.judge is not None:
        if settings.judge.name in prices:
            raise ValueError(
                f"preferences.judge.name is {settings.judge.name!r}, which a teacher is called too; give the judge a "
                "name of its own"
            )
        prices[settings.judge.name] = _price(settings.judge)
    endpoints = [_endpoint(one, own) for one in settings.teachers]
    judging = None if settings.judge is None else _endpoint(settings.judge, own)
    budget = Budget(prices, ceiling=settings.max_cost, trace_ceiling=settings.max_cost_per_rollout, state=budget_state)
    chooser, kept = _chooser(settings, seed), settings.max_cached_states
    judge = None if judging is None else Asker([judging], budget=budget, max_cached_states=kept, seed=seed)
    return DisagreementChannel(
        Asker(endpoints, budget=budget, max_cached_states=kept, seed=seed),
        chooser,
        _agreement(settings, judge),
        reference,
        template_of,
        budget=budget,
        ready=_ready(
            settings, path, pairs_state, step=step, has_left=has_left, base_model=base_model, sequence_len=sequence_len
        ),
        base_model=base_model,
        sequence_len=sequence_len,
        path=path,
        at_least=settings.num_agreeing,
        max_waiting=settings.max_waiting,
        num_parallel=settings.max_concurrent,
        judge=judge,
    )


def open_hint_model(
    settings: ApiSettings, *, own_servers: Addresses, own_api_key_var: str, base_model_name: str, seed: int
) -> AskedForHints:
    """A `HintModel`, to be closed; arguments and errors as of `open_channel`."""
    endpoint = _endpoint(settings, _Own(own_servers, own_api_key_var, base_model_name))
    budget = Budget({settings.name: _price(settings)})
    return AskedForHints(Asker([endpoint], budget=budget, seed=seed), budget)


class _Own:
    """The run's own servers, as an API."""

    def __init__(self, servers: Addresses, api_key_var: str, model: str) -> None:
        self._servers, self.model = servers, model
        self.api_key_var = api_key_var if os.environ.get(api_key_var) else None

    def addresses(self) -> list[str]:
        return [f"{server.rstrip('/').removesuffix('/v1')}/v1" for server in self._servers()]


def _endpoint(settings: ApiSettings, own: _Own) -> TeacherEndpoint:
    is_own = settings.base_url is None
    return TeacherEndpoint(
        name=settings.name,
        base_url=settings.base_url or own.addresses,
        model=settings.model or own.model,
        api_key_var=own.api_key_var if is_own else settings.api_key_var,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        max_tokens_field=settings.max_tokens_field,
        extra=settings.extra,
        tool_role=settings.tool_role,
        price=_price(settings),
        timeout_s=settings.timeout,
        num_retries=settings.retries,
        requests_per_s=settings.requests_per_s,
        burst=settings.burst,
        failure_threshold=settings.failure_threshold,
        cooldown_s=settings.cooldown_s,
    )


def _ready(
    settings: PreferenceSettings, path: Path | None, state: Mapping[str, Any] | None, *, step: int, **known: Any
) -> ReadyPairs:
    waiting, num_lines = ([], 0) if path is None else waiting_again(path, state, **known)
    return ReadyPairs(
        waiting,
        max_ready=MAX_READY,
        max_off_policy_steps=settings.max_off_policy_steps,
        num_lines=num_lines,
        step=step,
    )


def _price(settings: ApiSettings) -> Price:
    return Price(prompt=settings.price.prompt, completion=settings.price.completion)


def _chooser(settings: PreferenceSettings, seed: int) -> Chooser:
    return Chooser(
        settings.select,
        share=settings.fraction,
        seed=seed,
        max_per_trace=settings.max_turns,
        below=settings.low_reward_below,
    )


def _agreement(settings: PreferenceSettings, judge: Asker | None) -> AgreementOf:
    if judge is None or settings.judge is None:
        return agreement_of(settings.agreement)
    return agreement_of(settings.agreement, judge=AskedJudge(judge), judge_timeout_s=settings.judge.timeout)
