"""`python -m deploy.memory --train FILE [--infer FILE] [--measure] [--shared all]`: who needs what of one device."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from configs.common import exit_with_problems, load
from configs.errors import SettingsError
from configs.infer import InferSettings
from configs.train import TrainSettings
from deploy.gpus import visible_gpus
from deploy.memory.device import DeviceError, DeviceMemory, gpu_memory
from deploy.memory.dry_step import DryStepError, measure
from deploy.memory.estimate import GIB, Device, EstimateError, estimate
from deploy.memory.shapes import ModelShape, ShapeError
from deploy.memory.split import NoRoom, split
from deploy.memory.table import lines
from transport.weights.identity import resolve_model


def main() -> None:
    """Exit status: 0 done, 1 no room or nothing that can be estimated, 2 bad settings."""
    options = _parser().parse_args()
    try:
        train = load(TrainSettings, file=options.train).settings
        infer = load(InferSettings, file=options.infer).settings if options.infer else None
    except SettingsError as error:
        exit_with_problems(error)
    try:
        _tell(train, infer, options)
    except (EstimateError, ShapeError, NoRoom, DeviceError, DryStepError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _tell(train: TrainSettings, infer: InferSettings | None, options: argparse.Namespace) -> None:
    device = _device(train, options)
    folder = resolve_model(train.model)
    shape = ModelShape.of_folder(folder)
    estimated = estimate(train, shape, device=device, shared=options.shared)
    measured = measure(train, folder, timeout_s=options.timeout) if options.measure else None
    need = measured.corrected(estimated) if measured else estimated.need
    divided = None
    if device == "cuda" and infer is not None:
        memory = _memory(options.device_gib)
        divided = split(train, infer, shape, memory=memory, shared=options.shared, need=need)
    print("\n".join(lines(estimated, measured=measured, split=divided)))
    figures = {
        "need": need.total,
        "stays": need.stays,
        "estimate": asdict(estimated),
        "measured": asdict(measured) if measured else None,
    }
    print(json.dumps(figures | {"gpu_memory_utilization": divided.utilization if divided else None}))


def _device(train: TrainSettings, options: argparse.Namespace) -> Device:
    """Where the trainer is taken to compute: on a GPU of the size that was given, or as it would find out itself."""
    there = bool(visible_gpus(os.environ).names)
    if train.device == "cpu" and options.device_gib is not None:
        raise EstimateError("--device-gib is for a GPU, and device is cpu (train.yaml); leave one of them out")
    if train.device == "cpu" or (train.device == "auto" and not there and options.device_gib is None):
        return "cpu"
    if options.measure and not there:
        raise EstimateError("--measure needs the GPU itself, and none is visible here; leave it out")
    return "cuda"


def _memory(device_gib: float | None) -> DeviceMemory:
    if device_gib is None:
        return gpu_memory(os.environ)
    return DeviceMemory(total=int(device_gib * GIB), free=int(device_gib * GIB))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.memory",
        description="What the trainer needs of a device's memory, by part, and what it leaves to the server. The last "
        "line is one JSON object, in bytes.",
    )
    parser.add_argument("--train", type=Path, required=True, help="the trainer's settings")
    parser.add_argument("--infer", type=Path, help="the server's settings: divides a GPU between the two")
    parser.add_argument("--measure", action="store_true", help="make a step on made-up tokens, in a process of its own")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the step may take (default: 600)")
    parser.add_argument("--device-gib", type=float, help="divide a GPU of so many GiB, whether there is one or not")
    parser.add_argument(
        "--shared",
        choices=("all", "linear", "none"),
        default="linear",
        help="what of the base the trainer borrows: all, the layers' linear layers (default), none",
    )
    return parser


if __name__ == "__main__":
    main()
