"""Programming problems with tests, read from records of three styles.

- Unit tests (MBPP, HumanEval and alike): `tests`, `test_list` or `test`, each a piece of Python that raises where it
  fails; with `test_imports`, `setup` and `test_setup_code` before it. Functions `test_…` are called, and
  `check(candidate)` with `entry_point`.
- Standard input (APPS, CodeContests): `inputs` and `outputs`, or both inside `input_output`; with `fn_name` the inputs
  are arguments of that function. Where each of its outputs is a list of one, as APPS wraps them, what it returns may
  be either.
- LiveCodeBench: `public_test_cases` and `private_test_cases`, each a list of `input`, `output` and `testtype`.
"""

import ast
import base64
import hashlib
import json
import pickletools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.envs.critique.testing import CallTest, InputTest, Test, UnitTest

_QUESTION = ("question", "question_content", "prompt", "text", "description")
_NAME = ("id", "question_id", "task_id", "problem_id", "name")
_PROGRAM = ("program", "code", "candidate")
_UNIT_TESTS = ("tests", "test_list", "test")
_SETUP = ("test_imports", "setup", "test_setup_code")
_CASES = ("public_test_cases", "private_test_cases")
_MOST_BYTES = 1 << 28
"""The largest unpacked list of private tests."""


class UnknownRecord(ValueError):
    """A problem record in none of the styles, or with contents that its style does not have."""


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
    program: str | None
    """A candidate program that comes with the problem."""

    @property
    def digest(self) -> str:
        """32 bytes in hexadecimal digits for what is tested."""
        text = json.dumps([[type(test).__name__, asdict(test)] for test in self.tests])
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def load_problems(path: Path) -> list[Problem]:
    """Reads a JSONL file, a record with a candidate program a line. Raises UnknownRecord that names the line."""
    problems: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            problem = problem_from_record(record)
        except (ValueError, TypeError, AttributeError, KeyError, SyntaxError) as error:
            raise UnknownRecord(f"{path}:{number} is no problem: {error}; it begins {line[:100]!r}") from None
        if problem.program is None:
            raise UnknownRecord(
                f"{path}:{number} has no candidate program, which is what is criticised: give it a 'program'; it has "
                f"the keys {sorted(record)}"
            )
        problems.append(problem)
    if not problems:
        raise UnknownRecord(f"{path} has no problems in it: expected one record a line")
    return problems


def problem_from_record(record: Mapping[str, Any]) -> Problem:
    """Reads a record of any style. Raises `UnknownRecord`, which names the keys that were found."""
    question, program = _first(record, _QUESTION), _first(record, _PROGRAM)
    if not isinstance(question, str) or not question.strip():
        raise UnknownRecord(f"no question: expected a text as one of {_QUESTION}, got the keys {sorted(record)}")
    tests = tuple(_tests(record))
    if not tests:
        raise UnknownRecord("no tests: a program for it could not be judged")
    return Problem(
        name=str(_first(record, _NAME) or ""),
        question=question,
        starter_code=str(record.get("starter_code") or ""),
        tests=tests,
        program=None if program is None else str(program),
    )


def _tests(record: Mapping[str, Any]) -> Iterator[Test]:
    if any(key in record for key in _CASES):
        return _livecodebench(record)
    if "input_output" in record:
        return _inputs_and_outputs({**record, **_parsed(record["input_output"])})
    if "inputs" in record:
        return _inputs_and_outputs(record)
    if any(key in record for key in _UNIT_TESTS):
        return _unit_tests(record)
    raise UnknownRecord(
        "a problem needs its tests: 'tests', 'test_list' or 'test' (pieces of Python), 'inputs' and 'outputs', "
        f"'input_output', or 'public_test_cases' and 'private_test_cases'; got the keys {sorted(record)}"
    )


def _unit_tests(record: Mapping[str, Any]) -> Iterator[Test]:
    entry_point = str(record.get("entry_point") or "")
    setup = "\n".join(line for key in _SETUP for line in _pieces(record.get(key) or []) if line.strip())
    for piece in _pieces(_first(record, _UNIT_TESTS)):
        yield UnitTest(setup=setup, code=testing(piece, entry_point), entry_point=entry_point)


