"""Replaces functions of fairseq, and names the fairseq command of this process."""

import functools
import inspect
import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Prefix of the values that --monitor-interval logs; see running.progress_lines().
MONITOR = "monitor/"
COMMANDS = tuple(
    f"fairseq-{name}"
    for name in "eval-lm generate hydra-train interactive preprocess score train validate".split()
)


def command():
    """Return the fairseq command of this process, such as "fairseq-train"; None for any other."""
    folder, program = os.path.split(sys.argv[0])
    name = os.path.splitext(program)[0]
    if os.path.basename(folder) == "fairseq_cli":  # python -m fairseq_cli.train
        name = "fairseq-" + name.replace("_", "-")
    return name if name in COMMANDS else None


def replace(owner, name):
    """Decorate f(original, *args, **kwargs), which replaces owner.name. Only one f may do so."""

    def decorate(function):
        original = getattr(owner, name)
        if hasattr(original, "_replaced_by"):
            assert original._replaced_by == function.__qualname__, f"{name} is replaced twice"
            return function

        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        replacement._replaced_by = function.__qualname__
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
        return function

    return decorate
