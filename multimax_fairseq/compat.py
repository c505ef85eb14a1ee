"""What fairseq 0.12.3 lacks under a current torch and numpy, and one sentence for a user's mistake.

One function a fix, each with its cause and when it can go; `apply()` runs them all, and running it
again changes nothing. models/__init__.py calls it under --user-dir, and startup.py in every fairseq
command: there this file is loaded by its path, beside the package, so it imports nothing of the
package, and the mark that something is patched sits on the patched object.
"""

import argparse
import ast
import atexit
import builtins
import contextlib
import contextvars
import functools
import inspect
import math
import os
import pickletools
import re
import sys
import types
import zipfile
from pickle import UnpicklingError

import numpy as np
import torch

PACKAGE = os.path.dirname(os.path.abspath(__file__))
OUR_FLAGS = ("--attention-normalizer", "--output-normalizer", "--multimax-")
OUR_NAMES = re.compile(r"[\w-]*multimax\w*|(attention|output)[_-]normalizer")


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one sentence with the remedy."""

    user_error = True  # the commands print the message alone: see explain()


class CheckpointError(UsageError):
    """A checkpoint file that is refused, damaged, or not fairseq's."""


def apply():
    """Make fairseq, as installed, work with the torch and numpy that are installed."""
    checkpoint_classes()
    checkpoint_errors()
    checkpoint_models()
    numpy_compat()
    token_blocks()
    last_batch()
    score_command()
    diverse_beams()
    impossible_words()
    precision_flags()
    user_dir()
    unknown_model()
    if command():
        plain_errors()


def command():
    """The fairseq command that this process is, such as "fairseq-train"; None for any other."""
    for argument in sys.orig_argv[1:6]:  # a few interpreter options may come before it
        folder, name = os.path.split(argument)
        if name.startswith("fairseq-"):
            return os.path.splitext(name)[0]
        if argument.startswith("fairseq_cli."):  # python -m fairseq_cli.train
            return "fairseq-" + argument.partition(".")[2].replace("_", "-")
        if os.path.basename(folder) == "fairseq_cli":
            return "fairseq-" + os.path.splitext(name)[0].replace("_", "-")
    return None


def _wrap(owner, name, make):
    """Replace owner.name by make(owner.name), once for all copies of this module."""
    original = getattr(owner, name)
    if getattr(original, "_multimax", False):
        return
    wrapper = functools.wraps(original)(make(original))
    wrapper._multimax = True
    if isinstance(inspect.getattr_static(owner, name), staticmethod):
        wrapper = staticmethod(wrapper)
    setattr(owner, name, wrapper)


# --- checkpoints ---------------------------------------------------------------------------------


class _PickledDtype:
    """Stands in for numpy.dtype in a checkpoint: a plain number type and nothing else."""

    def __init__(self, code, align=False, copy=True):
        if not re.fullmatch(r"[biufc]\d\d?", code):
            raise UnpicklingError(f"numpy.dtype({code!r}) is not a plain number type")
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        _version, order, subarray, names, fields = state[:5]
        if subarray is not None or names is not None or fields is not None:
            raise UnpicklingError("numpy.dtype with fields is not a plain number type")
        self.dtype = self.dtype.newbyteorder(order)


class _PickledArray(np.ndarray):
    """Stands in for numpy.ndarray in a checkpoint: plain numbers whose bytes fill its shape."""

    def __new__(cls):
        return np.ndarray.__new__(cls, (0,), np.uint8)

    def __setstate__(self, state):
        _version, shape, dtype, fortran, data = state
        dtype = dtype.dtype
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            raise UnpicklingError("numpy.ndarray whose bytes do not fill its shape")
        super().__setstate__((1, shape, dtype, fortran, data))

    def __reduce__(self):  # the next checkpoint holds an ordinary array
        return np.array(self).__reduce__()


def _pickled_array(subtype, shape, typecode):
    return _PickledArray()


def _pickled_scalar(dtype, data):
    return np.frombuffer(data, dtype.dtype, count=1)[0]


