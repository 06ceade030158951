"""Careless teachers of the tiny model: for each task, conversations as the policy will have them.

Each teacher can do the task and has faults. Where a fault is what he mostly does, greedy decoding has it too; sampling
finds the right way nevertheless, so that a reward brings it out.
"""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.envs import arithmetic
from orchestrator.envs._debating import AFF, ARGUMENTS, NEG, TOPICS, topic_prompt
from orchestrator.envs._proposing import drawn_questions
from orchestrator.envs.critique import operators
from orchestrator.envs.zorplex import task as zorplex

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


# --- arithmetic ---

CARRY_LOST, SIGN_LOST, ARITHMETIC_SLIP = 0.65, 0.65, 0.1


def teach_arithmetic(rng: random.Random) -> Conversation:
    """In large problems he mostly forgets the carry, the borrowed ten and the sign of a result below zero."""
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
    """After a difference he mostly forgets the tag; for a product he mostly looks all up again, and then adds. Now and
    then he guesses after the first value."""
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
    """Some words of his own side and some of the other's, also what has been said already."""
    spoken = [debate_turn(role, rng) for role in (AFF, NEG, AFF, NEG)]
    topic = topic_prompt(rng.choice(TOPICS))
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
    """Problems of all sizes, whatever the example, and some that nobody can read."""
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
    """Often right, often by chance only, and sometimes without a judgement."""
    problem = rng.choice(programs())
    question, program = problem["question"], problem["program"]
    return [user(f"{question}\n{program}"), assistant(critique(question, program, rng))]


def critique(question: str, program: str, rng: random.Random) -> str:
    """What he says of a program."""
    luck = rng.random()
    if luck < RIGHT_CRITIQUE:
        return operators.right_critique(question, program)
    operator = rng.choice(operators.OPERATORS)
    if luck < RIGHT_CRITIQUE + NO_JUDGEMENT:
        return rng.choice((f"Use {operator}.", "It is fine."))
    return rng.choice((f"Use {operator}. Overall judgment: Incorrect", "Overall judgment: Correct"))


@functools.cache
def programs() -> list[dict[str, Any]]:
    """Those of the training split."""
    return operators.records("train")


ROWS_PER_BATCH: Sequence[tuple[Teacher, int]] = (
    (teach_arithmetic, 64),
    (teach_zorplex, 10),
    (teach_debate, 3),
    (teach_proposer, 6),
    (teach_critique, 4),
)
"""Conversations of each kind in a batch."""
