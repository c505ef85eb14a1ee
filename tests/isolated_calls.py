"""Makes a test module's calls in a subprocess, so that a crash or a hang fails one call only.

The subprocess prints the index of a call before the call begins. If the call crashes or hangs, the
next subprocess continues with the call after it.
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
    """In the subprocess: make the calls, from the index in the command line on.

    Args:
        calls: (backend, function) pairs. The function's return value is the outcome; it must be
            JSON serialisable. The backend "kernels" requires the compiled kernels.
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
    """Run a test module's `child` in subprocesses; return (done, gone), two dicts by call index.

    done: the outcome of a call; None if it needs compiled kernels and there are none.
    gone: for a call that ended its process, the end of that process's standard error.
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
