"""One sentence for a user's mistake, where fairseq prints a traceback."""

import argparse
import atexit
import contextlib
import difflib
import os
import re
import sys
import sysconfig
import traceback

import torch

from multimax_fairseq.compat.patch import PACKAGE, command, wrap

OUR_FLAGS = ("--attention-normalizer", "--output-normalizer", "--multimax-")
OUR_NAMES = re.compile(r"[\w-]*multimax\w*|(attention|output)[_-]normalizer")
LOAD_PLUGIN = "load the plugin that defines it with --user-dir (common.user_dir in a YAML file)."
INTERRUPTED = "interrupted; a training goes on from its last checkpoint by the same command"
# The longest list of choices that an error prints in full: there are fewer mappings, but some 150
# architectures.
MAX_LISTED = 20
_LANGUAGE_MODEL = "add --task language_modeling for a language model,"
_MAKE_DATA = "give the folder that fairseq-preprocess (or a script of data-prep/) wrote."


def plugin_hint(name):
    """What to do about a name that this plugin defines; None if it is loaded or not concerned."""
    if not OUR_NAMES.search(name) or "multimax_fairseq.models" in sys.modules:
        return None
    option = "common.user_dir=" if command() == "fairseq-hydra-train" else "--user-dir "
    if any(word.startswith("common.user_dir=") for word in sys.argv):
        return (
            f"hydra looks '{name}' up before it loads common.user_dir: write the key with ._name, "
            "as in criterion._name=... or +model._name=..., or into a YAML file"
        )
    return f"'{name}' belongs to the multimax_fairseq plugin; load it with {option}{PACKAGE}"


def language_pairs(folder):
    """Return the language pairs of the translation data in a folder, such as ["de-en"]."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    parts = [name.split(".") for name in names]  # train.de-en.de.idx
    return sorted({part[1] for part in parts if len(part) > 2 and part[1].count("-") == 1})


def _frames(error):
    """Return the frames that an error passed, the outermost first."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _explain_os_error(error):
    if not isinstance(error, OSError):
        return None
    if any(f.f_code.co_name == "verify_checkpoint_directory" for f in _frames(error)):
        return f"cannot write to '{error.filename}' ({error.strerror}); give another --save-dir."
    if match := re.match(r"Model file not found: (.*)", str(error)):
        return f"checkpoint '{match[1]}' does not exist; check --path."
    if match := re.match(r"Dataset not found: (.*?) \((.*)\)", str(error)):
        pairs = ", ".join(language_pairs(match[2]))
        holds = f", which holds translation data of {pairs}" if pairs else ""
        return (
            f"no split '{match[1]}' in '{match[2]}'{holds}; name one that is there (--gen-subset, "
            f"--valid-subset, --train-subset), or {_MAKE_DATA}"
        )
    if isinstance(error, FileExistsError) and re.search(r"dict\.(.*\.)?txt$", str(error)):
        return f"there is '{error}' already; give another --destdir, or remove that folder."
    if match := re.match(r"file (.*) not found$", str(error)):
        return f"'{match[1]}' does not exist; check its path."
    path = error.filename
    if not isinstance(path, str):
        return None
    if isinstance(error, FileNotFoundError):
        folder, name = os.path.split(path)
        if re.fullmatch(r"dict\.(.*\.)?txt", name):
            if folder and not os.path.isdir(folder):
                return f"data folder '{folder}' does not exist; {_MAKE_DATA}"
            if pairs := ", ".join(language_pairs(folder)):
                remedy = "give that --source-lang and --target-lang."
                if name == "dict.txt":  # of a language model
                    remedy = "add --task translation and a translation model, or give other data."
                return (
                    f"no dictionary '{path}', as '{folder}' holds translation data of {pairs}; "
                    f"{remedy}"
                )
            if os.path.isfile(os.path.join(folder, "dict.txt")):
                return (
                    f"no dictionary '{path}', as '{folder}' holds data of one language; "
                    f"{_LANGUAGE_MODEL} or give other data."
                )
            return f"no dictionary '{path}'; {_MAKE_DATA}"
        what = f"'{path}'" if os.path.isdir(folder or ".") else f"the folder of '{path}'"
        return f"{what} does not exist; check the path; for data, {_MAKE_DATA}"
    if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)):
        return f"cannot open '{path}' ({error.strerror}); check the path and its permissions."
    return None


def _explain_check(error):
    """fairseq's commands check their options with assert; the rest of it names a flag at least."""
    frames, text = _frames(error), str(error)
    if not frames:
        return None
    code, module = frames[-1].f_code, str(frames[-1].f_globals.get("__name__"))
    folder = os.path.basename(os.path.dirname(code.co_filename))
    if folder == "fairseq_cli" and code.co_name == "validate" and isinstance(error, KeyError):
        return (
            f"validation computes no {text}: give --best-checkpoint-metric loss, or what else its "
            "line in the log has"
        )
    is_check = folder == "fairseq_cli" and isinstance(error, AssertionError)
    names_flag = module.startswith("fairseq.") and re.search(r"(^|[\s`(])--[a-z]", text)
    return text if text and (is_check or names_flag) else None


