"""Deliberate faults in what feeds the losses and puts them together, each of which the tests of the objective must
find. Faults in the losses themselves are in test_loss_faults.py."""

from pathlib import Path
from types import ModuleType

import pytest

import trainer.objective
import trainer.packs
import trainer.streams
from tests.trainer import test_batch, test_objective, test_packs
from tests.trainer.faults import Fault, new_module, own_names, planted
from tests.trainer.test_objective import Step, step  # noqa: F401  (a fixture)

USERS: dict[str, tuple[ModuleType, ...]] = {
    "batch.py": (trainer.streams, trainer.packs, test_batch),
    "packs.py": (trainer.streams, test_packs),
    "streams.py": (trainer.objective,),
    "objective.py": (test_objective,),
}
"""Who imports a file's functions and is given the faulty ones."""

FAULTS = [
    Fault("the logits after the target predict it", "batch.py", "source[targets - 1]", "source[targets]"),
    Fault("temperatures are off by one", "batch.py", "temperatures[targets]", "temperatures[targets - 1]"),
    Fault("targets are off by one", "batch.py", "token_ids[targets].astype", "token_ids[targets - 1].astype"),
    Fault("positions do not restart", "batch.py", "(position_ids[kept]", "(np.arange(len(position_ids))[kept]"),
    Fault("the lag is off by one", "batch.py", "batch.step - 1 -", "batch.step -"),
    Fault("the lag is of other tokens", "batch.py", "policy_versions[targets]", "policy_versions[: len(targets)]"),
    Fault("all tokens are of one sample", "batch.py", "(sample_ids[targets])", "(0 * sample_ids[targets])"),
    Fault("the teacher's tokens are off by one", "batch.py", "teacher[targets]", "teacher[targets - 1]"),
    Fault(
        "the server's tokens are off by one",
        "batch.py",
        "inference_logprobs[targets]",
        "inference_logprobs[targets - 1]",
    ),
    Fault("advantages are off by one", "batch.py", "(batch.advantages)[targets]", "(batch.advantages)[targets - 1]"),
    Fault("a micro-batch is its own step", "batch.py", "tokens=batch.num_loss_tokens", "tokens=len(targets)"),
    Fault("hints have no weight", "packs.py", "[one.hint.weight for one", "[1.0 for one"),
    Fault("the context is aligned as the sample", "packs.py", "one.hint.teacher_index)", "one.hint.student_index)"),
    Fault(
        "continuations are off by one",
        "packs.py",
        "np.arange(start, start + count)",
        "np.arange(start, start + count) - 1",
    ),
    Fault("the sums are swapped", "packs.py", "return sums[0::2], sums[1::2]", "return sums[1::2], sums[0::2]"),
    Fault("the references are swapped", "packs.py", "chosen, rejected = torch", "rejected, chosen = torch"),
    Fault("the student reads the hint", "streams.py", "hidden(pack.student)", "hidden(pack.teacher)"),
    Fault("the teacher lacks the hint", "streams.py", "hidden(pack.teacher), None", "hidden(pack.student), None"),
    Fault("a pack of hints is its own step", "streams.py", "=num_hint_tokens", "=len(pack.weights)"),
    Fault("a pack of pairs is its own step", "streams.py", "=num_pairs", "=len(pairs)"),
    Fault(
        "the hints' β is the student's share",
        "streams.py",
        "beta=self._settings.beta,\n            temperature",
        "beta=1 - self._settings.beta,\n            temperature",
    ),
    Fault("the hints' temperature is ignored", "streams.py", "=self._settings.temperature", "=1.0"),
    Fault("the streams are not weighted", "objective.py", "(stream.weight * loss)", "(loss)"),
    Fault("the total is not weighted", "objective.py", "stream.weight * metrics.get", "metrics.get"),
    Fault("a stream replaces the one before", "objective.py", "else earlier.add_(gradient)", "else gradient"),
]


def check(tiny_model: Path, step: Step) -> None:  # noqa: F811
    """What the tests of batches, packs and objective check, as far as they need nothing else."""
    for options, naive, name, weight in (
        (test_objective.POLICY_ONLY, test_objective.naive_policy, "policy", 1.0),
        (test_objective.SDPO_ONLY, test_objective.naive_sdpo, "sdpo", 0.7),
        (test_objective.DPO_ONLY, test_objective.naive_dpo, "dpo", 0.4),
    ):
        test_objective.test_each_stream_alone_is_what_hugging_face_gives_on_single_samples(
            tiny_model, step, options, naive, name, weight
        )
    test_objective.test_the_streams_add_up(tiny_model, step)
    parts = test_objective.SPLITS["two micro-batches"]
    test_objective.test_the_gradients_do_not_depend_on_order_or_micro_batches(tiny_model, step, parts)
    test_objective.test_packs_of_hints_and_pairs_may_be_split_further(tiny_model, step)
    test_batch.test_only_tokens_that_carry_loss_reach_the_head_and_the_loss()
    test_batch.test_the_teachers_logprobs_are_those_of_the_loss_tokens()
    test_packs.test_a_pair_is_two_sequences_whose_prompt_is_computed_once()


def put_in(monkeypatch: pytest.MonkeyPatch, file: str, module: ModuleType) -> None:
    """The module's functions and classes in the place of the file's, wherever they are imported."""
    for user in USERS[file]:
        for name, value in own_names(module).items():
            if name in vars(user):
                monkeypatch.setattr(user, name, value)


@pytest.mark.parametrize("file", USERS)
def test_the_checks_pass_without_a_fault(
    tiny_model: Path,
    step: Step,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    put_in(monkeypatch, file, new_module(file))
    check(tiny_model, step)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_each_planted_fault_is_found(
    tiny_model: Path,
    step: Step,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    put_in(monkeypatch, fault.file, planted(fault))
    with pytest.raises(AssertionError):
        check(tiny_model, step)
