"""README.md of an exported version: what it is, how it was trained, what it reached, how to load it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.policy_version import Version, recorded_arguments
from grpo.proofs import Page
from grpo.run import Run
from grpo.run_files import EVALUATED, REWARD, STEP, metrics
from grpo.service_folder import is_service
from grpo.transport.extras import is_installed
from grpo.transport.run import recorded_settings

CURVE_FILE = "curve.png"
_TRAIN = (
    "learning_rate",
    "optimizer",
    "recipe",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "seed",
    "sequence_len",
)
_ORCH = ("batch_size", "rollouts_per_example", "max_async_level", "max_off_policy_steps")
_NUM_ROWS = 10


def write_card(version: Version, folder: Path, *, kind: str, figures: Mapping[str, float], page: Page) -> None:
    """Writes the card and its picture. `figures` are those of the export's own proof, `page` is that of the run."""
    run, step, spec = Run(version.run), version.manifest.version, version.manifest.spec
    train, orch = version.settings, recorded_settings(version.run, "orch") or {}
    rewards = _rewards(version.run, step)
    draws = bool(rewards) and is_installed("plots")
    if draws:
        run.plot().savefig(folder / CURVE_FILE)
    base = Path(version.base_name).name if Path(version.base_name).exists() else version.base_name
    environments = [str(one.get("id") or one.get("address")) for one in orch.get("env", [])]
    how = "a loop against the training service" if is_service(version.run) else "supervised learning"
    how = f"reinforcement learning on {', '.join(environments)}" if environments else how
    settings = {key: train[key] for key in _TRAIN if train.get(key) is not None}
    settings |= {key: orch[key] for key in _ORCH if orch.get(key) is not None}
    if spec.quantization:
        settings["base held as"] = spec.quantization
    if arguments := recorded_arguments(version.run):
        settings["chat_template_kwargs"] = arguments
    temperature = orch.get("sampling", {}).get("temperature")
    settings |= {} if temperature is None else {"temperature": temperature}
    what = "A LoRA adapter for" if kind == "adapter" else "A model trained from"
    parts = [
        _front_matter(base, kind),
        f"# {base}, trained by {how}\n",
        f"{what} `{base}`: {version.name} of a run of `grpo`, {how}.\n",
        f"![Reward by step]({CURVE_FILE})\n" if draws else "",
        _table(("step", "mean reward"), rewards) if rewards else "",
        "## Settings\n",
        _table(("setting", "value"), [(key, _shown(value)) for key, value in settings.items()]),
        _evaluations(version.run),
        "## Use\n",
        _use(base, kind, arguments),
        f"As exported, its log-probabilities of the run's canary differ from the trainer's by {figures['max_abs']:.2g} "
        f"nats at most, {figures['mean_abs']:.2g} on average.\n",
        f"Of the run, `grpo prove` says: {page.verdict} (`proof.json`"
        + (f"; its files: `{page.digest}`).\n" if page.digest else ").\n"),
    ]
    (folder / "README.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _front_matter(base: str, kind: str) -> str:
    library = "peft" if kind == "adapter" else "transformers"
    tags = "".join(f"- {tag}\n" for tag in ("grpo", "reinforcement-learning", *(["lora"] if kind == "adapter" else [])))
    hub = f"base_model: {base}\n" if "/" in base else ""
    return f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n{hub}tags:\n{tags}---\n"


def _rewards(folder: Path, step: int) -> list[tuple[str, str]]:
    """About `_NUM_ROWS` steps up to this one."""
    steps = [line for line in metrics(folder) if REWARD in line and line[STEP] <= step]
    chosen = steps[:: max(1, len(steps) // _NUM_ROWS)]
    if steps and chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    return [(f"{line[STEP]:.0f}", f"{line[REWARD]:.3f}") for line in chosen]


def _evaluations(folder: Path) -> str:
    found = [line for line in metrics(folder) if EVALUATED in line]
    keys = sorted({key for line in found for key in line if key.startswith("eval/accuracy/")})
    rows = [[f"{line[STEP]:.0f}", *(f"{line[key]:.3f}" if key in line else "" for key in keys)] for line in found]
    return "## Held-out accuracy\n\n" + _table(("version", *keys), rows) if keys else ""


def _use(base: str, kind: str, arguments: Mapping[str, Any]) -> str:
    if kind == "adapter":
        load = (
            "from peft import AutoPeftModelForCausalLM\n\n"
            'model = AutoPeftModelForCausalLM.from_pretrained("this folder or repository")'
        )
        serve = f"vllm serve {base} --enable-lora --lora-modules policy=FOLDER"
    else:
        load = (
            "from transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("this folder or repository")'
        )
        serve = "vllm serve FOLDER"
    given = (
        f"\nThe chat template here sets `{json.dumps(arguments)}`, as in training; whoever renders may give others.\n"
    )
    if arguments and kind == "adapter":  # vLLM takes the base's tokenizer, and so the base's template
        serve += f" --default-chat-template-kwargs '{json.dumps(arguments)}'"
    return f"```python\n{load}\n```\n\n```sh\n{serve}\n```\n{given if arguments else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
