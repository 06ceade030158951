"""Programming problems with tests, read from three styles of records.

- Unit tests (MBPP, HumanEval and alike): `tests`, `test_list` or `test`, each a piece of Python that raises where it
  fails; with `test_imports`, `setup` and `test_setup_code` before it. Functions `test_…` are called, and
  `check(candidate)` with `entry_point`.
- Standard input (APPS, CodeContests): `inputs` and `outputs`, or both inside `input_output`; with `fn_name` the inputs
  are arguments of that function. Where each of its outputs is a list of one, as APPS wraps them, what it returns may
  be either.
- LiveCodeBench: `public_test_cases` and `private_test_cases`, each a list of `input`, `output` and `testtype`.
"""

import base64
import binascii
import hashlib
import json
import pickletools
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from orchestrator.envs.critique.pieces import pieces_of, setup_of, testing
from orchestrator.sandbox import Result

_UNIT_TESTS = ("tests", "test_list", "test")
_MOST_BYTES = 1 << 28
"""The largest unpacked list of private tests."""


class UnknownRecord(ValueError):
    """A problem record in none of the styles, or with contents that its style does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a program against one test.

    What is compared stays outside: the sandbox gets the program and its input, never the expected output.
    """

    program: str
    stdin: Callable[[], bytes]
    """Makes it, once it is the program's turn: inputs may be large, and many wait."""
    mark: str
    """Printed by the test's own code when it got to its end; empty where the program itself does the printing. A
    program that ends early with exit code 0 has not passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTest:
    """Python code that raises unless the program before it is right."""

    setup: str
    code: str
    public: bool = False

    def trial(self, program: str) -> Trial:
        mark = secrets.token_hex(16)
        given = [mark, program, self.setup, self.code]
        return Trial(program=_UNIT_HARNESS, stdin=lambda: json.dumps(given).encode(), mark=mark)

    def passed(self, trial: Trial, result: Result) -> bool:
        return result.succeeded and trial.mark.encode() in result.stdout.splitlines()[-1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTest:
    """What the program must print for one standard input."""

    stdin: str
    expected: str
    public: bool = False

    def trial(self, program: str) -> Trial:
        return Trial(program=program, stdin=self.stdin.encode, mark="")

    def passed(self, trial: Trial, result: Result) -> bool:
        return result.succeeded and same_output(result.stdout.decode(errors="replace"), self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """What a function, or a method of the class `Solution`, must return."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False
    """Whether `expected` is a list of one, which may stand around what is returned."""
    public: bool = False

    def trial(self, program: str) -> Trial:
        mark = secrets.token_hex(16)
        given = [mark, program, self.function, list(self.arguments)]
        return Trial(program=_CALL_HARNESS, stdin=lambda: json.dumps(given).encode(), mark=mark)

    def passed(self, trial: Trial, result: Result) -> bool:
        if not result.succeeded:
            return False
        last = (result.stdout.splitlines() or [b""])[-1].decode(errors="replace")
        mark, _, text = last.partition(" ")
        try:
            return mark == trial.mark and self._is_right(json.loads(text))
        except (ValueError, RecursionError):
            return False

    def _is_right(self, value: Any) -> bool:
        return same_value(value, self.expected) or (self.wrapped and same_value(value, self.expected[0]))


Test = UnitTest | InputTest | CallTest

