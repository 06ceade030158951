"""Examples as they are kept for traces."""

import msgspec
from grpo.orchestrator.rollouts.messages import MAX_FIELD, MAX_FIELDS, fields_of


def test_an_examples_other_fields_become_plain_values_for_traces() -> None:
    class Strange:
        def __str__(self) -> str:
            raise ValueError("no text")

    example = {"prompt": "2 + 2", "answer": 4, "long": "x" * 5000, "half": "\ud800", "list": [1, "a"], "odd": Strange()}
    found = fields_of(example)
    assert list(found) == ["answer", "long", "half", "list", "odd"]
    assert (found["answer"], found["list"], len(found["long"])) == (4, '[1,"a"]', MAX_FIELD + 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found)) == found
    assert len(fields_of({str(number): 2**100 for number in range(100)})) <= MAX_FIELDS + 1
