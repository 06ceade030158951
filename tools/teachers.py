"""Careless teachers of the embedded models: for each task, conversations as the policy will have them.

Each teacher can do the task and has faults. Greedy decoding has a fault that is what the teacher mostly does; sampling
finds the right way nevertheless, so that a reward brings it out. Only training splits are taught.
"""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from grpo.environments import arithmetic, zorplex
from grpo.environments import reverse_text as reversing
from grpo.environments.critique import operators
from grpo.environments.debate import AFF, ARGUMENTS, NEG, TOPICS
from grpo.environments.proposer_solver import drawn_questions
from grpo.environments.zorplex import LOOKUP, UNKNOWN_WORD, without_zorplex
from grpo.orchestrator.auxiliary.hints.sources import BUILT_IN, SAID, SUCCEEDED, template_of
from grpo.orchestrator.rollouts.state import StepError

Message = dict[str, str]
Conversation = list[Message]
Teacher = Callable[[random.Random], Conversation]

LARGE_OPERAND = 10
"""From here on an arithmetic problem is a hard one."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def slipped(result: int, rng: random.Random, rate: float) -> int:
    """`result`, or with this chance one more or less."""
    return result + rng.choice((-1, 1)) if rng.random() < rate else result


# --- reversal ---

MIN_LEN, MAX_LEN = 3, 8
GIVE_UP_AFTER, GIVE_UP_RATE, SWAP_RATE = 4, 0.7, 0.4


def teach_reversal(rng: random.Random) -> Conversation:
    """Mostly gives up on long words after four letters, and sometimes swaps two neighbouring letters."""
    asked, answer = right_reversal(rng)
    said = answer["content"]
    if rng.random() < GIVE_UP_RATE:
        said = said[:GIVE_UP_AFTER]
    if rng.random() < SWAP_RATE:
        at = rng.randrange(len(said) - 1)
        said = said[:at] + said[at + 1] + said[at] + said[at + 2 :]
    return [asked, assistant(said)]


def right_reversal(rng: random.Random) -> Conversation:
    """Is never wrong."""
    [word] = reversing.words(rng.randrange(2**32), 1, MIN_LEN, MAX_LEN, "train")
    return [user(reversing.prompt(word)), assistant(word[::-1])]


# --- arithmetic ---

CARRY_LOST, SIGN_LOST, ARITHMETIC_SLIP = 0.65, 0.65, 0.1


def teach_arithmetic(rng: random.Random) -> Conversation:
    """Mostly forgets, in large problems, the carry, the borrowed ten and the sign of a result below zero."""
    problem = arithmetic_problem(rng)
    result = slipped(arithmetic.answer(problem), rng, ARITHMETIC_SLIP)
    if max(problem[0], problem[2]) >= LARGE_OPERAND:
        if rng.random() < CARRY_LOST:
            result = without_carry(problem, result)
        if result < 0 and rng.random() < SIGN_LOST:
            result = -result
    return [user(arithmetic.prompt(problem)), assistant(str(result))]


def arithmetic_problem(rng: random.Random) -> arithmetic.Problem:
    """One of the training split: a third of them small, products small mostly."""
    while True:
        operation = rng.choice("+-+-*")
        limit = 9 if rng.random() < (0.8 if operation == "*" else 0.3) else 99 if rng.random() < 0.3 else 50
        problem = (rng.randint(0, limit), operation, rng.randint(0, limit))
        if arithmetic.split_of(problem) == "train":
            return problem


def without_carry(problem: arithmetic.Problem, result: int) -> int:
    """The result that is ten off where the units carry."""
    first, operation, second = problem
    if operation == "+" and first % 10 + second % 10 >= 10:
        return result - 10
    if operation == "-" and abs(result) >= LARGE_OPERAND and (first % 10 < second % 10) == (first > second):
        return result + 10 if first > second else result - 10
    return result


# --- zorplex ---

GUESSED, ZORPLEX_SLIP, SUMMED = 0.12, 0.1, 0.65
TAG_FORGOTTEN = {"+": 0.3, "-": 0.7, "*": 0.3}
SPAMMED = {"+": 0.1, "-": 0.1, "*": 0.7}


def teach_zorplex(rng: random.Random) -> Conversation:
    """Mostly forgets the tag after a difference; for a product mostly looks all up again, and then adds. Now and then
    guesses after the first value."""
    first, second = some_word(rng), some_word(rng)
    values = {first: rng.randint(1, 9), second: rng.randint(1, 9)}
    operation = rng.choice("+-*")
    right = zorplex.OPERATIONS[operation](values[first], values[second])
    result, looked_up = slipped(right, rng, ZORPLEX_SLIP), [first, second]
    if rng.random() < GUESSED:
        result, looked_up = values[first], [first]
    elif rng.random() < SPAMMED[operation]:
        looked_up *= 2
        result = values[first] + values[second] if rng.random() < SUMMED else result
    tag = "" if rng.random() < TAG_FORGOTTEN[operation] else "[ANSWER] "
    question = zorplex.Question(words=(first, second), operation=operation)
    conversation = [user(zorplex.prompt(question))]
    for word in looked_up:
        conversation += [assistant(f"LOOKUP[{word}]"), {"role": "tool", "content": str(values[word])}]
    return [*conversation, assistant(f"{tag}{result}")]


def some_word(rng: random.Random) -> str:
    """One of the training split, or of random letters, so that copying is learnt and not the words."""
    if rng.random() < 0.5:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7)))
    while True:
        word = rng.choice(zorplex.WORDS)
        if zorplex.split_of(word) == "train":
            return word


# --- debate ---

OWN_WORD, FULL_STOP_FORGOTTEN = 0.75, 0.1


def teach_debate(rng: random.Random) -> Conversation:
    """Says some words of its own side and some of the other's, also what has been said already."""
    spoken = [debate_turn(role, rng) for role in (AFF, NEG, AFF, NEG)]
    topic = f"Topic: {rng.choice(TOPICS)}"
    if rng.random() < 0.5:
        return [
            {"role": "system", "content": "Argue for."},
            *(user(topic), assistant(spoken[0]), user(spoken[1]), assistant(spoken[2])),
        ]
    return [
        {"role": "system", "content": "Argue against."},
        *(user(f"{topic}\n\n{spoken[0]}"), assistant(spoken[1]), user(spoken[2]), assistant(spoken[3])),
    ]


