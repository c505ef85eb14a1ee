"""Makes a test module's calls in a process of their own, and says how each of them ended.

The process names a call before it makes it. One that ends the process, or does not end, is one call
that failed; the next process begins behind it. A file's functions run in a fresh process as well.
"""

import faulthandler
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

TESTS = Path(__file__).resolve().parent
HANGS_AFTER = 60  # seconds
MAX_PROCESSES = 10
BACKENDS = ("auto", "plain", "cpp")


def child(calls):
    """In that process: make calls, (backend, function) each, from the index in the command line on.

    A function returns what is to be said of its call: anything that JSON holds. Backend "kernels"
    is for what only the compiled kernels have.
    """
    from multimax_fairseq.ops import native

    warnings.simplefilter("ignore")
    kernels = native.library() is not None
    for index, (backend, call) in enumerate(calls):
        if index < int(sys.argv[1]):
            continue
        os.environ["MULTIMAX_BACKEND"] = "auto" if backend == "kernels" else backend
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        print(json.dumps(["begin", index]), flush=True)
        outcome = call() if kernels or backend in ("auto", "plain") else None
        print(json.dumps(["end", index, outcome]), flush=True)


def outcomes(module):
    """What `child` of a test module said: (done, gone), each by the index of a call.

    done: what the call's function returned, None where it needs kernels that this machine has not;
    gone: the last words of the process that the call ended.
    """
    done, gone, start = {}, {}, 0
    paths = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for _ in range(MAX_PROCESSES):
        process = subprocess.run(
            [sys.executable, module, str(start)], env=environment, capture_output=True, text=True
        )
        lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
        done |= {line[1]: line[2] for line in lines if line[0] == "end"}
        if process.returncode == 0 and lines[-1][0] == "end":
            break
        assert lines and lines[-1][0] == "begin", process.stderr[-3000:]
        start = lines[-1][1]
        gone[start] = f"the process ended with {process.returncode}: {process.stderr[-1500:]}"
        start += 1
    return done, gone


def run_functions(prefix, tmp_path, file, **environment):
    """Collect a file's functions of that prefix in a fresh process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-o", f"python_functions={prefix}_*", str(file)]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
