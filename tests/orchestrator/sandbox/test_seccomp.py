"""The filter of system calls, run step by step as the kernel would."""

import errno
import struct

import pytest

from orchestrator.sandbox.seccomp import system_call_filter

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def decide(program: bytes, architecture: int, number: int, first_argument: int = 0) -> int:
    """What the filter says of one call: an interpreter of the five instructions that are used."""
    record = struct.pack("=IIQQ", number, architecture, 0, first_argument)
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    value, at = 0, 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (value,) = struct.unpack_from("=I", record, operand)
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            at += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "architecture", "number", "argument", "decision"),
    [
        ("x86_64", X86_64, 0, 0, ALLOWED),  # read
        ("x86_64", X86_64, 59, 0, ALLOWED),  # execve
        ("x86_64", X86_64, 56, 0x01200011, ALLOWED),  # clone as fork calls it
        ("x86_64", X86_64, 56, 0x003D0F00, ALLOWED),  # clone of a thread
        ("x86_64", X86_64, 56, 0x10000011, REFUSED),  # clone with CLONE_NEWUSER
        ("x86_64", X86_64, 56, 0x40000011, REFUSED),  # clone with CLONE_NEWNET
        ("x86_64", X86_64, 435, 0, UNKNOWN),  # clone3
        ("x86_64", X86_64, 272, 0, REFUSED),  # unshare
        ("x86_64", X86_64, 101, 0, REFUSED),  # ptrace
        ("x86_64", X86_64, 319, 0, REFUSED),  # memfd_create
        ("x86_64", X86_64, 0x40000000, 0, KILLED),  # read with x32's numbers
        ("x86_64", 0x40000003, 0, 0, KILLED),  # 32 bits
        ("aarch64", AARCH64, 63, 0, ALLOWED),  # read
        ("aarch64", AARCH64, 220, 0x10000011, REFUSED),  # clone with CLONE_NEWUSER
        ("aarch64", AARCH64, 97, 0, REFUSED),  # unshare
        ("aarch64", X86_64, 0, 0, KILLED),
    ],
)
def test_calls_are_allowed_or_refused(
    machine: str, architecture: int, number: int, argument: int, decision: int
) -> None:
    assert decide(system_call_filter(machine), architecture, number, argument) == decision


def test_a_machine_whose_calls_are_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no filter of system calls for riscv64"):
        system_call_filter("riscv64")
