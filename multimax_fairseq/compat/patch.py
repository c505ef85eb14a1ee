"""Wraps functions of fairseq, and names the fairseq command of this process."""

import functools
import inspect
import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The prefix of the names of --monitor-interval's values: see running.progress_lines().
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


def wrap(owner, name, make):
    """Replace owner.name by make(owner.name). Only one `make` may wrap a function."""
    original = getattr(owner, name)
    if hasattr(original, "_wrapped_by"):
        assert original._wrapped_by == make.__qualname__, f"{name} is wrapped twice"
        return
    wrapper = functools.wraps(original)(make(original))
    wrapper._wrapped_by = make.__qualname__
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        wrapper = staticmethod(wrapper)
    setattr(owner, name, wrapper)


def replace(owner, name):
    """Decorate f(original, *args, **kwargs), which replaces owner.name."""

    def decorate(function):
        def make(original):
            return lambda *args, **kwargs: function(original, *args, **kwargs)

        make.__qualname__ = function.__qualname__
        wrap(owner, name, make)
        return function

    return decorate
