"""`debate`: two roles argue for and against a topic, and what one wins the other loses. Held-out debates are against
the model before training: in a game against itself a policy wins as much as it loses, however well it plays."""

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
"""The words that speak for a topic and against it."""
AFF_PROMPT = "You debate. Argue for the topic in a few sentences, and answer what the other side says."
NEG_PROMPT = "You debate. Argue against the topic in a few sentences, and answer what the other side says."
JUDGE_PROMPT = """\
You judge a debate on the topic "{topic}". Aff argues for it, Neg against it.

{transcript}

Who argued better? Judge the arguments, not your own opinion of the topic. End with one line:
Winner: Aff, or Winner: Neg, or Winner: tie"""
_VERDICT = re.compile(r"\bwinner\W{1,10}(aff|neg|tie)\b", re.IGNORECASE)


def points(transcript: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns how many different words of its own list each role named before anybody else did.

    Example: ``points([("Aff", "good, fun."), ("Neg", "good, bad, bad.")])`` is ``{"Aff": 2.0, "Neg": 1.0}``
    """
    counts, said = dict.fromkeys(ARGUMENTS, 0.0), set[str]()
    for role, text in transcript:
        for word in re.findall(r"[a-z]+", text.lower()):
            counts[role] += word in ARGUMENTS[role] and word not in said
            said.add(word)
    return counts


def verdict_of(text: str) -> str | None:
    """Returns `Aff`, `Neg` or `tie` as a judge's answer says, the last where it says so more than once; None where it
    does not say."""
    found = _VERDICT.findall(text)
    return {"aff": AFF, "neg": NEG, "tie": "tie"}[found[-1].lower()] if found else None


class Debate(AlternatingRolesEpisode, Environment):
    """`num_rounds` times Aff and then Neg speak; then a judge, who is no role and is never trained, names the winner.

    The winner gets 1, the other -1; after a tie, and where the judge's answer names nobody, both get
    0, and the metrics `tie` and `no_verdict` count it. Each role's rewards are compared within the group. With the
    judge `rule` the metrics `points/Aff` and `points/Neg` say how many arguments counted.

    Each held-out topic is debated twice, by the policy as the one role and the model before training as the other.
    The accuracy is the share that the policy wins, a tie being half, and `against_base/Aff` and `against_base/Neg` are
    that of each role; in training it is the share against the `opponent`, and a half where there is none.
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
        """`judge`: `rule` names the side with more `points` and needs no model; else a model that is asked beside the
        policy, greedily: `base`, `policy`, or `{base_url, model, api_key_var}`. `num_eval` of the `topics` are kept for
        evaluation (0: it is on those of training). `max_tokens`: of one speech. `opponent`: who has the one side
        in training, which side by chance: `past`, drawn `by` a rule from each version that is a multiple of `every`,
        of which the newest `keep` stay; `base`; `newest` (None: the policy is trained in both)."""
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
        """Returns what the policy says as the role that it plays, and the model before training as the other."""
        shown = self.messages_for(state.role, state)
        if state.role == state.example["plays"]:
            return (await ctx.sample(state.role, shown)).text
        asked = [{"role": "system", "content": self._prompts[state.role]}, *shown]
        return await ctx.ask(asked, temperature=1.0, max_tokens=self._max_tokens)

    def extras(self, state: EpisodeState) -> Mapping[str, Any]:
        """The topic, and once the judge has spoken, the verdict, and what a model said."""
        return {"topic": state.example["topic"], **state.data}

    # --- the rubric ---

    async def verdict(self, state: EpisodeState) -> dict[str, float]:
        """The winner gets 1, the other -1."""
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
        """1 where the role that the policy plays has won, and a half after a tie and where it plays both."""
        bound = [role for role in ARGUMENTS if role not in state.players] if state.players else []
        own, winner = state.example.get("plays", *bound), state.data["verdict"]
        return float(winner == own) if own is not None and winner in (AFF, NEG) else 0.5

    def against_base(self, state: EpisodeState) -> dict[str, float]:
        """1 where the policy has won against the model before training, by the role that it played."""
        own = state.example.get("plays")
        return {} if own is None else {own: self.won(state)}

    def tie(self, state: EpisodeState) -> float:
        """1 where the judge found both alike."""
        return float(state.data["verdict"] == "tie")

    def no_verdict(self, state: EpisodeState) -> float:
        """1 where the judge's answer names nobody."""
        return float(state.data["verdict"] is None)

    def points(self, state: EpisodeState) -> dict[str, float]:
        """Arguments of each side that counted."""
        return points(_transcript(state))


def _transcript(state: EpisodeState) -> list[tuple[str, str]]:
    """Returns the speeches as (role, text)."""
    said = [message for message in state.messages if message["role"] == "assistant"]
    return [(message["name"], message["content"]) for message in said]
