"""Runs our commands and scripts: a user's mistake ends in one sentence, as in fairseq's."""

import contextlib
import logging
import os
import signal
import sys

from multimax_fairseq.children import exit_on_signals
from multimax_fairseq.compat.mistakes import error_message, explain, wants_traceback
from multimax_fairseq.errors import STOPPED

# Packages of the extra "analysis"; all others belong to "fairseq".
ANALYSIS_PACKAGES = ("jinja2", "matplotlib", "pandas")


@contextlib.contextmanager
def program(name, resumes=False):
    """Run the body of a command called `name`; `resumes` if the same command continues its work.

    Exit status: 1 for a mistake; 128 + the signal's number for SIGINT, SIGTERM, SIGHUP and a closed
    pipe.
    """
    # fairseq logs missing packages for speech synthesis when it is imported.
    for package in ("fairseq", "multimax_fairseq"):
        logging.getLogger(package).setLevel(logging.WARNING)
    try:
        with exit_on_signals():
            yield
            sys.stdout.flush()
    except BrokenPipeError:  # such as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        if resumes:
            print(f"\n{STOPPED}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        text = explain(error) or missing_package(error)
        if text is None and isinstance(error, OSError):
            text = str(error)
        if text is None or wants_traceback():
            raise
        sys.exit(error_message(name, text))


def missing_package(error):
    """Return a sentence about a package that is not installed; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = str(error.name).partition(".")[0]
    if package == "multimax_fairseq":
        return None
    extra = "analysis" if package in ANALYSIS_PACKAGES else "fairseq"
    return f"the package {package} is missing: pip install 'multimax-fairseq[{extra}]'"
