"""How fairseq is patched, and which of its commands this process is."""

import functools
import inspect
import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What the names of a model's own figures begin with: see progress_lines().
MONITOR = "monitor/"
COMMANDS = tuple(
    f"fairseq-{name}"
    for name in "eval-lm generate hydra-train interactive preprocess score train validate".split()
)


def command():
    """The fairseq command that this process is, such as "fairseq-train"; None for any other."""
    folder, program = os.path.split(sys.argv[0])
    name = os.path.splitext(program)[0]
    if os.path.basename(folder) == "fairseq_cli":  # python -m fairseq_cli.train
        name = "fairseq-" + name.replace("_", "-")
    return name if name in COMMANDS else None


def wrap(owner, name, make):
    """Replace owner.name by make(owner.name), once for each `make`."""
    original = getattr(owner, name)
    fixes = getattr(original, "_multimax", ())
    if make.__qualname__ in fixes:
        return
    wrapper = functools.wraps(original)(make(original))
    wrapper._multimax = (*fixes, make.__qualname__)
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        wrapper = staticmethod(wrapper)
    setattr(owner, name, wrapper)
