"""Whether token ids mean the same to the policy and to its teacher."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.renderer import ChatRenderer
from orchestrator.teachers.scoring import TeacherRefused
from orchestrator.teachers.vocabulary import Probe, Vocabulary, check_probe, check_same, probes
from tests.orchestrator.fakes import MODEL

OURS = Vocabulary(tokens={0: "a", 1: "b", 2: "<end>"}, control=frozenset({2}))


def test_a_folders_vocabulary_is_the_one_that_its_tokenizer_has() -> None:
    from transformers import PreTrainedTokenizerFast

    found = Vocabulary.of_folder(MODEL)
    assert (len(found.tokens), found.tokens[258], sorted(found.control)) == (259, "<|im_end|>", [256, 257, 258])
    assert found == Vocabulary.of_tokenizer(PreTrainedTokenizerFast.from_pretrained(MODEL))


def test_a_vocabulary_of_pieces_with_scores_is_read_too() -> None:
    data = json.dumps({"model": {"vocab": [["<unk>", 0.0], ["x", -1.5]]}, "added_tokens": None}).encode()
    assert Vocabulary.of_json(data, "t").tokens == {0: "<unk>", 1: "x"}


@pytest.mark.parametrize("data", [b"nothing", b"\xff", b"[]", b'{"model": {}}', b'{"model": {"vocab": [7]}}'])
def test_a_file_that_is_no_tokenizer_is_named(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"here is no tokenizer\.json"):
        Vocabulary.of_json(data, "here")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json and no tokenizer_config\.json"):
        Vocabulary.of_folder(tmp_path)


def test_a_teacher_with_more_tokens_can_teach() -> None:
    check_same(OURS, replace(OURS, tokens={**OURS.tokens, 3: "<more>"}, control=frozenset({2, 3})), "it")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (replace(OURS, tokens={0: "a", 1: "b", 2: "<stop>"}), "1 of 3 .* 1 of them control .*'<end>' .* and '<stop>'"),
        (replace(OURS, tokens={0: "a", 2: "<end>"}), "1 of 3 .* 0 of them control .* 1 is 'b' for .* nothing for"),
        (replace(OURS, tokens={0: "b", 1: "a", 2: "<end>"}), "2 of 3 tokens differ"),
        (replace(OURS, control=frozenset()), "2 is '<end>' for both, a control token only for the policy"),
        (replace(OURS, control=frozenset({1, 2})), "1 is 'b' for both, a control token only for the teacher"),
    ],
)
def test_another_vocabulary_is_refused_with_its_differences(theirs: Vocabulary, message: str) -> None:
    with pytest.raises(TeacherRefused, match=f"it has another vocabulary than the policy: .*{message}") as caught:
        check_same(OURS, theirs, "it")
    assert caught.value.reason == "other_vocabulary"


def test_probes_hold_all_control_tokens_and_a_sample_of_the_others() -> None:
    ours = Vocabulary.of_folder(MODEL)
    found = probes(ours, ChatRenderer.of_model(MODEL))
    read = {index for probe in found for index in probe.token_ids}
    assert ours.control <= read
    assert len(read) > 120
    assert all(probe.tokens == tuple(ours.tokens[index] for index in probe.token_ids) for probe in found)


PROBE = Probe(text="ab<end>", token_ids=(0, 1, 2), tokens=("a", "b", "<end>"))


def test_a_probe_that_is_read_alike_passes() -> None:
    check_probe(PROBE, [0, 1, 2], ["a", "b", "<end>"], "it")
    check_probe(PROBE, [0, 1, 2], None, "it")


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([0, 3, 2], None, "it reads token 3 where the policy reads token 1 .'b'."),
        ([0, 1, 2], ["a", "b", "<stop>"], "reads token 2 .'<stop>'. where the policy reads token 2 .'<end>'."),
        ([0, 1], ["a", "b"], "it reads 2 tokens where the policy reads 3"),
        ([0, 1, 2, 2], None, "it reads 4 tokens where the policy reads 3"),
        ([0, 1, 2], ["a", "b"], "it names 2 tokens of 3"),
        ([], None, "it reads 0 tokens"),
    ],
)
def test_a_probe_that_is_read_otherwise_is_refused(ids: list[int], tokens: list[str] | None, message: str) -> None:
    with pytest.raises(TeacherRefused, match=f"it has another tokenizer than the policy: .*{message}"):
        check_probe(PROBE, ids, tokens, "it")
