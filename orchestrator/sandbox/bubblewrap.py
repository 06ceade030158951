"""The command line of bubblewrap: what a sandbox sees of the machine, and whether this machine can make one."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.sandbox.records import SandboxMissing

HOW_TO_INSTALL = "install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
WHY_NOT = (
    "bubblewrap needs namespaces of its own. As an ordinary user: user namespaces must be allowed "
    "(sysctl user.max_user_namespaces above 0; on Debian kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
    "kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for bwrap). In a container: run it with "
    "--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined, or use an external sandbox service"
)
_LIBRARIES = ("bin", "sbin", "lib", "lib32", "lib64")
_INSIDE = Path(__file__).with_name("inside.py")
_USERS = (0x70000000, 0x7FFFFFF0)
"""User ids that nothing hands out, for sandboxes that root starts."""


def find_bubblewrap() -> str:
    """Path of `bwrap`. Raises `SandboxMissing` where there is none."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxMissing(f"untrusted code runs only inside bubblewrap, and there is no 'bwrap': {HOW_TO_INSTALL}")
    return found


@dataclass(frozen=True, slots=True)
class Users:
    """Who the programs are.

    The kernel counts processes for each user of each user namespace, and exempts root. An ordinary user's sandboxes
    have a user namespace each. Root's sandboxes become one user id each, of which nothing else on the machine runs.
    """

    first: int
    """The first of the ids; -1 for an ordinary user."""
    how_many: int

    @property
    def namespaces(self) -> bool:
        """Whether each sandbox has a user namespace of its own."""
        return self.first < 0

    def numbers(self) -> Iterator[int]:
        """An id for each sandbox, from a random one on, so that two programs on one machine hardly meet."""
        offset = secrets.randbelow(self.how_many)
        while True:
            yield self.first + offset
            offset = (offset + 1) % self.how_many


def users_here(user: int | None = None, id_map: str | None = None) -> Users:
    """How sandboxes that this user starts are told apart."""
    user = os.geteuid() if user is None else user
    id_map = Path("/proc/self/uid_map").read_text() if id_map is None else id_map
    inside, _, num = max((tuple(map(int, line.split())) for line in id_map.splitlines()), key=lambda row: row[2])
    if user != 0 or inside + num < 65536:
        return Users(-1, 1)
    first, last = _USERS
    if inside + num > last:
        return Users(first, last - first)
    return Users(inside + num - 4096, 4096)


def packages_inside(how_many: int) -> list[Path]:
    """Where the folders with packages are, seen from inside."""
    return [Path(f"/sandbox/packages/{number}") for number in range(how_many)]


def command_line(
    bubblewrap: str,
    *,
    own_namespace: bool,
    user: int,
    disk_bytes: int,
    python_path: tuple[Path, ...],
    filter_fd: int,
    info_fd: int,
) -> list[str]:
    """The whole command: namespaces, what is visible, the filter of system calls, and the first process.

    Visible are `/usr` with its libraries, the interpreter and `python_path`, read-only, and nothing else of the
    machine: neither `/etc` nor `/home` nor `/sys` nor other processes.
    """
    # Not --die-with-parent: killed in the wrong moment, bubblewrap leaves a process behind that waits for it for ever.
    # The first process inside ends when the socket to us does, and everything else with it.
    interpreter, base = Path(os.path.realpath(sys.executable)), Path(os.path.realpath(sys.base_prefix))
    command = [bubblewrap, "--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--hostname", "sandbox", "--seccomp", str(filter_fd), "--info-fd", str(info_fd)]
    if own_namespace:
        command += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for library in (Path("/", name) for name in _LIBRARIES):
        if library.is_symlink():
            command += ["--symlink", str(library.readlink()), str(library)]
        elif library.is_dir():
            command += ["--ro-bind", str(library), str(library)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):
        command += ["--ro-bind-try", name, name]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for disk in ("/dev/shm", "/tmp"):
        command += ["--size", str(disk_bytes), "--perms", "1777", "--tmpfs", disk]
    visible = {_INSIDE: Path("/sandbox/inside.py")}
    visible |= dict(zip(python_path, packages_inside(len(python_path)), strict=True))
    if not base.is_relative_to("/usr"):
        visible[base] = base
    for folder in sorted({parent for place in visible.values() for parent in place.parents}):
        if str(folder) not in ("/", "/tmp"):
            command += ["--perms", "0755", "--dir", str(folder)]
    for path, place in visible.items():
        command += ["--ro-bind", str(path), str(place)]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in {
        "PATH": f"{interpreter.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "2",
        "PYTHONDONTWRITEBYTECODE": "1",
    }.items():
        command += ["--setenv", name, value]
    return [*command, str(interpreter), "-I", "-S", "-B", "/sandbox/inside.py", "-" if own_namespace else str(user)]
