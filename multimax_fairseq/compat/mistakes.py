"""Common mistakes of users, each with the sentence that ends the command.

SETTINGS is checked before the command starts. ERRORS matches errors that fairseq raises. Any other
error keeps its traceback.
"""

import argparse
import atexit
import contextlib
import difflib
import os
import re
import string
import sys
import sysconfig
import traceback
from collections import defaultdict

import torch

from multimax_fairseq.compat.patch import PACKAGE, command, replace
from multimax_fairseq.errors import UsageError

PREPARED = "fairseq-preprocess and the scripts of data-prep/ write such a folder"
PLUGIN = f"load the plugin with --user-dir {PACKAGE} (common.user_dir in a YAML file)"
METRIC = "--best-checkpoint-metric {best_checkpoint_metric}"


def _has_no_gpu():
    return not torch.cuda.is_available()


def _is_other_pair(given):
    """Whether one language alone is given, which fairseq ignores, and does not fit the data."""
    source, target = given["source_lang"], given["target_lang"]
    if given["task"] != "translation" or (source is None) == (target is None):
        return False
    folder = str(given["data"]).split(os.pathsep)[0]
    names = os.listdir(folder) if os.path.isdir(folder) else ()
    # train.de-en.de.idx
    pairs = {part for name in names for part in name.split(".") if "-" in part}
    return not all(p.startswith(f"{source}-") or p.endswith(f"-{target}") for p in pairs)


# (whether the settings are mistaken, the sentence)
SETTINGS = [
    # Missing or foreign data, dictionary, checkpoint.
    (
        lambda given: (
            "path" in given
            and given["path"] is None
            and command() in ("fairseq-eval-lm", "fairseq-interactive", "fairseq-validate")
        ),
        "--path is missing: give a checkpoint, such as checkpoints/checkpoint_best.pt",
    ),
    (
        _is_other_pair,
        "--source-lang {source_lang} and --target-lang {target_lang} do not fit the data in "
        "'{data}': give both languages of it",
    ),
    # Names.
    (
        lambda given: given["config_file"] and not os.path.isfile(given["config_file"]),
        "there is no '{config_file}': check --config-dir and --config-name",
    ),
    # Lengths, batch size, save folder.
    (
        lambda given: (
            given["lr_scheduler"] == "polynomial_decay"
            and str(given["total_num_update"]) in ("None", "0")
        ),
        "--lr-scheduler polynomial_decay needs --total-num-update, the update at which the "
        "learning rate has decayed: add it",
    ),
    (
        lambda given: given["best_checkpoint_metric"] == "bleu" and given["eval_bleu"] is False,
        f"{METRIC} needs --eval-bleu: add it, or choose loss",
    ),
    (
        lambda given: (
            given["best_checkpoint_metric"] in ("accuracy", "bleu")
            and given["maximize_best_checkpoint_metric"] is False
        ),
        f"{METRIC} keeps the worst checkpoint, as a high value is good: add "
        "--maximize-best-checkpoint-metric",
    ),
    (
        lambda given: (
            given["best_checkpoint_metric"] in ("loss", "nll_loss", "ppl")
            and given["maximize_best_checkpoint_metric"]
        ),
        f"{METRIC} with --maximize-best-checkpoint-metric keeps the worst checkpoint: leave "
        "--maximize-best-checkpoint-metric out",
    ),
    (
        lambda given: (given["context_window"] or 0) > 0 and (given["num_workers"] or 0) > 1,
        "--context-window {context_window} takes the context from other text with --num-workers "
        "{num_workers}: give --num-workers 1",
    ),
    # A GPU flag without a GPU. fairseq sets fp16 itself for --memory-efficient-fp16.
    *(
        (
            lambda given, name=name: given[name] and _has_no_gpu(),
            f"--{name.replace('_', '-')} needs a GPU, and torch finds none: leave it out",
        )
        for name in ("memory_efficient_fp16", "fp16", "amp")
    ),
]

