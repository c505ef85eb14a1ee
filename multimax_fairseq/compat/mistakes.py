"""Common mistakes of users, each with the sentence that ends the command.

_setting_mistake() lists mistaken settings, which are checked before the command starts. ERRORS
lists errors that fairseq raises. Any other error keeps its traceback.
"""

import argparse
import atexit
import contextlib
import difflib
import operator
import os
import re
import string
import sys
import sysconfig
import traceback
from collections import defaultdict

import torch

from multimax_fairseq import bleu
from multimax_fairseq.compat.patch import PACKAGE, command, replace
from multimax_fairseq.errors import MAX_LISTED, UsageError

PREPARED = "fairseq-preprocess and the scripts of data-prep/ write such a folder"
PLUGIN = f"load the plugin with --user-dir {PACKAGE} (common.user_dir in a YAML file)"


def _infers_another_pair(settings):
    """Whether one language is given alone, and fairseq, which ignores it, infers another pair."""
    given = settings["source_lang"], settings["target_lang"]
    if settings["task"] != "translation" or given.count(None) != 1:
        return False
    from fairseq.data.data_utils import infer_language_pair

    pair = infer_language_pair(str(settings["data"]).split(os.pathsep)[0])
    return not any(map(operator.eq, given, pair))


def target_language():
    """Return the target language of this process's command, given or inferred, or ""."""
    from fairseq.data.data_utils import infer_language_pair

    data, language = str(_settings["data"]).split(os.pathsep)[0], _settings["target_lang"]
    if language is None and os.path.isdir(data):
        language = infer_language_pair(data)[1]
    return language or ""


def _setting_mistake(settings):
    """Return the sentence for the first mistaken setting; None if there is none."""
    # Missing or foreign data, dictionary, checkpoint.
    needs_path = command() in ("fairseq-eval-lm", "fairseq-interactive", "fairseq-validate")
    if needs_path and settings.get("path", "") is None:
        return "--path is missing: pass a checkpoint, such as checkpoints/checkpoint_best.pt"
    if _infers_another_pair(settings):
        return (
            f"--source-lang {settings['source_lang']} and --target-lang {settings['target_lang']} "
            f"do not match the data in '{settings['data']}': pass both languages of it"
        )
    file = settings["config_file"]
    if file and not os.path.isfile(file):
        return f"there is no '{file}': check --config-dir and --config-name"

    # Lengths, batch size, save folder.
    is_polynomial = settings["lr_scheduler"] == "polynomial_decay"
    if is_polynomial and str(settings["total_num_update"]) in ("None", "0"):
        return (
            "--lr-scheduler polynomial_decay needs --total-num-update, the update at which the "
            "learning rate has decayed: add it"
        )
    metric, maximize = settings["best_checkpoint_metric"], "--maximize-best-checkpoint-metric"
    is_maximized = settings["maximize_best_checkpoint_metric"]
    if metric == "bleu" and settings["eval_bleu"] is False:
        return "--best-checkpoint-metric bleu needs --eval-bleu: add it, or choose loss"
    if metric in ("accuracy", "bleu") and is_maximized is False:
        return (
            f"--best-checkpoint-metric {metric} keeps the worst checkpoint, as a high value is "
            f"good: add {maximize}"
        )
    if metric in ("loss", "nll_loss", "ppl") and is_maximized:
        return (
            f"--best-checkpoint-metric {metric} with {maximize} keeps the worst checkpoint: leave "
            f"{maximize} out"
        )
    if settings["eval_bleu"] and not settings["eval_tokenized_bleu"]:
        bleu.metric(target_language())  # raises UsageError without its package
    if settings["beam"] is not None and settings["beam"] < 1:
        return f"--beam {settings['beam']} must be at least 1"
    window, workers = settings["context_window"] or 0, settings["num_workers"] or 0
    tokens = settings["tokens_per_sample"]
    if command() == "fairseq-eval-lm" and tokens and window >= tokens:
        return (
            f"--context-window {window} leaves no token of --tokens-per-sample {tokens} to score: "
            "pass a smaller one"
        )
    if window > 0 and workers > 1:
        return (
            f"--context-window {window} takes the context from other text with --num-workers "
            f"{workers}: pass --num-workers 1"
        )

    # A GPU flag without a GPU. fairseq sets fp16 itself for --memory-efficient-fp16.
    for name in ("memory_efficient_fp16", "fp16", "amp"):
        if settings[name] and not torch.cuda.is_available():
            return f"--{name.replace('_', '-')} needs a GPU, and torch finds none: leave it out"
    return None


