"""`grpo.train`: a run of the three programs, started from a script or a notebook."""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from grpo.configs.errors import Problem, SettingsError
from grpo.configs.keys import find, is_list, sections_of
from grpo.configs.loading import COMMAND_LINE
from grpo.configs.run import LoadedRun, RunSettings, is_model, load_run
from grpo.notebook import dataset_settings, env_settings, name_of
from grpo.orchestrator.rollouts.environment import Environment
from grpo.orchestrator.rollouts.rubric import RewardFunction
from grpo.run import GRPO, LOG_FILE, POLL_S, Run
from grpo.transport.errors import UserError
from grpo.transport.parent import PARENT_VAR

Env: TypeAlias = str | Mapping[str, Any] | Environment | type[Environment]
"""An environment: its id, its settings, an object or a class of one's own."""
Reward: TypeAlias = str | Mapping[str, Any] | RewardFunction
"""A reward by its name, or a function of one's own."""
START_S = 60.0
"""Longest time for which `train` waits to see whether the run can begin."""
_BEGUN = "run folder "


def train(
    target: str | Path | None = None,
    *,
    model: str | Path | None = None,
    env: Env | Sequence[Env] | None = None,
    dataset: Any = None,
    reward: Reward | Sequence[Reward] | None = None,
    eval_dataset: Any = None,
    steps: int | None = None,
    **settings: Any,
) -> Run:
    """Starts a run: server, orchestrator and trainer, the same programs as `grpo` starts. Returns as soon as they
    start; `Run.wait` waits for the end. The run ends with this process.

    Args:
        target: The model, a folder or a Hugging Face id, with `env` or `dataset`. Or a run that is described in a file:
            a preset's name as `"quickstart"`, a folder with `run.yaml`, or such a file.
        model: The model, where `target` is a run or is left out.
        env: What to train on: an object or class derived from `grpo.Environment`, an environment's id
            (`"reverse-text"`, `"my_env.py:MyEnv"`), its settings as a mapping, or several of these. Objects are made
            again in worker processes from their class's source and the arguments they were made with.
        dataset: Rows to train on, instead of `env`: a list of mappings, a `datasets.Dataset` or `DatasetDict`, a
            DataFrame, or the path or Hub id of a data set. Each row has a `prompt`, a text or a list of chat messages.
        reward: What an answer to a row is worth: a function of `completion` and `example` (as for `grpo.Rubric`), a
            name (`"exact"`, `"number"`, `"math"` …, which compare with the column `answer`), or a list of these, whose
            sum counts. Left out: `"exact"`.
        eval_dataset: Rows to evaluate on. Left out: those of the split `test`, `validation` or `eval`, or else a tenth
            of `dataset`, which is not trained on.
        steps: Number of training steps, as `max_steps`.
        **settings: Any key of `grpo docs settings`: `output_dir="outputs/x"`, sections as mappings
            (`train={"learning_rate": 1e-3}`), or `__` for a dot (`orch__sampling__max_tokens=64`).

    Raises:
        SettingsError: A ValueError that lists every setting that cannot be honoured.
        UserError: A ValueError for an environment, rows or a reward that cannot be given to other processes.
        ValueError: A reward function takes what no rubric gives; the message has the line to write instead.
        RunFailed: The programs cannot start, for example because `output_dir` holds a run with other settings.

    Example:
        ```python
        rows = [{"prompt": "Shout: hello", "answer": "HELLO"}, {"prompt": "Shout: world", "answer": "WORLD"}]
        run = grpo.train("Qwen/Qwen3-0.6B", dataset=rows, reward="exact", steps=20)
        run = grpo.train("quickstart", env=Shout(), steps=20, output_dir="outputs/shout")
        run.wait()
        run.metrics["reward/mean"]
        ```
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("grpo.train is called in a thread, with which the run would end; call it in the main thread")
    if dataset is None and (reward is not None or eval_dataset is not None):
        raise UserError("reward and eval_dataset belong to dataset; give the rows too, or env with rewards of its own")
    if dataset is not None and env is not None:
        raise UserError("env and dataset are both what to train on; give one of them")
    if target is not None and is_model(target):
        if model is not None:
            raise UserError(f"{target} and {model} are two models; give one")
        target, model = None, target
    given = (
        dict(settings) | ({} if steps is None else {"max_steps": steps}) | ({} if model is None else {"model": model})
    )
    envs = [] if env is None else listed_envs(env)
    names = [name_of(one) for one in envs]
    if dataset is not None:
        names = [{"id": "dataset", "args": {"path": str(dataset)} if isinstance(dataset, str | Path) else {}}]
    try:
        # Once with names alone: what is refused leaves no file behind, and what is written lies in the run's folder.
        folder = Path(_loaded(target, given | ({"orch.env": names} if names else {})).train.settings.output_dir)
        overwrite = bool(given.get("overwrite_output_dir") or given.get("resume_with_changed_code"))
        if dataset is not None:
            rows = dataset_settings(dataset, reward, folder, held_out=eval_dataset, overwrite=overwrite)
            given["orch.env"] = [rows]
        elif envs:
            given["orch.env"] = [env_settings(one, folder, overwrite=overwrite) for one in envs]
        _loaded(target, given | {"output_dir": folder})
    except SettingsError as error:
        raise SettingsError([_from_python(one) for one in error.problems]) from None
    words = [*([] if target is None else [str(target)]), *_words(given | {"output_dir": folder})]
    return _started(words, folder)


def _loaded(target: str | Path | None, given: Mapping[str, Any]) -> LoadedRun:
    return load_run(target, _words(given))


def _words(given: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={text}" for key, text in _texts(given)]


def _from_python(problem: Problem) -> Problem:
    return replace(problem, origin="grpo.train") if problem.origin == COMMAND_LINE else problem


def listed_envs(env: Env | Sequence[Env]) -> Sequence[Env]:
    """Returns the environments as a list; one may stand for a list of one. Raises `UserError` for rows."""
    if isinstance(env, (str, Mapping, Environment, type)):
        return [env]
    if not isinstance(env, list | tuple):
        raise UserError(
            f"env is a {type(env).__name__}, expected environments; rows are given as dataset=ROWS, reward=F"
        )
    return env


def _texts(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as on `grpo`'s command line; a mapping is a section, or else a value."""
    for name, value in tree.items():
        key = prefix + name.replace("__", ".")
        field = find(RunSettings, key)
        is_section = field is not None and bool(sections_of(field.annotation)) and not is_list(field.annotation)
        if isinstance(value, Mapping) and is_section:
            yield from _texts(value, f"{key}.")
        else:
            plain = isinstance(value, (str, Path))
            yield key, str(value) if plain else json.dumps(value, default=str)


def _started(words: Sequence[str], folder: Path) -> Run:
    """Starts `grpo` with these words. Raises `RunFailed` where it refuses to begin."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG_FILE).open("wb") as log:
        # A group of its own: an interrupt of the notebook or of the script is no interrupt of the run.
        process = subprocess.Popen(
            [*GRPO, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, PARENT_VAR: str(os.getpid())},
        )
    run = Run(folder, process=process)
    atexit.register(_ended_with_this_process, run)
    deadline_s = time.monotonic() + START_S
    while run.is_running and _BEGUN not in run.log and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    run.check()
    return run


def _ended_with_this_process(run: Run) -> None:
    if run.is_running:
        print(f"this process ends, and the run in {run.folder} with it; run.wait() waits for a run", file=sys.stderr)
        run.stop()