# Namespace: keeps attributes, runs nothing. numpy: arrays of counts (--eval-bleu) and single
# numbers. numpy's own classes are not harmless: a forged dtype makes numpy read wherever a
# checkpoint says, objects included. So the stand-ins above are allowed under numpy's names.
SAFE_GLOBALS = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _PickledDtype,
    "numpy.ndarray": _PickledArray,
    "numpy._core.multiarray._reconstruct": _pickled_array,
    "numpy._core.multiarray.scalar": _pickled_scalar,
    "numpy.core.multiarray._reconstruct": _pickled_array,  # written under numpy 1
    "numpy.core.multiarray.scalar": _pickled_scalar,
}


def checkpoint_classes():
    """torch 2.6 loads tensors and plain values only; fairseq's checkpoints hold a little more.

    Can go when fairseq's checkpoints hold plain values only. torch's protection stays on.
    """
    known = {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        for entry in torch.serialization.get_safe_globals()
    }
    torch.serialization.add_safe_globals(
        [(value, name) for name, value in SAFE_GLOBALS.items() if name not in known]
    )


def _raised_in_torch_load(error):
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "load" and code.co_filename == torch.serialization.__file__:
            return True
        trace = trace.tb_next
    return False


def _refused(error, path):
    """What torch would not load, by name; None if it stumbled over something that is no code."""
    known = re.search(r"GLOBAL (\S+)|function (\S+)|but got (<[^>]*>)|(numpy\.\S+)", str(error))
    if known:
        return next(filter(None, known.groups()))
    # Pickle protocols that torch does not read: list the opcodes, which runs none of them.
    strings = []
    try:
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                file = archive.open(member)
            else:
                file.seek(0)
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                    words = argument.split() if opcode.name == "GLOBAL" else strings[-2:]
                    if words[:1] not in (["torch"], ["collections"]):
                        return ".".join(words)
                elif isinstance(argument, str):
                    strings.append(argument)
    except (ValueError, StopIteration, IndexError, zipfile.BadZipFile):
        pass
    return None


def _is_code(text):
    """Whether a string calls something that fairseq's eval() would find."""
    try:
        tree = ast.parse(text.strip(), mode="eval") if "(" in text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call):
            root = node.func
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if not isinstance(root, ast.Name) or hasattr(builtins, root.id):
                return True
            fairseq = [m for name, m in sys.modules.items() if name.split(".")[0] == "fairseq"]
            if any(hasattr(module, root.id) for module in fairseq):
                return True
    return False


def _code_in_options(options, name=""):
    """The first option of a checkpoint that is code, as (name, value); None if there is none."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(options, DictConfig):
        options = OmegaConf.to_container(options, resolve=False)
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    if isinstance(options, dict):
        pairs = options.items()
    elif isinstance(options, list | tuple):
        pairs = ((name, value) for value in options)
    else:
        return (name, options) if isinstance(options, str) and _is_code(options) else None
    return next(filter(None, (_code_in_options(value, key) for key, value in pairs)), None)


def checkpoint_errors():
    """torch explains a refused or damaged file in a page that names neither file nor remedy.

    And options that fairseq keeps as text, such as adaptive_softmax_cutoff, it hands to eval():
    those of a checkpoint must not call anything. Can go when fairseq does both.
    """
    from fairseq import checkpoint_utils

    def make(original):
        def load_checkpoint_to_cpu(path, *args, **kwargs):
            try:
                state = original(path, *args, **kwargs)
                code = _code_in_options([state.get("args"), state.get("cfg")])
                if code:
                    raise CheckpointError(
                        f"'{path}' is refused: its option {code[0]} is code, {code[1]!r}; "
                        "get a file from a source that you trust."
                    )
                return state
            except CheckpointError:
                raise
            except Exception as error:
                if not _raised_in_torch_load(error):  # such as a missing file
                    if isinstance(error, (KeyError, TypeError, AttributeError)):
                        raise CheckpointError(
                            f"'{path}' is not a fairseq checkpoint ({type(error).__name__}: "
                            f"{error}); give a file that fairseq-train wrote."
                        ) from error
                    raise
                refused = isinstance(error, UnpicklingError) and _refused(error, path)
                if refused:
                    raise CheckpointError(
                        f"'{path}' is refused: it holds {refused}, which is no part of a "
                        "fairseq checkpoint and could run code; get a file from a source that "
                        "you trust."
                    ) from error
                raise CheckpointError(
                    f"'{path}' is damaged or incomplete; copy it again, or delete it and continue "
                    "from another one."
                ) from error

        return load_checkpoint_to_cpu

    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", make)


def checkpoint_models():
    """A model is not told whether it is built to be trained, or for the parameters of a checkpoint.

    So it cannot refuse a setting in training alone: see building_from_checkpoint(). Can go when
    fairseq hands `from_checkpoint`, which its tasks get, on to the models.
    """
    from fairseq import checkpoint_utils

    def make(original):
        building = contextvars.ContextVar("building_from_checkpoint", default=False)

        def load_model_ensemble_and_task(*args, **kwargs):
            token = building.set(True)
            try:
                return original(*args, **kwargs)
            finally:
                building.reset(token)

        checkpoint_utils.building_from_checkpoint = building
        return load_model_ensemble_and_task

    _wrap(checkpoint_utils, "load_model_ensemble_and_task", make)


def building_from_checkpoint():
    """Whether fairseq is loading a checkpoint's model."""
    from fairseq import checkpoint_utils

    return checkpoint_utils.building_from_checkpoint.get()  # there for all copies of this module


