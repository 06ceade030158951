"""`debate`: two roles argue for and against a topic, and what one wins the other loses."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.envs import _debating as task
from orchestrator.envs._debating import AFF, NEG
from orchestrator.envs.base import Environment
from orchestrator.rollouts.clients import client_of
from orchestrator.rollouts.context import RolloutContext
from orchestrator.rollouts.episode import AlternatingRolesEpisode
from orchestrator.rollouts.messages import Message
from orchestrator.rollouts.roles import Role
from orchestrator.rollouts.rubric import Rubric
from orchestrator.rollouts.state import EpisodeState

AFF_PROMPT = "You debate. Argue for the topic in a few sentences, and answer what the other side says."
NEG_PROMPT = "You debate. Argue against the topic in a few sentences, and answer what the other side says."


class Debate(AlternatingRolesEpisode, Environment):
    """`num_rounds` times Aff and then Neg speak; then a judge, who is no role and is never trained, names the winner.

    The winner gets `score`, the other its negative; after a tie, and where the judge's answer names nobody, both get
    0, and the metrics `tie` and `no_verdict` count it. Each role's rewards are compared within the group. With the
    judge `rule` the metrics `points/Aff` and `points/Neg` say how many arguments counted.
    """

    def __init__(
        self,
        *,
        judge: str | Mapping[str, Any] = "rule",
        num_rounds: int = 2,
        topics: Sequence[str] = task.TOPICS,
        num_eval: int = 4,
        topic_store: bool = False,
        score: float = 1.0,
        aff_prompt: str = AFF_PROMPT,
        neg_prompt: str = NEG_PROMPT,
        seed: int = 0,
    ) -> None:
        """`judge`: `rule` counts words of two short lists (`_debating.py`) and needs no model; else a model that is
        asked beside the policy, greedily: `base`, `policy`, or `{base_url, model, api_key_var}`. `num_eval` of the
        `topics` are kept for evaluation. With `topic_store`, training draws each debate's topic from the run's store
        `topics`, which begins with the topics for training, instead of having the same one for a group."""
        if num_rounds < 1 or score <= 0:
            raise ValueError(f"num_rounds={num_rounds}, score={score}: expected at least 1 round, and a score above 0")
        if len(set(topics)) != len(topics) or not 0 < num_eval < len(topics):
            raise ValueError(
                f"{len(topics)} topics, {len(set(topics))} of them different, and num_eval={num_eval}: expected "
                "different topics, more than the 1 or more that are kept for evaluation"
            )
        roles = (Role(id=AFF, system_prompt=aff_prompt), Role(id=NEG, system_prompt=neg_prompt))
        super().__init__(roles=roles, max_turns=2 * num_rounds)
        self._judge = None if judge == "rule" else client_of(judge)
        counts = [self.points] if self._judge is None else []
        self.rubric = Rubric([self.verdict], accuracy=self.decided, metrics=[self.tie, self.no_verdict, *counts])
        self._score, self._topic_store = score, topic_store
        shuffled = random.Random(seed).sample(list(topics), len(topics))
        self._topics = {"eval": shuffled[:num_eval], "train": shuffled[num_eval:]}
        self.stores = {"topics": 10_000} if topic_store else {}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": task.topic_prompt(topic), "topic": topic} for topic in self._topics[split]]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        state.data["topic"] = await self._topic(ctx, state.example)
        await super().rollout(ctx, state)

    def initial_messages(self, state: EpisodeState) -> list[Message]:
        return [{"role": "user", "content": task.topic_prompt(state.data["topic"])}]

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The topic, and once the judge has spoken, the verdict, and what a model said."""
        return {key: state.data[key] for key in ("topic", "verdict", "judgement") if key in state.data}

    async def _topic(self, ctx: RolloutContext, example: Mapping[str, Any]) -> str:
        """The example's, or one from the store."""
        if not self._topic_store or ctx.split != "train":
            return str(example["topic"])
        store = ctx.stores["topics"]
        if await store.size() == 0:
            for topic in self._topics["train"]:
                await store.add({"topic": topic})
        [(_, drawn)] = await store.sample(weighted=True)
        return str(drawn["topic"])

    # --- the rubric ---

    async def verdict(self, state: EpisodeState) -> dict[str, float]:
        """Who gets what."""
        transcript = transcript_of(state)
        if self._judge is None:
            verdict: task.Verdict | None = task.verdict_by_rule(transcript)
        else:
            asked = task.judge_prompt(state.data["topic"], transcript)
            state.data["judgement"] = await self._judge.complete([{"role": "user", "content": asked}])
            verdict = task.verdict_of(state.data["judgement"])
        state.data["verdict"] = verdict
        return task.zero_sum(verdict, self._score)

    def decided(self, state: EpisodeState) -> float:
        """1 where somebody has won."""
        return float(state.data["verdict"] in (AFF, NEG))

    def tie(self, state: EpisodeState) -> float:
        """1 where the judge found both alike."""
        return float(state.data["verdict"] == "tie")

    def no_verdict(self, state: EpisodeState) -> float:
        """1 where the judge's answer names nobody."""
        return float(state.data["verdict"] is None)

    def points(self, state: EpisodeState) -> dict[str, float]:
        """Arguments of each side that counted."""
        return {role: float(num) for role, num in task.points(transcript_of(state)).items()}


def transcript_of(state: EpisodeState) -> list[task.Line]:
    """What was said, in order."""
    return [(reply.role, reply.text) for reply in state.trajectory]
