"""Applies compat.py in every fairseq command, with or without --user-dir.

Run by multimax_fairseq_startup.pth at the start of a Python process whose command line names
fairseq (and of the processes that such a one spawns); all other processes never read this file.
"""

import importlib.util
import logging
import os
import sys


class _OnFairseqCommand:
    """An import finder that finds nothing: it waits for the first import of fairseq_cli."""

    def find_spec(self, name, path=None, target=None):
        if name == "fairseq_cli":
            sys.meta_path.remove(self)
            try:
                _apply()
            except Exception as error:  # the command itself may still work, or say more
                print(f"multimax_fairseq: compat.py was not applied: {error!r}", file=sys.stderr)
        return None


def _apply():
    # By file path and under a name of its own: with multimax_fairseq already in sys.modules,
    # fairseq's --user-dir would take the plugin for loaded and skip its models.
    path = os.path.join(os.path.dirname(__file__), "compat.py")
    spec = importlib.util.spec_from_file_location("_multimax_fairseq_compat", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The command sets up logging before it imports fairseq, and so does fairseq itself: whoever
    # comes first wins. Here fairseq comes first, so what it sets up is taken back.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.INFO)
    try:
        spec.loader.exec_module(module)
        module.apply()
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)


# Python reads a virtual environment's .pth files twice.
if not any(type(finder).__name__ == _OnFairseqCommand.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _OnFairseqCommand())
