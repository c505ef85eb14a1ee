"""What a checkpoint must hold before fairseq builds anything of it.

torch's protection keeps a file from naming code. It does not ask whether what is in it is a
checkpoint: numbers that are none, settings that never end, options that fairseq would evaluate.
"""

import argparse
import ast
import importlib
import numbers
import re
import reprlib
import sys

import torch

from multimax_fairseq.compat.patch import command

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Far above what a run of fairseq has: single values, and letters, beside its parameters; how deep
# they lie; layers, where the parameters are fewer than that; widths and lengths.
MOST_VALUES, DEEPEST, MOST_LAYERS, WIDEST = 500_000, 30, 1000, 1 << 20
SIZES = re.compile(r"\w*_(layers|dim|size|positions|heads)")


def unwrapped(parameters):
    """Return {name: parameter} without what a wrapper for several GPUs begins all names with."""
    return {name.removeprefix("module."): value for name, value in parameters.items()}


def refuse(state):
    """Raise ValueError, with what is wrong and the remedy, for a state that is no checkpoint."""
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError("it has no parameters of a model; give a file that fairseq-train wrote")
    for name in ("cfg", "args", "extra_state", "task_state"):
        value = state.get(name)
        if value is not None and not isinstance(value, dict | argparse.Namespace):
            raise ValueError(
                f"its {name} is of the type {type(value).__name__}; give a file that "
                "fairseq-train wrote"
            )
    history = state.get("optimizer_history", [{}])
    if not isinstance(history, list) or not history or not isinstance(history[-1], dict):
        raise ValueError("its optimizer_history is empty or no list; get the file again")
    extra = state.get("extra_state") or {}
    where = extra.get("train_iterator", {})
    where = where if isinstance(where, dict) else {"epoch": where}
    counts = {name: where.get(name, 0) for name in ("epoch", "iterations_in_epoch")}
    counts["num_updates"] = history[-1].get("num_updates", 0)
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"its {name} is {reprlib.repr(count)}; get the file again")
    best = extra.get("best")
    if best is not None and not isinstance(best, numbers.Real | torch.Tensor):
        raise ValueError(f"its best value is {reprlib.repr(best)}; get the file again")
    for name, value in state["model"].items():
        _refuse_parameter(name, value)
    _refuse_values({name: value for name, value in state.items() if name != "model"})
    for name in ("args", "cfg"):
        _refuse_sizes(state.get(name), state["model"])


def _refuse_parameter(name, value):
    """Raise ValueError for what is no tensor of plain numbers that are all there, and finite."""
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise ValueError(
            f"its parameter {reprlib.repr(name)} is of the type {type(value).__name__}; give a "
            "file that fairseq-train wrote"
        )
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        kind = "quantized" if value.is_quantized else f"{value.layout} on {value.device}"
        raise ValueError(f"its parameter {name} is {kind}; give a file that fairseq-train wrote")
    if value.dtype not in FLOATS + WHOLE:
        raise ValueError(
            f"its parameter {name} has numbers of {value.dtype}; convert them to torch.float32"
        )
    # A stride of 0 makes a tensor of any size out of one number.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ValueError(
            f"its parameter {name} of shape {list(value.shape)} is larger than what is stored of "
            "it; get the file again"
        )
    # A sink, and what masks, may be -inf. NaN goes through the largest value.
    if value.dtype in FLOATS and value.numel() and not value.amax() < torch.inf:
        raise ValueError(
            f"its parameter {name} has numbers that are not finite; give a checkpoint of before "
            "the training went wrong"
        )


def _refuse_values(values):
    """Raise ValueError for values without end, or that OmegaConf would resolve."""
    left, waiting = MOST_VALUES, [("", values, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, list | tuple):
            inner = ((name, item) for item in value)
        else:
            inner = ()
            left -= len(value) if isinstance(value, str) else 1
        left -= 1
        if left < 0 or depth > DEEPEST:
            raise ValueError(
                "its values are nested without end, or too many; get a file from a source that "
                "you trust"
            )
        if isinstance(value, str) and re.search(r"\$\{[^}]*:", value):  # ${oc.env:HOME}
            raise ValueError(
                f"its option {name} calls a resolver of OmegaConf, {reprlib.repr(value)}; get a "
                "file from a source that you trust"
            )
        waiting += ((key, item, depth + 1) for key, item in inner)


def literal(text):
    """Return the value of a Python literal; takes the place of eval() in fairseq.

    Lists may be added and repeated, as in "[(512, 3)] * 20", the layers of a stock model.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"{reprlib.repr(text)} is no Python literal: write a number, tuple, list or dictionary"
        ) from None


def _value(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, list) and isinstance(right, int) and len(left) * right <= MOST_LAYERS:
            return left * right
    return ast.literal_eval(node)


def evaluate_literals():
    """fairseq runs eval() on settings of a checkpoint or a command line, such as adam_betas.

    Each loaded module of fairseq gets `literal` under the name eval. Can go when fairseq calls
    ast.literal_eval.
    """
    if command() in ("fairseq-eval-lm", "fairseq-validate"):  # whose own modules call it too
        importlib.import_module("fairseq_cli." + command()[len("fairseq-") :].replace("-", "_"))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli"):
            module.eval = literal


def _refuse_sizes(options, model):
    """Raise ValueError for sizes that the parameters belie: to build such a model takes forever."""
    settings = getattr(options, "model", options.get("model") if isinstance(options, dict) else ())
    if isinstance(options, argparse.Namespace):
        settings = options
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    widest = max((max(value.shape, default=0) for value in model.values()), default=0)
    for name, value in settings.items() if isinstance(settings, dict) else ():
        kind = SIZES.fullmatch(name) if isinstance(name, str) else None
        if kind is None or not isinstance(value, int):
            continue
        if value > (max(len(model), MOST_LAYERS) if kind[1] == "layers" else max(widest, WIDEST)):
            raise ValueError(
                f"its setting {name} is {reprlib.repr(value)}, which its parameters do not bear "
                "out; get a file from a source that you trust"
            )
