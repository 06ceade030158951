"""`proposer-solver`: one role asks, the other answers, and the best questions are those that half of the answers get
right."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.envs import _proposing as task
from orchestrator.envs.base import Environment
from orchestrator.rollouts.context import RolloutContext
from orchestrator.rollouts.episode import Episode, SingleTurnEpisode
from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState

PROPOSER, SOLVER = "Proposer", "Solver"
PROPOSER_PROMPT = (
    "Write one exercise of whole-number arithmetic with +, -, * and brackets, for instance {question}, that is hard "
    "enough to be got wrong about half of the time. Answer with one line:\nQuestion: {question}"
)
SOLVER_PROMPT = "Compute {question} and end with the number."


def solved(completion: str, example: Mapping[str, Any]) -> float:
    """1 where the last whole number of the answer is what the question comes to."""
    return float(task.answer_of(completion) == task.value_of(example["question"]))


class ProposerSolver(Episode, Environment):
    """The Proposer writes a question; `num_solvers` Solvers answer it, each in an episode of its own below the
    Proposer's. What is right is computed, not asked.

    A Solver gets 1 or 0. The Proposer gets 1 - 2 |pass rate - target|, or `unparsable_reward` for what is no question
    (see `_proposing.question_of`), which no Solver sees. Proposers are compared with the others of their group, Solvers
    with those of the same question.

    In training, questions that earned more than 0 go into the run's store `questions`, with that reward as weight.
    """

    def __init__(
        self,
        *,
        num_solvers: int = 4,
        target: float = 0.5,
        unparsable_reward: float = -1.0,
        seed_questions: Sequence[str] = (),
        from_store: float = 0.0,
        proposer_prompt: str = PROPOSER_PROMPT,
        solver_prompt: str = SOLVER_PROMPT,
        num_train: int = 500,
        num_eval: int = 50,
        seed: int = 0,
    ) -> None:
        """The prompts contain `{question}`: for the Proposer an example, for a Solver what it is to answer. Training
        examples are `seed_questions` and `num_train` drawn ones, those of evaluation `num_eval` other ones.
        `from_store`: the share of training rollouts whose example is drawn by weight from the store instead, in which
        the seed questions have weight 1."""
        _check(num_solvers=num_solvers, target=target, from_store=from_store)
        seeds = _checked_questions(seed_questions)
        for name, prompt in (("proposer_prompt", proposer_prompt), ("solver_prompt", solver_prompt)):
            if "{question}" not in prompt:
                raise ValueError(f"{name} = {prompt!r} has no {{question}} in it, where a question is put")
        self.roles = (Role(id=PROPOSER),)
        self.rubric = Rubric([self.goldilocks], metrics=[self.parsable, self.pass_rate])
        self.episodes = {"solve": SingleTurnEpisode(rubric=Rubric([solved]), roles=[Role(id=SOLVER)])}
        self.stores = {"questions": 10_000}
        self._num_solvers, self._target, self._unparsable_reward = num_solvers, target, unparsable_reward
        self._proposer_prompt, self._solver_prompt = proposer_prompt, solver_prompt
        self._seeds, self._from_store = seeds, from_store
        self._seeded = False
        drawn = [one for one in task.drawn_questions(num_train + num_eval, random.Random(seed)) if one not in seeds]
        self._questions = {"eval": drawn[:num_eval], "train": [*seeds, *drawn[num_eval:]]}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": self._asked(question), "question": question} for question in self._questions[split]]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        prompt = await self._prompt(ctx, state.example)
        proposal = await ctx.sample(PROPOSER, [{"role": "user", "content": prompt}])
        question = task.question_of(proposal.text)
        state.data["question"] = question
        if question is None:
            return
        example = {"prompt": self._solver_prompt.replace("{question}", question), "question": question}
        solvers = await ctx.spawn("solve", [example] * self._num_solvers)
        state.data["pass_rate"] = sum(solver.reward for solver in solvers) / len(solvers)
        if ctx.split == "train" and (weight := self.goldilocks(state)) > 0:
            await ctx.stores["questions"].add({"question": question}, weight=weight)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The question as it was understood (None: it was not), and the Solvers' pass rate."""
        return {"question": state.data["question"], "pass_rate": state.data.get("pass_rate")}

    # --- the rubric ---

    def goldilocks(self, state: EpisodeState) -> float:
        """The Proposer's reward."""
        if state.data["question"] is None:
            return self._unparsable_reward
        return task.goldilocks(state.data["pass_rate"], self._target)

    def parsable(self, state: EpisodeState) -> float:
        """1 where there was a question."""
        return float(state.data["question"] is not None)

    def pass_rate(self, state: EpisodeState) -> float:
        """Of the Solvers; 0 where there was no question, which `parsable` tells apart."""
        return float(state.data.get("pass_rate", 0.0))

    # --- the Proposer's prompt ---

    def _asked(self, question: str) -> str:
        return self._proposer_prompt.replace("{question}", question)

    async def _prompt(self, ctx: RolloutContext, example: Mapping[str, Any]) -> str:
        """The example's, or one about a question from the store."""
        if ctx.split != "train" or ctx.rng.random() >= self._from_store:
            return str(example["prompt"])
        store = ctx.stores["questions"]
        if not self._seeded:
            self._seeded = True
            for question in self._seeds:
                await store.add({"question": question})
        if await store.size() == 0:
            return str(example["prompt"])
        [(_, drawn)] = await store.sample(weighted=True)
        return self._asked(drawn["question"])


def _check(*, num_solvers: int, target: float, from_store: float) -> None:
    if num_solvers < 1:
        raise ValueError(f"num_solvers={num_solvers}: expected at least 1, whose answers rate the question")
    for name, value in (("target", target), ("from_store", from_store)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: expected a share from 0 to 1")


def _checked_questions(questions: Sequence[str]) -> list[str]:
    """Each as `question_of` writes it, without those that are there twice."""
    read = {question: task.question_of(f"Question: {question}") for question in questions}
    if bad := [question for question, expression in read.items() if expression is None]:
        raise ValueError(
            f"seed_questions has {bad[0]!r}: expected whole-number arithmetic such as '3+4' or '(2+5)*3', 2 to 8 "
            "numbers of up to 6 digits"
        )
    return list(dict.fromkeys(expression for expression in read.values() if expression is not None))
