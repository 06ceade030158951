"""The command that makes a sandbox: what a program sees of the machine, who it is, and which system calls it has."""

import errno
import functools
import os
import resource
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from grpo.environments.sandbox.records import Limits, SandboxError, SandboxMissing

WHY_NOT = (
    "Bubblewrap needs namespaces of its own: for an ordinary user user.max_user_namespaces above 0, in a container "
    "--cap-add SYS_ADMIN and no seccomp profile; `grpo docs sandbox` has all of it"
)
PROGRAM = "/sandboxed.py"
OPEN_FILES = 256
_REFUSED = """
    unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsmount mount_setattr swapon swapoff
    reboot acct quotactl init_module finit_module delete_module kexec_load kexec_file_load syslog
    ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd
    memfd_create memfd_secret shmget msgget semget
    bpf perf_event_open userfaultfd io_uring_setup add_key request_key keyctl fanotify_init
    name_to_handle_at open_by_handle_at
""".split()  # noqa: SIM905
"""System calls that no honest program needs: namespaces and mounts, the machine, other processes, memory that no limit
counts, parts of the kernel known for their faults."""
_NEW_NAMESPACES = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_AF_INET6 = 10


def find_bubblewrap() -> str:
    """Returns the path of `bwrap`. Raises `SandboxMissing` where there is none."""
    if (found := shutil.which("bwrap")) is None:
        raise SandboxMissing("untrusted code runs only inside bubblewrap; install it (apt-get install bubblewrap)")
    return found


@functools.cache
def system_call_filter() -> bytes:
    """Returns the filter of system calls as bubblewrap's `--seccomp` takes it: EPERM for those of the list, for new
    namespaces, and for sockets beyond UNIX and IP, of which netlink and vsock would reach out of the network namespace.
    Calls with the numbers of another architecture are killed. `clone3` does not exist (its flags lie in memory, which
    a filter cannot read): the C library uses `clone` then. Raises `SandboxMissing` without a fitting libseccomp.
    """
    try:
        import pyseccomp as seccomp  # type: ignore[import-untyped, unused-ignore]

        calls, refuse = seccomp.SyscallFilter(seccomp.ALLOW), seccomp.ERRNO(errno.EPERM)
        for name in _REFUSED:
            calls.add_rule(refuse, name)
    except (ImportError, OSError, RuntimeError) as error:
        raise SandboxMissing(f"untrusted code needs libseccomp 2.5.2 or later (Debian: libseccomp2): {error}") from None
    for flag in _NEW_NAMESPACES:
        calls.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    calls.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.GT, _AF_INET6))
    calls.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()


def _own_user() -> int | None:
    """Returns a user id that nothing else on the machine has, drawn anew for each sandbox, because the kernel counts
    processes by user and exempts root; None for an ordinary user, whose sandboxes have a user namespace each."""
    rows = (tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines())
    first, _, num = max(rows, key=lambda row: row[2])
    if os.geteuid() != 0 or first + num < 65536:
        return None
    return min(first + num, 0x7FFFFFF0) - 1 - secrets.randbelow(min(num // 16, 1 << 28))


def command_line(limits: Limits, *, filter_fd: int, status_fd: int, program_fd: int, stdin_fd: int) -> list[str]:
    """Returns the whole command: namespaces, what is visible, the filter, the user, the kernel's limits, Python.

    Visible are `/usr` with its libraries and the interpreter, read-only, and nothing else of the machine. Bubblewrap's
    own process 1 keeps what is open as its standard input, which programs of an ordinary user could read there: the
    program gets its own by the shell.
    """
    interpreter, base, user = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve(), _own_user()
    command = [find_bubblewrap(), "--new-session", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--hostname", "sandbox", "--seccomp", str(filter_fd), "--json-status-fd", str(status_fd)]
    if user is None:
        command += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--tmpfs", "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for library in (Path("/", name) for name in ("bin", "sbin", "lib", "lib32", "lib64")):
        if library.is_symlink():
            command += ["--symlink", str(library.readlink()), str(library)]
        elif library.is_dir():
            command += ["--ro-bind", str(library), str(library)]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for disk in ("/dev/shm", "/tmp"):
        command += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", disk]
    for folder in [] if base.is_relative_to("/usr") else [*base.parents][-2::-1]:
        command += ["--perms", "0755", "--dir", str(folder)]
    command += [] if base.is_relative_to("/usr") else ["--ro-bind", str(base), str(base)]
    command += ["--perms", "0444", "--file", str(program_fd), PROGRAM]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--setenv", "PATH", f"{interpreter.parent}:/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    command += ["--setenv", "LANG", "C.UTF-8", "--setenv", "MALLOC_ARENA_MAX", "2", "--"]
    if user is not None:
        command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
    command += ["prlimit", *(f"--{name}={value}" for name, value in kernel_limits(limits).items())]
    command += ["sh", "-c", f'exec "$@" </dev/fd/{stdin_fd}', "sh"]
    return [*command, str(interpreter), "-I", "-B", PROGRAM]


def kernel_limits(limits: Limits) -> dict[str, int]:
    """Returns what the kernel itself keeps, by the names of `prlimit`. Two processes more than allowed may be made, of
    which one may be bubblewrap's: that there are too many is seen from outside. Raises `SandboxError` for what cannot
    be set here, which would be no failure of the program's."""
    kept = {"as": limits.memory_bytes, "cpu": int(limits.cpu_s) + 1, "fsize": limits.disk_bytes}
    kept |= {"nofile": OPEN_FILES, "nproc": limits.processes + 2, "core": 0, "memlock": 0, "msgqueue": 0}
    for name, asked in kept.items():
        most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        if most != resource.RLIM_INFINITY and asked > most:
            raise SandboxError(f"the limit {name} of a program is {asked}, at most {most} can be set here (ulimit -H)")
    return kept