# (regular expression for "Kind: message", the sentence); {0} is the expression's first group.
ERRORS = [
    # Missing or foreign data, dictionary, checkpoint.
    (
        r"FileNotFoundError: .*'(.*dict\.(?:\w+\.)?txt)'$",
        f"there is no dictionary '{{0}}': check the data folder, its languages, and --task "
        f"(translation or language_modeling); {PREPARED}",
    ),
    (
        r"Exception: Could not infer language pair",
        "'{data}' holds no translation data: check its path, or give --task language_modeling and "
        f"a language model; {PREPARED}",
    ),
    (
        r"FileNotFoundError: Dataset not found: (.*) \((.*)\)$",
        "there is no split '{0}' in '{1}': check --train-subset, --valid-subset or --gen-subset, "
        "and the languages",
    ),
    (r"OSError: Model file not found: (.*)", "there is no checkpoint '{0}': check --path"),
    (
        r"FileNotFoundError: (/.*)",
        f"--user-dir '{{0}}' does not exist: for this plugin give {PACKAGE}",
    ),
    (
        r"(?:FileNotFoundError: .*|AssertionError: \w+ \w+ file )'?(?<=[ '])(.+?)'?"
        r"(?: does not exist)?$",
        "'{0}' does not exist: check the path; for data, " + PREPARED,
    ),
    (
        r"FileExistsError: (.*)",
        "'{0}' exists already: give another --destdir, or remove that folder",
    ),
    (
        r"UnicodeDecodeError: .* (byte 0x..) .*",
        "the text is not UTF-8 ({0}): convert it, as iconv -f LATIN1 -t UTF-8 does from Latin-1",
    ),
    (
        r"AssertionError: Source and target must contain the same number of examples",
        "source and target in '{data}' have different numbers of lines: prepare the data again",
    ),
    (
        r"ValueError: cannot mmap an empty file",
        "a split in '{data}' has no line: leave it out, or prepare it from text with some",
    ),
    # Unknown architecture, mapping or criterion, or no --user-dir.
    (
        r"(?s)\w*Exception: .*?(?:'model/|'criterion/)(\w*multimax\w*)",
        "hydra looks '{0}' up before it loads common.user_dir: give it with ._name, as in "
        f"+model._name={{0}}, and common.user_dir={PACKAGE}",
    ),
    (
        r"(?s)Config\w*Exception: .*To append to your config use (\+\S+)",
        "the configuration has no such key: check its name, or write {0} to add it",
    ),
    (
        r"ConfigKeyError: Key '(\w+)' not in '(\w+)'",
        "there is no option '{0}' in {1}: check its name",
    ),
    (
        r"(?s)ValidationError: (Invalid value '.*?', expected one of \[.*?\]).*full_key: (\S+)",
        "option {1}: {0}",
    ),
    (
        r"(?s)MissingMandatoryValue: .*full_key: (\S+)",
        "the option {0} is missing: add it",
    ),
    (
        r"(?s)MissingConfigException: (.*?)\n",
        "{0}: check --config-dir and --config-name",
    ),
    # Options that do not fit a checkpoint.
    (
        r"(?s)RuntimeError: Error\(s\) in loading state_dict[^\n]*\n\s*([^\n]{0,300})",
        "the checkpoint does not fit this data or model ({0}): use the dictionaries and options "
        "that it was trained with",
    ),
    (
        r"Exception: Cannot load model parameters from checkpoint (.*?);",
        "checkpoint '{0}' does not fit this architecture or dictionary: use the options and data "
        "that it was trained with, or another --save-dir",
    ),
    (
        r"AttributeError: '(\w+)' object has no attribute 'supported_targets'",
        "{0} is no language model: choose one, or use fairseq-generate or fairseq-validate",
    ),
    # Lengths, batch size, save folder.
    (
        r"AssertionError: Sentences lengths should not exceed max_tokens=(\d+)",
        "a sentence has more than the {0} tokens of --max-tokens: give a larger number",
    ),
    (
        r"Exception: (Size of sample #\d+) is invalid .*max_positions=(.*?), skip",
        "{0} is longer than the positions {1}: give larger --max-source-positions and "
        "--max-target-positions, or --skip-invalid-size-inputs-valid-test",
    ),
    (
        r"(?:PermissionError|IsADirectoryError|NotADirectoryError|OSError): \[.*?\] (.*): '(.*)'",
        "cannot open '{1}' ({0}): check the path and its permissions; checkpoints go to --save-dir",
    ),
    # Several processes: each says what is wrong, and the others lose their connection.
    (
        r"(?s)ProcessRaisedException: .*\nmultimax_fairseq[\w.]*: ([^\n]*)\s*$",
        "{0}",
    ),
    (
        r"ProcessExitedException: (.*)",
        "{0}: its message is printed above",
    ),
    (
        r"RuntimeError: .*Connection closed by peer",
        "the connection to another rank is lost: its message says why",
    ),
    # Messages of fairseq that name the option.
    (
        r"(?:AssertionError|Exception|ImportError|ValueError): (.*(?<![\w-])--[a-z].*)",
        "{0}",
    ),
]