_HARNESS_START = """\
import json as _json
import sys as _sys
import types as _types

def _run():
    import io, os
    mark, program, first, second = _json.loads(_sys.stdin.read())
    main = _types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    _sys.modules["__main__"] = main
    _sys.stdin = io.StringIO()
    write, out, dumps, flush = os.write, os.dup(1), _json.dumps, _sys.stdout.flush
    exec(compile(program, "program.py", "exec", dont_inherit=True), main.__dict__)
"""
_UNIT_HARNESS = (
    _HARNESS_START
    + """\
    exec(compile(first + "\\n" + second, "test.py", "exec", dont_inherit=True), main.__dict__)
    flush()
    write(out, ("\\n" + mark + "\\n").encode())

_run()
"""
)
_CALL_HARNESS = (
    _HARNESS_START
    + """\
    place = main.Solution() if hasattr(main, "Solution") else main
    value = getattr(place, first)(*second)
    flush()
    write(out, ("\\n" + mark + " " + dumps(value) + "\\n").encode())

_run()
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and the tests that a program has to pass.

    Example::

        problem_from_record({"question": "Print the sum.", "inputs": ["1 2\\n"], "outputs": ["3\\n"]})
    """

    name: str
    question: str
    starter_code: str
    tests: tuple[Test, ...]
    digest: str
    """Names the tests: equal where they are."""
    program: str | None
    """A candidate program that comes with the problem."""

    @property
    def public_tests(self) -> tuple[Test, ...]:
        """Those that may be shown."""
        return tuple(test for test in self.tests if test.public)


def problem_from_record(record: Mapping[str, Any]) -> Problem:
    """Reads a record of any style. Raises `UnknownRecord`, which names the keys that were found."""
    tests = _tests(record)
    name = str(_first(record, "id", "question_id", "task_id", "problem_id", "name") or "")
    if not tests:
        raise UnknownRecord(f"the problem {name!r} has no tests: a program for it could not be judged")
    question = _first(record, "question", "question_content", "prompt", "text", "description")
    if not isinstance(question, str) or not question.strip():
        raise UnknownRecord(
            f"the problem {name!r} has no question: expected one of the keys 'question', 'question_content', 'prompt', "
            f"'text', 'description' with a text, got the keys {sorted(record)}"
        )
    program = _first(record, "program", "code", "candidate")
    return Problem(
        name=name,
        question=question,
        starter_code=str(record.get("starter_code") or ""),
        tests=tests,
        digest=digest_of(tests),
        program=None if program is None else str(program),
    )


def digest_of(tests: tuple[Test, ...]) -> str:
    """32 bytes in hexadecimal digits for what is tested."""
    text = json.dumps([[type(test).__name__, asdict(test)] for test in tests])
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _tests(record: Mapping[str, Any]) -> tuple[Test, ...]:
    if "public_test_cases" in record or "private_test_cases" in record:
        return _livecodebench(record)
    if "input_output" in record:
        inner = _parsed(record["input_output"], "input_output")
        if not isinstance(inner, dict):
            raise UnknownRecord(f"'input_output' is {str(inner)[:200]}: expected an object with 'inputs' and 'outputs'")
        return _inputs_and_outputs({**record, **inner})
    if "inputs" in record:
        return _inputs_and_outputs(record)
    if any(key in record for key in _UNIT_TESTS):
        return _unit_tests(record)
    raise UnknownRecord(
        "a problem needs its tests: 'tests', 'test_list' or 'test' (pieces of Python), 'inputs' and 'outputs', "
        f"'input_output', or 'public_test_cases' and 'private_test_cases'; got the keys {sorted(record)}"
    )


def _unit_tests(record: Mapping[str, Any]) -> tuple[Test, ...]:
    try:
        setup, pieces = setup_of(record), pieces_of(_first(record, *_UNIT_TESTS))
        return tuple(UnitTest(setup=setup, code=testing(piece, record.get("entry_point"))) for piece in pieces)
    except ValueError as error:
        raise UnknownRecord(str(error)) from None


def _inputs_and_outputs(record: Mapping[str, Any]) -> tuple[Test, ...]:
    inputs, outputs = record.get("inputs"), record.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnknownRecord(
            f"'inputs' and 'outputs' must be lists of the same length, got {str(inputs)[:100]} and {str(outputs)[:100]}"
        )
    name, pairs = record.get("fn_name"), list(zip(inputs, outputs, strict=True))
    if name:
        if not all(isinstance(arguments, list) for arguments, _ in pairs):
            raise UnknownRecord(f"with 'fn_name' ({name!r}) each of 'inputs' must be the list of its arguments")
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        return tuple(
            CallTest(function=name, arguments=tuple(given), expected=output, wrapped=wrapped) for given, output in pairs
        )
    return tuple(InputTest(stdin=_lines(given), expected=_lines(output)) for given, output in pairs)


def _livecodebench(record: Mapping[str, Any]) -> tuple[Test, ...]:
    metadata = _parsed(record.get("metadata") or "{}", "metadata")
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    tests: list[Test] = []
    for key, public in (("public_test_cases", True), ("private_test_cases", False)):
        cases = _cases(record.get(key) or "[]", key)
        if not isinstance(cases, list):
            raise UnknownRecord(f"{key!r} is {str(cases)[:200]}: expected a list")
        tests += [_livecodebench_test(case, function, public, key) for case in cases]
    return tuple(tests)


def _livecodebench_test(case: Any, function: str | None, public: bool, key: str) -> Test:
    if not isinstance(case, dict) or not all(isinstance(case.get(name), str) for name in ("input", "output")):
        raise UnknownRecord(
            f"a test in {key!r} is {str(case)[:200]}: expected an object with the texts input and output"
        )
    kind = case.get("testtype", "stdin")
    if kind == "stdin":
        return InputTest(stdin=case["input"], expected=case["output"], public=public)
    if kind != "functional" or not function:
        raise UnknownRecord(
            f"a test in {key!r} has testtype {kind!r} and the metadata func_name {function!r}: expected 'stdin', or "
            "'functional' and the function's name"
        )
    try:
        arguments = tuple(json.loads(line) for line in case["input"].splitlines() if line.strip())
        expected = json.loads(case["output"])
    except ValueError as error:
        raise UnknownRecord(f"a functional test in {key!r} is not written as JSON: {error}") from None
    return CallTest(function=function, arguments=arguments, expected=expected, public=public)


def _cases(value: Any, key: str) -> Any:
    """A list of tests: itself, as JSON, or packed (base64 of compressed JSON inside a pickled string)."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value, validate=True), _MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return json.loads(_pickled_text(data))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UnknownRecord(f"{key!r} is neither JSON nor packed JSON: {error}") from None


def _pickled_text(data: bytes) -> str:
    """The only text in a pickle, read without running it."""
    if data[:1] != b"\x80":
        return data.decode()
    texts = [argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)]
    if len(texts) != 1:
        raise ValueError(f"expected a pickle of one text, got one with {len(texts)}")
    return texts[0]


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree line by line, but for space at the ends of lines and of the whole, and for how numbers
    are written (`1.50` and `1.5`)."""
    ours, theirs = (text.strip().splitlines() for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(one: str, other: str) -> bool:
    ours, theirs = one.split(), other.split()
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_word, ours, theirs)))


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        first, second = Decimal(one), Decimal(other)
    except InvalidOperation:
        return False
    return first.is_finite() and first == second


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true and 1 are not."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _first(record: Mapping[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _parsed(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UnknownRecord(f"{key!r} is not JSON: {error}") from None


def _lines(value: Any) -> str:
    """APPS writes a standard input as a text or as a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
