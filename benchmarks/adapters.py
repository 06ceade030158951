"""Adapters cost little and change nothing they should not: decoding speed, and mixed batches against Hugging Face.

    python -m benchmarks.adapters [--check]

Starts the real server on the 29M random Qwen3 three times (without LoRA, with LoRA, with LoRA in float32). Claims:
decoding with an adapter runs at 0.75 or more of the speed of a server without LoRA; log-probabilities of mixed batches
of base, v1 and v2 equal Hugging Face PEFT's to 1e-4 in float32. Speeds are the best of three rounds.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.infer.published import Publisher, logprobs_of, reference
from tests.infer.server_process import Server, running
from tests.tiny_models import make_mid
from transport.run import found_run

NUM_PROMPTS = 8
GROUP = 8
PROMPT_TOKENS = 16
NEW_TOKENS = 128
ROUNDS = 3
RANK = 16
WANTED_RATIO = 0.75
WANTED_GAP = 1e-4


def prompts(num: int, length: int, *, vocab_size: int) -> list[list[int]]:
    """Seeded random prompts [num][length]."""
    source = random.Random(0)
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(num)]


def decode_speed(server: Server, versions: list[int | None], vocab_size: int) -> float:
    """Tokens a second of 64 answers of 128 tokens; the prompts take the versions in turn."""

    def ask(numbered: tuple[int, list[int]]) -> int:
        index, prompt = numbered
        answer = server.answer(
            "/policy/generate",
            version=versions[index % len(versions)],
            prompt_token_ids=prompt,
            n=GROUP,
            max_tokens=NEW_TOKENS,
        )
        return sum(len(choice["token_ids"]) for choice in answer["choices"])

    started_s = time.monotonic()
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        num_tokens = sum(pool.map(ask, enumerate(prompts(NUM_PROMPTS, PROMPT_TOKENS, vocab_size=vocab_size))))
    return num_tokens / (time.monotonic() - started_s)


def best_speeds(server: Server, mixes: dict[str, list[int | None]], vocab_size: int) -> dict[str, float]:
    """The best of ROUNDS for each mix of versions, the mixes taken in turn so that noise hits all alike."""
    best = dict.fromkeys(mixes, 0.0)
    for versions in mixes.values():
        decode_speed(server, versions, vocab_size)
    for _ in range(ROUNDS):
        for name, versions in mixes.items():
            best[name] = max(best[name], decode_speed(server, versions, vocab_size))
    return best


def largest_gap(server: Server, publisher: Publisher, vocab_size: int) -> float:
    """Largest difference in nats to Hugging Face, over sampled and scored tokens of one mixed batch."""
    versions: list[int | None] = [None, 1, 2] * 4
    sequences = prompts(len(versions), PROMPT_TOKENS, vocab_size=vocab_size)

    def ask(pair: tuple[int | None, list[int]]) -> tuple[list[float], list[int], list[float]]:
        version, prompt = pair
        answer = server.answer("/policy/generate", version=version, prompt_token_ids=prompt, max_tokens=24)
        whole = prompt + answer["choices"][0]["token_ids"]
        scored = server.answer("/policy/score", version=version, token_ids=whole)["logprobs"]
        return answer["choices"][0]["logprobs"], whole, scored

    with ThreadPoolExecutor(len(versions)) as pool:
        answers = list(pool.map(ask, zip(versions, sequences, strict=True)))
    gap = 0.0
    for wanted in (None, 1, 2):
        folder = publisher.run.broadcasts / f"step_{wanted or 1:06d}"
        model: Any = reference(publisher.model_dir, folder)
        if wanted is None:
            model = model.unload()
        for version, (sampled, whole, scored) in zip(versions, answers, strict=True):
            if version == wanted:
                truth = logprobs_of(model, whole)
                pairs = [*zip(scored, truth, strict=True), *zip(sampled, truth[PROMPT_TOKENS - 1 :], strict=True)]
                gap = max(gap, *(abs(x - y) for x, y in pairs))
    return gap


def publish_versions(folder: Path, model_dir: Path) -> Publisher:
    """Versions 1 and 2 of a run in `folder`."""
    publisher = Publisher(run=found_run(folder), model_dir=model_dir, rank=RANK, alpha=2 * RANK)
    for version in (1, 2):
        publisher.publish(version, publisher.files(version=version, seed=version, scale=0.02))
    return publisher


def load_versions(server: Server, publisher: Publisher) -> None:
    """Make both live."""
    for version in (1, 2):
        server.answer("/policy/load", run_id=publisher.run.run_id, version=version)


def measure(folder: Path) -> dict[str, float]:
    """All figures: tokens a second, their ratio, and the largest gap in nats."""
    model_dir = folder / "mid"
    make_mid(model_dir)
    vocab_size = int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    publisher = publish_versions(folder / "run", model_dir)
    common = {"model": model_dir, "output_dir": publisher.run.path, "max_model_len": 512}
    with running(log=folder / "plain.log", enable_lora=False, dtype="bfloat16", **common) as server:
        plain = best_speeds(server, {"no LoRA": [None]}, vocab_size)
    mixes: dict[str, list[int | None]] = {"base": [None], "adapter": [1], "mixed": [None, 1, 2, 1]}
    with running(log=folder / "lora.log", dtype="bfloat16", max_lora_rank=RANK, **common) as server:
        load_versions(server, publisher)
        speeds = plain | best_speeds(server, mixes, vocab_size)
    with running(log=folder / "exact.log", dtype="float32", max_lora_rank=RANK, **common) as server:
        load_versions(server, publisher)
        gap = largest_gap(server, publisher, vocab_size)
    figures = {f"{name.replace(' ', '_')}_tok_s": round(speed, 1) for name, speed in speeds.items()}
    return figures | {"ratio": round(speeds["adapter"] / speeds["no LoRA"], 3), "largest_gap_nats": gap}


def main() -> None:
    """Prints a table and, last, one JSON object; with --check, exits with 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 unless both claims hold")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    print(f"{'29M Qwen3, 64 sequences, bfloat16':<40}{'tok/s':>10}{'of no LoRA':>12}")
    for name in ("no_LoRA", "base", "adapter", "mixed"):
        speed = figures[f"{name}_tok_s"]
        print(f"{name.replace('_', ' '):<40}{speed:>10.0f}{speed / figures['no_LoRA_tok_s']:>12.2f}")
    print(f"mixed batches against Hugging Face, float32: {figures['largest_gap_nats']:.2g} nats at most")
    holds = figures["ratio"] >= WANTED_RATIO and figures["largest_gap_nats"] <= WANTED_GAP
    print(json.dumps({"benchmark": "adapters", "holds": holds, **figures}))
    if options.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
