"""The command that makes a sandbox: what a program sees of the machine, who it is, and which system calls it has."""

import errno
import functools
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from orchestrator.sandbox.records import Limits, SandboxMissing

HOW_TO_INSTALL = "install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
WHY_NOT = (
    "bubblewrap needs namespaces of its own. As an ordinary user: user namespaces must be allowed "
    "(sysctl user.max_user_namespaces above 0; on Debian kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
    "kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for bwrap). In a container: run it with "
    "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined, or use an external sandbox service"
)
PROGRAM = "/sandboxed.py"
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
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxMissing(f"untrusted code runs only inside bubblewrap, and there is no 'bwrap': {HOW_TO_INSTALL}")
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
    except (ImportError, RuntimeError) as error:
        raise SandboxMissing(f"untrusted code needs libseccomp (Debian: libseccomp2): {error}") from None
    if unknown := [name for name in _REFUSED if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) == -1]:
        raise SandboxMissing(f"libseccomp is too old to refuse {', '.join(unknown)}: 2.5.2 or later is needed")
    calls = seccomp.SyscallFilter(seccomp.ALLOW)
    refuse = seccomp.ERRNO(errno.EPERM)
    for name in _REFUSED:
        calls.add_rule(refuse, name)
    for flag in _NEW_NAMESPACES:
        calls.add_rule(refuse, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    calls.add_rule(refuse, "socket", seccomp.Arg(0, seccomp.GT, _AF_INET6))
    calls.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        calls.export_bpf(file)
        file.seek(0)
        return file.read()


def own_user() -> int | None:
    """Returns a user id that nothing else on the machine has, drawn anew for each sandbox; None for an ordinary user,
    whose sandboxes have a user namespace each.

    The kernel counts processes by user and user namespace, and exempts root.
    """
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
    interpreter, base = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    user = own_user()
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
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", name, name]
    for disk in ("/dev/shm", "/tmp"):
        command += ["--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", disk]
    if not base.is_relative_to("/usr"):
        for folder in reversed(base.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(folder)]
        command += ["--ro-bind", str(base), str(base)]
    command += ["--perms", "0444", "--file", str(program_fd), PROGRAM]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    command += ["--setenv", "PATH", f"{interpreter.parent}:/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
    command += ["--setenv", "LANG", "C.UTF-8", "--setenv", "MALLOC_ARENA_MAX", "2", "--"]
    if user is not None:
        command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=-all"]
    command += ["prlimit", *(f"--{name}={value}" for name, value in kernel_limits(limits).items()), "--core=0"]
    command += ["--memlock=0", "--msgqueue=0", "sh", "-c", f'exec "$@" </dev/fd/{stdin_fd}', "sh"]
    return [*command, str(interpreter), "-I", "-B", PROGRAM]


def kernel_limits(limits: Limits) -> dict[str, int]:
    """Returns what the kernel itself keeps, by the names of `prlimit` and `resource`. Two processes more than allowed,
    of which one may be bubblewrap's: that there are too many is seen from outside then."""
    return {
        "as": limits.memory_bytes,
        "cpu": int(limits.cpu_s) + 1,
        "fsize": limits.file_bytes,
        "nofile": limits.open_files,
        "nproc": limits.processes + 2,
    }
