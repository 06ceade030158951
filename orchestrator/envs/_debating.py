"""What a debate is about and who has won it: topics, arguments, the rule that counts them, and verdicts.

Pure Python, knows of no model and no episode.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

AFF, NEG = "Aff", "Neg"
Verdict = Literal["Aff", "Neg", "tie"]
Line = tuple[str, str]
"""(role, what it said)"""

# fmt: off
TOPICS = (
    "tea", "rain", "cats", "dogs", "trains", "cars", "books", "bikes", "snow", "bread", "music", "chess",
    "cities", "maps", "boats", "phones", "milk", "ice", "games", "shoes", "clocks", "bees", "hats", "songs",
    "parks", "lamps", "ropes", "coins", "kites", "soup",
)
# fmt: on
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    AFF: ("good", "cheap", "fun", "safe", "fast", "clean", "kind", "warm"),
    NEG: ("bad", "dear", "dull", "risky", "slow", "dirty", "mean", "cold"),
}
"""The words that speak for a topic and against it."""

_WORD = re.compile(r"[a-z]+")
_VERDICT = re.compile(r"\bwinner\W{1,10}(aff|neg|tie)\b", re.IGNORECASE)
_JUDGE = """\
You judge a debate on the topic "{topic}". Aff argues for it, Neg against it.

{transcript}

Who argued better? Judge the arguments, not your own opinion of the topic. End with one line:
Winner: Aff, or Winner: Neg, or Winner: tie"""


def topic_prompt(topic: str) -> str:
    """What both sides are told: `Topic: tea`."""
    return f"Topic: {topic}"


def points(transcript: Sequence[Line], arguments: Mapping[str, Sequence[str]] = ARGUMENTS) -> dict[str, int]:
    """By role: how many different words of its own list it named before anybody else did.

    Example: ``points([("Aff", "good, fun."), ("Neg", "good, bad, bad.")])`` is ``{"Aff": 2, "Neg": 1}``
    """
    counts, said = dict.fromkeys(arguments, 0), set[str]()
    for role, text in transcript:
        for word in _WORD.findall(text.lower()):
            counts[role] += word in arguments[role] and word not in said
            said.add(word)
    return counts


def verdict_by_rule(transcript: Sequence[Line]) -> Verdict:
    """The side with more points."""
    counts = points(transcript)
    if counts[AFF] == counts[NEG]:
        return "tie"
    return "Aff" if counts[AFF] > counts[NEG] else "Neg"


def verdict_of(text: str) -> Verdict | None:
    """What a judge's answer says: `Winner: Aff`, `Winner: Neg` or `Winner: tie`, the last where it says so more than
    once; None where it does not say."""
    found = _VERDICT.findall(text)
    if not found:
        return None
    verdicts: dict[str, Verdict] = {"aff": "Aff", "neg": "Neg", "tie": "tie"}
    return verdicts[found[-1].lower()]


def judge_prompt(topic: str, transcript: Sequence[Line]) -> str:
    """What a model is asked that judges."""
    said = "\n\n".join(f"{role}: {text}" for role, text in transcript)
    return _JUDGE.format(topic=topic, transcript=said)


def zero_sum(verdict: Verdict | None, score: float) -> dict[str, float]:
    """`score` for the winner and its negative for the other; 0 for both in a tie, or where there is no verdict."""
    aff, neg = {"Aff": (score, -score), "Neg": (-score, score)}.get(verdict or "tie", (0.0, 0.0))
    return {AFF: aff, NEG: neg}
