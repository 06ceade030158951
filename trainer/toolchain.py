"""What torch needs on a machine to compile kernels while it runs."""

import importlib.util
import os
import shutil

import torch


def missing_for_compile(device: torch.device) -> str | None:
    """Why nothing can be compiled for this device here; None where it can."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) else f"the C++ compiler {compiler} is not installed"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("clang", "gcc")
    if not any(shutil.which(compiler) for compiler in compilers):
        return f"Triton needs a C compiler, and {' and '.join(compilers)} cannot be found"
    return None
