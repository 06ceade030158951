"""`grpo evaluate MODEL|RUN|CHECKPOINT` and `grpo.evaluate`: how good a policy is at environments, without training."""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo.configs.infer import InferSettings
from grpo.configs.loading import Values, load
from grpo.configs.orch import OrchSettings
from grpo.configs.run import load_run, presets
from grpo.notebook import env_settings, yaml_value
from grpo.orchestrator.evaluate import Evaluation, held_out
from grpo.orchestrator.evaluate import evaluate as evaluate_version
from grpo.orchestrator.inference.client import PolicyClient, ServerError
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.registry import check_id
from grpo.orchestrator.startup import held_out_prompts, make_environments
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.policy_version import Version, open_version
from grpo.run import Run
from grpo.server_process import WITHOUT_TRAINER, ServerProcess, server_process
from grpo.start import Env, listed_envs
from grpo.transport.errors import UserError
from grpo.transport.http import Choice
from grpo.transport.logs import printable
from grpo.transport.ports import free_port
from grpo.transport.run import RUN_FILE, recorded_settings
from grpo.transport.weights.identity import resolve_model

TAKES_OTHERS = True
EPILOG = """\
MODEL is a folder or a Hugging Face id. RUN is a run's folder, of which the newest version is evaluated, or that of
--step; a checkpoint is one of the folders in its checkpoints/ or broadcasts/. A run's own environments, server and
sampling hold unless they are given here. All other options are keys of grpo-infer, which is started for it:

  grpo evaluate configs/quickstart/model --env reverse-text --dtype float32 --max_model_len 128 --max_tokens 12
  grpo evaluate outputs/first --step 58 --rollouts_per_example 8 --temperature 1

exit codes: 0 done, 1 a server or an environment failed, 2 settings that cannot be honoured, 130 Ctrl-C"""
_LOOK_S = 0.5
_VERSION_FOLDER = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model or version that is evaluated."""

    model: str
    """The base model."""
    version: Version | None = None
    """A version of a run's policy; None for the model itself."""

    @property
    def run(self) -> Path | None:
        """The run's folder."""
        return None if self.version is None else self.version.run

    @property
    def number(self) -> int | None:
        """The version's number."""
        return None if self.version is None else self.version.manifest.version

    @property
    def name(self) -> str:
        """The target's name in messages."""
        return self.model if self.version is None else f"{self.run}, version {self.number}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", help="a model, a run, or a checkpoint of a run")
    parser.add_argument("--env", action="append", help="an environment's id, or its settings as JSON; may be repeated")
    parser.add_argument("--step", type=int, help="which version of the run (the newest)")
    parser.add_argument("--num_examples", type=int, help="of each environment (all, or as the run has it)")
    parser.add_argument("--rollouts_per_example", type=int, help="answers to each prompt; more than 1 give pass@k (1)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (0)")
    parser.add_argument("--max_tokens", type=int, help="longest answer (what the context leaves)")
    parser.add_argument("--seed", type=int, help="sampling seed")
    parser.add_argument("--show", type=int, default=0, help="print so many answers of each environment (0)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON instead of a table")


def evaluate(
    target: str | Path | Run,
    env: Env | Sequence[Env] | None = None,
    *,
    step: int | None = None,
    num_examples: int | None = None,
    rollouts_per_example: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    **server: Any,
) -> Evaluation:
    """Answers the held-out examples of environments by a model, or by a run's policy. A server is started for it.

    Args:
        target: A model's folder or Hugging Face id, a run or its folder, or one of a run's checkpoints.
        env: What to evaluate on, as of `grpo.train`; a run's own environments where it is left out.
        step: Which version of the run; the newest where it is left out.
        num_examples: Of each environment.
        rollouts_per_example: Answers to each prompt; more than one, at a `temperature` above 0, give pass@k.
        temperature: 0 is greedy.
        max_tokens: Longest answer.
        seed: Of what is sampled.
        **server: Keys of grpo-infer, as `max_model_len=512`.

    Returns:
        `accuracy` by environment, all figures in `metrics`, and every answer in `results`.

    Raises:
        ValueError: The target cannot be evaluated, or settings cannot be honoured.
        ServerError: The server does not start, or has ended meanwhile; the message has the end of its log.

    Example:
        ```python
        before = grpo.evaluate("configs/quickstart/model", "reverse-text", max_model_len=128)
        after = grpo.evaluate("outputs/first")
        ```
    """
    with tempfile.TemporaryDirectory(prefix="grpo_evaluate_") as folder:
        found = find_target(str(target.folder if isinstance(target, Run) else target), step)
        settings = evaluation_settings(
            found,
            env=[env_settings(one, Path(folder), overwrite=False) for one in ([] if env is None else listed_envs(env))],
            num_examples=num_examples,
            rollouts_per_example=rollouts_per_example,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            server=[f"--{key}={json.dumps(v) if isinstance(v, Mapping) else v}" for key, v in server.items()],
        )
        with ThreadPoolExecutor(1) as beside:  # a notebook has an event loop in this thread
            return beside.submit(figures, found, *settings).result()


