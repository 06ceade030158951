"""`grpo-infer [infer.yaml] [--key value …]`: the inference server."""

import contextlib
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from grpo.configs.entry import load_settings
from grpo.configs.infer import InferSettings
from grpo.transport.cores import COMPILED_VAR, compiled_folder, set_numeric_defaults
from grpo.transport.hidden import hide_environment, key_variables
from grpo.transport.limits import raise_file_limit
from grpo.transport.parent import end_with_starter

MAX_TEMPORARY = 40
"""Characters of a temporary folder's path that leave room for another folder and a socket: that takes 107 at most."""
if "--multiprocessing-fork" in sys.orig_argv:
    gc.disable()  # an engine's process that is started anew imports this module before vLLM; `PolicyWorker` ends it


def main() -> None:
    """Exit codes: 0 done, 1 failure, 2 bad settings, 75 vLLM's engine process has ended by itself (started again, the
    server may serve as before), 130 on SIGINT, 143 on SIGTERM."""
    end_with_starter()
    raise_file_limit()
    settings = load_settings(InferSettings)
    hide_environment(key_variables(settings.model_dump()))
    # Read as torch and numpy are imported; numpy's threads would do nothing, and no process can be forked beside them.
    num_threads = settings.num_threads or os.environ.get("OMP_NUM_THREADS", 1)
    os.environ |= {"OMP_NUM_THREADS": str(num_threads), "OPENBLAS_NUM_THREADS": "1"}
    set_numeric_defaults()
    gc.disable()  # imports make objects that stay; looking through them takes a quarter of the time

    with temporary_folder():
        from grpo.infer.server import run

        code = run(settings)
    logging.shutdown()
    # At once: vLLM's libraries report leaks while the interpreter ends, below the line that says what went wrong.
    os._exit(code)


@contextlib.contextmanager
def temporary_folder() -> Iterator[None]:
    """Within it, what this process and those that it starts leave in the machine's temporary folder, sockets above all,
    is in a folder there that goes at the end. Only what torch has compiled stays for later starts."""
    outer = tempfile.gettempdir()
    if len(outer) > MAX_TEMPORARY:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="grpo-infer-", dir=outer, ignore_cleanup_errors=True) as folder:
        os.environ[COMPILED_VAR] = compiled_folder()
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield


if __name__ == "__main__":
    main()
