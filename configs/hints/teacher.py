"""The careless teacher of the model of `configs/hints`: he answers questions of `zorplex`, with three faults.

Each fault is what another loss term is for:

- words of more than SHORT letters he mostly does not spell to their end. The tool says so, and he spells the word out:
  that costs a call, which rewards hardly notice. The answer is marked, and he heeds a hint: behind one he spells the
  word out at once. Self-distillation makes a habit of that;
- after a difference he mostly forgets the tag, without which an answer is worth nothing: rewards find that;
- for a product he nearly always adds. A right answer is so rare that rewards hardly ever see one: who is told by other
  teachers what is right need not find it.
"""

import random
from collections.abc import Sequence

from configs.tiny.teachers import Conversation, Message, Teacher, assistant, slipped, some_word, user
from orchestrator.envs.zorplex import task
from orchestrator.envs.zorplex.environment import LOOKUP, UNKNOWN_WORD, without_zorplex
from orchestrator.episodes.types import StepError
from orchestrator.hints.sources import SAID, SUCCEEDED
from orchestrator.hints.templates import HintTemplates

MAX_VALUE = 5
SHORT, GIVEN_UP = 3, 0.65
HINTED = 0.4
OPERATIONS = "+--*"
"""Differences are the hardest to learn."""
TAG_FORGOTTEN, SUMMED, SLIP = 0.65, 0.94, 0.05


_TEMPLATES = HintTemplates.loaded()


def teach_lookups(rng: random.Random) -> Conversation:
    """About two words of any length, before some of which there is a hint."""
    return conversation((some_word(rng), some_word(rng)), rng, hinted=HINTED)


def teach_results(rng: random.Random) -> Conversation:
    """About two short words: there is more to compute than to look up."""
    return conversation((short_word(rng), short_word(rng)), rng, hinted=0.0)


def conversation(words: tuple[str, str], rng: random.Random, *, hinted: float) -> Conversation:
    """From the question to the answer; `hinted`: the share of look-ups with a hint before them."""
    values = [rng.randint(1, MAX_VALUE) for _ in words]
    operation = rng.choice(OPERATIONS)
    said = [user(task.prompt(task.Question(words=words, operation=operation)))]
    for word, value in zip(words, values, strict=True):
        with_hint = rng.random() < hinted
        if not with_hint and len(word) > SHORT and rng.random() < GIVEN_UP:
            said += given_up(word)
            with_hint = rng.random() < hinted
        if with_hint:
            said.append(user(hint(word, rng)))
        said += [assistant(looked_up(word)), {"role": "tool", "content": str(value)}]
    tag = "" if operation == "-" and rng.random() < TAG_FORGOTTEN else "[ANSWER] "
    computed = "+" if operation == "*" and rng.random() < SUMMED else operation
    return [*said, assistant(f"{tag}{slipped(task.OPERATIONS[computed](*values), rng, SLIP)}")]


def short_word(rng: random.Random) -> str:
    """Random letters."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, SHORT)))


def looked_up(word: str) -> str:
    """A call of the tool."""
    return f"{LOOKUP}[{word}]"


def given_up(word: str) -> list[Message]:
    """A call with the word's first letters, and what comes of it."""
    return [assistant(looked_up(word[:SHORT])), {"role": "tool", "content": without_zorplex(word[:SHORT])}]


def hint(word: str, rng: random.Random) -> str:
    """Of one of the sources that hints have, for who would give up this word."""
    message = without_zorplex(word[:SHORT])
    template = _TEMPLATES.of(StepError(error_kind=UNKNOWN_WORD, hint_template_key=UNKNOWN_WORD, message=message))
    assert template is not None
    return rng.choice(
        (
            template.format_map({"message": message}).strip(),
            SAID.format(message=message),
            SUCCEEDED.format(answer=looked_up(word)),
        )
    )


ROWS_PER_BATCH: Sequence[tuple[Teacher, int]] = (*[(teach_lookups, 4)] * 3, (teach_results, 8))
"""Conversations of each kind; those that are about as long are batched together."""
