"""Words to write backwards; with `dictionary`, a tool must be asked for the word first."""

import random

import verifiers.v1 as vf

from backwards_env.dictionary import Dictionary, number_of


class BackwardsData(vf.TaskData):
    word: str


class BackwardsTask(vf.Task[BackwardsData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(_answer(trace) == self.data.word[::-1])

    @vf.reward(weight=0.5)
    async def in_place(self, trace: vf.Trace) -> float:
        expected, given = self.data.word[::-1], _answer(trace)
        right = sum(one == other for one, other in zip(given, expected, strict=False))
        return right / max(len(given), len(expected))


class BackwardsConfig(vf.TasksetConfig):
    num_tasks: int = 200
    seed: int = 0
    length: int = 3
    dictionary: bool = False
    broken: bool = False


class BackwardsTaskset(vf.Taskset[BackwardsTask, BackwardsConfig]):
    @classmethod
    def toolsets(cls, config: BackwardsConfig) -> list[vf.Toolset]:
        return [Dictionary(vf.ToolsetConfig())] if config.dictionary else []

    def load(self) -> list[BackwardsTask]:
        if self.config.broken:
            return [_Broken(BackwardsData(prompt="a", word="a"))] * 4
        rng = random.Random(self.config.seed)
        words = ["".join(rng.choices("abcdefgh", k=self.config.length)) for _ in range(self.config.num_tasks)]
        return [BackwardsTask(BackwardsData(prompt=self._prompt(word), word=word)) for word in words]

    def _prompt(self, word: str) -> str:
        if self.config.dictionary:
            return f"Write word number {number_of(word)} backwards."
        return f"Reverse: {word}"


class _Broken(BackwardsTask):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        raise RuntimeError("no such column: colour")


def _answer(trace: vf.Trace) -> str:
    return (trace.branches[-1].messages[-1].content or "").strip() if trace.branches else ""
