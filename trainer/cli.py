"""The command `grpo-train [train.yaml] [--key value ...]`: the trainer."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from grpo.configs.entry import load_settings
from grpo.configs.errors import SettingsError
from grpo.configs.train import TrainSettings
from grpo.transport.cores import set_allocator, set_numeric_defaults
from grpo.transport.hidden import hide_environment, key_variables
from grpo.transport.imports import hidden_modules, import_transformers_by_names
from grpo.transport.logs import printable, start_log
from grpo.transport.parent import end_with_starter


def main() -> None:
    """Exits with 0 when done, 1 if the run failed, 2 for bad settings, 76 if a proof does not hold, 130 after SIGINT,
    143 after SIGTERM, and 75 if starting it again helps: a program that the trainer needs is gone, a step ran out of
    the device's memory, or the trainer has ended with a checkpoint after SIGUSR1."""
    end_with_starter()
    settings = load_settings(TrainSettings)
    hide_environment(key_variables(settings.model_dump()))
    set_numeric_defaults()
    set_allocator(os.environ)
    rank = os.environ["RANK"] if settings.num_ranks > 1 and _is_worker(os.environ) else None
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    who = f"rank {rank}: " if rank else ""
    level = logging.INFO if rank in (None, "0") else logging.WARNING  # the others would say the same
    start_log(level=level, who=who)
    # On a CPU it warns of a kernel that it would download, and that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from grpo.trainer.errors import EndedEarly, ExporterGone, OutOfMemory, RankFailed, TrainerError
    from grpo.transport.errors import PROOF_FAILED, START_AGAIN, PeerFailed, ProofFailed, TransportError, UserError

    code, message = 0, ""
    try:
        _run(settings, starts_ranks=settings.num_ranks > 1 and rank is None)
    except SystemExit as ended:
        code, message = (ended.code or 0, "") if isinstance(ended.code, int | None) else (1, ended.code)
    except RankFailed as failure:  # that rank says what is wrong
        code, message = START_AGAIN, f"{who}ends, because {failure}"
    except (EndedEarly, ExporterGone, OutOfMemory, PeerFailed) as error:
        code, message = START_AGAIN, f"error: {who}{error}"
    except SettingsError as error:  # of the run that was to be gone on with
        code, message = 2, f"error: {who}{error}"
    except ProofFailed as error:
        code, message = PROOF_FAILED, f"error: {who}{error}"
    except (TrainerError, TransportError, UserError, FileNotFoundError) as error:
        code, message = 1, f"error: {who}{error}"
    except Exception as error:
        logging.getLogger("grpo.trainer").exception("unexpected failure")
        code, message = 1, f"error: {who}{type(error).__name__}: {error}"
    if message:
        print(printable(message), file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    # At once: Triton reports leaks while the interpreter ends, below the line that says what went wrong.
    os._exit(code)


def _is_worker(environment: Mapping[str, str]) -> bool:
    """Returns whether torchrun's agent has started this process. RANK alone may come from a job scheduler."""
    return "TORCHELASTIC_RUN_ID" in environment


def _run(settings: TrainSettings, *, starts_ranks: bool) -> None:
    from grpo.transport.extras import check_installed
    from grpo.transport.weights.identity import resolve_model

    if (what := settings.needs_bitsandbytes) is not None:
        check_installed("bitsandbytes", what)
    model_folder = resolve_model(settings.model)  # before torch is imported, which takes seconds
    if starts_ranks:
        from grpo.trainer.launch import launch

        status = Path(settings.output_dir) / "status" / "train.json"
        raise SystemExit(launch(settings, sys.argv[1:], status=status))
    gc.disable()  # imports make objects that stay; looking through them takes a quarter of the time
    _import_peft()
    from grpo.trainer.startup import run

    run(settings, model_folder)


def _import_peft() -> None:
    """Imports PEFT without bitsandbytes, which PEFT would import for layers that the trainer does not use, and
    transformers without scipy, which it would for losses that the trainer does not use. On a CPU the former takes as
    long as importing torch, because it imports torch's compiler."""
    with import_transformers_by_names(), hidden_modules("bitsandbytes", "scipy"):
        from peft.import_utils import is_bnb_available

        is_bnb_available()  # it remembers that there is none


def _end(number: int, _: FrameType | None) -> None:
    """Ends the process at the next Python instruction. That is safe because nothing published is ever half written."""
    os.write(2, f"ended by {signal.Signals(number).name}\n".encode())  # print may be what was interrupted
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