# (regular expression for "Kind: message", the sentence); {0} is the expression's first group, a
# name such as {data} a setting.
DATA = [  # missing or foreign data, dictionary, checkpoint
    (
        r"FileNotFoundError: .*'(.*dict\.(?:\w+\.)?txt)'$",
        f"there is no dictionary '{{0}}': check the data folder, its languages, and --task "
        f"(translation or language_modeling); {PREPARED}",
    ),
    (
        r"Exception: Could not infer language pair",
        "'{data}' holds no translation data: check its path, or pass --task language_modeling and "
        f"a language model; {PREPARED}",
    ),
    (
        r"FileNotFoundError: Dataset not found: (.*) \((.*)\)$",
        "there is no split '{0}' in '{1}': check --train-subset, --valid-subset or --gen-subset, "
        "and the languages",
    ),
    (
        r"AssertionError: --replace-unk requires a raw text dataset",
        "--replace-unk needs the words of the sources, which prepared data does not have: use "
        "fairseq-interactive, or prepare the data with fairseq-preprocess --dataset-impl raw and "
        "pass --dataset-impl raw here",
    ),
    (r"OSError: Model file not found: (.*)", "there is no checkpoint '{0}': check --path"),
    (
        r"FileNotFoundError: (/.*)",
        f"--user-dir '{{0}}' does not exist: for this plugin pass {PACKAGE}",
    ),
    (
        r"(?:FileNotFoundError: .*|AssertionError: \w+ \w+ file )'?(?<=[ '])(.+?)'?"
        r"(?: does not exist)?$",
        "'{0}' does not exist: check the path; for data, " + PREPARED,
    ),
    (
        r"FileExistsError: (.*)",
        "'{0}' exists already: pass another --destdir, or remove that folder",
    ),
    (
        r"UnicodeDecodeError: .* (byte 0x..) .*",
        "the text is not UTF-8 ({0}): convert it, as iconv -t UTF-8 -f LATIN1 does from Latin-1, "
        "and -f UTF-16 from UTF-16",
    ),
    (
        r"AssertionError: Source and target must contain the same number of examples",
        "source and target in '{data}' have different numbers of lines: prepare the data again",
    ),
    (
        r"ValueError: cannot mmap an empty file",
        "a split in '{data}' has no line: leave it out, or prepare it from text with some",
    ),
]
NAMES = [  # unknown architecture, mapping or criterion, or no --user-dir
    (r"KeyError: None$", "--task is missing: pass translation or language_modeling"),
    (
        r"(?s)\w*Exception: .*?(?:'model/|'criterion/)(\w*multimax\w*)",
        "hydra looks '{0}' up before it loads common.user_dir: pass it with ._name, as in "
        f"+model._name={{0}}, and common.user_dir={PACKAGE}",
    ),
    (
        r"(?s)Config\w*Exception: .*To append to your config use (\+\S+)",
        "the configuration has no such key: check its name, or write {0} to add it",
    ),
    (
        r"(?s)\w+: .*?Key '(\w+)' not in '(\w+)'",
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
]
CHECKPOINTS = [  # options that do not match a checkpoint
    (
        r"(?s)RuntimeError: Error\(s\) in loading state_dict[^\n]*\n\s*([^\n]{0,300})",
        "the checkpoint does not match this data or model ({0}): use the dictionaries and options "
        "that it was trained with",
    ),
    (
        r"Exception: Cannot load model parameters from checkpoint (.*?);",
        "checkpoint '{0}' does not match this architecture or dictionary: use the options and data "
        "that it was trained with, or another --save-dir",
    ),
    (
        r"ValueError: Unsupported language modeling target: (\w+)",
        "this language model predicts only the next token: leave --{0}-target out",
    ),
    (
        r"AttributeError: '(\w+)' object has no attribute 'supported_targets'",
        "{0} is no language model: choose one, or use fairseq-generate or fairseq-validate",
    ),
]
SIZES_AND_FOLDERS = [  # lengths, batch size, save folder
    (
        r"AssertionError: Sentences lengths should not exceed max_tokens=(\d+)",
        "a sentence has more than the {0} tokens of --max-tokens: pass a larger number",
    ),
    (
        r"Exception: Size of sample #(\d+) is invalid \(=(.*?)\) since max_positions=(.*?), skip",
        "sample #{0} has {1} tokens, more than the {2} positions: shorten it, leave it out with "
        "--skip-invalid-size-inputs-valid-test, or train with larger --max-source-positions and "
        "--max-target-positions",
    ),
    (
        r"(?:PermissionError|IsADirectoryError|NotADirectoryError|OSError): \[.*?\] (.*): '(.*)'",
        "cannot open '{1}' ({0}): check the path and its permissions",
    ),
]
PROCESSES = [  # one of several processes fails, and the others lose their connection
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
]
NAMED_OPTIONS = [  # fairseq's own message names the option or the package
    (r"ImportError: (Please install .*)", "{0}"),
    (
        r"(?:AssertionError|Exception|ImportError|ValueError): (.*(?<![\w-])--[a-z].*)",
        "{0}",
    ),
]
ERRORS = [*DATA, *NAMES, *CHECKPOINTS, *SIZES_AND_FOLDERS, *PROCESSES, *NAMED_OPTIONS]

OUR_NAMES = re.compile(r"(--)?\w*multimax|--(attention|output)-normalizer|--(quantize|topk)\b")
INTERRUPTED = "interrupted; the same command resumes a training from its last checkpoint"

# The settings of this process's command, for the sentences of ERRORS.
_settings = defaultdict(lambda: None)


def check_settings(settings):
    """Raise UsageError for the first mistake in {name: value}."""
    _settings.update(settings)
    sentence = _setting_mistake(defaultdict(lambda: None, settings))
    if sentence is not None:
        raise UsageError(sentence)


def explain(error):
    """Return the sentence for a user's mistake; None for any other error.

    It is the message of the first exception in the chain of causes that has `user_error`. Otherwise
    it is the sentence of the first row of ERRORS that matches, if fairseq raised the error.
    """
    cause, seen = error, []
    while cause is not None and cause not in seen:
        if getattr(cause, "user_error", False):
            return " ".join(str(cause).split())
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    if is_raised_by_fairseq(error):
        text = f"{type(error).__name__}: {error}"
        reason = f"\n{error.__cause__}" if error.__cause__ else ""  # where hydra names the key
        for pattern, sentence in ERRORS:
            if match := re.match(pattern, text) or re.match(pattern, text + reason):
                text = string.Formatter().vformat(sentence, match.groups(), _settings)
                return " ".join(text.split())
    return None


# An error in one of these libraries counts as fairseq's, if fairseq called it.
LIBRARIES = "antlr4 hydra numpy omegaconf sacrebleu sentencepiece torch yaml".split()
STANDARD_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen")


def is_raised_by_fairseq(error):
    """Whether fairseq or this package raised an error, or called a library that did."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("fairseq", "fairseq_cli", "multimax_fairseq"):
            return True
        path = frame.f_code.co_filename
        is_standard = path.startswith(STANDARD_LIBRARY) and "site-packages" not in path
        if package not in LIBRARIES and not is_standard:
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
    """Return a short sentence for an error of argparse."""
    plugin = "" if "multimax_fairseq.models" in sys.modules else PLUGIN
    if message.startswith("unrecognized arguments"):
        hint = f"; for multimax_fairseq {plugin}" if plugin else ""
        return (
            f"{message}: check their spelling, and that --arch, --task, --criterion, --optimizer "
            f"and --lr-scheduler know them{hint}"
        )
    choice = re.fullmatch(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
    if not choice:
        return message
    start, value, choices = choice[1], choice[2], choice[3].replace("'", "").split(", ")
    if plugin and OUR_NAMES.search(value):
        return f"'{value}' belongs to the multimax_fairseq plugin: {plugin}"
    if len(choices) <= MAX_LISTED:
        return message
    near = difflib.get_close_matches(value, choices, n=3, cutoff=0.5)
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{start}: {nearest}MULTIMAX_TRACEBACK=1 lists all {len(choices)}"


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
        self.exit(2, f"{command()}: error: {parser_message(message)}\n")

    if command() != "fairseq-hydra-train":
        return
    from hydra._internal import utils as hydra_utils

    @replace(hydra_utils, "run_and_report")  # hydra prints errors itself
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


def save_folder():
    """Name --save-dir if it cannot be made or written to; fairseq's error names no flag."""
    from fairseq import checkpoint_utils

    @replace(checkpoint_utils, "verify_checkpoint_directory")
    def verify_checkpoint_directory(original, save_dir):
        try:
            original(save_dir)
        except OSError as error:
            raise UsageError(
                f"--save-dir '{save_dir}' cannot be made or written to ({error.strerror}): pass "
                "another folder"
            ) from error


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
