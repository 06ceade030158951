"""`debate`: two roles argue for and against a topic; one wins and the other loses. Evaluation debates are against the
model before training, because a policy that debates itself always wins half."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from grpo import (
    AlternatingRolesEpisode,
    ContextFull,
    DrawRule,
    Environment,
    EpisodeState,
    Role,
    RolloutContext,
    Rubric,
    client_of,
)

AFF, NEG = "Aff", "Neg"
# fmt: off
TOPICS = (
    "tea", "rain", "cats", "dogs", "trains", "cars", "books", "bikes", "snow", "bread", "music", "chess",
    "cities", "maps", "boats", "phones", "milk", "ice", "games", "shoes", "clocks", "bees", "hats", "songs",
    "parks", "lamps", "ropes", "coins", "kites", "soup",
)
# fmt: on
ARGUMENTS = {
    AFF: ("good", "cheap", "fun", "safe", "fast", "clean", "kind", "warm"),
    NEG: ("bad", "dear", "dull", "risky", "slow", "dirty", "mean", "cold"),
}
"""The words that count as arguments of each role."""
AFF_PROMPT = "You debate. Argue for the topic in a few sentences, and answer what the other side says."
NEG_PROMPT = "You debate. Argue against the topic in a few sentences, and answer what the other side says."
JUDGE_PROMPT = """\
You judge a debate on the topic "{topic}". Aff argues for it, Neg against it.

{transcript}

Who argued better? Judge the arguments, not your own opinion of the topic. End with one line:
Winner: Aff, or Winner: Neg, or Winner: tie"""
_VERDICT = re.compile(r"\bwinner\W{1,10}(aff|neg|tie)\b", re.IGNORECASE)


def points(transcript: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns, for each role, how many different words of its list it said before the other role did.

    Example: ``points([("Aff", "good, fun."), ("Neg", "good, bad, bad.")])`` is ``{"Aff": 2.0, "Neg": 1.0}``
    """
    counts, said = dict.fromkeys(ARGUMENTS, 0.0), set[str]()
    for role, text in transcript:
        for word in re.findall(r"[a-z]+", text.lower()):
            counts[role] += word in ARGUMENTS[role] and word not in said
            said.add(word)
    return counts


def verdict_of(text: str) -> str | None:
    """Returns the last verdict in a judge's answer: `Aff`, `Neg` or `tie`; None if it has none."""
    found = _VERDICT.findall(text)
    return {"aff": AFF, "neg": NEG, "tie": "tie"}[found[-1].lower()] if found else None


