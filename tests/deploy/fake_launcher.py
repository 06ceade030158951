"""A launcher process that runs fake programs: `fake_launcher.py RUN_FOLDER INFER TRAIN ORCH`, where the last three are
the steps of each fake program, joined by spaces. Variables: FAKE_GRACE_S, how long programs may take to end;
FAKE_RESTARTS, how often in a row each is started again."""

import os
import sys
from pathlib import Path

from grpo.deploy import programs
from grpo.deploy.launcher import explain
from grpo.deploy.programs import Program, Signals, run_programs
from grpo.transport.errors import RunFolderError
from grpo.transport.run import only_one, open_run

FAKE = Path(__file__).with_name("fake_program.py")


def main() -> None:
    programs.GRACE_S = float(os.environ.get("FAKE_GRACE_S", programs.GRACE_S))
    programs.FIRST_PAUSE_S, programs.STRAYS_S = 0.1, 0.5
    path = Path(sys.argv[1])
    try:
        with only_one(path, "launcher"), Signals() as signals:
            run = open_run(path, resume="auto")
            started = [
                Program(
                    role=role,
                    command=(sys.executable, str(FAKE), *steps.split()),
                    log=run.logs / f"{role}.log",
                    status=run.status / f"{role}.json",
                    environment=dict(os.environ),
                )
                for role, steps in zip(("infer", "train", "orch"), sys.argv[2:5], strict=True)
            ]
            restarts = int(os.environ.get("FAKE_RESTARTS", 3))
            outcome = run_programs(started, restarts=restarts, signals=signals, tick=lambda: None)
    except RunFolderError as error:
        sys.exit(f"error: {error}")
    explain(outcome)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