def _explain_mismatch(error):
    text = str(error)
    if match := re.match(r"Cannot load model parameters from checkpoint (.*);", text):
        is_given = any(word.startswith("--finetune-from-model") for word in sys.argv)
        other_run = "" if is_given else ", or another --save-dir"
        return (
            f"checkpoint '{match[1]}' does not fit this architecture or dictionary; use the "
            f"options and data that it was trained with{other_run}."
        )
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        detail = text.splitlines()[1].strip() if "\n" in text else text
        return (
            "the checkpoint does not fit this data folder or model; use the dictionaries and "
            f"options that it was trained with ({detail[:300]})"
        )
    return None


def _explain_name(error):
    """A name of this plugin where fairseq or hydra knows none such, or a key misspelt in a YAML."""
    kind = type(error).__name__
    hydra_kinds = ("MissingConfigException", "ConfigCompositionException", "ConfigKeyError")
    if added := re.search(r"To append to your config use (\+\S+)", str(error)):
        return f"the configuration has no such key: write {added[1]} to add it."
    if removed := re.search(r"Either remove \+ prefix: (\S+)", str(error)):
        return f"the configuration has this key already: write {removed[1]} without a plus."
    if kind == "KeyError" or kind in hydra_kinds:
        name = OUR_NAMES.search(str(error))
        if name and (hint := plugin_hint(name[0])):
            return hint
    if kind == "InterpolationKeyError" and (key := re.search(r"'(task\.[^']*)'", str(error))):
        return f"this model reads '{key[1]}': give it a task that has it: --task language_modeling."
    if kind == "MissingMandatoryValue" and error.full_key:
        return f"--{error.full_key.replace('_', '-')} is missing: add it."
    if re.search(r"Error merging (override )?'?tokenizer", str(error)):
        return "--tokenizer needs --source-lang and --target-lang: add them."
    if kind == "OverrideParseException":
        return (
            f"hydra cannot read '{error.override}': quote a value with spaces or signs, as in "
            "\"task.data='a b/data-bin'\"."
        )
    if kind in ("ValidationError", "InterpolationKeyError") and getattr(error, "full_key", None):
        return f"option '{error.full_key}': {str(error).splitlines()[0]}"
    if kind == "ConfigKeyError" and error.full_key and error.object_type:
        owner = error.object_type.__name__
        return f"there is no option '{error.full_key}' in {owner}; check its name."
    return None


def _explain_data(error):
    text = str(error)
    if text.startswith("Size of sample #"):
        return text  # it names the option that helps
    if match := re.match(r"Sentences lengths should not exceed max_tokens=(\d+)", text):
        return (
            f"a sentence has more than the {match[1]} tokens of --max-tokens (in validation "
            "--max-tokens-valid): give a larger number."
        )
    if match := re.match(r"(?:Unknown post_process option: |--post-process=)(\S+)", text):
        return (
            f"--remove-bpe {match[1]} is none that this command takes: give '@@ ', or to "
            "fairseq-generate and fairseq-interactive sentencepiece."
        )
    if "could not parse ModelProto" in text:
        return f"{text}: give the .model file that sentencepiece wrote."
    if re.match(r"min_len cannot be larger than max_len", text):
        return "--min-len is more than the model or --max-len-b allows: give a lower one."
    if text == "Source and target must contain the same number of examples":
        return f"source and target have different numbers of lines in the data; {_MAKE_DATA}"
    if text == "cannot mmap an empty file":
        return "a split of the data has no line: leave it out, or prepare it from text with some."
    if isinstance(error, UnicodeDecodeError):
        seen = error.object[max(error.start - 20, 0) : error.end + 20]
        return (
            f"the text is not UTF-8: byte {error.object[error.start]:#04x} in {seen!r}; convert "
            "it, as iconv -f LATIN1 -t UTF-8 does from Latin-1."
        )
    if isinstance(error, AttributeError) and error.name == "supported_targets":
        return (
            f"{type(error.obj).__name__} is no language model: choose one, such as "
            "transformer_lm_multimax, or --task translation with fairseq-generate or "
            "fairseq-validate."
        )
    if isinstance(error, ImportError) and text.strip().startswith("Please install"):
        return text  # it names the package that an option needs
    if text.startswith("Provided Search parameters"):
        return (
            "--sampling, --diverse-beam-groups, --match-source-len and --diversity-rate exclude "
            "each other: give one of them."
        )
    if isinstance(error, KeyError) and error.args == (None,) and command() == "fairseq-validate":
        return "no task is given; add --task translation or --task language_modeling."
    if text.startswith("Could not infer language pair"):
        return (
            "no translation data (train.de-en.de.idx or its like) in the data folder; "
            f"{_LANGUAGE_MODEL} or {_MAKE_DATA}"
        )
    return None


def _explain_spawned(error):
    """A GPU's own process sends its traceback as text, which ends with our sentence; one on a CPU
    has said it."""
    if type(error).__name__ == "ProcessRaisedException":
        last = str(error).strip().splitlines()[-1]
        if match := re.match(r"_?multimax_fairseq[\w.]*: (.*)", last):
            return match[1]
    if type(error).__name__ == "ProcessExitedException":
        return f"{error}; what it could still say is printed above."
    return None


