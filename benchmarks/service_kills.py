"""`kill -9` at random moments of a loop over the service, and the bytes that it comes to.

    python -m benchmarks.service_kills [--kills 36] [--seed 0] [--check]

The loop is a person's script against the stock tinker client: a supervised stage on sums, then importance sampling on
them, with a checkpoint every few steps from which the same command goes on. There are five kinds of process: the script
(`client`), `grpo service` (`service`), the other one of two that train (`trainer`), its grpo-infer (`server`) and that
one's engine (`engine`). Half of the service's kills wait until it computes a gradient. After each kill the same command
is given again. A round is one loop with four kills; all rounds are on one service, each with a model of its own.

Claims of each round: adapter and optimizer's state at the end have the bytes of a loop that nobody kills; each step's
loss is the same whenever it was computed; the optimizer has counted each step once; nothing of a killed service
goes on.
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from grpo.transport.ports import free_port

from benchmarks.report import parser, report
from tests.service.running import Running
from tests.support import until

MODEL = Path(__file__).parents[1] / "configs/tiny/model"
KINDS = ("client", "service", "trainer", "server", "engine")
SEED = 5
SAVE_EVERY = 3
A_ROUND = 4
STEPS = {"sft_steps": 4, "rl_steps": 6}
PROMPTS, SAMPLES = 2, 4
WAIT_S = 600.0


# --- the script that is killed ---


def loop(folder: Path, model: str, sft_steps: int, rl_steps: int) -> None:
    """Trains from the last checkpoint in `folder` on, as tinker-cookbook's loops do, and writes losses and
    checkpoints there. Samples have seeds, and are asked for one by one: what is sampled beside a sequence may change
    the last bits of its log-probabilities."""
    import tinker

    service = tinker.ServiceClient()
    saved = _lines(folder / "checkpoints.jsonl")
    if saved:
        training = _done(service.create_training_client_from_state_with_optimizer(saved[-1]["path"]))
    else:
        training = _done(service.create_lora_training_client(base_model=model, rank=8, seed=1))
    tokenizer = training.get_tokenizer()
    for step in range(saved[-1]["step"] if saved else 0, sft_steps + rl_steps):
        draw = random.Random(step)
        if step < sft_steps:
            data, loss_fn = [_taught(tokenizer, draw) for _ in range(6)], "cross_entropy"
        else:
            data, loss_fn = _sampled(training, tokenizer, draw), "importance_sampling"
        halves = [training.forward_backward(half, loss_fn) for half in (data[:2], data[2:])]
        ended = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
        losses = [_done(half).metrics["loss:sum"] for half in halves]
        _add(folder / "losses.jsonl", {"step": step, "losses": losses, "norm": _done(ended).metrics["grad_norm"]})
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == sft_steps + rl_steps:
            path = _done(training.save_state(f"{step + 1:06d}")).path
            _add(folder / "checkpoints.jsonl", {"step": step + 1, "path": path})


def _question(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(0, 49), draw.randint(0, 49)
    return f"<|im_start|>user\nCompute: {first}+{second}<|im_end|>\n<|im_start|>assistant\n", str(first + second)


def _taught(tokenizer: Any, draw: random.Random) -> Any:
    prompt, answer = _question(draw)
    return _datum(tokenizer.encode(prompt), tokenizer.encode(f"{answer}<|im_end|>"))


def _datum(prompt: list[int], answer: list[int], **of_answer: float | list[float]) -> Any:
    """Tokens of the answer have the values `of_answer`, those of the prompt zeros."""
    import numpy as np
    from tinker import types

    ids, inputs = prompt + answer, dict[str, Any]()
    for name, values in (of_answer or {"weights": 1.0}).items():
        whole = np.zeros(len(ids) - 1, np.float32)
        whole[len(prompt) - 1 :] = values
        inputs[name] = whole
    inputs["target_tokens"] = np.array(ids[1:], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _sampled(training: Any, tokenizer: Any, draw: random.Random) -> list[Any]:
    """Rewards are shares of right characters, so that most groups have some spread."""
    from tinker import types

    sampler, data = _done(training.save_weights_and_get_sampling_client()), []
    for _ in range(PROMPTS):
        text, answer = _question(draw)
        prompt, sequences = tokenizer.encode(text), []
        for _ in range(SAMPLES):
            params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=draw.randrange(2**31))
            asked = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)
            sequences += _done(asked).sequences
        texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in sequences]
        rewards = [sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer) for text in texts]
        mean = sum(rewards) / len(rewards)
        data += [
            _datum(prompt, list(one.tokens), logprobs=list(one.logprobs), advantages=reward - mean)
            for one, reward in zip(sequences, rewards, strict=True)
        ]
    return data


def _done(given: Any) -> Any:
    return given.result() if hasattr(given, "result") else given


def _add(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# --- what kills it ---


class Loop:
    """A script and the service that it talks to, both started again by the same commands."""

    def __init__(self, folder: Path, service: Running, sft_steps: int, rl_steps: int) -> None:
        folder.mkdir()
        self.folder, self.service, self.steps = folder, service, sft_steps + rl_steps
        words = [str(folder), str(MODEL), str(sft_steps), str(rl_steps)]
        self._command = [sys.executable, "-m", "benchmarks.service_kills", "--loop", *words]
        self.client = self._client()

    def _client(self) -> "subprocess.Popen[bytes]":
        about = self.service.about
        where = {"TINKER_BASE_URL": about["base_url"], "TINKER_API_KEY": about["api_key"]}
        with (self.folder / "client.log").open("ab") as output:
            return subprocess.Popen(self._command, env=os.environ | where, stdout=output, stderr=output)

    def reached(self) -> int:
        """The furthest step that the script has seen the end of."""
        return max((line["step"] + 1 for line in _lines(self.folder / "losses.jsonl")), default=0)

    def is_at(self, step: int) -> bool:
        """Whether the script has come to this step, or has ended."""
        return self.ended() or self.reached() >= step

    def ended(self) -> bool:
        """Whether the script has come to its end; fails where it has ended otherwise."""
        if self.client.poll() is None:
            return False
        assert self.client.returncode == 0, (self.folder / "client.log").read_text()[-3000:]
        return True

    def kill(self, kind: str, *, computing: bool = False) -> bool:
        """Kills the process of this kind, and gives the commands again that have ended; returns False where the script
        has come to its end before. With `computing`, waits until the service has a gradient to compute."""
        if computing:
            until(lambda: self.ended() or self._computes(), limit_s=WAIT_S, log=self.log)
        if self.ended():
            return False
        if kind == "client":
            self.client.kill()
            self.client.wait()
            self.client = self._client()
            return True
        processes = self._processes()
        processes[kind].kill()
        # The service ends with its server and its trainer; both end with the service.
        _, left = psutil.wait_procs(processes.values(), timeout=WAIT_S)
        assert not left, left
        self.service.end(signal.SIGKILL)
        self.service.start()
        return True

    def _computes(self) -> bool:
        """Whether a gradient is asked for and not there yet."""
        with sqlite3.connect(f"file:{self.service.folder / 'commands.sqlite'}?mode=ro", uri=True, timeout=30) as db:
            query = "SELECT count(*) FROM commands WHERE kind='forward_backward' AND state='waiting'"
            return bool(db.execute(query).fetchone()[0])

    def _processes(self) -> dict[str, psutil.Process]:
        """The processes of the service, which serves."""
        service = psutil.Process(self.service.pid)
        (server,) = [one for one in service.children() if "grpo.infer.cli" in one.cmdline()]
        (engine,) = [one for one in server.children() if "resource_tracker" not in " ".join(one.cmdline())]
        (trainer,) = [one for one in service.children() if "grpo.service.ranks" in one.cmdline()]
        return {"service": service, "trainer": trainer, "server": server, "engine": engine}

    def log(self) -> str:
        """The ends of both logs."""
        return (
            self.service.folder.with_suffix(".log").read_text()[-3000:]
            + (self.folder / "client.log").read_text()[-3000:]
        )

    def result(self) -> dict[str, Any]:
        """What the script has come to."""
        until(self.ended, limit_s=WAIT_S, log=self.log)
        last = _lines(self.folder / "checkpoints.jsonl")[-1]
        assert last["step"] == self.steps
        saved = self.service.folder / "checkpoints" / last["path"].removeprefix("tinker://")
        losses: dict[int, set[str]] = {}
        for line in _lines(self.folder / "losses.jsonl"):
            losses.setdefault(line["step"], set()).add(json.dumps([line["losses"], line["norm"]]))
        return {
            "adapter": (saved / "adapter_model.safetensors").read_bytes(),
            "optimizer": (saved / "optimizer.safetensors").read_bytes(),
            "optimizer's steps": json.loads((saved / "state.json").read_text())["num_steps"],
            "losses": {step: sorted(found) for step, found in losses.items()},
        }

    def close(self) -> None:
        """Ends the script."""
        self.client.kill()
        self.client.wait()


def run(loop: Loop, kills: list[str], draw: random.Random, told: Callable[[str], None]) -> tuple[Any, list[str]]:
    """Returns what a loop with these kills has come to, and which were done before its end."""
    killed: list[str] = []
    try:
        for number, kind in enumerate(kills):
            # The kills are spread over the loop.
            due = loop.steps * number // len(kills) + draw.randrange(2)
            until(partial(loop.is_at, due), limit_s=WAIT_S, log=loop.log)
            time.sleep(draw.uniform(0.0, 0.5))
            if not loop.kill(kind, computing=kind == "service" and draw.random() < 0.5):
                break
            killed.append(kind)
            told(f"{loop.folder.name}: {kind} killed after step {loop.reached()}")
        return loop.result(), killed
    finally:
        loop.close()


@contextmanager
def served(folder: Path) -> Iterator[Running]:
    """A service with the embedded model, two processes of which train, on a port that it keeps."""
    service = Running(folder, MODEL, "--port", str(free_port()), "--gpus", "2")
    service.start()
    try:
        yield service
    finally:
        if service.is_up():
            service.end()


def differences(plain: dict[str, Any], killed: dict[str, Any]) -> list[str]:
    """Returns the names of what differs."""
    return [name for name in plain if plain[name] != killed[name]]


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--kills", type=int, default=36)
    command.add_argument("--seed", type=int, default=SEED)
    command.add_argument("--loop", nargs=4, metavar=("FOLDER", "MODEL", "SFT", "RL"), help="the script that is killed")
    given = command.parse_args()
    if given.loop:
        folder, model, sft_steps, rl_steps = given.loop
        loop(Path(folder), model, int(sft_steps), int(rl_steps))
        return 0
    draw, since_s = random.Random(given.seed), time.monotonic()
    kills = [KINDS[number % len(KINDS)] for number in range(given.kills)]
    draw.shuffle(kills)
    killed, different, counted, num_rounds = Counter[str](), list[str](), set[int](), 0
    with tempfile.TemporaryDirectory() as parent, served(Path(parent, "service")) as service:
        plain, _ = run(Loop(Path(parent, "plain"), service, **STEPS), [], draw, print)
        print(f"without kills: {time.monotonic() - since_s:.0f} s", flush=True)
        while kills and num_rounds < given.kills:
            num_rounds += 1
            attempt = Loop(Path(parent, f"round {num_rounds}"), service, **STEPS)
            found, done = run(attempt, kills[:A_ROUND], draw, partial(print, flush=True))
            # Kills that the loop's end was before are the next round's.
            kills = kills[len(done) :]
            killed.update(done)
            counted.add(found["optimizer's steps"])
            new = [f"{attempt.folder.name}: {name}" for name in differences(plain, found)]
            different += new
            print(f"{attempt.folder.name}: {', '.join(new) or 'the same bytes'}", flush=True)
    figures = {f"kills of {kind}": float(killed[kind]) for kind in KINDS}
    figures |= {"kills": float(killed.total()), "rounds": float(num_rounds), "differences": float(len(different))}
    figures |= {"steps counted otherwise": float(len(counted - {sum(STEPS.values())}))}
    figures |= {"seconds": time.monotonic() - since_s}
    targets = {"kills": (">=", float(given.kills)), "differences": ("<=", 0.0), "steps counted otherwise": ("<=", 0.0)}
    return report("service_kills", figures, targets, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())
