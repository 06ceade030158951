"""Puts a silent fault into this process, where `SILENT_FAULT` names one: Python imports this module at every start with
this folder on PYTHONPATH, as `benchmarks/faults.py` puts it there."""

import os

if os.environ.get("SILENT_FAULT"):
    import silent_faults  # type: ignore[import-not-found]

    silent_faults.install(os.environ["SILENT_FAULT"])