def _pieces(found: Any) -> list[str]:
    """Returns a list of pieces, as it is or written as one text; any other text is one piece."""
    if isinstance(found, str) and found.lstrip().startswith("["):
        found = ast.literal_eval(found.strip())
    pieces = [found] if isinstance(found, str) else found
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        raise UnknownRecord(f"{str(found)[:200]} is given as Python: expected a piece of it, or a list of pieces")
    return pieces


def testing(piece: str, entry_point: str) -> str:
    """Returns the piece, followed by calls of its test functions where it only defines them: `test_double()`, or
    `check(ENTRY_POINT)`. Raises UnknownRecord where nothing in it would test anything."""
    try:
        tree = ast.parse(piece)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownRecord(f"the unit test {piece[:100]!r} is no Python: {error}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    rest = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    named = {node.id for statement in tree.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    calls = [_call(node, entry_point) for node in functions if node.name not in named and _is_test(node)]
    if not calls and not any(map(_tests_something, rest)):
        raise UnknownRecord(
            f"the unit test {piece[:100]!r} would pass every program: let it assert something, or define functions "
            "test_… without arguments"
        )
    return "\n".join([piece, *calls])


def _is_test(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return function.name == "check" or function.name.startswith("test")


def _call(function: ast.FunctionDef | ast.AsyncFunctionDef, entry_point: str) -> str:
    given = function.args
    needed = len(given.posonlyargs) + len(given.args) - len(given.defaults)
    checks = function.name == "check"
    callable_so = needed == checks and not function.decorator_list and isinstance(function, ast.FunctionDef)
    if not callable_so or (checks and not entry_point.isidentifier()):
        raise UnknownRecord(
            f"{function.name} of a unit test cannot be called here: expected a plain function without arguments, or "
            f"check(candidate) with the candidate's name as 'entry_point', which is {entry_point!r}"
        )
    return f"{function.name}({entry_point if checks else ''})"


def _tests_something(statement: ast.stmt) -> bool:
    asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(statement))
    return asserts or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call))


def _inputs_and_outputs(record: Mapping[str, Any]) -> Iterator[Test]:
    inputs, outputs = record.get("inputs"), record.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnknownRecord(
            f"'inputs' and 'outputs' must be lists of the same length, got {str(inputs)[:100]} and {str(outputs)[:100]}"
        )
    name = record.get("fn_name")
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    for given, output in zip(inputs, outputs, strict=True):
        if not name:
            yield InputTest(stdin=_lines(given), expected=_lines(output))
        elif isinstance(given, list):
            yield CallTest(function=name, arguments=tuple(given), expected=output, wrapped=wrapped)
        else:
            raise UnknownRecord(f"with 'fn_name' ({name!r}) each of 'inputs' must be the list of its arguments")


def _livecodebench(record: Mapping[str, Any]) -> Iterator[Test]:
    function = _parsed(record.get("metadata") or "{}").get("func_name")
    for case in [case for key in _CASES for case in _cases(record.get(key) or "[]")]:
        kind = case.get("testtype", "stdin")
        if kind == "stdin":
            yield InputTest(stdin=case["input"], expected=case["output"])
        elif kind == "functional" and function:
            arguments = tuple(json.loads(line) for line in case["input"].splitlines() if line.strip())
            yield CallTest(function=function, arguments=arguments, expected=json.loads(case["output"]))
        else:
            raise UnknownRecord(
                f"a test has testtype {kind!r} and the metadata func_name {function!r}: expected 'stdin', or "
                "'functional' and the function's name"
            )


def _cases(value: Any) -> list[Any]:
    """Returns a list of tests: itself, from JSON, or packed (base64 of compressed JSON inside a pickled string, which
    is read without running it)."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(value, validate=True), _MOST_BYTES)
        if unpacker.unconsumed_tail:
            raise UnknownRecord(f"packed tests of more than {_MOST_BYTES} bytes")
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