def _explain_other_ranks(error):
    text = str(error)
    if isinstance(error, RuntimeError) and "Connection closed by peer" in text:
        return "the connection to another rank is lost: it ended first, and its message says why."
    if "Expected to have finished reduction in the prior iteration" in text:
        return (
            "a parameter got no gradient in the last update, for which --ddp-backend pytorch_ddp "
            "waits: add --find-unused-parameters, or give --ddp-backend legacy_ddp"
        )
    return None


_EXPLAIN = (
    _explain_os_error,
    _explain_check,
    _explain_mismatch,
    _explain_name,
    _explain_data,
    _explain_spawned,
    _explain_other_ranks,
)


def explain(error):
    """One sentence on what the user can mend; None if the error is not the user's.

    Equivalent to: str(e) of the first exception e behind `error` with `e.user_error`, else what an
    exception that fairseq raised is known to mean. One of another plugin is a traceback.
    """
    behind, seen = error, []
    while behind is not None and behind not in seen:
        if getattr(behind, "user_error", False):
            return " ".join(str(behind).split())
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    for rule in _EXPLAIN if is_raised_by_fairseq(error) else ():
        if text := rule(error):
            return " ".join(text.split())
    return None


# What fairseq calls for its work, so that an error in there is an error of fairseq's call.
_LIBRARIES = (
    *("antlr4", "hydra", "numpy", "omegaconf", "sacrebleu", "sentencepiece", "torch", "yaml"),
)
_STANDARD = sysconfig.get_path("stdlib")


def is_raised_by_fairseq(error):
    """Whether fairseq's or our code raised an error, or called the library that did."""
    for frame in reversed(_frames(error)):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("fairseq", "fairseq_cli", "multimax_fairseq"):
            return True
        path = frame.f_code.co_filename
        is_standard = path.startswith((_STANDARD, "<frozen")) and "site-packages" not in path
        if package not in _LIBRARIES and not is_standard:
            return False
    return False


def wants_traceback():
    """Whether MULTIMAX_TRACEBACK asks for the traceback of every error."""
    return os.environ.get("MULTIMAX_TRACEBACK", "0") not in ("", "0")


def error_message(program, text):
    """Return the text that a program prints for a user's mistake; the error is its last line."""
    return f"(MULTIMAX_TRACEBACK=1 prints the traceback.)\n{program}: error: {text}"


def _end(text, status=1):
    """End the process at once; the sentence is the last line of its output.

    The interpreter's own end kills threads that still read data inside of C++, which aborts. While
    several processes train, torch calls the hook with a sys.stderr that it would print afterwards.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = f"rank {torch.distributed.get_rank()}: " if distributed else ""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the reader of stdout is gone
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(error_message(command(), rank + text), file=sys.__stderr__, flush=True)
    os._exit(status)


def _nearest_choices(message):
    """Replace argparse's list of more than MAX_LISTED choices by the nearest three."""
    match = re.fullmatch(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
    known = match[3].replace("'", "").split(", ") if match else []
    if len(known) <= MAX_LISTED:
        return message
    near = difflib.get_close_matches(match[2], known, n=3, cutoff=0.5)
    nearest = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{match[1]}: {nearest}MULTIMAX_TRACEBACK=1 lists all {len(known)}"


def plain_errors():
    """A user's mistake ends in one sentence; MULTIMAX_TRACEBACK=1 keeps every traceback.

    fairseq's commands print a traceback for everything. Can go when they do not.
    """
    if wants_traceback():
        return
    name = command()

    def make_hook(original):
        def excepthook(kind, error, trace):
            if isinstance(error, KeyboardInterrupt):
                _end(INTERRUPTED, 130)
            text = explain(error)
            if text is None:
                original(kind, error, trace)
            else:
                _end(text)

        return excepthook

    def make_error(original):
        def error(self, message):
            value = re.search(r"invalid choice: '([^']*)'", message)
            words = [value[1]] if value else []
            if message.startswith("unrecognized arguments:"):
                words = [word for word in message.split() if word.startswith(OUR_FLAGS)]
            hint = next(filter(None, map(plugin_hint, words)), None)
            if not hint and message.startswith(("argument -", "unrecognized arguments")):
                hint = _nearest_choices(message)  # without the hundreds of lines of usage
                if not message.startswith("argument"):
                    hint += (
                        ": check their spelling, and that --arch, --task, --criterion, --optimizer "
                        "and --lr-scheduler know them"
                    )
                    if "multimax_fairseq.models" not in sys.modules:
                        hint += f"; those of multimax_fairseq need --user-dir {PACKAGE}"
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
                    _end(text)

            return original(reported)

        return run_and_report

    wrap(sys, "excepthook", make_hook)
    wrap(argparse.ArgumentParser, "error", make_error)
    if name == "fairseq-hydra-train":
        from hydra._internal import utils as hydra_utils

        wrap(hydra_utils, "run_and_report", make_report)  # hydra reports errors by itself