def main(options: argparse.Namespace) -> int:
    """Prints the figures of each environment, and returns the exit code."""
    target = find_target(options.target, options.step)
    settings = evaluation_settings(
        target,
        env=[yaml_value(one) if one.lstrip().startswith("{") else {"id": one} for one in options.env or ()],
        num_examples=options.num_examples,
        rollouts_per_example=options.rollouts_per_example,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        server=options.others,
    )
    try:
        _print(target, figures(target, *settings), options)
    except (ServerError, EnvironmentFailed) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def find_target(text: str, step: int | None) -> Target:
    """Returns the target that a path or a name stands for. Raises UserError and FileNotFoundError."""
    path = Path(text)
    if (found := _VERSION_FOLDER.fullmatch(path.name)) and path.parent.name in ("checkpoints", "broadcasts"):
        path, step = path.parent.parent, int(found[1])
    if (path / RUN_FILE).is_file():
        version = open_version(path, step)
        return Target(model=version.base_name, version=version)
    if step is not None:
        raise UserError(f"{text} is no run, of which --step {step} would be a version")
    if not path.exists() and text.replace("-", "_") in presets():
        model = load_run(text).train.settings.model
        raise UserError(f"{text} is a preset, and no model or run; its model is {model}")
    resolve_model(text)
    return Target(model=text)


def evaluation_settings(
    target: Target,
    *,
    env: Sequence[Mapping[str, Any]] = (),
    num_examples: int | None = None,
    rollouts_per_example: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    server: Sequence[str] = (),
) -> tuple[OrchSettings, InferSettings]:
    """Returns the settings of the environments with their sampling, and of the server, of which `server` are words of
    grpo-infer's command line. None leaves a run's own setting. Raises SettingsError and UserError."""
    tree: dict[str, Any] = dict((target.run and recorded_settings(target.run, "orch")) or {})
    tree |= {"model": {**tree.get("model", {}), "name": target.model}, "report_to": None}
    evaluated = {"num_examples": -1, **tree.get("eval", {})}
    if env:
        tree["env"], evaluated["env"] = [dict(one) for one in env], []
    if not tree.get("env"):
        raise UserError("no environment to evaluate on; give --env ID")
    evaluated |= _given(num_examples=num_examples, rollouts_per_example=rollouts_per_example)
    evaluated["sampling"] = evaluated.get("sampling", {}) | _given(temperature=temperature, max_tokens=max_tokens)
    tree["eval"] = evaluated
    tree["sampling"] = tree.get("sampling", {}) | _given(seed=seed)
    words = ["--model", target.model, "--host", "127.0.0.1", "--port", str(free_port()), *server]
    recorded = None if target.run is None else recorded_settings(target.run, "infer")
    arguments = {"chat_template_kwargs": tree["model"].get("chat_template_kwargs", {})}
    with tempfile.NamedTemporaryFile("w", prefix="grpo_infer_", suffix=".yaml") as file:
        yaml.safe_dump(arguments if recorded is None else recorded | WITHOUT_TRAINER | arguments, file)
        infer = load(InferSettings, file=file.name, arguments=words).settings
    tree["model"]["chat_template_kwargs"] = infer.chat_template_kwargs
    tree["client"] = {"base_url": [f"http://127.0.0.1:{infer.port}/v1"], "api_key_var": infer.api_key_var}
    orch = Values(tree=tree).validated(OrchSettings, default="grpo evaluate")
    for one in held_out(orch):
        if one.env.address is None:
            check_id(one.env.id, one.env.args)
    if orch.eval.rollouts_per_example > 1 and orch.eval.sampling.temperature == 0:
        raise UserError("--rollouts_per_example makes the same answer again and again at --temperature 0; raise that")
    return orch, infer