# --- numpy and data ------------------------------------------------------------------------------


def numpy_compat():
    """numpy 2 has no np.compat, and np.percentile no `interpolation`.

    TokenBlockDataset and LanguagePairDataset use np.compat.long, --num-batch-buckets the other.
    Can go when fairseq writes np.int64 and `method`.
    """
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)

    def make(original):
        def percentile(*args, **kwargs):
            if "interpolation" in kwargs:
                kwargs["method"] = kwargs.pop("interpolation")
            return original(*args, **kwargs)

        return percentile

    _wrap(np, "percentile", make)


def token_blocks():
    """TokenBlockDataset keeps its indices in the smallest unsigned type that seems to fit.

    numpy 2 computes in that type, so a block's `end - 2` wraps around when the end is 1; and the
    sizes of blocks of 65,536 tokens or more wrap under any numpy. Where the end is 1, a signed
    `end - 2` counts from the buffer's other end, so past targets come out too long. Can go when
    fairseq keeps int64 and cuts past targets.
    """
    from fairseq.data.token_block_dataset import TokenBlockDataset

    def make(original):
        def _build_slice_indices(*args, **kwargs):
            _, block_to_dataset_index, slice_indices = original(*args, **kwargs)
            slice_indices = slice_indices.astype(np.int64)
            sizes = slice_indices[:, 1] - slice_indices[:, 0]
            return sizes, block_to_dataset_index.astype(np.int64), slice_indices

        return _build_slice_indices

    def make_getitem(original):
        def __getitem__(self, index):
            item = original(self, index)
            if not self.include_targets:
                return item
            source, target, past_target = item
            return source, target, past_target[: len(target)]

        return __getitem__

    _wrap(TokenBlockDataset, "_build_slice_indices", make)
    _wrap(TokenBlockDataset, "__getitem__", make_getitem)


def last_batch():
    """fairseq drops the last batch unless --required-batch-size-multiple (8) divides its size.

    The batch holds the longest sentences; generation and validation lose them without a word
    (fairseq issue 5036). Training is left alone: one batch more would shuffle all of them
    otherwise, and a seed would no longer give stock fairseq's numbers; unless nothing is left. Can
    go when fairseq keeps the batch.
    """
    from fairseq.data import data_utils
    from fairseq.trainer import Trainer

    training = []

    def make_train_iterator(original):
        def get_train_iterator(*args, **kwargs):
            training.append(True)
            try:
                return original(*args, **kwargs)
            finally:
                training.pop()

        return get_train_iterator

    def make(original):
        def batch_by_size(indices, *args, **kwargs):
            if not isinstance(indices, np.ndarray):
                indices = np.fromiter(indices, dtype=np.int64)
            batches = original(indices, *args, **kwargs)
            # fixed_shapes reorders and may leave out by design; elsewhere batches are slices.
            if (training and batches) or kwargs.get("fixed_shapes") is not None:
                return batches
            kept = sum(map(len, batches))
            return [*batches, indices[kept:]] if kept < len(indices) else batches

        return batch_by_size

    _wrap(Trainer, "get_train_iterator", make_train_iterator)
    _wrap(data_utils, "batch_by_size", make)


