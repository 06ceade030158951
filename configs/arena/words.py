from grpo import Arena, EpisodeRequest, Role, Rubric, SingleTurnEpisode

WORDS = ["garden", "window", "butter", "planet", "silver", "market", "doctor", "friend", "mother", "summer"]


def right(completion, example):
    return float(completion.strip() == example["answer"])


class Words(Arena):
    def setup(self):
        self.add_role(Role(id="policy", temperature=1.0))
        self.add_episode("code", SingleTurnEpisode(rubric=Rubric([right])))
        self.add_store("words", WORDS)

    def get_batch(self):
        words = [one.data for one in self.stores["words"].sample(16, weighted=True)]
        requests = [{"prompt": f"Code: {word}", "answer": word[:-5:-1], "word": word} for word in words]
        return [EpisodeRequest("code", request) for request in requests for _ in range(8)]

    def group_of(self, request):
        return request.artifact["prompt"]

    async def main(self):
        async for batch in self.run(concurrency=128):
            print(f"step {batch.meta['step']}: reward {batch.meta['reward']:.2f}", flush=True)