def _given(**options: Any) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


class _BaseClient(PolicyClient):
    """Asks for the base model, whatever version is asked for."""

    async def generate(self, *arguments: Any, version: int | None, **named: Any) -> list[Choice]:
        return await super().generate(*arguments, version=None, **named)

    async def score_answers(self, prompts: Any, answers: Any, version: int | None, **named: Any) -> list[list[float]]:
        return await super().score_answers(prompts, answers, None, **named)


# --- the evaluation ---


def figures(target: Target, orch: OrchSettings, infer: InferSettings) -> Evaluation:
    """Returns the evaluation of a target by a server of its own. Raises ServerError and EnvironmentFailed."""
    with tempfile.TemporaryDirectory(prefix="grpo_evaluate_") as scratch:
        log = Path(scratch, "logs", "infer.log")
        with server_process(infer.model_dump(mode="json"), log, version=target.version) as server:
            try:
                return asyncio.run(_evaluated(target, orch, server))
            except BaseExceptionGroup as group:
                raise _first(group) from None


async def _evaluated(target: Target, orch: OrchSettings, server: ServerProcess) -> Evaluation:
    async with asyncio.TaskGroup() as group, AsyncExitStack() as opened:
        watch = group.create_task(_ended(server))
        opened.callback(watch.cancel)
        pool = ServerPool([server.url])
        pool.readmit(server.url)
        make = _BaseClient if target.version is None else PolicyClient
        client = make(pool, api_key=server.key, timeout_s=orch.client.timeout)
        opened.push_async_callback(client.close)
        environments = make_environments(orch)
        opened.push_async_callback(lambda: asyncio.gather(*(pool.close() for pool in environments.values())))
        prompts = await held_out_prompts(orch, environments)
        engine = RolloutEngine(
            environments,
            client,
            ChatRenderer.of_model(resolve_model(target.model), orch.model.chat_template_kwargs),
            context_len=(await client.info(server.url)).max_model_len,
            seed=orch.seed,
        )
        return await evaluate_version(engine, orch, prompts, version=target.number or 0)


async def _ended(server: ServerProcess) -> None:
    """Raises ServerFailed when the server ends."""
    while True:
        server.check()
        await asyncio.sleep(_LOOK_S)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first of errors that came together."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


# --- what is printed ---


def _print(target: Target, evaluation: Evaluation, options: argparse.Namespace) -> None:
    if options.json:
        about = {"model": target.model, "run": target.run and str(target.run), "version": target.number}
        print(json.dumps({**about, "metrics": dict(evaluation.metrics)}, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    envs = list(evaluation.accuracy)
    table = Table("", *(escape(printable(env)) for env in envs), title=Text(target.name))
    names = dict.fromkeys(key.removesuffix(f"/{env}") for env in envs for key in evaluation.metrics if _is_of(key, env))
    for name in names:
        cells = [evaluation.metrics.get(f"{name}/{env}") for env in envs]
        table.add_row(
            Text(printable(name.removeprefix("eval/"))), *("" if one is None else f"{one:.4g}" for one in cells)
        )
    Console().print(table)
    for env in envs:
        own = [result for result in evaluation.results if result.task.env.removeprefix("eval:") == env]
        for result in own[: options.show]:
            reward = result.reward if result.failure is None else "none"
            lines = [f"\n{env}, example {result.task.index}, reward {reward}"]
            lines += [f"[{message['role']}] {message['content']}" for message in result.task.messages]
            lines += [f"[{step.role}] {step.text}" for one in result.walk() for step in one.steps]
            print(printable("\n".join(lines)))


def _is_of(key: str, env: str) -> bool:
    return key.endswith(f"/{env}") and key.startswith("eval/")
