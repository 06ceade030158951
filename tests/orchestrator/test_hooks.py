"""What a hook sees and changes in a whole run, and settings that ask for one that is not installed."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpo.orchestrator import hooks
from grpo.orchestrator.hooks import Hook, Opening
from grpo.orchestrator.monitoring.metrics import Figures
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.errors import UserError
from grpo.transport.records import PreferencePair

from tests.orchestrator.fakes import FakeServer
from tests.orchestrator.running import run

ASKED: dict[str, Any] = {"teacher_model": {"reference": True}, "eval": {"num_examples": 0}}
LOSS = {"settings": {"loss": {"teacher_tau": 1.0}}}


class Marker(Hook):
    """Of the first group of four it drops three, which leaves too few. Of the others it drops the first rollout,
    withholds the second and adds 1 to the third's advantage."""

    def __init__(self, opening: Opening) -> None:
        self.longest, self.num_groups = 40, opening.state.get("num_groups", 0)

    async def before_credit(self, group: ScoredGroup) -> None:
        self.num_groups += 1
        first, second, third, _ = group.results
        if self.num_groups == 1:
            group.drop(dict.fromkeys((first.id, second.id, third.id), "unmarked"))
            return
        group.withheld |= {first.id: "filter", second.id: "marked"}
        group.drop({first.id: "unmarked"})
        group.add_evidence((third.id, 0), np.ones(len(third.steps[0].completion.token_ids), np.float32))

    def before_batch(self, step: int) -> list[PreferencePair]:
        ids = np.array([step], np.int32)
        known = {"chosen_ref_logprob": -1.0, "rejected_ref_logprob": -1.0, "source": "a test"}
        return [PreferencePair(prompt_ids=ids, chosen_ids=ids, rejected_ids=ids, **known)]

    def figures(self) -> Figures:
        return Figures(counts={"hints/errors": self.num_groups})

    def state(self) -> dict[str, Any]:
        return {"num_groups": self.num_groups}


async def test_a_hook_changes_groups_and_batches_is_counted_and_goes_on_with_its_state(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[Marker]()

    async def open_marker(opening: Opening) -> Hook:
        opened.append(Marker(opening))
        return opened[-1]

    monkeypatch.setattr(hooks, "_module", lambda name, switch: SimpleNamespace(open=open_marker))
    server.answer = lambda prompt, version: "a" * 100
    changes = ASKED | {"sampling": {"max_tokens": None}}
    made = await run(tmp_path, server, trainer=LOSS, max_steps=2, **changes)
    assert Counter(made.summary.rollouts_dropped) == {"unmarked": 3 + 8, "group_too_small": 1, "marked": 8}
    assert [name.partition("/")[2] for name in made.trained] == ["2", "3"] * 8
    for step, batches in made.batches.items():
        assert [pair.prompt_ids.tolist() for batch in batches for pair in batch.pairs] == [[step]]
        assert {batch.sequence_lengths.max() for batch in batches} == {40}
        # The environment rewards all alike: what is left is what the hook has added.
        assert {float(one) for batch in batches for one in batch.advantages[batch.loss_mask]} == {0.0, 1.0}
    assert [line["hints/errors"] for line in made.steps] == [5, 4]
    later = await run(tmp_path, server, trainer={**LOSS, "goes_on_after": 2}, max_steps=3, **changes)
    assert [one.num_groups for one in opened] == [9, 13]
    assert [line["hints/errors"] for line in later.steps][-1] == 13


async def test_settings_that_ask_for_what_is_not_installed_are_refused(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "AUXILIARY", "grpo.orchestrator.not_installed")
    with pytest.raises(UserError, match=r"loss\.teacher_tau"):
        await run(tmp_path, server, trainer=LOSS, **ASKED)
