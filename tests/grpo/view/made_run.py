"""A run with metrics, a timeline, a ledger and traces, as large as asked, made without training."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from grpo.orchestrator.ledger import Game, Ledger
from grpo.transport.http import CanaryFigures, LoadReport
from grpo.transport.traces import SCHEMA, VOCABULARY_FILE, make_table, trace_path, write_table

from tests.grpo.run_folder import found

WORDS = ["the", " cat", " sat", " on", "\n", " a", " mat", ".", " 12", " +"]
HOSTILE = "<script>alert(1)</script>\x07\u202eabc <img src=x onerror=alert(2)>"


def make_run(
    folder: Path,
    *,
    steps: int = 6,
    groups: int = 4,
    size: int = 4,
    tokens: int = 40,
    text: str = "so be it",
    more_metrics: int = 0,
) -> Path:
    """`steps` steps of `groups` groups with `size` rollouts of `tokens` tokens each. All steps beyond the second are
    links to its trace. `more_metrics`: in each line of the metrics, as many as a real run has."""
    change = {"step": 2, "key": "code env.0.id my_env.py", "before": "sha256:1", "now": "sha256:2"}
    found(folder, programs={"train": {}, "orch": {"settings": {"max_steps": steps}, "changes": [change]}})
    more = {f"reward/measure/made_{number}/reverse-text": number / 7 for number in range(more_metrics)}
    metrics = [
        _metrics(step) | {name: value * (1 + step % 7) for name, value in more.items()} for step in range(1, steps + 1)
    ]
    evaluated = [
        {"progress/step": float(step), "eval/failed": 0.0, "eval/accuracy": 0.4 + 0.1 * (step > 0)}
        for step in (0, steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*evaluated, *metrics]))
    (folder / "timeline.jsonl").write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in _spans(steps)))
    _ledger(folder, steps, groups, size)
    write_table(pa.table({"id": list(range(len(WORDS))), "text": WORDS}), folder / "traces" / VOCABULARY_FILE)
    for step in range(1, min(3, steps) + 1):
        write_table(trace(step, groups, size, tokens, text), trace_path(folder, step))
    for step in range(4, steps + 1):
        os.link(trace_path(folder, 2), trace_path(folder, step))
    for version in (0, steps):
        write_table(
            trace(version, groups, 2, tokens, text, first_group=10**6), trace_path(folder, version, evaluation=True)
        )
    return folder


def trace(step: int, groups: int, size: int, tokens: int, text: str, *, first_group: int = 0) -> pa.Table:
    """One step's trace; the last token of the first rollout has by far the largest ratio."""
    rng = np.random.default_rng(step)
    rows = [
        _row(rng, step, first_group + group, number, tokens, text, outlier=group == number == 0)
        for group in range(groups)
        for number in range(size)
    ]
    return make_table(rows, SCHEMA)


def _row(
    rng: np.random.Generator, step: int, group: int, number: int, tokens: int, text: str, *, outlier: bool
) -> dict[str, Any]:
    sampled = np.arange(tokens) >= tokens // 4
    logprobs = np.where(sampled, -rng.exponential(0.3, tokens), 0).astype(np.float32)
    difference = np.where(sampled, rng.normal(0, 0.01, tokens), 0).astype(np.float32)
    difference[-1] = 3.0 if outlier else difference[-1]
    entropy = np.where(sampled, rng.exponential(0.2, tokens), 0).astype(np.float32)
    reward = float(rng.integers(0, 2))
    dropped = "repetition" if group % 7 == 6 else None
    conversation = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": f"{text} {number}"}]
    return {
        "step": step,
        "group": group,
        "rollout": f"{group}/{number}",
        "row": 0,
        "env": "reverse-text",
        "example": group % 97,
        "role": "policy",
        "trained": dropped is None,
        "drop_reason": dropped,
        "reward": reward,
        "rewards": json.dumps({"policy": reward}),
        "measures": json.dumps({"correct": reward, "num_turns": 1.0}),
        "accuracy": reward,
        "advantage": reward - 0.5,
        "num_tokens": int(sampled.sum()),
        "max_log_ratio": float(difference[np.abs(difference).argmax()]),
        "mean_entropy": float(entropy.mean()),
        "num_masked": int(outlier),
        "temperature": 1.0,
        "stop_reason": "stop",
        "fields": json.dumps({"answer": f"so be it {number}"}),
        "messages": json.dumps(conversation),
        "token_ids": rng.integers(0, len(WORDS), tokens, np.int32),
        "loss_mask": sampled,
        "versions": np.full(tokens, step - 1, np.int32),
        "logprobs": logprobs,
        "advantages": np.where(sampled, reward - 0.5, 0).astype(np.float32),
        "trainer_logprobs": logprobs + difference,
        "entropy": entropy,
        "masked": np.r_[np.zeros(tokens - 1, np.int8), np.int8(2 * outlier)],
    }


