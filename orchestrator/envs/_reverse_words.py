"""The data of the `reverse_text` task: words, prompts and the answer check.

Pure Python. Shared by the environment and by `tools/make_tiny_models.py`,
so that the quickstart model is pre-trained on the training split only and never
sees a word that the environment evaluates on.
"""

import hashlib
import random
import string
from typing import Literal

Split = Literal["train", "eval"]


def split_of(word: str) -> Split:
    """The split `word` belongs to: "eval" where SHA-256(word) mod 10 is 0, a tenth of all words."""
    digest = int.from_bytes(hashlib.sha256(word.encode()).digest())
    return "eval" if digest % 10 == 0 else "train"


def words(seed: int, num: int, min_len: int, max_len: int, split: Split) -> list[str]:
    """Draw `num` strings of lower-case letters from one split, with replacement.

    Lengths are uniform in [min_len, max_len], letters uniform in a-z. The same
    arguments give the same list, and a longer list begins with the shorter one.
    """
    if not 2 <= min_len <= max_len:
        raise ValueError(f"word lengths must satisfy 2 <= min_len <= max_len, got min_len={min_len}, max_len={max_len}")
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < num:
        length = rng.randint(min_len, max_len)
        word = "".join(rng.choices(string.ascii_lowercase, k=length))
        if split_of(word) == split:
            drawn.append(word)
    return drawn


def prompt(word: str) -> str:
    """The user's message: `Reverse: hello`."""
    return f"Reverse: {word}"


def answer(word: str) -> str:
    """The one right answer: `hello` gives `olleh`."""
    return word[::-1]


def is_correct(text: str, word: str) -> bool:
    """Whether `text` is the answer and nothing else; white space around it is ignored."""
    return text.strip() == answer(word)
