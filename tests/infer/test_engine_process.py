"""An engine's process: that it ends with its server, however it was started, and when it may be forked."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from grpo.infer.engine_process import FollowServer

SPAWNED = """
import os, pickle, subprocess, sys, threading, time
from grpo.infer.engine_process import FollowServer
code = '''
import pickle, sys, time
pickle.load(sys.stdin.buffer)
print("ready", flush=True)
sys.stdin.readline()
print("lives", flush=True)
time.sleep(250)
'''
children = []
def start():
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pickle.dump(FollowServer(os.getpid()), child.stdin)
    child.stdin.flush()
    child.stdout.readline()
    children.append(child)
start()
thread = threading.Thread(target=start)
thread.start()
thread.join()
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.01)
for child in children:
    child.stdin.write(bytes([10]))
    child.stdin.flush()
    assert child.stdout.readline() == b"lives" + bytes([10])
print(*(child.pid for child in children), flush=True)
time.sleep(250)
"""
FORKED = """
import multiprocessing, os, socket, time
from grpo.infer.engine_process import FollowServer
own = socket.create_server(("127.0.0.1", 0))
follow = FollowServer(os.getpid())
follow.at_forks([own])
def engine():
    print(os.getpid(), own.fileno(), flush=True)
    time.sleep(250)
multiprocessing.get_context("fork").Process(target=engine).start()
time.sleep(250)
"""
REASONS = """
import os, threading
from grpo.infer.engine_process import METHOD, choose_fork
loaded = next(line.split()[5] for line in open("/proc/self/maps") if "libc.so" in line)
os.environ["LD_PRELOAD"] = loaded
os.environ[METHOD] = "spawn"
choose_fork()
print(os.environ[METHOD])
os.environ[METHOD] = "spawn"
os.environ["LD_PRELOAD"] = f"/nowhere/libtcmalloc.so:{loaded}"
choose_fork()
print(os.environ[METHOD])
os.environ["LD_PRELOAD"] = ""
ended = threading.Event()
threading.Thread(target=ended.wait).start()
choose_fork()
print(os.environ[METHOD])
ended.set()
"""

THREADS = """
import os, sys
from types import ModuleType
server = ModuleType("grpo.infer.server")
def run(settings):
    import numpy, torch
    print(torch.get_num_threads(), len(os.listdir("/proc/self/task")), os.environ["OMP_WAIT_POLICY"], flush=True)
    return 0
server.run = run
sys.modules["grpo.infer.server"] = server
from grpo.infer.cli import main
main()
"""


def all_end_when_killed(server: subprocess.Popen[bytes], *children: int) -> bool:
    processes = [psutil.Process(child) for child in children]
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert server.stdout is not None
    server.stdout.close()
    _, left = psutil.wait_procs(processes, timeout=60)
    return all(one.status() == psutil.STATUS_ZOMBIE for one in left)


def test_processes_that_receive_the_servers_configuration_end_with_it_and_not_with_their_starting_thread() -> None:
    server = subprocess.Popen([sys.executable, "-c", SPAWNED], stdout=subprocess.PIPE)
    assert server.stdout is not None
    children = [*map(int, server.stdout.readline().split())]
    assert len(children) == 2
    assert all_end_when_killed(server, *children)


def test_a_forked_process_ends_when_the_server_is_killed_and_has_no_hand_on_its_sockets() -> None:
    server = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE)
    assert server.stdout is not None
    pid, descriptor = map(int, server.stdout.readline().split())
    assert descriptor == -1
    assert all_end_when_killed(server, pid)


def test_the_engine_is_forked_unless_threads_or_libraries_would_be_missing() -> None:
    done = subprocess.run([sys.executable, "-c", REASONS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["fork", "spawn", "spawn"], (
        "as it is, to be started with another library, with 2 threads"
    )


def test_the_server_computes_with_as_many_threads_as_its_settings_say_and_starts_none_before_its_engine() -> None:
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    environment.pop("OMP_WAIT_POLICY", None)
    environment |= {"OPENBLAS_NUM_THREADS": "3", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", THREADS, "--model", "m", "--num_threads", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    assert done.stdout.decode() == "2 1 passive\n"


def test_compiled_models_with_and_without_noise_are_not_taken_for_each_other() -> None:
    follows = [pickle.loads(pickle.dumps(FollowServer(os.getpid(), norm_noise))) for norm_noise in (False, True)]
    assert [one.norm_noise for one in follows] == [False, True]
    assert follows[0].compute_hash() != follows[1].compute_hash()
