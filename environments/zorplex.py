"""`zorplex`: arithmetic with hidden values of words, which a look-up tool gives.

As in the Zorplex benchmark, "What is zorplex(apple) + zorplex(plum)?" needs `LOOKUP[apple]`, `LOOKUP[plum]` and then
`[ANSWER] 97`. The reward is 1 for a right answer, plus 0.2 for any answer with the tag, minus 0.1 a call beyond two.
"""

import functools
import hashlib
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpo import (
    Environment,
    EpisodeState,
    MarkerParser,
    Parser,
    Role,
    Rubric,
    Tool,
    ToolEpisode,
    ToolFailed,
    parse_bracketed,
)

LOOKUP, UNKNOWN_WORD, ANSWER_TAG = "LOOKUP", "unknown_word", "[ANSWER]"
THINKING, NUMBERS = Parser(), MarkerParser(ANSWER_TAG, pattern=r"-?[0-9]{1,18}(?![0-9])")
CORRECT_REWARD, TAG_REWARD, EXCESS_CALL_REWARD = 1.0, 0.2, -0.1
FREE_CALLS, SPAM_CALLS = 2, 3
"""Numbers of calls: how many are free, and beyond how many a wrong answer counts as tool spam."""
MODES = ("success", "wrong_format", "tool_spam", "wrong_answer")
MAX_ECHO = 20
"""Characters of an unknown word that the error message repeats."""

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

WORDS = tuple(
    """
    acorn alder amber anvil apple arrow aspen bacon badge basil beach bean bear berry birch bird boat bone book bread
    brick brook broom brush cabin cake camel candle canoe carrot cat cedar chain chair cherry chess cliff clock cloud
    clover coal cobra coin comet copper coral cow crab crane crow crown daisy deer desk dog dove drum duck eagle ear
    egg elbow elm ember engine fan feather fern fiddle field finger fire fish flag flame flute fog fork fox frog fruit
    garlic gate ghost ginger glass globe glove goat gold goose grape grass gravel hammer harp hat hawk hazel heart
    hedge hill honey hook horn horse house ice ink iris iron island ivy jam jar jewel jungle kettle key kite kiwi knee
    knot ladder lake lamp lantern leaf lemon lily lime lion lizard lock log maple marble mask melon mill mint mirror
    mole moon moss moth mouse mud nail needle nest net night nut oak oar ocean olive onion otter owl ox paint palm pan
    paper parrot peach pear pebble pen pepper piano pig pine pipe plum pond poppy potato pot quail queen quilt rabbit
    rain raven reed ribbon rice ring river robin rock roof rope rose ruby sail salt sand seed shell ship shoe silk
    silver snail snow soap sock spade spider spoon spring squid star stone storm straw sugar sun swan table tea thorn
    thread tiger toad tooth torch tower train tree trout tulip turnip turtle vase vine viola walnut wasp water wave
    whale wheat wheel willow wind window wing wolf wood wool worm yarn zebra
    """.split()  # noqa: SIM905
)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIFFICULTIES = {"easy": (2, "+"), "medium": (2, "+-*"), "hard": (3, "+-*")}
"""By name: the number of words in a question, and the operations that it may have."""


class Question(NamedTuple):
    """A question. The same operation stands between all its words, and is applied from left to right."""

    words: tuple[str, ...]
    operation: str


def split_of(word: str) -> str:
    """Returns the split of a word: `eval` if SHA-256(word) mod 5 is 0 (a fifth of all words)."""
    return "train" if _digest(word) % 5 else "eval"


def zorplex(word: str, seed: int, max_value: int) -> int:
    """Returns a word's hidden value, 1 to `max_value`. It depends on the word and the seed alone, and so is the same in
    every process."""
    return 1 + _digest(f"{seed} {word}") % max_value


def questions(seed: int, num: int, difficulty: str, split: str) -> list[Question]:
    """Draws `num` questions about a split's words. The same arguments give the same list, and a longer list begins with
    the shorter one."""
    num_words, operations = DIFFICULTIES[difficulty]
    words, rng = [word for word in WORDS if split_of(word) == split], random.Random(seed)
    return [Question(words=tuple(rng.sample(words, num_words)), operation=rng.choice(operations)) for _ in range(num)]


def prompt(question: Question) -> str:
    """Returns the user's message: `What is zorplex(apple) + zorplex(plum)?`."""
    return f"What is {f' {question.operation} '.join(f'zorplex({word})' for word in question.words)}?"