class Debate(AlternatingRolesEpisode, Environment):
    """Aff and Neg speak in turns, `num_rounds` times each. Then a judge, which is never trained, names the winner.

    The winner's reward is 1, the loser's -1. Both get 0 if there is a tie or the judge names nobody; the metrics `tie`
    and `no_verdict` count these. Each role's rewards are compared within the group. With the judge `rule`, the metrics
    `points/Aff` and `points/Neg` are the numbers of arguments that counted.

    Each held-out topic is debated twice, with the policy in one role and the model before training in the other. The
    accuracy is the share of debates that the policy wins; a tie counts half. `against_base/Aff` and `against_base/Neg`
    are that share by the policy's role. In training, accuracy is against the `opponent`, and 0.5 without one.
    """

    def __init__(
        self,
        *,
        judge: str | Mapping[str, Any] = "rule",
        num_rounds: int = 2,
        topics: Sequence[str] = TOPICS,
        num_eval: int = 4,
        max_tokens: int = 256,
        aff_prompt: str = AFF_PROMPT,
        neg_prompt: str = NEG_PROMPT,
        opponent: str | None = None,
        every: int = 5,
        keep: int = 16,
        by: DrawRule = "uniform",
        seed: int = 0,
    ) -> None:
        """`judge`: `rule`, by which the side with more `points` wins, or a model, greedily: `base`, `policy`, or
        `{base_url, model, api_key_var}`. `num_eval`: topics kept for evaluation (0: it uses those of training).
        `max_tokens`: of one speech. `opponent`: who has one role, drawn at random, in training: `past` (a version,
        drawn `by` this rule from the newest `keep` multiples of `every`), `base` or `newest` (None: the policy is
        trained in both roles). Raises ValueError for repeated topics, or no more than `num_eval`."""
        prompts = {AFF: aff_prompt, NEG: neg_prompt}
        roles = [Role(id=role, system_prompt=text, max_tokens=max_tokens) for role, text in prompts.items()]
        super().__init__(roles=roles, max_turns=2 * num_rounds)
        if len(set(topics)) != len(topics) or not 0 <= num_eval < len(topics):
            raise ValueError(
                f"{len(topics)} topics and num_eval={num_eval}: expected different topics, more than num_eval"
            )
        self._prompts, self._max_tokens = prompts, max_tokens
        self._opponent, self._by = opponent, by
        if opponent == "past":
            self.add_pool("past", every=every, keep=keep)
        self._judge = None if judge == "rule" else client_of(judge)
        counts = [self.points] if self._judge is None else []
        measures = [self.tie, self.no_verdict, self.against_base, *counts]
        self.rubric = Rubric([self.verdict], accuracy=self.won, metrics=measures)
        shuffled = random.Random(seed).sample(list(topics), len(topics))
        self._topics = {"eval": shuffled[:num_eval] or shuffled, "train": shuffled[num_eval:]}

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        examples = [{"prompt": f"Topic: {topic}", "topic": topic} for topic in self._topics[split]]
        return examples if split == "train" else [{**one, "plays": role} for one in examples for role in ARGUMENTS]

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        if "plays" not in state.example:
            if self._opponent is not None:
                ctx.bind(ctx.rng.choice((AFF, NEG)), await self.opponent(self._opponent, by=self._by))
            await super().rollout(ctx, state)
            return
        state.messages = list(self.initial_messages(state))
        try:
            for turn in range(self.max_turns or 0):
                state.role = (AFF, NEG)[turn % 2]
                text = await self._speech(ctx, state)
                state.messages.append({"role": "assistant", "content": text, "name": state.role})
        except ContextFull:
            if not state.trajectory:
                raise
            state.truncated = True

    async def _speech(self, ctx: RolloutContext, state: EpisodeState) -> str:
        """Returns a speech: of the policy for its own role, of the model before training for the other."""
        shown = self.messages_for(state.role, state)
        if state.role == state.example["plays"]:
            return (await ctx.sample(state.role, shown)).text
        asked = [{"role": "system", "content": self._prompts[state.role]}, *shown]
        return await ctx.ask(asked, temperature=1.0, max_tokens=self._max_tokens)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """Returns the topic and, after the judgement, the verdict and a judging model's answer."""
        return {"topic": state.example["topic"], **state.data}

    # --- the rubric ---

    async def verdict(self, state: EpisodeState) -> dict[str, float]:
        """Returns each role's reward: 1 for the winner, -1 for the loser, else 0."""
        transcript = _transcript(state)
        if self._judge is None:
            counts = points(transcript)
            winner: str | None = "tie" if counts[AFF] == counts[NEG] else max(ARGUMENTS, key=counts.__getitem__)
        else:
            said = "\n\n".join(f"{role}: {text}" for role, text in transcript)
            asked = JUDGE_PROMPT.format(topic=state.example["topic"], transcript=said)
            state.data["judgement"] = await self._judge.complete([{"role": "user", "content": asked}])
            winner = verdict_of(state.data["judgement"])
        state.data["verdict"] = winner
        aff = {AFF: 1.0, NEG: -1.0}.get(winner or "tie", 0.0)
        return {AFF: aff, NEG: -aff}

    def won(self, state: EpisodeState) -> float:
        """Returns 1 if the policy's role has won, 0 if it has lost, 0.5 after a tie or if it plays both roles."""
        bound = [role for role in ARGUMENTS if role not in state.players] if state.players else []
        own, winner = state.example.get("plays", *bound), state.data["verdict"]
        return float(winner == own) if own is not None and winner in (AFF, NEG) else 0.5

    def against_base(self, state: EpisodeState) -> dict[str, float]:
        """Returns `won` by the policy's role, for debates against the model before training; else nothing."""
        own = state.example.get("plays")
        return {} if own is None else {own: self.won(state)}

    def tie(self, state: EpisodeState) -> float:
        """Returns 1 after a tie."""
        return float(state.data["verdict"] == "tie")

    def no_verdict(self, state: EpisodeState) -> float:
        """Returns 1 if the judge's answer names nobody."""
        return float(state.data["verdict"] is None)

    def points(self, state: EpisodeState) -> dict[str, float]:
        """Returns how many arguments of each role counted."""
        return points(_transcript(state))


def _transcript(state: EpisodeState) -> list[tuple[str, str]]:
    """Returns the speeches as (role, text)."""
    said = [message for message in state.messages if message["role"] == "assistant"]
    return [(message["name"], message["content"]) for message in said]
