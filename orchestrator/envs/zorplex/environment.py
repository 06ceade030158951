"""`zorplex`: compositional questions about words' hidden values, answered by look-up tools.

After the Zorplex benchmark: "What is zorplex(apple) + zorplex(plum)?" takes a `LOOKUP[apple]`, a `LOOKUP[plum]` and an
`[ANSWER] 97`. A right answer is worth 1, the tag 0.2 whatever stands behind it, and each call beyond two costs 0.1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orchestrator.envs.zorplex.task as task
from orchestrator.envs.base import Environment
from orchestrator.rollouts.roles import POLICY, Role
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState
from orchestrator.rollouts.tool_calls import ANSWER_TAG, Tool, parse_bracketed, tagged_integer
from orchestrator.rollouts.tool_episode import ToolEpisode, ToolFailed

LOOKUP, UNKNOWN_WORD = "LOOKUP", "unknown_word"
CORRECT_REWARD, TAG_REWARD, EXCESS_CALL_REWARD = 1.0, 0.2, -0.1
FREE_CALLS, SPAM_CALLS = 2, 3
"""Calls that cost nothing, and those beyond which a wrong answer is put down to tool spam."""
MAX_ECHO = 20
"""Characters of a word that is unknown which the policy is told."""

SYSTEM_PROMPT = """\
Each word has a hidden value, its zorplex. Look it up with LOOKUP[word], one call at a time, and wait for the result. \
When you have all values, do the arithmetic and end with [ANSWER] and the number.

Example:
User: What is zorplex(cat) + zorplex(dog)?
Assistant: LOOKUP[cat]
Tool: 42
Assistant: LOOKUP[dog]
Tool: 17
Assistant: 42 + 17 = 59. [ANSWER] 59"""


def correct(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the number behind the last `[ANSWER]` is right."""
    return float(tagged_integer(completion) == example["answer"])


def format_rate(completion: str) -> float:
    """1 where the last answer has the tag."""
    return float(ANSWER_TAG in completion)


def excess_calls(state: EpisodeState) -> float:
    """Calls beyond the free ones."""
    return float(max(0, num_calls(state) - FREE_CALLS))


def num_calls(state: EpisodeState) -> int:
    """Calls so far, whatever came of them."""
    return int(state.data.get("num_tool_calls", 0))


def failure_mode(state: EpisodeState) -> str:
    """`success`, `wrong_format`, `tool_spam` or `wrong_answer`: the first that fits."""
    if correct(state.last_text, state.example):
        return "success"
    if not format_rate(state.last_text):
        return "wrong_format"
    return "tool_spam" if num_calls(state) > SPAM_CALLS else "wrong_answer"


def success(state: EpisodeState) -> float:
    """1 where the answer is right."""
    return float(failure_mode(state) == "success")


def wrong_format(state: EpisodeState) -> float:
    """1 where the rollout ends without the tag."""
    return float(failure_mode(state) == "wrong_format")


def tool_spam(state: EpisodeState) -> float:
    """1 where the answer is wrong, after more than three calls."""
    return float(failure_mode(state) == "tool_spam")


def wrong_answer(state: EpisodeState) -> float:
    """1 where the answer is wrong for no such reason."""
    return float(failure_mode(state) == "wrong_answer")


def num_tool_calls(state: EpisodeState) -> float:
    """Calls, whatever came of them."""
    return float(num_calls(state))


def tool_error_rate(state: EpisodeState) -> float:
    """Share of the calls that failed; 0 without calls."""
    return int(state.data.get("tool_errors", 0)) / max(1, num_calls(state))


def num_turns(state: EpisodeState) -> float:
    """Answers of the policy."""
    return float(state.turn)


class Zorplex(ToolEpisode, Environment):
    """Questions about words; training and evaluation share none."""

    def __init__(
        self,
        *,
        difficulty: task.Difficulty = "easy",
        max_value: int = 100,
        max_turns: int = 6,
        system_prompt: str = SYSTEM_PROMPT,
        num_train: int = 10_000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        """`difficulty`: `easy` is the sum of two words' values, `medium` also their difference or product, `hard` the
        same of three words, of which the third call costs. Values are 1 to `max_value`, and follow from `seed`."""
        if difficulty not in task.DIFFICULTIES:
            raise ValueError(f"difficulty is {difficulty!r}, expected one of {', '.join(task.DIFFICULTIES)}")
        if max_value < 1:
            raise ValueError(f"max_value is {max_value}, expected at least 1")
        super().__init__(
            {LOOKUP: Tool.of(self.look_up, name=LOOKUP)},
            parser=parse_bracketed,
            max_turns=max_turns,
            show_tools=False,
            rubric=Rubric(
                [correct, format_rate, excess_calls],
                weights=[CORRECT_REWARD, TAG_REWARD, EXCESS_CALL_REWARD],
                metrics=[success, wrong_format, tool_spam, wrong_answer, num_tool_calls, tool_error_rate, num_turns],
            ),
            roles=[Role(id=POLICY, system_prompt=system_prompt)],
        )
        self._difficulty, self._seed, self._max_value = difficulty, seed, max_value
        self._num = {"train": num_train, "eval": num_eval}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        held_out: task.Split = "train" if split == "train" else "eval"
        return [
            {"prompt": task.prompt(question), "answer": task.answer(question, self._seed, self._max_value)}
            for question in task.questions(self._seed, self._num[held_out], self._difficulty, held_out)
        ]

    async def look_up(self, word: str) -> int:
        """The zorplex of a word.

        Args:
            word: one word
        """
        known = word.strip().lower()
        if known not in task.WORDS:
            raise ToolFailed(without_zorplex(word), error_kind=UNKNOWN_WORD)
        return task.zorplex(known, self._seed, self._max_value)

    def is_done(self, state: EpisodeState) -> bool:
        return tagged_integer(state.last_text) is not None

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        return {"failure_mode": failure_mode(state), "num_tool_calls": num_calls(state)}


def without_zorplex(word: str) -> str:
    """What the policy is told of a word that there is not."""
    return f"{shown(word)} has no zorplex; look up a word of the question."


def shown(word: str) -> str:
    """What the policy wrote, short and harmless."""
    plain = "".join(letter if letter.isalnum() else "?" for letter in word[:MAX_ECHO])
    return plain + ("..." if len(word) > MAX_ECHO else "") if plain else "Nothing"