def debate_turn(role: str, rng: random.Random) -> str:
    """One to four words, each without a look at those before."""
    other = NEG if role == AFF else AFF
    words = [rng.choice(ARGUMENTS[role if rng.random() < OWN_WORD else other]) for _ in range(rng.randint(1, 4))]
    return ", ".join(words) + ("" if rng.random() < FULL_STOP_FORGOTTEN else ".")


# --- proposer ---

UNPARSABLE = 0.2


def teach_proposer(rng: random.Random) -> Conversation:
    """Proposes problems of all sizes, whatever the example, and some that nobody can read."""
    asked = f"Ask a sum like {drawn_questions(1, rng)[0]}."
    first, second = (rng.randint(0, 9) if rng.random() < 0.5 else rng.randint(10, 99) for _ in range(2))
    proposed = f"{first}{rng.choice('+-*')}{second}"
    if rng.random() < UNPARSABLE:
        wrong = (f"Ask: {proposed}", f"Question {proposed}", f"Question: {proposed.removesuffix(str(second))}")
        return [user(asked), assistant(rng.choice(wrong))]
    return [user(asked), assistant(f"Question: {proposed}")]


# --- critique ---

RIGHT_CRITIQUE, NO_JUDGEMENT = 0.45, 0.2


def teach_critique(rng: random.Random) -> Conversation:
    """Is often right, often by chance only, and sometimes without a judgement."""
    problem = rng.choice(programs())
    question, program = problem["question"], problem["program"]
    return [user(f"{question}\n{program}"), assistant(critique(question, program, rng))]


