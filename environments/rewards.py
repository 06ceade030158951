"""Rewards and parsers that a run's settings can name, for environments without code."""

import functools
import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from typing import Any

from grpo.environments.critique.problems import problem_from_record
from grpo.environments.critique.testing import ProgramScorer, extract_program

from grpo import (
    BoxedParser,
    InferenceClient,
    MarkerParser,
    Parser,
    UserError,
    XMLParser,
    client_of,
    load_object,
    messages_of,
)

Reward = Callable[..., Any]
"""A reward function of a rubric: takes the completion and the example."""
JUDGE_PROMPT = """\
You judge an answer to a question.

{question}{known}

The answer to judge is:

{completion}

Is it right? End with one line:
Verdict: right, or Verdict: wrong"""
NO_MATH = "reward: math needs math-verify, which is not installed: pip install 'grpo-pipeline[math]'"
_VERDICT = re.compile(r"\bverdict\W{1,10}(right|wrong)\b", re.IGNORECASE)
MATH_TIMEOUT_S = 2
"""Limit in seconds for math-verify to parse one text, or to compare two."""
MAX_MATH_CHARS = 10_000
"""Only so many characters at the end of a text are read, because answers stand there."""

_NUMBER = re.compile(
    r"(?<![\w.])[+-]?(?>(?>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?>(?:e[+-]?[0-9]+)?)"
    r"(?![.,]?[0-9]|[^\W\d_]*[\d_])",
    re.IGNORECASE,
)
"""Matches a whole number or decimal, never a part of a longer one. Letters may follow, such as a unit."""