OUR_NAMES = re.compile(r"(--)?\w*multimax|--(attention|output)-normalizer|--(quantize|topk)\b")
# The longest list of choices that an error prints in full.
MAX_LISTED = 20
INTERRUPTED = "interrupted; a training goes on from its last checkpoint by the same command"

# The settings of this process's command, for the sentences.
_given = defaultdict(lambda: None)


def check_settings(settings):
    """Raise UsageError for the first row of SETTINGS that matches {name: value}."""
    given = defaultdict(lambda: None, settings)
    _given.update(settings)
    for is_mistaken, sentence in SETTINGS:
        if is_mistaken(given):
            raise UsageError(sentence.format_map(given))


def explain(error):
    """Return the sentence for a user's mistake; None for any other error.

    It is the message of the first exception in the chain of causes that has `user_error`. Otherwise
    it is the sentence of the first row of ERRORS that matches, if fairseq raised the error.
    """
    behind, seen = error, []
    while behind is not None and behind not in seen:
        if getattr(behind, "user_error", False):
            return " ".join(str(behind).split())
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    if is_raised_by_fairseq(error):
        text = f"{type(error).__name__}: {error}"
        for pattern, sentence in ERRORS:
            if match := re.match(pattern, text):
                filled = string.Formatter().vformat(sentence, match.groups(), _given)
                return " ".join(filled.split())
    return None


# Packages that fairseq calls for its work.
_LIBRARIES = (
    *("antlr4", "hydra", "numpy", "omegaconf", "sacrebleu", "sentencepiece", "torch", "yaml"),
)
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")


def is_raised_by_fairseq(error):
    """Whether fairseq or this package raised an error, or called a library that did."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("fairseq", "fairseq_cli", "multimax_fairseq"):
            return True
        path = frame.f_code.co_filename
        is_standard = path.startswith(_STANDARD) and "site-packages" not in path
        if package not in _LIBRARIES and not is_standard:
            return False
    return False


def wants_traceback():
    """Whether MULTIMAX_TRACEBACK asks for the traceback of every error."""
    return os.environ.get("MULTIMAX_TRACEBACK", "0") not in ("", "0")


def error_message(program, text):
    """Return the text that a program prints for a user's mistake; the sentence is its last line."""
    return f"(MULTIMAX_TRACEBACK=1 prints the traceback.)\n{program}: error: {text}"