# --- commands ------------------------------------------------------------------------------------


def score_command():
    """fairseq-score hands open files to sacrebleu, and three numbers to its own Scorer.

    sacrebleu 2 wants lists of lines (--sacrebleu); the Scorer wants a BleuConfig
    (--sentence-bleu). Can go when fairseq-score passes those.
    """
    import sacrebleu
    from fairseq.scoring import bleu

    def make_corpus_bleu(original):
        def corpus_bleu(hypotheses, references, *args, **kwargs):
            references = [r if r is None else list(r) for r in references]
            return original(list(hypotheses), references, *args, **kwargs)

        return corpus_bleu

    def make_init(original):
        def __init__(self, cfg, *numbers):
            if numbers:
                cfg = bleu.BleuConfig(pad=cfg, eos=numbers[0], unk=numbers[1])
            original(self, cfg)

        return __init__

    _wrap(sacrebleu, "corpus_bleu", make_corpus_bleu)
    _wrap(bleu.Scorer, "__init__", make_init)


def diverse_beams():
    """--diverse-beam-groups finds a sentence's row by its number in the data, not in the batch.

    So it stops at the first batch that holds a number past its size, or takes another sentence's
    row. Can go when fairseq passes the position in the batch.
    """
    from fairseq.search import DiverseBeamSearch

    def make(original):
        def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
            if original_batch_idxs is not None:
                if step == 0:
                    self.sentences = original_batch_idxs
                match = original_batch_idxs.unsqueeze(1) == self.sentences.unsqueeze(0)
                original_batch_idxs = match.long().argmax(dim=1)
            return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)

        return step

    _wrap(DiverseBeamSearch, "step", make)


def impossible_words():
    """Generation stops by an assertion where an end of sentence that is forced is impossible.

    A sparse output layer gives most words the score -inf; the end of sentence at the greatest
    length may be one of them, and with fewer possible words than beams the rest of the beam is
    -inf for good. In beam search alone, such words get a finite score below all others. Can go
    when fairseq ends such hypotheses.
    """
    from fairseq.sequence_generator import SequenceGenerator

    def make(original):
        def __init__(self, models, *args, **kwargs):
            original(self, models, *args, **kwargs)
            decoders = (getattr(model, "decoder", None) for model in self.model.models)
            if all(getattr(decoder, "output_normalizer", None) is None for decoder in decoders):
                return
            step = self.model.forward_decoder

            def forward_decoder(*args, **kwargs):
                log_probs, attention = step(*args, **kwargs)
                return log_probs.clamp(min=-1e4), attention

            self.model.forward_decoder = forward_decoder

        return __init__

    _wrap(SequenceGenerator, "__init__", make)


def precision_flags():
    """--fp16 without a GPU dies in the middle of a run, or is ignored; --bf16 means a TPU.

    fairseq converts what it cannot compute, and --bf16 makes it look for torch_xla. Can go when
    fairseq refuses the first, and reads --bf16 as it does common.bf16 in a YAML file.
    """
    from fairseq import options
    from fairseq.distributed import utils as distributed_utils

    def refuse_without_gpu(common, spelling):
        for name in ("fp16", "memory_efficient_fp16", "amp"):
            if getattr(common, name, False) and not torch.cuda.is_available():
                flag = spelling(name)
                raise UsageError(
                    f"{flag} needs a GPU and torch finds none; leave {flag} out, "
                    "or run where torch.cuda.is_available() is true."
                )

    def make_parse(original):
        def parse_args_and_arch(parser, input_args=None, *rest, **kwargs):
            parsed = original(parser, input_args, *rest, **kwargs)
            args = parsed[0] if isinstance(parsed, tuple) else parsed
            if "--tpu" not in (sys.argv if input_args is None else input_args):
                args.tpu = False
            refuse_without_gpu(args, lambda name: "--" + name.replace("_", "-"))
            return parsed

        return parse_args_and_arch

    def make_main(original):  # what fairseq-hydra-train comes to
        def call_main(cfg, main, **kwargs):
            refuse_without_gpu(cfg.common, lambda name: "common." + name)
            cfg.common.user_dir = _resolve(cfg.common.user_dir)  # spawned processes read it
            return original(cfg, main, **kwargs)

        return call_main

    _wrap(options, "parse_args_and_arch", make_parse)
    _wrap(distributed_utils, "call_main", make_main)


