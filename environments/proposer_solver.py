"""`proposer-solver`: one role writes questions and the other answers them. A question is best if half of the answers
are right."""

import ast
import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.environments.data.files import check_refused, find_files, parse_rows
from grpo.environments.rewards import Reward, asked_verdict, number

from grpo import Environment, Episode, EpisodeState, Role, RolloutContext, Rubric, SingleTurnEpisode, client_of

PROPOSER, SOLVER = "Proposer", "Solver"
UNPARSABLE_REWARD = -1.0
PROPOSER_PROMPT = (
    "Write one exercise of whole-number arithmetic with +, -, * and brackets, for instance {question}, that is hard "
    "enough to be got wrong about half of the time. Answer with one line:\nQuestion: {question}"
)
SOLVER_PROMPT = "Compute {question} and end with the number."
FREE_PROPOSER_PROMPT = (
    "Write one question that has a short answer, for instance:\n{question}\nIt should be hard enough to be got wrong "
    "about half of the time. Answer with one line that begins with Question:"
)
FREE_SOLVER_PROMPT = "{question}\n\nEnd with a short answer."
_QUESTION = re.compile(r"^[ \t]*question[ \t]*:[ \t]*(?:what is[ \t]+)?([^\n]*)$", re.IGNORECASE | re.MULTILINE)
_OPERATIONS: dict[type[ast.operator], Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_FREE_QUESTION = re.compile(r"^[ \t]*question[ \t]*:[ \t]*(\S[^\n]*)$", re.IGNORECASE | re.MULTILINE)
_MOST_CHARACTERS, _MOST_NUMBERS, _MOST_DIGITS, _MOST_FREE_CHARACTERS = 100, 8, 6, 1000
_NUM_DRAWABLE = 2 * 21 * 21 + 10 * 10


def question_of(text: str) -> str | None:
    """Returns a proposal's last question, without spaces: `Question: 3 + 4` gives `3+4`. None if there is none, or it
    is no whole-number arithmetic (`+`, `-`, `*`, brackets; 2 to 8 numbers of up to 6 digits)."""
    found = _QUESTION.findall(text)
    expression = found[-1].strip().rstrip("?= .").strip() if found else ""
    return None if value_of(expression) is None else expression.replace(" ", "")


def free_question_of(text: str) -> str | None:
    """Returns a proposal's last question in words, one line. None if there is none, or it has over 1000 characters."""
    found = _FREE_QUESTION.findall(text)
    return found[-1].strip() if found and len(found[-1]) <= _MOST_FREE_CHARACTERS else None


def value_of(expression: str) -> int | None:
    """Returns an expression's value, or None for one that `question_of` refuses."""
    numbers = re.findall(r"\d+", expression)
    if (
        len(expression) > _MOST_CHARACTERS
        or set(expression) - set("0123456789+-*() ")
        or not 2 <= len(numbers) <= _MOST_NUMBERS
    ):
        return None
    try:
        return None if max(map(len, numbers)) > _MOST_DIGITS else _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError, ValueError, KeyError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return int(_OPERATIONS[type(op)](_value(left), _value(right)))
    raise ValueError(f"{ast.dump(node)} is no whole-number arithmetic")


def drawn_questions(num: int, rng: random.Random) -> list[str]:
    """Draws `num` different questions of two numbers: up to 20 for `+` and `-`, up to 9 for `*`. Raises ValueError."""
    if num > _NUM_DRAWABLE:
        raise ValueError(f"{num} different example questions were asked for; there are {_NUM_DRAWABLE}")
    questions: dict[str, None] = {}
    while len(questions) < num:
        sign = rng.choice("+-*")
        most = 9 if sign == "*" else 20
        questions[f"{rng.randint(0, most)}{sign}{rng.randint(0, most)}"] = None
    return list(questions)


def solved(completion: str, example: Mapping[str, Any]) -> float:
    """Returns 1 if the answer's last number is the question's value, else 0."""
    return number(completion, {"answer": value_of(example["question"])})


def judged_by(judge: str | Mapping[str, Any]) -> Reward:
    """Returns a reward that is 1 if a model judges the answer right, else 0, also for no verdict."""
    client = client_of(judge)

    async def judged(completion: str, example: Mapping[str, Any]) -> float:
        return float(await asked_verdict(client, example["question"], completion) or 0.0)

    return judged


class ProposerSolver(Episode, Environment):
    """The Proposer writes a question, and `num_solvers` Solvers answer it, each in its own child episode. Questions are
    arithmetic, whose results are computed, or, with a `judge`, in words, whose answers a model judges.

    A Solver's reward is 1 or 0. The Proposer's is 1 - 2 |pass rate - target|, or -1 if it wrote no valid question (see
    `question_of`); then no Solver is asked. Proposers are compared within their group, Solvers with those of the same
    question.

    In training, a question with a reward above 0 goes into the run's store `questions`, with the reward as its weight.
    """

    roles = (Role(id=PROPOSER),)
    stores: Mapping[str, int] = {"questions": 10_000}

    def __init__(
        self,
        *,
        num_solvers: int = 4,
        target: float = 0.5,
        seed_questions: Sequence[str | Mapping[str, Any]] = (),
        questions: str | None = None,
        judge: str | Mapping[str, Any] | None = None,
        from_store: float = 0.0,
        proposer_prompt: str | None = None,
        solver_prompt: str | None = None,
        num_train: int = 500,
        num_eval: int | None = None,
        seed: int = 0,
    ) -> None:
        """`target`: the best pass rate. The prompts contain `{question}`: an example for the Proposer, the task for a
        Solver. Training examples are `seed_questions` (texts or `{question: TEXT}`), the column `question` of the data
        file `questions` (`grpo docs data`), and `num_train` random ones; evaluation has `num_eval` other ones (null:
        50). `judge`: `base`, `policy`, or `{base_url, model, api_key_var}`. With it, questions are in words, none are
        random, and the last `num_eval` are for evaluation (null: a tenth, 1 to 50). `from_store`: share of training
        rollouts with an example from the store, drawn by weight; seed questions have weight 1. Raises ValueError."""
        if num_solvers < 1 or not 0 <= target <= 1 or not 0 <= from_store <= 1:
            raise ValueError(
                f"num_solvers={num_solvers}, target={target}, from_store={from_store}: expected at least 1, and shares "
                "from 0 to 1"
            )
        proposer_prompt = proposer_prompt or (PROPOSER_PROMPT if judge is None else FREE_PROPOSER_PROMPT)
        solver_prompt = solver_prompt or (SOLVER_PROMPT if judge is None else FREE_SOLVER_PROMPT)
        for name, prompt in (("proposer_prompt", proposer_prompt), ("solver_prompt", solver_prompt)):
            if "{question}" not in prompt:
                raise ValueError(f"{name} = {prompt!r} has no {{question}} in it, where a question is put")
        self._read = question_of if judge is None else free_question_of
        given = [_seed_question(one) for one in seed_questions]
        given += [] if questions is None else _questions_of(questions)
        read = [self._read(f"Question: {question}") for question in given]
        if None in read:
            expected = "whole-number arithmetic such as (2+5)*3, or a judge" if judge is None else "one line each"
            raise ValueError(f"the question {given[read.index(None)]!r} is given: expected {expected}")
        solve = Rubric([solved if judge is None else judged_by(judge)])
        self.episodes = {"solve": SingleTurnEpisode(rubric=solve, roles=[Role(id=SOLVER)])}
        self.rubric = Rubric([self.goldilocks], metrics=[self.parsable, self.pass_rate])
        self._num_solvers, self._target = num_solvers, target
        self._proposer_prompt, self._solver_prompt = proposer_prompt, solver_prompt
        self._seeds = [question for question in dict.fromkeys(read) if question is not None]
        self._from_store, self._seeded = from_store, False
        if judge is None:
            num_eval = 50 if num_eval is None else num_eval
            drawn = drawn_questions(num_train + num_eval, random.Random(seed))
            drawn = [one for one in drawn if one not in self._seeds]
            self._questions = {"eval": drawn[:num_eval], "train": [*self._seeds, *drawn[num_eval:]]}
            return
        num_eval = min(50, max(1, len(self._seeds) // 10)) if num_eval is None else num_eval
        if not 0 < num_eval < len(self._seeds):
            raise ValueError(f"{len(self._seeds)} different questions and num_eval={num_eval}: give more questions")
        self._questions = {"eval": self._seeds[-num_eval:], "train": self._seeds[:-num_eval]}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": self._asked(question), "question": question} for question in self._questions[split]]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        prompt = await self._prompt(ctx, state.example)
        proposal = await ctx.sample(PROPOSER, [{"role": "user", "content": prompt}])
        question = state.data["question"] = self._read(proposal.text)
        if question is None:
            return
        example = {"prompt": self._solver_prompt.replace("{question}", question), "question": question}
        solvers = await ctx.spawn("solve", [example] * self._num_solvers)
        state.data["pass_rate"] = sum(solver.reward for solver in solvers) / len(solvers)
        if ctx.split == "train" and (weight := self.goldilocks(state)) > 0:
            await ctx.stores["questions"].add(question, weight=weight)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """Returns the question as it was read (None: it was not valid), and the Solvers' pass rate."""
        return {"question": state.data["question"], "pass_rate": state.data.get("pass_rate")}

    async def _prompt(self, ctx: RolloutContext, example: Mapping[str, Any]) -> str:
        """Returns the example's prompt, or one with a question from the store."""
        if ctx.split != "train" or ctx.rng.random() >= self._from_store:
            return str(example["prompt"])
        store = ctx.stores["questions"]
        if not self._seeded:
            self._seeded = True
            for question in self._seeds:
                await store.add(question)
        drawn = await store.sample_one(weighted=True)
        return str(example["prompt"]) if drawn is None else self._asked(drawn[1])

    def _asked(self, question: str) -> str:
        return self._proposer_prompt.replace("{question}", question)

    # --- the rubric ---

    def goldilocks(self, state: EpisodeState) -> float:
        """Returns the Proposer's reward, -1 to 1; it is 1 if the pass rate is the target."""
        if state.data["question"] is None:
            return UNPARSABLE_REWARD
        return 1.0 - 2.0 * abs(float(state.data["pass_rate"]) - self._target)

    def parsable(self, state: EpisodeState) -> float:
        """Returns 1 if there was a valid question."""
        return float(state.data["question"] is not None)

    def pass_rate(self, state: EpisodeState) -> float:
        """Returns the mean reward of the Solvers; 0 without a valid question (see `parsable`)."""
        return float(state.data.get("pass_rate", 0.0))


def _seed_question(given: Any) -> str:
    """Returns the text of a seed question. Raises ValueError."""
    fields = given if isinstance(given, Mapping) else {"question": given}
    if others := sorted(map(str, fields.keys() - {"question"})):
        raise ValueError(
            f"seed_questions has {given!r:.200}, and {', '.join(others)} would have no effect: who is right is "
            "computed, or the judge's word; give a text, or {question: TEXT}"
        )
    if not isinstance(question := fields.get("question"), str):
        raise ValueError(f"seed_questions has {given!r:.200}; expected a text, or {{question: TEXT}}")
    return question


def _questions_of(path: str) -> list[str]:
    """Returns the column `question` of a data file. Raises UserError."""
    made, refused = parse_rows(find_files(path, subset=None, split="train"), lambda row, place: str(row["question"]))
    check_refused(refused, len(made))
    return made
