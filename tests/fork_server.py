"""A fork server: runs the environment's programs in forks of one process that imported PyTorch.

The tests start hundreds of programs; importing PyTorch and fairseq takes each about six seconds.
The server process imports both once. A folder of stand-ins (`python`, `fairseq-train`, ...) comes
first in PATH. A stand-in sends its arguments, folder, environment and open files to the server,
which runs the program in a fork; the stand-in ends with the fork's exit status. Scripts that start
further programs find the stand-ins too. MULTIMAX_TEST_FORKS=0 starts each program normally.
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
request = json.dumps([sys.orig_argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
server.sendall(request)
for number in {signals}:
    signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = server.recv(1)
os._exit(status[0] if status else 1)
"""


def programs():
    """Start the server; return the folder of the stand-ins for the environment's programs."""
    if os.environ.get("MULTIMAX_TEST_FORKS") == "0" or not hasattr(os, "pidfd_open"):  # Linux
        return REAL
    folder = Path(tempfile.mkdtemp(prefix="fork-server"))
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
    # Requests wait in the socket until the server runs. Its imports begin at the first request.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        # Programs inherit the server's sys.stdout. A pipe cannot seek, as with a real program.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__, str(number)]
        server = subprocess.Popen(command, pass_fds=[number], **pipes)
    atexit.register(server.communicate)  # closes its stdin, which ends it
    return folder / "bin"


# --- the server -----------------------------------------------------------------------------------


def serve(listener):
    """Accept requests until the parent process ends."""
    if not has_request(listener):
        return
    import_what_programs_need()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the forks below are not awaited
    while has_request(listener):
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            handle(connection)
        connection.close()


def has_request(listener):
    """Wait for a request or for the end of the parent; return whether there is a request."""
    ready, _, _ = select.select([listener, sys.stdin], [], [])
    return listener in ready


def import_what_programs_need():
    # Not fairseq_cli, whose modules set up logging, and not our models, which --user-dir imports.
    names = "fairseq.models fairseq.tasks fairseq.trainer hydra.experimental sacrebleu"
    # Modules that PyTorch's optimizers and fairseq's trainer import at their first use.
    names += " torch._dynamo fairseq.quantization_utils omegaconf._impl"
    names += " multimax_fairseq.compat multimax_fairseq.api multimax_fairseq.statistics"
    for name in f"{names} quick_compose".split():
        importlib.import_module(name)
    # Parse the options of training and generation once; most keep these values.
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    for parser, words in (
        (options.get_training_parser(), ["data", "--arch", "transformer"]),
        (options.get_generation_parser(), ["data", "--path", "model"]),
    ):
        convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))
    sys.dont_write_bytecode = False  # else each program compiles the modules anew
    # Each program sets up logging itself, before it imports fairseq.
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)


def handle(connection):
    """Run one request in a fork, forward signals to it and send its exit status back."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = b""
    while len(request) < int.from_bytes(size, "big"):
        request += connection.recv(1 << 16)
    program = os.fork()
    if program == 0:
        os.setpgid(0, 0)
        connection.close()
        become(*json.loads(request), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        numbers = connection.recv(16) if connection in ready else b""
        # The stand-in was killed: kill its program, and with it the program's own stand-ins.
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
    """Run the requested program in this process and exit with its status."""
    import numpy
    import torch

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)
    if pattern := environment.get("MULTIMAX_TEST_WAITS"):
        wait_after(pattern)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    sys.path[0] = ""
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = given
    if any(Path(path, "sitecustomize.py").exists() for path in given):
        sys.modules.pop("sitecustomize", None)  # the server's own
        importlib.import_module("sitecustomize")
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
    """Make the program sleep after os.replace has moved a file to a path that matches."""
    replace = os.replace

    def waiting(source, target):
        replace(source, target)
        if fnmatch.fnmatch(str(target), pattern):
            time.sleep(1000)

    os.replace = waiting


def run(arguments):
    """Run a program's script, or the interpreter's -c, -m, file or standard input."""
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