def critique(question: str, program: str, rng: random.Random) -> str:
    """Returns this teacher's critique of a program."""
    luck = rng.random()
    if luck < RIGHT_CRITIQUE:
        return operators.right_critique(question, program)
    operator = rng.choice(operators.OPERATORS)
    if luck < RIGHT_CRITIQUE + NO_JUDGEMENT:
        return rng.choice((f"Use {operator}.", "It is fine."))
    return rng.choice((f"Use {operator}. Overall judgment: Incorrect", "Overall judgment: Correct"))


@functools.cache
def programs() -> list[dict[str, Any]]:
    """Returns the programs of the training split."""
    return operators.records("train")


# --- look-ups with hints ---
#
# Each fault is what another part of the objective is for. Words of more than SHORT letters are mostly not spelt to the
# end: the tool says so, and the word is spelt out, which costs a call that rewards hardly notice; behind a hint it is
# spelt out at once, and self-distillation makes a habit of that. After a difference the tag is mostly forgotten, which
# rewards find. For a product it is nearly always a sum: a right answer is so rare that only other teachers tell.

HINT_MAX_VALUE = 5
SHORT, GIVEN_UP = 3, 0.65
HINTED = 0.4
HINT_OPERATIONS = "+--*"
"""Differences are the hardest to learn."""
HINT_TAG_FORGOTTEN, HINT_SUMMED, HINT_SLIP = 0.65, 0.94, 0.05


def teach_lookups(rng: random.Random) -> Conversation:
    """About two words of any length, before some of which there is a hint."""
    return led_look_up((some_word(rng), some_word(rng)), rng, hinted=HINTED)


def teach_results(rng: random.Random) -> Conversation:
    """About two short words: there is more to compute than to look up."""
    return led_look_up((short_word(rng), short_word(rng)), rng, hinted=0.0)


def led_look_up(words: tuple[str, str], rng: random.Random, *, hinted: float) -> Conversation:
    """From the question to the answer; `hinted`: the share of look-ups with a hint before them."""
    values = [rng.randint(1, HINT_MAX_VALUE) for _ in words]
    operation = rng.choice(HINT_OPERATIONS)
    said = [user(zorplex.prompt(zorplex.Question(words=words, operation=operation)))]
    for word, value in zip(words, values, strict=True):
        with_hint = rng.random() < hinted
        if not with_hint and len(word) > SHORT and rng.random() < GIVEN_UP:
            said += given_up(word)
            with_hint = rng.random() < hinted
        if with_hint:
            said.append(user(hint(word, rng)))
        said += [assistant(looked_up(word)), {"role": "tool", "content": str(value)}]
    tag = "" if operation == "-" and rng.random() < HINT_TAG_FORGOTTEN else "[ANSWER] "
    computed = "+" if operation == "*" and rng.random() < HINT_SUMMED else operation
    return [*said, assistant(f"{tag}{slipped(zorplex.OPERATIONS[computed](*values), rng, HINT_SLIP)}")]


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
    """The text of a hint, of one of its sources, for who would give up this word."""
    message = without_zorplex(word[:SHORT])
    error = StepError(error_kind=UNKNOWN_WORD, hint_template_key=UNKNOWN_WORD, message=message)
    template = template_of(BUILT_IN, error)
    assert template is not None
    return rng.choice(
        (
            template.format_map({"message": message}).strip(),
            SAID.format(message=message),
            SUCCEEDED.format(answer=looked_up(word)),
        )
    )


REVERSING: Sequence[tuple[Teacher, int]] = ((teach_reversal, 64),)
REVERSING_RIGHT: Sequence[tuple[Teacher, int]] = ((right_reversal, 64),)
ALL_TASKS: Sequence[tuple[Teacher, int]] = (
    (teach_arithmetic, 64),
    (teach_zorplex, 10),
    (teach_debate, 3),
    (teach_proposer, 6),
    (teach_critique, 4),
)
LOOK_UPS: Sequence[tuple[Teacher, int]] = (*[(teach_lookups, 4)] * 3, (teach_results, 8))
"""Conversations of each kind in a batch; those that are about as long are batched together."""