def answer(question: Question, seed: int, max_value: int) -> int:
    """Returns the right answer."""
    values = [zorplex(word, seed, max_value) for word in question.words]
    return int(functools.reduce(OPERATIONS[question.operation], values))


def without_zorplex(word: str) -> str:
    """Returns the error message for an unknown word, which it repeats shortened, without special characters."""
    plain = "".join(letter if letter.isalnum() else "?" for letter in word[:MAX_ECHO])
    return f"{plain or 'Nothing'}{'...' * (len(word) > MAX_ECHO)} has no zorplex; look up a word of the question."


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


# --- what a rollout is worth ---


def correct(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the number after the last `[ANSWER]` that has one is right, else 0."""
    number = NUMBERS.parse(completion).answer
    return float(number is not None and int(number) == example["answer"])


def format_rate(completion: str) -> float:
    """Returns 1 if the last message has the tag."""
    return float(ANSWER_TAG in completion)


def num_tool_calls(state: EpisodeState) -> float:
    """Returns the number of calls, failed ones included."""
    return float(state.data["num_tool_calls"])


def excess_calls(state: EpisodeState) -> float:
    """Returns the number of calls beyond the free ones."""
    return max(0.0, num_tool_calls(state) - FREE_CALLS)


def tool_error_rate(state: EpisodeState) -> float:
    """Returns the share of calls that failed; 0 without calls."""
    return float(state.data["tool_errors"]) / max(1.0, num_tool_calls(state))


def num_turns(state: EpisodeState) -> float:
    """Returns the number of the policy's messages."""
    return float(state.turn)


def failure_mode(state: EpisodeState) -> str:
    """Returns the first of MODES that fits. `tool_spam` is a wrong answer after more than three calls."""
    answer = THINKING.parse(state.last or "").answer or ""
    if correct(answer, state.example):
        return "success"
    if not format_rate(answer):
        return "wrong_format"
    return "tool_spam" if num_tool_calls(state) > SPAM_CALLS else "wrong_answer"


def _share_of(mode: str) -> Callable[[EpisodeState], float]:
    """Returns a metric, named like the mode, that is 1 if the rollout ended in it, else 0."""

    def share(state: EpisodeState) -> float:
        return float(failure_mode(state) == mode)

    share.__name__ = mode
    return share


class Zorplex(ToolEpisode, Environment):
    """Asks for arithmetic with words' hidden values. Training and evaluation share no word."""

    def __init__(
        self,
        *,
        difficulty: str = "easy",
        max_value: int = 100,
        max_turns: int = 6,
        system_prompt: str = SYSTEM_PROMPT,
        num_train: int = 10_000,
        num_eval: int = 200,
        seed: int = 0,
    ) -> None:
        """`difficulty`: `easy` has sums of two words, `medium` also differences and products, `hard` three words, so
        that the third call costs. Values are 1 to `max_value` and depend on `seed`. Raises ValueError."""
        if difficulty not in DIFFICULTIES or max_value < 1:
            known = ", ".join(DIFFICULTIES)
            raise ValueError(
                f"difficulty is {difficulty!r}, max_value {max_value}: expected one of {known}, at least 1"
            )
        rubric = Rubric(
            [correct, format_rate, excess_calls],
            weights=[CORRECT_REWARD, TAG_REWARD, EXCESS_CALL_REWARD],
            metrics=[*map(_share_of, MODES), num_tool_calls, tool_error_rate, num_turns],
            parser=THINKING,
        )
        super().__init__(
            {LOOKUP: Tool.of(self.look_up, name=LOOKUP)},
            parser=parse_bracketed,
            max_turns=max_turns,
            show_tools=False,
            rubric=rubric,
            roles=[Role(id="policy", system_prompt=system_prompt)],
        )
        self._difficulty, self._seed, self._max_value = difficulty, seed, max_value
        self._num = {"train": num_train, "eval": num_eval}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        drawn = questions(self._seed, self._num[split], self._difficulty, split)
        return [{"prompt": prompt(one), "answer": answer(one, self._seed, self._max_value)} for one in drawn]

    async def look_up(self, word: str) -> int:
        """The zorplex of a word.

        Args:
            word: one word
        """
        known = word.strip().lower()
        if known not in WORDS:
            raise ToolFailed(without_zorplex(word), error_kind=UNKNOWN_WORD)
        return zorplex(known, self._seed, self._max_value)

    def is_done(self, state: EpisodeState) -> bool:
        return NUMBERS.parse(state.last or "").answer is not None

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        return {"failure_mode": failure_mode(state), "num_tool_calls": state.data["num_tool_calls"]}