def exact(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion, without white space around it, is the answer, else 0."""
    return float(completion.strip() == str(example["answer"]).strip())


def number(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the completion's last number equals the answer, else 0: `1,000` is `1000.0`, `1.5kg` is `1.5`."""
    found = _NUMBER.findall(completion.replace("\u2212", "-"))
    return float(bool(found) and _decimal(found[-1]) == _decimal(str(example["answer"])))


def math(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if math-verify finds the completion's result, boxed or not, equal to the answer, else 0: `\\frac{1}{2}`
    is `0.5`. Any equal expression counts, even the question itself: `2+3` is `5`."""
    try:
        from math_verify import parse, verify  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise UserError(NO_MATH) from None

    given = parse(completion.strip()[-MAX_MATH_CHARS:], parsing_timeout=_limit_s())
    return float(verify(_parsed_answer(str(example["answer"]).strip()), given, timeout_seconds=_limit_s()))


def regex(pattern: str) -> Reward:
    """Returns a reward that is 1 if the first group in the last match of `pattern` is the answer or, if the pattern has
    no group, if it matches. Raises ValueError for an invalid pattern."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"reward: regex has {pattern!r}, which is no regular expression: {error}") from None

    def regex(completion: str, example: Mapping[str, Any]) -> float:
        found = [match[1 if compiled.groups else 0] or "" for match in compiled.finditer(completion)]
        if not compiled.groups:
            return float(bool(found))
        return float(bool(found) and found[-1].strip() == str(example["answer"]).strip())

    return regex


def judge(model: str | Mapping[str, Any] = "base") -> Reward:
    """Returns a reward that is 1 if a model judges the completion right, else 0, also for no verdict. The model sees
    the question and any answer, and is never trained. `model`: as `client_of` takes it."""
    client = client_of(model)

    async def judge(completion: str, example: Mapping[str, Any]) -> float:
        question = "\n\n".join(message["content"] for message in messages_of(example))
        return float(await asked_verdict(client, question, completion, example.get("answer")) or 0.0)

    return judge


async def asked_verdict(client: InferenceClient, question: str, completion: str, answer: Any = None) -> bool | None:
    """Asks a model whether a completion is right. Returns None if it gives no verdict. `answer`: the right one, if it
    is known."""
    known = "" if answer is None else f"\n\nThe right answer is:\n\n{answer}"
    asked = JUDGE_PROMPT.format(question=question, completion=completion, known=known)
    told = Parser().parse(await client.complete([{"role": "user", "content": asked}]))
    said = _VERDICT.findall(told.answer or "")
    return said[-1].lower() == "right" if said else None


def unit_tests(settings: Mapping[str, Any] | None = None) -> Reward:
    """Returns a reward: the share, 0 to 1, of the example's tests that the completion's program passes in the sandbox.
    Examples are problems in any style of `grpo.environments.critique.problems`. `settings`: of `ProgramScorer`."""
    scorer = ProgramScorer(**(settings or {}))

    async def unit_tests(completion: str, example: Mapping[str, Any]) -> float:
        problem = problem_from_record(example)
        program = extract_program(completion)
        return await scorer.score(program, problem.tests, digest=problem.digest, names=problem.names)

    return unit_tests


def _math() -> Reward:
    """Returns `math`. Raises UserError if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise UserError(NO_MATH)
    return math


REWARDS: dict[str, Callable[[Any], Reward]] = {
    "exact": lambda _: exact,
    "number": lambda _: number,
    "math": lambda _: _math(),
    "regex": regex,
    "judge": lambda model: judge(model or "base"),
    "unit_tests": unit_tests,
}
"""By name, a function that makes the reward from its option (None: it has none)."""
COMPARING = ("exact", "number", "math")
"""The rewards that compare the completion with the answer and take no option."""


def make_reward(given: str | Mapping[str, Any]) -> tuple[str, Reward, bool]:
    """Returns the name, the reward, and whether it compares with an answer. `given`: a name, `{name: option}`, or your
    own `module:function` or `path/to/file.py:function`. Raises ValueError for anything else."""
    name, option = given, None
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise ValueError(
                f"reward is {dict(given)}, expected one name with its option, as {{regex: 'Answer: (.*)'}}"
            )
        [(name, option)] = given.items()
    if ":" in str(name):
        function = load_object(str(name), setting="reward")
        if not callable(function):
            raise ValueError(f"reward = {name!r} is a {type(function).__name__}, expected a function")
        return str(name), function, False
    if name not in REWARDS:
        raise ValueError(
            f"unknown reward {name!r}; there are {', '.join(REWARDS)}, and your own, as my_rewards.py:score"
        )
    if (option is not None and name in COMPARING) or (option is None and name == "regex"):
        raise ValueError(f"reward {name} {'takes no option' if name in COMPARING else 'needs one: a pattern'}")
    reward = REWARDS[str(name)](option)
    return str(name), reward, name in COMPARING or (name == "regex" and re.compile(str(option)).groups > 0)


PARSERS: dict[str, Callable[[Any], Parser | None]] = {
    "thinking": lambda _: Parser(),
    "boxed": lambda _: BoxedParser(),
    "marker": lambda marker: MarkerParser(str(marker)),
    "xml": lambda tags: XMLParser(*(tags if isinstance(tags, list | tuple) else [str(tags)])),
    "text": lambda _: None,
}
"""By name, a function that makes the parser from its option."""


def make_parser(given: str | Mapping[str, Any]) -> Parser | None:
    """Returns the parser of completions, or None for `text`, the whole text. `given`: a name, `{marker: TEXT}` or
    `{xml: TAG}`. Raises ValueError for anything else."""
    name, option = next(iter(given.items()), ("", None)) if isinstance(given, Mapping) else (given, None)
    if name not in PARSERS or (isinstance(given, Mapping) and len(given) != 1):
        known = "thinking, boxed, text, {marker: '####'} and {xml: answer}"
        raise ValueError(f"unknown parser {given!r}; there are {known}")
    if (option is None) == (name in ("marker", "xml")):
        raise ValueError(
            f"parser {name} {'needs an option' if option is None else 'takes no option'}, and has {option!r}"
        )
    return PARSERS[str(name)](option)


def wrong_answer(name: str, answer: Any) -> str | None:
    """Returns why the reward `name` cannot compare with `answer`, or None if it can."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"answer is {answer!r}, expected a text or a number"
    text = str(answer).strip()
    if not text and name != "exact":
        return "answer is empty"
    if name == "number" and _decimal(text) is None:
        return f"answer is {answer!r}, which is no number"
    if name == "math" and not _parsed_answer(text):
        return f"answer is {answer!r}, which math-verify cannot read"
    return None


def _decimal(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


@functools.lru_cache(maxsize=4096)
def _parsed_answer(expected: str) -> Any:
    """Returns an answer as math-verify parses it: its boxed part or, if it has none, as LaTeX or else plain text. Empty
    if it cannot be parsed."""
    from math_verify import parse  # type: ignore[import-untyped, unused-ignore]

    if "\\boxed" in expected:
        return parse(expected[-MAX_MATH_CHARS:], parsing_timeout=_limit_s())
    return parse(f"${expected}$", parsing_timeout=_limit_s()) or parse(expected, parsing_timeout=_limit_s())


def _limit_s() -> int | None:
    """Returns math-verify's limit in seconds; None outside of the main thread, since it uses signals, which only that
    thread gets. The limit of the whole reward holds there."""
    return MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
