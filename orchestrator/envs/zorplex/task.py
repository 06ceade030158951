"""The data of `zorplex`: words, their hidden values, and questions about them. Pure Python.

A word's zorplex is a number that follows from the word and a seed, so that it is the same in every process and at
every replay, and a policy can only look it up. Questions of training and evaluation share no word.
"""

import functools
import hashlib
import operator
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "eval"]
Difficulty = Literal["easy", "medium", "hard"]

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
DIFFICULTIES: dict[str, tuple[int, tuple[str, ...]]] = {
    "easy": (2, ("+",)),
    "medium": (2, tuple(OPERATIONS)),
    "hard": (3, tuple(OPERATIONS)),
}
"""Words in a question, and the operations that may stand between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question without its answer. Example: ``Question(words=("apple", "plum"), operation="+")``"""

    words: tuple[str, ...]
    operation: str
    """The same between all words."""


def split_of(word: str) -> Split:
    """The split `word` belongs to: "eval" where SHA-256(word) mod 5 is 0, a fifth of all words."""
    digest = int.from_bytes(hashlib.sha256(word.encode()).digest())
    return "eval" if digest % 5 == 0 else "train"


def zorplex(word: str, seed: int, max_value: int) -> int:
    """The word's hidden value, 1 to `max_value`."""
    digest = int.from_bytes(hashlib.sha256(f"{seed} {word}".encode()).digest())
    return 1 + digest % max_value


def questions(seed: int, num: int, difficulty: Difficulty, split: Split) -> list[Question]:
    """Draw `num` questions about a split's words. The same arguments give the same list, and a longer list begins with
    the shorter one."""
    num_words, operations = DIFFICULTIES[difficulty]
    words, rng = _words_of(split), random.Random(seed)
    return [Question(words=tuple(rng.sample(words, num_words)), operation=rng.choice(operations)) for _ in range(num)]


def prompt(question: Question) -> str:
    """The user's message: `What is zorplex(apple) + zorplex(plum)?`."""
    terms = f" {question.operation} ".join(f"zorplex({word})" for word in question.words)
    return f"What is {terms}?"


def answer(question: Question, seed: int, max_value: int) -> int:
    """The one right answer, with the operation applied from left to right."""
    values = [zorplex(word, seed, max_value) for word in question.words]
    return int(functools.reduce(OPERATIONS[question.operation], values))


@functools.cache
def _words_of(split: Split) -> tuple[str, ...]:
    return tuple(word for word in WORDS if split_of(word) == split)