def _metrics(step: int) -> dict[str, float]:
    return {
        "progress/step": float(step),
        "reward/mean": 0.3 + 0.4 * (1 - 0.99**step),
        "reward/accuracy": 0.3 + 0.3 * (1 - 0.99**step),
        "policy/entropy": 0.5 * 0.999**step,
        "policy/ratio_max": 1.0 + (step % 50 == 7),
        "policy/canary_max_abs": 1e-5,
        "policy/canary_base_max_abs": 1e-6,
        "policy/version": float(step),
        "rollout/dropped": float(step == 4),
        "time/step_s": 1.0,
        "rollout/num": 4.0,
    }


def _spans(steps: int) -> Sequence[dict[str, Any]]:
    start = 1_700_000_000_000_000
    spans = []
    for step in range(steps):
        for who, what, begin, seconds in (
            ("grpo-infer http://127.0.0.1:1", "busy", 0.0, 0.6),
            ("grpo-train", "train", 0.5, 0.4),
        ):
            times = {"ts": start + int(1e6 * (step + begin)), "dur": int(1e6 * seconds)}
            spans.append({"name": what, "ph": "X", **times, "pid": 1, "tid": 1, "args": {"who": who, "step": step + 1}})
    return spans


def _ledger(folder: Path, steps: int, groups: int, size: int) -> None:
    ledger = Ledger(folder / "ledger.sqlite")
    for step in range(1, min(steps, 20) + 1):
        ids = []
        for group in range(groups):
            number = (step - 1) * groups + group
            ledger.issued(number, num=size, env="reverse-text", example=group % 97, version=step - 1)
            for place in range(size):
                ledger.scored(f"{number}/{place}", reward=0.5, num_tokens=3)
                ids.append(f"{number}/{place}")
                other = "base" if step == 1 else f"v{(number + place) % step}"
                sides = {"player": f"v{step - 1}", "digest": "xxh3_128:a", "other": other, "other_digest": "xxh3_128:b"}
                game = {"group_id": number, "number": place, "place": "", "role": "first", "other_role": "second"}
                ledger.played([Game(env="reverse-text", score=(0.0, 0.5, 1.0, 1.0)[place % 4], **game, **sides)])
        ledger.shipping(ids, step, state={}, metrics={})()
        ledger.shipped(step)
        ledger.trained(step)
        for server in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
            figures = {"max_abs": 1e-5 * step, "mean_abs": 1e-6, "base_max_abs": 4e-6, "base_mean_abs": 2e-6}
            canary, times = CanaryFigures(**figures, tolerance=1e-3), {"load_s": 0.0, "canary_s": 0.0}
            ledger.proved(server, LoadReport(version=step, name="p", snapshot="s", canary=canary, **times))
    pair = {"rollout_id": "0/1", "chosen": "better", "rejected": "worse", "source": "teachers", "messages": []}
    ledger.pair_made(0, json.dumps(pair))
    ledger.changes()()
    ledger.close()
