"""Silent faults of real runs, and what notices each of them.

    python -m benchmarks.faults [--only NAME ...] [--results FILE] [--check] [--list] [--table]
    python -m benchmarks.faults --healthy N [--check]

Each fault is a small patch to a running program, behind a seam that only this benchmark opens: benchmarks/seam. A run
with one is a whole `grpo` run of the embedded model with real vLLM, 8 to 30 steps, on one server or two and one rank or
two, at the product's own settings. Then it is seen what noticed the fault (an exit code other than 0 or a warning, by
the part that says it, then by `grpo prove`), in which step, and what it said.

Claims (`--check`): a fault that touches every rollout is noticed within 2 steps from where it acts; one that touches a
share p of them within the steps that the share of proofs promises with 99 % (docs/proofs.md). A run that fails for
another reason has noticed nothing.

With `--healthy` N steps are made of runs without any fault, short ones of many kinds and a long one, of which none may
be warned of.

With `--results` each fault's result is kept in a file, and a fault that is in it is not run again. `--table` writes
docs/faults.md from benchmarks/faults.json.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo.orchestrator.ledger_reader import open_ledger

from benchmarks import faults_trl
from benchmarks.kills import killed_run
from benchmarks.report import parser, report
from benchmarks.seam.silent_faults import FAULTS, MARKS, Fault, by_name
from tests.e2e.runs import PROGRAMS, ROOT, Run
from tests.e2e.scripted_teachers import scripted_teachers
from tests.support import options

SEAM = ROOT / "benchmarks/seam"
RESULTS = ROOT / "benchmarks/faults.json"
"""The results that the documentation shows."""
PAGE = ROOT / "docs/faults.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
LIMIT_S = 300.0
"""How long a run may take."""
MAX_SAID = 240
"""Characters of a sentence that are kept."""
SMALL: dict[str, object] = {
    "max_steps": 8,
    "restarts": 0,
    "orch.batch_size": 64,
    "orch.rollouts_per_example": 8,
    "orch.eval.num_examples": 8,
}
ADAPTERS = '["solver", "proposer"]'
PROMPTS = {"proposer_prompt": "Ask a sum like {question}.", "solver_prompt": "Compute: {question}"}
ROLES = {
    "id": "proposer-solver",
    "name": "play",
    "args": {"num_solvers": 4, **PROMPTS},
    "adapters": {"Proposer": "proposer"},
}
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("configs/quickstart", {}),
    "two servers": ("configs/quickstart", {"infer_replicas": 2}),
    "two ranks": ("configs/quickstart", {"device": "cpu", "train.gpus": 2}),
    "in flight": ("configs/quickstart", {"orch.inflight_weight_updates": "true", "max_steps": 12}),
    "noise": (
        "configs/quickstart",
        {
            "train.noise_scheduler.enabled": "true",
            "train.noise_scheduler.num_stages": 3,
            "train.noise_scheduler.sigma_start": 0.1,
            "train.noise_scheduler.sigma_end": 0.01,
            "max_steps": 9,
        },
    ),
    "two adapters": (
        "configs/proposer_solver",
        {
            "train.lora_adapters": ADAPTERS,
            "orch.model.lora_adapters": ADAPTERS,
            "orch.env": json.dumps([ROLES]),
            "orch.batch_size": 32,
        },
    ),
    "resumed": ("configs/quickstart", {"train.ckpt.interval": 2}),
}
"""Presets and settings of the runs. One that is resumed makes its first steps without the fault."""
FIRST_STEPS = 4
"""Of a run that is resumed."""
PARTS = (
    (
        "double check",
        r"with the same seed|gave to another one|equal another one of their group|the same answer|asked again in epoch",
    ),
    ("loss check", r"policy/slope"),
    ("spot proof", r"spot proof|sampled by .* differ"),
    ("witness", r"witness|gradients of step \d+ are not"),
    ("resume check", r"the optimizer counts \d+ steps"),
    ("version check", r"changed nothing|before with another adapter"),
    ("gradient check", r"gradient .*(?:exactly zero|not finite|of 0)|without a gradient"),
    ("canary", r"canary|is not applied|without any adapter"),
    ("mismatch", r"mismatch"),
    ("digest", r"corrupt|sha-?256|digest"),
    ("batch check", r"BatchError|micro-batch \d+ (?:has|is|brings|lacks)"),
    ("codec", r"CorruptError|ValidationError"),
)
"""Which part of the product says what, by its words; the first that fits."""
UNNAMED = "exit code"
"""A run has failed, and no part has said that this fault was the reason: it is not noticed."""
SHARE_OF_PROOFS_PER_STEP = 2
"""Samples that are proved in each step, at least."""
CONFIDENCE = 0.99


def steps_promised(share: float) -> int:
    """Returns within how many steps a fault that touches this share of the rollouts is noticed with 99 %, by spot
    proofs alone: the smallest s with (1 - share)^(proofs of s steps) <= 0.01."""
    if share == 1.0:
        return 2
    return math.ceil(math.log(1 - CONFIDENCE) / (SHARE_OF_PROOFS_PER_STEP * math.log1p(-share)))


def settings_of(fault: Fault) -> tuple[str, dict[str, object]]:
    """Returns the preset and the settings of a fault's run, long enough for what is promised."""
    preset, settings = RUNS[fault.run]
    settings = SMALL | settings | fault.settings
    if fault.share < 1.0:
        settings["max_steps"] = max(int(str(settings["max_steps"])), steps_promised(fault.share) + 6)
    return preset, settings


