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
from grpo.configs.loading import COMMAND_LINE, read_yaml
from grpo.configs.run import RunSettings, load_run, run_file
from grpo.notebook import env_settings
from grpo.orchestrator.rollouts.environment import Environment
from grpo.run import GRPO, LOG_FILE, POLL_S, Run
from grpo.transport.parent import PARENT_VAR

Env: TypeAlias = str | Mapping[str, Any] | Environment | type[Environment]
"""An environment: its id, its settings, an object or a class of one's own."""
START_S = 60.0
"""Longest time for which `train` waits to see whether the run can begin."""
_BEGUN = "run folder "


def train(
    preset: str | Path,
    *,
    env: Env | Sequence[Env] | None = None,
    steps: int | None = None,
    **settings: Any,
) -> Run:
    """Starts a run: server, orchestrator and trainer, the same programs as `grpo PRESET` starts. Returns as soon as
    they start; `Run.wait` waits for the end. The run ends with this process.

    Args:
        preset: A preset's name as `"quickstart"`, a folder with `run.yaml`, or such a file.
        env: What to train on: an object or class derived from `grpo.Environment`, an environment's id
            (`"reverse-text"`, `"my_env.py:MyEnv"`), its settings as a mapping, or several of these. Objects are made
            again in worker processes from their class's source and the arguments they were made with.
        steps: Number of training steps, as `max_steps`.
        **settings: Any key of docs/settings.md: `output_dir="outputs/x"`, sections as mappings
            (`train={"learning_rate": 1e-3}`), or `__` for a dot (`orch__sampling__max_tokens=64`).

    Raises:
        SettingsError: A ValueError that lists every setting that cannot be honoured.
        UserError: A ValueError for an environment whose source cannot be given to other processes.
        RunFailed: The programs cannot start, for example because `output_dir` holds a run with other settings.

    Example:
        ```python
        run = grpo.train("quickstart", env=Shout(), steps=20, output_dir="outputs/shout")
        run.wait()
        run.metrics["reward/mean"]
        ```
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("grpo.train is called in a thread, with which the run would end; call it in the main thread")
    given = dict(settings) if steps is None else settings | {"max_steps": steps}
    try:
        folder = Path(given.get("output_dir") or read_yaml(run_file(preset)).get("output_dir") or "outputs")
        if env is not None:
            overwrite = bool(given.get("overwrite_output_dir") or given.get("resume_with_changed_code"))
            given["orch.env"] = [env_settings(one, folder, overwrite=overwrite) for one in listed_envs(env)]
        words = [f"--{key}={text}" for key, text in _texts(given)]
        folder = Path(load_run(preset, words).train.settings.output_dir)
    except SettingsError as error:
        raise SettingsError([_from_python(one) for one in error.problems]) from None
    return _started([str(preset), *words], folder)


def _from_python(problem: Problem) -> Problem:
    return replace(problem, origin="grpo.train") if problem.origin == COMMAND_LINE else problem


def listed_envs(env: Env | Sequence[Env]) -> Sequence[Env]:
    """Returns the environments as a list; one may stand for a list of one."""
    return [env] if isinstance(env, (str, Mapping, Environment, type)) else list(env)


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
