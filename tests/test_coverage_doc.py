"""tests/coverage.md: what a row says shows it is there, and speaks of what the row is about.

Of each row, what stands in code style in the first two columns must be found in the tests of the last one: a word (of a
dotted key its last part) in the source of one of the tests, with what it and its fixtures name of their own file; a
path of ours as an import, or a name, in one of their files. Each cited test has at least one of the row's words.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests/coverage.md").read_text()
PACKAGES = ("configs", "deploy", "environments", "grpo", "infer", "orchestrator", "tests", "trainer", "transport")


def rows() -> Iterator[tuple[str, str, str]]:
    """What is asked, where it is, what shows it, for each row of the tables."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| asked"):
            asked, where, shown = (cell.strip() for cell in line.strip("|").split(" | "))
            yield asked, where, shown


def test_each_row_is_shown_by_tests_that_speak_of_it() -> None:
    found = [problem for row in rows() for problem in problems(*row)]
    assert found == [], "\n".join(found)


SHOWN = "`tests/trainer/test_ema.py::test_the_average_begins_as_the_weights_and_keeps_its_share_of_itself_at_each_step`"


@pytest.mark.parametrize(
    ("asked", "where", "shown"),
    [
        ("a moving average", "`trainer/ema.py`", SHOWN),
        ("`warmup_steps`", "`trainer/ema.py`", SHOWN),
        ("a moving `average`", "`trainer/loss.py`", SHOWN),
        ("a moving `average`", "`trainer/means.py`", SHOWN),
        ("a moving `average`", "[a page](that_is_not_there.md)", SHOWN),
        ("a moving `average`", "`trainer/ema.py`", "`tests/trainer/test_ema.py`"),
        ("a moving `average`", "`trainer/ema.py`", "`tests/trainer/test_ema.py::test_nothing`"),
        ("a moving `average`", "`trainer/ema.py`", f"{SHOWN}, `tests/test_imports.py`"),
    ],
)
def test_a_row_without_a_proof_is_found(asked: str, where: str, shown: str) -> None:
    assert problems("a moving `average`", "`trainer/ema.py`", SHOWN) == []
    assert problems(asked, where, shown) != []


def problems(asked: str, where: str, shown: str) -> list[str]:
    """What is wrong with a row."""
    codes = re.findall(r"`([^`]+)`", f"{asked} {where}")
    paths = [code for code in codes if re.fullmatch(rf"({'|'.join(PACKAGES)})/[\w/.]*", code)]
    words = {part for code in codes if code not in paths for part in parts(code)}
    cited = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown)
    links = re.findall(r"\]\((?:\.\./docs/)?(\w+\.md)(?:#[\w-]+)?\)", where)
    wrong = [f"{one} is not there" for one in paths if not (ROOT / one).exists()]
    wrong += [f"docs/{one} is not there" for one in links if not (ROOT / "docs" / one).exists()]
    wrong += [f"{one} is no test" for one in re.findall(r"`([^`]+)`", shown) if tuple(one.split("::")) not in cited]
    wrong += [] if cited else ["no test is cited"]
    wrong += [] if words else ["no word in code style says what it is about"]
    texts = {name: sources(path).get(name) for path, name in cited if (ROOT / path).exists()}
    wrong += [f"{path}::{name} is not there" for path, name in cited if texts.get(name) is None]
    there = {name: text for name, text in texts.items() if text is not None}
    wrong += [
        f"`{word}` is in none of its tests" for word in words if not any(holds(word, text) for text in there.values())
    ]
    for name, text in there.items():
        wrong += [] if any(holds(word, text) for word in words) else [f"{name} has none of {', '.join(sorted(words))}"]
    files = [(ROOT / path).read_text() for path, _ in cited if (ROOT / path).exists()]
    wrong += [f"{one} is in none of its tests' files" for one in paths if not any(names(one, text) for text in files)]
    return [f"{asked}: {problem}" for problem in wrong]


def parts(code: str) -> list[str]:
    """The words of a piece of code: of a key its last part, of `key: value` both, of a command its words."""
    words = re.findall(r"[\w.-]+", code)
    return [word if word.startswith(("-", "grpo-")) else word.strip(".").rpartition(".")[2] for word in words]


def holds(word: str, text: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", text) is not None


def names(path: str, text: str) -> bool:
    """Whether a file imports what is below a path, or names it."""
    return path.removesuffix(".py").rstrip("/").replace("/", ".") in text or path.rstrip("/") in text


Definition = tuple[ast.stmt, str]
"""A statement, and the text in which it stands."""


@cache
def sources(path: str) -> dict[str, str]:
    """The tests of a file, each with the source of what it names of that file: helpers, fixtures, constants, imports,
    and classes in programs that stand there as texts."""
    text = (ROOT / path).read_text()
    defined = definitions(text)
    for node, _ in list(defined.values()):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and "class " in str(node.value.value):
            defined |= definitions(str(node.value.value).replace("{{", "{").replace("}}", "}"))
    return {name: with_used(name, defined) for name in defined if name.startswith("test_")}


def definitions(text: str) -> dict[str, Definition]:
    try:
        return {name: (node, text) for node in ast.parse(text).body for name in names_of(node)}
    except SyntaxError:  # a template of a program
        return {}


def names_of(node: ast.stmt) -> list[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [one.asname or one.name for one in node.names]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
    return []


def with_used(name: str, defined: dict[str, Definition]) -> str:
    """The source of a test and of what it names itself, with what its fixtures name: not of what is further away, which
    may be there for other tests."""
    test = defined[name]
    fixtures = [defined[one.arg] for one in ast.walk(test[0]) if isinstance(one, ast.arg) and one.arg in defined]
    found = [one for each in (test, *fixtures) for one in (each, *named_by(each[0], defined))]
    return "\n".join(dict.fromkeys(source_of(*one) for one in found))


def named_by(node: ast.stmt, defined: dict[str, Definition]) -> list[Definition]:
    used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    used |= {word for one in texts for word in re.findall(r"\w+", one)}  # classes of environments, as `file:Class`
    return [defined[word] for word in sorted(used) if word in defined]


def source_of(node: ast.stmt, text: str) -> str:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
