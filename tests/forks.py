"""Programs of this environment in forks of one process that has imported torch and fairseq.

Such a program would take six seconds to start, and the tests start hundreds. A folder of stand-ins
(`python`, `fairseq-train`, ...) takes the place of the environment's bin/: each sends arguments,
folder, environment and open files to that process, and ends as the fork ends that runs them. What
is tested is a process as any other, but for the time that its imports would take; scripts that
start further programs find the stand-ins too. MULTIMAX_TEST_FORKS=0 starts each program by itself.
"""

import atexit
import fnmatch
import importlib
import json
import logging
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REAL = Path(sys.prefix) / "bin"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STAND_IN = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
order = json.dumps([sys.orig_argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(order).to_bytes(8, "big")], [0, 1, 2])
server.sendall(order)
for number in {signals}:
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = server.recv(1)
os._exit(status[0] if status else 1)
"""


def programs():
    """Return the folder of stand-ins for the environment's programs, which a server runs."""
    if os.environ.get("MULTIMAX_TEST_FORKS") == "0" or not hasattr(os, "pidfd_open"):  # Linux
        return REAL
    folder = Path(tempfile.mkdtemp(prefix="forks"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "socket")
    (folder / "bin").mkdir()
    names = [p.name for p in REAL.iterdir() if p.name.startswith(("fairseq-", "multimax-"))]
    for name in ("python", "python3", "sacrebleu", *names):
        text = STAND_IN.format(
            python=sys.executable, address=address, signals=[int(n) for n in FORWARDED]
        )
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    # Orders wait in it until the server is there, which starts with the first of them.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        # Programs have sys.stdout of the server: of a pipe, it does not seek.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__, str(number)]
        server = subprocess.Popen(command, pass_fds=[number], **pipes)
    atexit.register(server.communicate)  # which ends it
    return folder / "bin"


# --- the server -----------------------------------------------------------------------------------


def serve(listener):
    """Accept orders until whoever started this process is gone."""
    if not has_order(listener):
        return
    import_what_programs_need()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks below
    while has_order(listener):
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            take(connection)
        connection.close()


def has_order(listener):
    """Wait for an order, or for the end of whoever started this process."""
    ready, _, _ = select.select([listener, sys.stdin], [], [])
    return listener in ready


def import_what_programs_need():
    # Not fairseq_cli, whose modules set up logging, nor our models, which --user-dir imports.
    names = "fairseq.models fairseq.tasks fairseq.trainer hydra.experimental sacrebleu"
    # What torch's optimizers and fairseq's trainer import when they are first used.
    names += " torch._dynamo fairseq.quantization_utils omegaconf._impl"
    for name in f"{names} multimax_fairseq.compat".split():
        importlib.import_module(name)
    # A program sets up logging by itself, before it imports fairseq.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def take(connection):
    """Run one order in a fork, forward signals to it, and send its exit status back."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    order = b""
    while len(order) < int.from_bytes(size, "big"):
        order += connection.recv(1 << 16)
    program = os.fork()
    if program == 0:
        os.setpgid(0, 0)
        connection.close()
        become(*json.loads(order), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        numbers = connection.recv(16) if connection in ready else b""
        # A stand-in that was killed takes its program with it, and that its own stand-ins.
        for number in numbers or [signal.SIGKILL]:
            os.killpg(program, number)
        if not numbers:
            os._exit(1)
    _, status = os.waitpid(program, 0)
    code = os.waitstatus_to_exitcode(status)
    connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


# --- the program ----------------------------------------------------------------------------------


def become(arguments, folder, environment, files):
    """Be the program that was asked for, from its start to its exit status."""
    import numpy
    import torch

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)
    # It is ignored if the tests run in a shell's background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if pattern := environment.get("MULTIMAX_TEST_WAITS"):
        wait_after(pattern)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    sys.path[0] = ""
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        sys.executable = str(Path(arguments[0]).parent / "python")
        run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int):
        if code is not None:
            print(code, file=sys.stderr)
        code = int(code is not None)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code & 0xFF)


def wait_after(pattern):
    """Have the program wait for a signal once it has put such a file in its place."""
    replace = os.replace

    def waiting(source, target):
        replace(source, target)
        if fnmatch.fnmatch(str(target), pattern):
            time.sleep(1000)

    os.replace = waiting


def run(arguments):
    """Run a program's script, or what an interpreter is given."""
    program, *rest = arguments
    if not Path(program).name.startswith("python"):
        script = REAL / Path(program).name
        sys.argv = [str(script), *rest]
        runpy.run_path(str(script), run_name="__main__")
        return
    while rest and rest[0][0] == "-" and rest[0] not in ("-c", "-m", "-"):
        rest.pop(0)
    if rest[:1] == ["-m"]:
        sys.argv = rest[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    if rest[:1] == ["-c"]:
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), vars(module))
    elif rest[:1] in ([], ["-"]):
        sys.argv = rest or [""]
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), vars(module))
    else:
        sys.argv = rest
        sys.path[0] = str(Path(rest[0]).resolve().parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
