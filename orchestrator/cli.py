"""`grpo-orch [orch.yaml] [--key value …]`: the orchestrator."""

import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

import uvloop
from grpo.configs.entry import load_settings
from grpo.configs.errors import SettingsError
from grpo.configs.orch import OrchSettings
from grpo.transport.errors import PROOF_FAILED, START_AGAIN, PeerFailed, ProofFailed, TransportError
from grpo.transport.limits import raise_file_limit
from grpo.transport.logs import printable, start_log
from grpo.transport.parent import end_with_starter

log = logging.getLogger(__name__)


def main() -> None:
    """Exit codes: 0 done, 1 failure, 2 bad settings, 75 the trainer, all servers or a process of an environment is
    gone, and this may be started again, 130 on SIGINT, 143 on SIGTERM."""
    end_with_starter()
    raise_file_limit()
    settings = load_settings(OrchSettings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    raise SystemExit(_run(settings))


def _end(number: int, _: FrameType | None) -> None:
    """Until the loops take over, there is nothing to put in order."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


def _run(settings: OrchSettings) -> int:
    gc.disable()  # imports make objects that stay; looking through them takes a quarter of the time
    from grpo.orchestrator.inference.client import ServerError, ServersAway
    from grpo.orchestrator.monitoring.summary import what_next
    from grpo.orchestrator.run import orchestrate
    from grpo.orchestrator.workers.failures import EnvironmentFailed, EnvironmentKilled

    gc.freeze()  # what is there stays: the collector never looks at it
    gc.enable()
    start_log()
    ended_by: list[signal.Signals] = []

    async def until_signal() -> None:
        task = asyncio.ensure_future(orchestrate(settings))

        def end(number: signal.Signals) -> None:
            ended_by.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        (await task).print()
        print(what_next(Path(settings.output_dir)))

    try:
        uvloop.run(until_signal())
    except asyncio.CancelledError:
        print(f"ended by {ended_by[0].name}", file=sys.stderr)
        return 128 + ended_by[0]
    except (TransportError, ServerError, EnvironmentFailed, ValueError, OSError) as error:  # whose message says all
        print(f"error: {printable(str(error))}", file=sys.stderr)
        if isinstance(error, SettingsError):  # of the run that was to be gone on with
            return 2
        if isinstance(error, ProofFailed):
            return PROOF_FAILED
        return START_AGAIN if isinstance(error, PeerFailed | ServersAway | EnvironmentKilled) else 1
    except Exception as error:
        log.exception("unexpected failure")
        print(f"error: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
