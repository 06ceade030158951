"""Programming problems with tests, read from records of four styles.

- Unit tests (MBPP, HumanEval and alike): `tests`, `test_list` or `test`, each a piece of Python that raises where it
  fails; with `test_imports`, `setup` and `test_setup_code` before it. Its functions `test_…` are called, and
  `check(candidate)` with `entry_point`.
- Standard input (APPS): `inputs` and `outputs`, or both inside `input_output`; with `fn_name` the inputs are arguments
  of that function. Where each of its outputs is a list of one, as APPS wraps them, what it returns may be either.
- CodeContests: `public_tests`, `private_tests` and `generated_tests`, each with the lists `input` and `output`.
- LiveCodeBench: `public_test_cases` and `private_test_cases`, each a list of `input`, `output` and `testtype`.
"""

import ast
import base64
import functools
import hashlib
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo.environments.critique.testing import Test
from grpo.environments.data.files import check_refused, find_files, parse_rows

_QUESTION = ("question", "question_content", "prompt", "text", "description")
_NAME = ("id", "question_id", "task_id", "problem_id", "name")
_PROGRAM = ("program", "code", "candidate")
_UNIT_TESTS = ("tests", "test_list", "test")
_SETUP = ("test_imports", "setup", "test_setup_code")
_CONTEST = ("public_tests", "private_tests", "generated_tests")
_CASES = ("public_test_cases", "private_test_cases")
_MOST_BYTES = 1 << 28
"""The largest unpacked list of private tests."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question and the tests that a program has to pass.

    Example::

        problem_from_record({"question": "Print the sum.", "inputs": ["1 2\\n"], "outputs": ["3\\n"]})
    """

    name: str
    question: str
    tests: tuple[Test, ...]
    program: str
    """The candidate; may be empty."""

    @functools.cached_property
    def digest(self) -> str:
        """32 bytes in hexadecimal digits for what is tested."""
        return hashlib.blake2b(json.dumps([*map(asdict, self.tests)]).encode(), digest_size=32).hexdigest()

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """All words of the tests that call functions: the names of the program that they may use."""
        jobs = [test.job for test in self.tests if test.job is not None]
        code = " ".join(str(job.get(key, "")) for job in jobs for key in ("setup", "code", "function"))
        return frozenset(re.findall(r"\w+", code))


def load_problems(path: str) -> list[Problem]:
    """Reads a data file of records, each with a candidate program. Raises UserError that names one that has none."""

    def parse(record: Mapping[str, Any], place: str) -> Problem:
        problem = problem_from_record(record)
        if not problem.program:
            raise ValueError("there is no candidate program to criticise: give it a 'program'")
        return problem

    made, refused = parse_rows(find_files(path, subset=None, split="train"), parse)
    check_refused(refused, len(made))
    return made


def problem_from_record(record: Mapping[str, Any]) -> Problem:
    """Reads a record of any style. Raises ValueError, which names the keys that were found."""
    question, tests = _first(record, _QUESTION), tuple(_tests(record))
    if not isinstance(question, str) or not question.strip() or not tests:
        raise ValueError(
            f"expected a question (one of {', '.join(_QUESTION)}) and its tests: {', '.join(_UNIT_TESTS)} (pieces of "
            f"Python), inputs and outputs, input_output, {_CONTEST[0]} or {_CASES[0]}; got the keys {sorted(record)}"
        )
    return Problem(
        name=str(_first(record, _NAME) or ""),
        question=f"{question}\n\n{record.get('starter_code') or ''}".strip(),
        tests=tests,
        program=str(_first(record, _PROGRAM) or ""),
    )


def _tests(record: Mapping[str, Any]) -> Iterator[Test]:
    if any(key in record for key in _CASES):
        yield from _livecodebench(record)
    elif any(key in record for key in _CONTEST):
        for given in filter(None, map(record.get, _CONTEST)):
            yield from _inputs_and_outputs({"inputs": given["input"], "outputs": given["output"]})
    elif "inputs" in record or "input_output" in record:
        yield from _inputs_and_outputs({**record, **_parsed(record.get("input_output") or {})})
    else:
        yield from _unit_tests(record)


def _unit_tests(record: Mapping[str, Any]) -> Iterator[Test]:
    entry_point = str(record.get("entry_point") or "")
    setup = "\n".join(line for key in _SETUP for line in _pieces(record.get(key)) if line.strip())
    for piece in _pieces(_first(record, _UNIT_TESTS)):
        if "assert" not in piece and "raise" not in piece:
            raise ValueError(f"the unit test {piece[:100]!r} would pass every program: let it assert something")
        yield Test(job={"setup": setup, "code": piece, "entry_point": entry_point})


def _pieces(found: Any) -> list[str]:
    """Returns a list of pieces, as it is or written as one text; any other text is one piece."""
    if isinstance(found, str):
        found = ast.literal_eval(found.strip()) if found.lstrip().startswith("[") else [found]
    if not all(isinstance(piece, str) for piece in found or []):
        raise ValueError(f"{str(found)[:200]} is given as Python: expected a piece of it, or a list of pieces")
    return list(found or [])


def _inputs_and_outputs(record: Mapping[str, Any]) -> Iterator[Test]:
    inputs, outputs, name = record.get("inputs"), record.get("outputs"), record.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"expected inputs and outputs, as many of both, got {str(inputs)[:99]}, {str(outputs)[:99]}")
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    for given, output in zip(inputs, outputs, strict=True):
        if not name:
            yield Test(stdin=_lines(given), accepted=(_lines(output),))
        elif isinstance(given, list):
            yield _call(name, given, output, *(output if wrapped else ()))
        else:
            raise ValueError(f"with fn_name ({name!r}) each of inputs must be the list of its arguments")


def _call(function: str, arguments: list[Any], *accepted: Any) -> Test:
    return Test(job={"function": function, "arguments": arguments}, accepted=accepted)


def _livecodebench(record: Mapping[str, Any]) -> Iterator[Test]:
    function = _parsed(record.get("metadata") or "{}").get("func_name")
    for case in [case for key in _CASES for case in _cases(record.get(key) or "[]")]:
        if case.get("testtype", "stdin") == "stdin":
            yield Test(stdin=case["input"], accepted=(case["output"],))
        elif case["testtype"] == "functional" and function:
            arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
            yield _call(function, arguments, json.loads(case["output"]))
        else:
            raise ValueError(f"a test is {case['testtype']!r}: expected stdin, or functional with metadata.func_name")


def _cases(value: Any) -> list[Any]:
    """Returns a list of tests: itself, from JSON, or packed (base64 of compressed JSON inside a pickled string, which
    is read without running it)."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value, validate=True), _MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"packed tests of more than {_MOST_BYTES} bytes")
        [value] = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    cases: list[Any] = _parsed(value)
    return cases


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _lines(value: Any) -> str:
    """APPS writes a standard input as a text or as a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