def run(fault: Fault, folder: Path) -> dict[str, Any]:
    """Makes the fault's run in `folder`, and returns what became of it."""
    preset, settings = settings_of(fault)
    marks = folder / "marks"
    shutil.rmtree(folder, ignore_errors=True)
    marks.mkdir(parents=True)
    variables = {"PYTHONPATH": str(SEAM), "SILENT_FAULT": fault.name, MARKS: str(marks)}
    target, since_s = folder / "run", time.monotonic()
    if fault.run == "resumed":
        code, said = grpo([preset, *words(target, settings | {"max_steps": FIRST_STEPS})], {})
        assert code == 0, said
    code, said = grpo([preset, *words(target, settings)], variables)
    found = noticed(target, code, said)
    first = first_step(fault, target)
    result = {"exit": code, "first": first, "seconds": time.monotonic() - since_s} | found
    if found["by"] and found["step"] is not None:
        result["steps"] = max(0, found["step"] - first + 1) if first else 0
    return result


def words(folder: Path, settings: Mapping[str, object]) -> list[str]:
    return ["--output_dir", str(folder), *options(settings)]


def grpo(arguments: Sequence[str], variables: Mapping[str, str], *, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Runs the command to its end or for so long, and returns its exit code and what it printed."""
    command = [str(PROGRAMS / "grpo"), *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
            said += f"\nit was ended after {limit_s:g} s"
    return process.returncode, said


def noticed(folder: Path, code: int, said: str) -> dict[str, Any]:
    """Returns which part noticed the fault (None: none), in which step, and its sentence."""
    done = max((int(line["progress/step"]) for line in Run(folder).steps), default=0)
    lines = [*alarms(folder), *(reversed(said.splitlines()) if code else ())]
    for part, pattern in PARTS:
        if line := next((line for line in lines if re.search(pattern, line)), None):
            return {"by": part, "step": step_in(line, done), "said": sentence(line)}
    if code:
        return {"by": UNNAMED, "step": done + 1, "said": said[-2000:]}
    exit_code, page = grpo(["prove", str(folder)], {})
    if exit_code == 1:
        line = page.partition("BROKEN:")[2].strip().partition("\n")[0].removeprefix("- ")
        return {"by": "grpo prove", "step": done, "said": sentence(line)}
    return {"by": None, "step": None, "said": ""}


def alarms(folder: Path) -> Iterator[str]:
    """Yields the warnings and errors in the programs' logs, the trainer's first."""
    for log in sorted((folder / "logs").glob("*.log"), key=lambda path: ("train" not in path.name, path.name)):
        yield from (
            line
            for line in log.read_text().splitlines()
            if re.search(r" (WARNING|ERROR|CRITICAL) grpo\.|^\S*Error: ", line)
        )


def step_in(line: str, done: int) -> int:
    """Returns the step that a line names, or the one after the last that was done."""
    found = re.search(r"\b(?:step|version|batch) (\d+)", line)
    return int(found[1]) if found else done + 1


def sentence(line: str) -> str:
    """Returns a line without its time and its logger's name, and no more than a sentence of it."""
    plain = re.sub(r"^.*? (?:WARNING|ERROR|CRITICAL) \S+: |^.*?\berror: ", "", line.strip())
    plain = re.sub(r"^grpo-\w+ ended with exit code \d+: ", "", plain)
    plain = re.sub(r"/\S*?/run/", "RUN/", re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", plain))
    first = re.split(r"\. (?=[A-Z])|; see |; so are ", plain)[0]
    return first if len(first) < MAX_SAID else first[: MAX_SAID - 3] + "..."


def first_step(fault: Fault, folder: Path) -> int:
    """Returns the first step that the fault could act in."""
    kind, number = fault.acts.split()
    if kind == "step":
        return int(number)
    with open_ledger(folder) as ledger:
        for step in sorted(ledger.steps()):
            if max(row.version for row in ledger.rollouts(step=step)) >= int(number):
                return step
    return 0


# --- healthy runs ---

LATER = """
import asyncio
from grpo import Rubric
from grpo.environments.reverse_text import ReverseText, exact

async def verdict(completion, example, ctx):
    async with ctx.delayed(timeout_s=60):
        await asyncio.sleep(0.3)
        return exact(completion, example)

class Later(ReverseText):
    rubric = Rubric([verdict])
"""
HEALTHY: dict[str, tuple[str, dict[str, object]]] = {
    "quickstart": ("configs/quickstart", {}),
    "lag 0": ("configs/quickstart", {"orch.max_async_level": 0, "orch.max_off_policy_steps": 0}),
    "lag 4": ("configs/quickstart", {"orch.max_async_level": 4}),
    "temperature 0.7": ("configs/quickstart", {"orch.sampling.temperature": 0.7}),
    "several micro-batches, over ZeroMQ": (
        "configs/quickstart",
        {"sequence_len": 1024, "rollout_transport.type": "zmq"},
    ),
    "bfloat16": ("configs/quickstart", {"train.recipe": "bf16", "infer.dtype": "bfloat16"}),
    "bfloat16 server": ("configs/quickstart", {"infer.dtype": "bfloat16"}),
    "all weights": (
        "configs/quickstart",
        {
            "train.lora": "false",
            "train.learning_rate": "1e-4",
            "weight_broadcast.format": "full",
            "infer.enable_lora": "false",
            "infer.max_lora_rank": "null",
        },
    ),
    "two servers, in flight": (
        "configs/quickstart",
        {"infer_replicas": 2, "orch.inflight_weight_updates": "true"},
    ),
    "delayed rewards": ("configs/quickstart", {"orch.env": '[{"id": "LATER/later.py:Later"}]'}),
    **{
        name: (f"configs/{name}", dict.fromkeys(SMALL.keys() - {"max_steps", "restarts"}))
        for name in ("arena", "kuhn", "leduc", "tictactoe", "nim")
    },
    **{name: RUNS[name] for name in ("two ranks", "in flight", "noise", "two adapters", "resumed")},
    **{
        name: (f"configs/{name}", {})
        for name in (
            *("all_channels", "arithmetic", "critique", "debate", "distillation"),
            *("hints", "preferences", "proposer_solver", "zorplex"),
        )
    },
}
"""Presets and settings of healthy runs: all presets that run on a CPU, and what else may make a proof fail. A setting
of `SMALL` that is None here is the preset's own."""
SHORT_STEPS = 30
TINY: dict[str, object] = {"orch.batch_size": 16, "orch.rollouts_per_example": 8, "train.learning_rate": "1e-4"}
"""The long run's steps."""


def healthy(num_steps: int, parent: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Makes a short run of each kind, one with kills, and a long one with all the steps that are left. Yields its name,
    its steps, and what was noticed."""
    left = num_steps
    for name, (preset, settings) in HEALTHY.items():
        folder = parent / name.replace(" ", "-")
        folder.mkdir()
        (folder / "later.py").write_text(LATER)
        settings = SMALL | settings | {"max_steps": SHORT_STEPS}
        settings = {
            key: str(value).replace("LATER", str(folder)) for key, value in settings.items() if value is not None
        }
        arguments, code = [preset, *words(folder / "run", settings)], 0
        with ExitStack() as opened:
            if preset.removeprefix("configs/") in ("preferences", "all_channels"):
                arguments += opened.enter_context(scripted_teachers(preset.removeprefix("configs/")))
            if name == "resumed":
                half = settings | {"max_steps": SHORT_STEPS // 2}
                code, said = grpo([preset, *words(folder / "run", half)], {})
            if not code:
                code, said = grpo(arguments, {}, limit_s=4 * LIMIT_S)
        found = noticed(folder / "run", code, said)
        yield name, (done := steps_done(folder / "run")), found
        left -= done
    folder, settings = parent / "killed", {"max_steps": SHORT_STEPS}
    try:
        targets = [(name, 1) for name in ("infer", "train", "orch", "engine", "launcher")]
        killed = list(killed_run(folder, settings, targets, random.Random(0), within_s=4.0))
        found = noticed(folder, 0, "")
    except AssertionError as error:
        killed, found = [], {"by": UNNAMED, "said": str(error)[-2000:]}
    yield f"kill -9 of {', '.join(killed)}", (done := steps_done(folder)), found
    if (left := left - done) > 0:
        arguments = ["configs/quickstart", *words(parent / "long", SMALL | TINY | {"max_steps": left})]
        code, said = grpo(arguments, {}, limit_s=10.0 * left)
        yield "long", steps_done(parent / "long"), noticed(parent / "long", code, said)


def steps_done(folder: Path) -> int:
    """Returns how many steps a run has made."""
    return len({int(line["progress/step"]) for line in Run(folder).steps})


def check_healthy(given: argparse.Namespace) -> int:
    """Prints the healthy runs as they end. Returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="healthy-") as parent:
        figures = {"healthy steps": 0.0, "false alarms": 0.0}
        for name, done, found in healthy(given.healthy, given.keep or Path(parent)):
            figures["healthy steps"] += done
            figures["false alarms"] += found["by"] is not None
            print(f"{name:40} {done:6} steps  {found['by'] or ''} {found['said'][:2000]}", flush=True)
        targets = {"healthy steps": (">=", float(given.healthy)), "false alarms": ("<=", 0.0)}
        return report("healthy runs", figures, targets, check=given.check)


# --- the page ---


METRIC, WARNING, IMPOSSIBLE = "a metric", "a warning at the start", "-"
TRL = {
    **dict.fromkeys(
        (
            *(
                "base-for-all",
                "base-for-a-tenth",
                "base-from-version-12",
                "base-when-decoding",
                "version-before",
                "slot-taken-over",
            ),
            *("temperature-ignored", "top-p-applied", "logprobs-shifted", "answer-of-another", "zero-modules"),
            *("q-and-k-swapped", "scale-lost", "scale-doubled", "scale-of-rslora", "rank-dropped", "another-base"),
            *("last-layer-missing", "bf16-for-fp32", "mask-shifted", "logprobs-bf16", "prompt-retokenised"),
            *("version-lags", "published-before-step", "published-after-next", "file-of-version-before"),
            *("trainer-ignores-temperature", "positions-run-on", "version-bit"),
        ),
        METRIC,
    ),
    **dict.fromkeys(
        (
            *("base-on-one-server", "base-on-one-route", "another-adapter", "noise-not-sampled", "batch-before"),
            *("noise-of-another-stage", "versions-joined", "adapter-label-lost", "temperature-label-lost", "batch-bit"),
            "first-ranks-batch",
        ),
        IMPOSSIBLE,
    ),
    "logprobs-raw": WARNING,
}
"""What TRL 1.16 has for a fault, by its source; "nothing" where it is not in here."""


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the documentation: by what noticed them how many faults, the first, those that others had
    and those in a share of the rollouts; then what TRL has."""
    known = [fault for fault in FAULTS if fault.name in results]
    for by in dict.fromkeys(results[fault.name]["by"] for fault in known):
        found = [fault for fault in known if results[fault.name]["by"] == by]
        yield from (f"**{by or 'nothing'}**: {len(found)}", "")
        for fault in found:
            promised = steps_promised(fault.share)
            steps = f": noticed in step {results[fault.name]['steps']} of {promised}" if by and promised != 2 else ""
            if fault is found[0] or fault.elsewhere or steps:
                yield f"- {fault.about}" + (f" ({fault.elsewhere})" if fault.elsewhere else "") + steps
        yield ""
    has = Counter(TRL.get(fault.name, "nothing") for fault in known)
    made = sum(fault.name in faults_trl.FAULTS for fault in known)
    yield (
        f"TRL 1.16, by its source, logs a number that changes for {has[METRIC]} of these {len(known)} faults, but "
        f"compares it with no limit. It warns of {has[WARNING]}, has nothing for {has['nothing']}, and cannot have "
        f"{has[IMPOSSIBLE]}. `python -m benchmarks.faults_trl` makes {made} of them there."
    )


def write_page() -> None:
    """Writes the lists of `RESULTS` into the documentation."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    lines = "".join(f"{line}\n" for line in table(json.loads(RESULTS.read_text())))
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}")


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="+", metavar="NAME", choices=sorted(by_name()), help="these faults alone")
    command.add_argument("--results", type=Path, metavar="FILE", help="keep results here, and run what is not in it")
    command.add_argument("--list", action="store_true", help="list the faults")
    command.add_argument("--table", action="store_true", help="write docs/faults.md from benchmarks/faults.json")
    command.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the runs here")
    command.add_argument("--healthy", type=int, metavar="N", help="make N healthy steps instead, and count alarms")
    given = command.parse_args()
    if given.healthy is not None:
        return check_healthy(given)
    results: dict[str, Any] = {}
    if given.results is not None and given.results.exists():
        results = json.loads(given.results.read_text())
    if given.list:
        for fault in FAULTS:
            print(f"{fault.name:28} {fault.run:12} {fault.about}")
        return 0
    if given.table:
        write_page()
        return 0
    chosen = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    for fault in chosen:
        if fault.name in results and not given.only:
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as parent:
            found = run(fault, (given.keep or Path(parent)) / fault.name)
        results[fault.name] = found
        print(
            f"{fault.name:28} {found['by'] or 'NOTHING':15} {found.get('steps', ''):>3} {found['said'][:160]}",
            flush=True,
        )
        if given.results is not None:
            merged = json.loads(given.results.read_text()) if given.results.exists() else {}
            given.results.write_text(json.dumps(merged | {fault.name: found}, indent=1))
    late = [
        fault.name
        for fault in chosen
        if results[fault.name]["by"] in (None, UNNAMED)
        or results[fault.name].get("steps", math.inf) > steps_promised(fault.share)
    ]
    figures = {"faults": float(len(chosen)), "noticed": float(sum(bool(results[one.name]["by"]) for one in chosen))}
    figures["late or unnoticed"] = float(len(late))
    if late:
        print(f"not within the steps that are promised: {', '.join(late)}", file=sys.stderr)
    return report("faults", figures, {"late or unnoticed": ("<=", 0.0)}, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())