def _end(text, status=1):
    """End the process at once; the sentence is the last line of its output.

    A normal exit can abort, because it kills threads of torch that still read data in C++. In a
    process group torch replaces sys.stderr while the hook runs.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = f"rank {torch.distributed.get_rank()}: " if distributed else ""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # stdout is a closed pipe
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(error_message(command(), rank + text), file=sys.__stderr__, flush=True)
    os._exit(status)


def parser_message(message):
    """Return a short sentence for an error of argparse; None to keep argparse's own form."""
    is_loaded = "multimax_fairseq.models" in sys.modules
    choice = re.fullmatch(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
    if choice:
        if OUR_NAMES.search(choice[2]) and not is_loaded:
            return f"'{choice[2]}' belongs to the multimax_fairseq plugin: {PLUGIN}"
        known = choice[3].replace("'", "").split(", ")
        if len(known) <= MAX_LISTED:
            return message
        near = difflib.get_close_matches(choice[2], known, n=3, cutoff=0.5)
        nearest = f"did you mean {' or '.join(near)}? " if near else ""
        return f"{choice[1]}: {nearest}MULTIMAX_TRACEBACK=1 lists all {len(known)}"
    if message.startswith("unrecognized arguments"):
        plugin = "" if is_loaded else f"; for multimax_fairseq {PLUGIN}"
        return (
            f"{message}: check their spelling, and that --arch, --task, --criterion, --optimizer "
            f"and --lr-scheduler know them{plugin}"
        )
    return message if message.startswith("argument -") else None


def plain_errors():
    """Print a user's mistake as one sentence, without a traceback.

    Cause: fairseq prints a traceback for every error. MULTIMAX_TRACEBACK=1 keeps them.
    Remove when fairseq prints one sentence.
    """
    if wants_traceback():
        return

    @replace(sys, "excepthook")
    def excepthook(original, kind, error, trace):
        if isinstance(error, KeyboardInterrupt):
            _end(INTERRUPTED, 130)
        text = explain(error)
        if text is None:
            original(kind, error, trace)
        else:
            _end(text)

    @replace(argparse.ArgumentParser, "error")
    def error(original, self, message):
        if text := parser_message(message):
            self.exit(2, f"{command()}: error: {text}\n")
        original(self, message)

    if command() != "fairseq-hydra-train":
        return
    from hydra._internal import utils as hydra_utils

    @replace(hydra_utils, "run_and_report")  # hydra reports errors by itself
    def run_and_report(original, func):
        def reported():
            try:
                return func()
            except Exception as error:
                text = explain(error)
                if text is None:
                    raise
                _end(text)

        return original(reported)


def unknown_model():
    """Name a model that no loaded plugin defines.

    Cause: fairseq's own error message fails.
    Remove when it names the model.
    """
    from fairseq import models

    @replace(models, "build_model")
    def build_model(original, cfg, *args, **kwargs):
        name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
        if name and name not in models.ARCH_MODEL_REGISTRY | models.MODEL_DATACLASS_REGISTRY:
            raise UsageError(f"no plugin that is loaded defines the model '{name}': {PLUGIN}")
        return original(cfg, *args, **kwargs)


def criterion_and_model():
    """Refuse a criterion that cannot train the model, before training starts.

    Cause: fairseq calls the criterion for the first time in the first update, and an error there
    writes a crash.pt. The fix calls the criterion's `check_model(model)`, and refuses stock
    criteria for a sparse output layer.
    Remove when fairseq asks the criterion before it trains.
    """
    from fairseq.trainer import Trainer

    @replace(Trainer, "__init__")
    def __init__(original, self, cfg, task, model, criterion, *args, **kwargs):
        check_criterion(model, criterion)
        original(self, cfg, task, model, criterion, *args, **kwargs)


def check_criterion(model, criterion):
    """Raise UsageError for a criterion that cannot train a model."""
    decoder = getattr(model, "decoder", None)
    adaptive = getattr(decoder, "adaptive_softmax", None)
    is_ours = hasattr(criterion, "check_model")
    if adaptive is not None and is_ours:
        cutoff = ",".join(map(str, adaptive.cutoff[:-1]))
        raise UsageError(
            f"--adaptive-softmax-cutoff {cutoff} trains with --criterion adaptive_loss: choose "
            "that, or leave the cutoff out"
        )
    if is_ours:
        criterion.check_model(model)
    elif type(criterion).__module__.startswith("fairseq.") and hasattr(decoder, "linear_output"):
        decoder.linear_output()  # raises UsageError for a sparse output layer