def _resolve(path):
    """--user-dir multimax_fairseq means this package, whatever the current folder."""
    if path is not None and not os.path.exists(path) and path == os.path.basename(PACKAGE):
        return PACKAGE
    return path


def user_dir():
    """A --user-dir that does not exist is reported as a path alone, without the option's name.

    Can go when fairseq names the option.
    """
    from fairseq import utils

    def make(original):
        def import_user_module(args):
            asked = getattr(args, "user_dir", None)
            if asked is not None:
                args.user_dir = _resolve(asked)
            try:
                return original(args)
            except FileNotFoundError as error:
                if error.errno is not None:  # from the module itself
                    raise
                raise UsageError(
                    f"--user-dir '{asked}' does not exist; for this plugin give {PACKAGE}"
                ) from error

        return import_user_module

    _wrap(utils, "import_user_module", make)


def unknown_model():
    """For a model that no loaded plugin defines, fairseq fails while it formats its message.

    Can go when fairseq's message (KeyError: "'_name'") names the model.
    """
    from fairseq import models

    def make(original):
        def build_model(cfg, *args, **kwargs):
            name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
            known = (models.ARCH_MODEL_REGISTRY, models.MODEL_DATACLASS_REGISTRY)
            if name and not any(name in registry for registry in known):
                raise UsageError(_hint(name) or f"there is no model '{name}'; {_LOAD_PLUGIN}")
            return original(cfg, *args, **kwargs)

        return build_model

    _wrap(models, "build_model", make)


# --- one sentence for a user's mistake -----------------------------------------------------------

_LOAD_PLUGIN = "load the plugin that defines it with --user-dir (common.user_dir in a YAML file)."
_MAKE_DATA = "give the folder that fairseq-preprocess (or a script of data-prep/) wrote."


def _hint(name):
    """What to do about a name that this plugin defines; None if it is loaded or not concerned."""
    if not OUR_NAMES.search(name) or "multimax_fairseq.models" in sys.modules:
        return None
    option = "common.user_dir=" if command() == "fairseq-hydra-train" else "--user-dir "
    return f"'{name}' belongs to the multimax_fairseq plugin; load it with {option}{PACKAGE}"


def _explain_os_error(error):
    if not isinstance(error, OSError):
        return None
    if match := re.match(r"Model file not found: (.*)", str(error)):
        return f"checkpoint '{match[1]}' does not exist; check --path."
    if match := re.match(r"Dataset not found: (\S+) \((.*)\)", str(error)):
        return (
            f"no split '{match[1]}' in '{match[2]}'; name one that is there (--gen-subset, "
            f"--valid-subset, --train-subset), or {_MAKE_DATA}"
        )
    path = error.filename
    if not isinstance(path, str):
        return None
    if isinstance(error, FileNotFoundError):
        folder, name = os.path.split(path)
        if re.fullmatch(r"dict\.(.*\.)?txt", name):
            if folder and not os.path.isdir(folder):
                return f"data folder '{folder}' does not exist; {_MAKE_DATA}"
            return f"no dictionary '{path}'; {_MAKE_DATA}"
        return f"'{path}' does not exist; check the path; for data, {_MAKE_DATA}"
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
        return f"cannot open '{path}' ({error.strerror}); check the path and its permissions."
    return None


def _explain_assertion(error):
    """fairseq's commands check their options with assert: the innermost frame is the command's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, AssertionError) and str(error) and trace is not None:
        folder = os.path.dirname(trace.tb_frame.f_code.co_filename)
        if os.path.basename(folder) == "fairseq_cli":
            return str(error)
    return None


def _explain_mismatch(error):
    text = str(error)
    if match := re.match(r"Cannot load model parameters from checkpoint (.*);", text):
        return (
            f"checkpoint '{match[1]}' does not fit this architecture or dictionary; use the "
            "options and data that it was trained with, or another --save-dir."
        )
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        detail = text.splitlines()[1].strip() if "\n" in text else text
        return (
            "the checkpoint does not fit this data folder or model; use the dictionaries and "
            f"options that it was trained with ({detail})"
        )
    return None


def _explain_name(error):
    """A name of this plugin where fairseq or hydra knows none such, or a key misspelt in a YAML."""
    kind = type(error).__name__
    hydra_kinds = ("MissingConfigException", "ConfigCompositionException", "ConfigKeyError")
    if kind == "KeyError" or kind in hydra_kinds:
        name = OUR_NAMES.search(str(error))
        if name and (hint := _hint(name[0])):
            return hint
    if kind == "ValidationError" and getattr(error, "full_key", None):
        return f"option '{error.full_key}': {str(error).splitlines()[0]}"
    if kind == "ConfigKeyError" and error.full_key and error.object_type:
        owner = error.object_type.__name__
        return f"there is no option '{error.full_key}' in {owner}; check its name."
    return None


def _explain_data(error):
    text = str(error)
    if text.startswith(("Size of sample #", "AdaptiveLoss is not compatible")):
        return text  # both name the option that helps
    if isinstance(error, KeyError) and error.args == (None,) and command() == "fairseq-validate":
        return "no task is given; add --task translation or --task language_modeling."
    if text.startswith("Could not infer language pair"):
        return (
            f"no translation data (train.de-en.de.idx or its like) in the data folder; {_MAKE_DATA}"
        )
    return None


def _explain_spawned(error):
    """A GPU's own process sends its traceback as text, which ends with our sentence."""
    if type(error).__name__ == "ProcessRaisedException":
        last = str(error).strip().splitlines()[-1]
        if match := re.match(r"_?multimax_fairseq[\w.]*: (.*)", last):
            return match[1]
    return None


_EXPLAIN = (
    _explain_os_error,
    _explain_assertion,
    _explain_mismatch,
    _explain_name,
    _explain_data,
    _explain_spawned,
)


def explain(error):
    """One sentence on what the user can mend; None if the error is not the user's.

    Equivalent to: str(e) of the first exception e behind `error` with `e.user_error`, else what
    fairseq's own exceptions are known to mean.
    """
    behind, seen = error, []
    while behind is not None and behind not in seen:
        if getattr(behind, "user_error", False):
            return " ".join(str(behind).split())
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    for rule in _EXPLAIN:
        if text := rule(error):
            return " ".join(text.split())
    return None


def _end(sentence):
    """Say it and end the process, which threads that still read data would make abort: the
    interpreter's end kills them inside of C++."""
    print(sentence, file=sys.stderr)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # nobody reads on
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def plain_errors():
    """A user's mistake ends in one sentence; MULTIMAX_TRACEBACK=1 keeps every traceback.

    fairseq's commands print a traceback for everything. Can go when they do not.
    """
    if os.environ.get("MULTIMAX_TRACEBACK", "0") not in ("", "0"):
        return
    name = command()

    def make_hook(original):
        def excepthook(kind, error, trace):
            text = explain(error)
            if text is None:
                original(kind, error, trace)
            else:
                _end(f"{name}: error: {text}")

        return excepthook

    def make_error(original):
        def error(self, message):
            value = re.search(r"invalid choice: '([^']*)'", message)
            words = [value[1]] if value else []
            if message.startswith("unrecognized arguments:"):
                words = [word for word in message.split() if word.startswith(OUR_FLAGS)]
            hint = next(filter(None, map(_hint, words)), None)
            if message.startswith(tuple(f"argument {flag}" for flag in OUR_FLAGS)):
                hint = message  # without the hundreds of lines of usage
            if hint:
                self.exit(2, f"{name}: error: {hint}\n")
            original(self, message)

        return error

    def make_report(original):
        def run_and_report(func):
            def reported():
                try:
                    return func()
                except Exception as error:
                    text = explain(error)
                    if text is None:
                        raise
                    _end(f"{name}: error: {text}")

            return original(reported)

        return run_and_report

    _wrap(sys, "excepthook", make_hook)
    _wrap(argparse.ArgumentParser, "error", make_error)
    if name == "fairseq-hydra-train":
        from hydra._internal import utils as hydra_utils

        _wrap(hydra_utils, "run_and_report", make_report)  # hydra reports errors by itself
