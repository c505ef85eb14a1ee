"""Settings that fairseq takes, and then stops on in the middle of a run, or never reads."""

import argparse
import ast
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Sequence

import torch

from multimax_fairseq.compat.commands import resolve
from multimax_fairseq.compat.explain import language_pairs
from multimax_fairseq.compat.patch import command, wrap
from multimax_fairseq.errors import UsageError, remedy_for

logger = logging.getLogger(__name__)
EVAL_LM, VALIDATE = "fairseq-eval-lm", "fairseq-validate"
TRAINING = ("fairseq-train", "fairseq-hydra-train")
# The commands that read a flag; the others take it and ignore it.
READERS = {
    "results_path": ("fairseq-generate",),
    # fairseq sets bf16 from memory_efficient_bf16, so the flag that was given comes first.
    "memory_efficient_bf16": TRAINING,
    "bf16": TRAINING,
    "truncate_source": (*TRAINING, VALIDATE, "fairseq-generate"),
}


def flags():
    """fairseq checks few flags before it needs them, and --bf16 means a TPU to it.

    It converts what it cannot compute, looks for torch_xla, and some flags of a command it never
    reads. Can go when fairseq refuses them, and reads --bf16 as it does common.bf16 in a YAML file.
    """
    from fairseq import options
    from fairseq.distributed import utils as distributed_utils

    def make_parse(original):
        def parse_args_and_arch(parser, input_args=None, *rest, **kwargs):
            try:
                parsed = original(parser, input_args, *rest, **kwargs)
            except RuntimeError as error:
                if error.args:
                    raise
                raise UsageError(
                    "no model is named: add --arch, such as --arch transformer_multimax"
                ) from error
            args = parsed[0] if isinstance(parsed, tuple) else parsed
            if "--tpu" not in (sys.argv if input_args is None else input_args):
                args.tpu = False
            _check({name: ("--" + name.replace("_", "-"), v) for name, v in vars(args).items()})
            return parsed

        return parse_args_and_arch

    def make_main(original):  # what every training comes to
        def call_main(cfg, main, **kwargs):
            if command() == "fairseq-hydra-train":
                _check_config(sys.argv[1:])
                _check(dict(_keys(cfg)))
            cfg.common.user_dir = resolve(cfg.common.user_dir)  # spawned processes read it
            return original(cfg, main, **kwargs)

        return call_main

    wrap(options, "parse_args_and_arch", make_parse)
    wrap(distributed_utils, "call_main", make_main)


# Of a training, each group of settings that has a name of its own after that.
GROUPS = ("common", "dataset", "optimization", "checkpoint")
NAMED_GROUPS = ("task", "criterion", "optimizer", "lr_scheduler")


def _keys(cfg):
    """Yield (name, (key, value)) of a YAML file's settings, those that others take their value from
    at the end, and of what it names as `_name`."""
    for of in (*NAMED_GROUPS, *GROUPS):
        group = cfg[of] if hasattr(cfg[of], "keys") else {}
        yield from ((name, (f"{of}.{name}", group.get(name))) for name in group)
    for of in NAMED_GROUPS:
        yield of, (of, getattr(cfg[of], "_name", cfg[of]))


def _check_config(words):
    """Refuse a --config-name without a file: hydra would take fairseq's defaults, of its name."""
    from hydra.utils import to_absolute_path

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    given, _ = parser.parse_known_args(words)
    if given.config_dir is None or given.config_name is None:
        return
    path = os.path.join(to_absolute_path(given.config_dir), given.config_name)
    if not (os.path.isfile(path) or os.path.isfile(f"{path}.yaml")):
        raise UsageError(
            f"'{given.config_dir}' has no {given.config_name}.yaml: check --config-name"
        )


def _check(settings):
    """Refuse what cannot work of {name: (how it is written, value)}."""

    def given(name, default=None):
        return settings.get(name, ("", default))

    _check_machine(given)
    _check_languages(given)
    _check_training(given)
    _check_shards(given("num_shards", 1), given("shard_id", 0))
    if "context_window" in settings:
        _check_window(given)
    _check_evaluation(given)
    for name in ("model_overrides", "optimizer_overrides"):
        flag, text = given(name, "{}")
        overrides = _literal(text)
        if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
            raise UsageError(
                f"{flag} {text} is no dictionary of settings: write it as \"{{'name': 0.1}}\""
            )


def _check_machine(given):
    """Refuse what needs a GPU or a package that is not here, and what no machine takes."""
    # fairseq sets the second by the first, which is the one that was given.
    for name in ("memory_efficient_fp16", "fp16", "amp", "profile", "quant_noise_scalar"):
        flag, value = given(name)
        if value and not torch.cuda.is_available():
            raise UsageError(
                f"{flag} needs a GPU and torch finds none; leave {flag} out, or run where "
                "torch.cuda.is_available() is true."
            )
    for name, package in (("tpu", "torch_xla"), ("write_checkpoints_asynchronously", "iopath")):
        flag, value = given(name)
        if value and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"{flag} needs the package {package}, which is missing: leave {flag} out"
            )
    for name in ("num_workers", "seed"):
        flag, value = given(name)
        if isinstance(value, int) and not 0 <= value < 2**31:
            raise UsageError(f"{flag} {value} must be a whole number of at least 0, below 2**31")


def _check_languages(given):
    """Refuse one language that does not fit the data: fairseq ignores it unless both are given."""
    (flag, source), (other, target) = given("source_lang"), given("target_lang")
    if given("task")[1] != "translation" or (source is None) == (target is None):
        return
    folder = (given("data")[1] or "").split(os.pathsep)[0]
    pairs = language_pairs(folder)
    if not all(pair.startswith(f"{source}-") or pair.endswith(f"-{target}") for pair in pairs):
        raise UsageError(
            f"{flag if target is None else other} {source or target} does not fit '{folder}', "
            f"which holds translation data of {', '.join(pairs)}: give both {flag} and {other}"
        )


def _check_window(given):
    """Refuse a context that is no part of a block, or that would be another block's."""
    (flag, window), (whole, length) = given("context_window"), given("tokens_per_sample", math.inf)
    if not 0 <= window < length:
        raise UsageError(
            f"{flag} {window} must be at least 0 and below {whole} {length}, of which it is a "
            "part: give a smaller one"
        )
    for name in ("num_workers", "num_shards") if window > 0 else ():
        other, value = given(name, 1)
        if value > 1:
            raise UsageError(
                f"{other} {value} with {flag} {window} would take each block's context from other "
                f"text: give {other} 1"
            )


def _check_evaluation(given):
    """Refuse what the command does not read, or stops on in the middle of a search."""
    for name, readers in READERS.items():
        flag, value = given(name)
        if value and command() not in (None, *readers):
            raise UsageError(f"{flag} acts only in {', '.join(readers)}: leave it out")
    flag, dictionary = given("replace_unk")
    if dictionary is not None:
        raise UsageError(
            f"{flag} stops fairseq at the first unknown word: leave it out; text in subwords has "
            "next to none"
        )
    flag, path = given("path", "")
    if path is None and command() in (EVAL_LM, VALIDATE, "fairseq-interactive"):
        raise UsageError(f"{flag} is missing: give a checkpoint")


def _literal(value):
    """What Python's notation of a number, tuple, dictionary stands for; None of any other text."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


def _check_training(given):
    """Refuse what a training stops on: a division by zero, a figure that is not computed."""
    flag, frequencies = given("update_freq")
    if frequencies and min(frequencies) < 1:
        raise UsageError(f"{flag} {min(frequencies)} must be at least 1: 1 updates at each batch")
    (named, scheduler), (flag, updates) = given("lr_scheduler"), given("warmup_updates")
    if scheduler == "inverse_sqrt" and updates == 0:
        raise UsageError(f"{flag} 0 must be at least 1 with {named} {scheduler}")
    flag, updates = given("total_num_update")
    try:
        decays = float(updates) > 0  # a text, as fairseq reads the command line
    except (TypeError, ValueError):
        decays = False
    if scheduler == "polynomial_decay" and not decays:
        raise UsageError(
            f"{named} {scheduler} needs {flag} above 0, at which the learning rate has decayed, "
            f"got {updates}"
        )
    (flag, frozen), updates = given("scalar_freeze_updates"), given("max_update")[1]
    if isinstance(frozen, int) and isinstance(updates, int) and 0 < updates <= frozen:
        logger.warning(
            f"{flag} {frozen} holds the learned scalars as they start to the last of {updates} "
            "updates: give a lower number to train them"
        )
    flag, text = given("adam_betas", (0.9, 0.999))
    betas = _literal(text)
    is_pair = isinstance(betas, Sequence) and len(betas) == 2
    if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise UsageError(
            f'{flag} {text} must be two numbers from 0 to below 1: write them as "(0.9, 0.98)"'
        )
    _check_metric(given)


def _check_metric(given):
    """Refuse a best checkpoint by a figure that is not computed, or that is the worst by it."""
    from fairseq.data.encoders import TOKENIZER_REGISTRY

    flag, metric = given("best_checkpoint_metric")
    for name, switch in (("bleu", "eval_bleu"), ("accuracy", "report_accuracy")):
        needed, is_on = given(switch)
        if metric == name and is_on is False:
            raise UsageError(f"{flag} {metric} needs {needed}: add it, or choose loss")
    switch, is_highest = given("maximize_best_checkpoint_metric")
    if metric in ("bleu", "accuracy") and is_highest is False:
        raise UsageError(
            f"{flag} {metric} without {switch} keeps the worst checkpoint, as a high {metric} is "
            f"good: add {switch}"
        )
    if metric in ("loss", "nll_loss", "ppl") and is_highest:
        raise UsageError(
            f"{flag} {metric} with {switch} keeps the worst checkpoint, as a low {metric} is good: "
            f"leave {switch} out"
        )
    _check_search(*given("eval_bleu_args", "{}"))  # which scripts/evaluate.py reads without it too
    if given("eval_bleu")[1]:
        flag, name = given("eval_bleu_detok", "space")
        if name not in TOKENIZER_REGISTRY:
            raise UsageError(f"{flag} {name}: {remedy_for(name, TOKENIZER_REGISTRY)}")


def _check_search(flag, text):
    """Refuse what --eval-bleu-args cannot be, of which a misspelt name would do nothing."""
    from fairseq.dataclass.configs import GenerationConfig

    try:
        settings = json.loads(text or "{}")
    except (RecursionError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{flag} {text} is no JSON dictionary: write it as '{{\"beam\": 5}}'")
    known = GenerationConfig.__dataclass_fields__
    for name in settings.keys() - known.keys():
        raise UsageError(f"{flag} has {name!r}, which no search reads: {remedy_for(name, known)}")


def _check_shards(num_shards, shard_id):
    """Refuse shards that are none, and any where the command does not read them."""
    name = command()
    for (flag, value), default in ((num_shards, 1), (shard_id, 0)):
        if value != default and name not in (None, EVAL_LM):
            remedy = "leave it out"
            if name == "fairseq-generate":
                remedy = "give --distributed-world-size and --distributed-rank instead"
            raise UsageError(f"{flag} {value} is read by {EVAL_LM} alone: {remedy}")
    if name == EVAL_LM and not 0 <= shard_id[1] < num_shards[1]:
        raise UsageError(
            f"{shard_id[0]} {shard_id[1]} must be at least 0 and below {num_shards[0]} "
            f"{num_shards[1]}: they count from 0"
        )


def overrides():
    """A key of --model-overrides that is misspelt is ignored. Can go when fairseq names it."""
    from fairseq import checkpoint_utils

    def make(original):
        def overwrite_args_by_name(cfg, overrides):
            asked = overrides
            if command() == VALIDATE:  # which overrides with its own flags too
                asked = ast.literal_eval(overrides.get("model_overrides", "{}"))
            if command():
                _check_names(cfg, asked)
            return original(cfg, overrides)

        return overwrite_args_by_name

    wrap(checkpoint_utils, "overwrite_args_by_name", make)


def _check_names(cfg, overrides):
    """Refuse names that nothing in a checkpoint's settings has."""
    known = set()
    for group in ("model", "task", "criterion"):
        settings = cfg.get(group)
        if isinstance(settings, argparse.Namespace):
            arch = (
                overrides.get("_name") or overrides.get("arch") or getattr(settings, "arch", None)
            )
            known |= set(vars(settings)) | _flags_of(arch)
        elif hasattr(settings, "keys"):  # a DictConfig
            known |= set(settings)
    for name, value in overrides.items():
        if isinstance(value, dict) and name in cfg:  # {"model": {...}}
            _check_names({name: cfg[name]}, value)
        elif name not in known:
            raise UsageError(
                f"--model-overrides: the checkpoint has no setting {name!r} of model, task or "
                f"criterion: {remedy_for(name, known)}"
            )


def _flags_of(arch):
    """The names of a model's flags: a namespace has only those that were given."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    model = ARCH_MODEL_REGISTRY.get(arch)
    parser = argparse.ArgumentParser()
    if model is not None:
        model.add_args(parser)
    return {action.dest for action in parser._actions}


def criteria():
    """A criterion meets its model at the first step, and what it refuses there leaves a crash.pt.

    Here a criterion that has `check_model(model)` is asked as soon as the trainer has both, and
    what fairseq's own criteria cannot train is refused. Can go when fairseq asks them.
    """
    from fairseq.trainer import Trainer

    def make(original):
        def __init__(self, cfg, task, model, criterion, *args, **kwargs):
            check_criterion(model, criterion)
            original(self, cfg, task, model, criterion, *args, **kwargs)

        return __init__

    wrap(Trainer, "__init__", make)


def check_criterion(model, criterion):
    """Refuse a criterion that cannot train a model."""
    from fairseq.criterions.adaptive_loss import AdaptiveLoss
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

    decoder = getattr(model, "decoder", None)
    adaptive = getattr(decoder, "adaptive_softmax", None)
    is_ours = hasattr(criterion, "check_model")
    is_stock = type(criterion).__module__.startswith("fairseq.")
    if isinstance(criterion, LabelSmoothedCrossEntropyCriterion) and not 0 <= criterion.eps < 1:
        raise UsageError(
            f"--label-smoothing {criterion.eps} must be at least 0 and below 1: 0 is off, 0.1 is "
            "usual"
        )
    if isinstance(criterion, AdaptiveLoss):
        if adaptive is None:
            raise UsageError(
                "--criterion adaptive_loss is for an adaptive softmax: add "
                "--adaptive-softmax-cutoff, such as 20000,60000, or choose another criterion"
            )
    elif adaptive is not None and (is_ours or is_stock):
        cutoff = ",".join(map(str, adaptive.cutoff[:-1]))
        raise UsageError(
            f"--adaptive-softmax-cutoff {cutoff} trains with --criterion adaptive_loss alone: "
            "choose that, or leave the cutoff out"
        )
    elif is_ours:
        criterion.check_model(model)
    elif is_stock and hasattr(decoder, "linear_output"):
        decoder.linear_output()  # refuses to be trained by the logarithms of its probabilities


def generation():
    """What a search cannot take ends in its middle, or in nothing that is printed.

    Can go when fairseq checks its generation flags as it builds the generator.
    """
    from fairseq.sequence_generator import SequenceGenerator
    from fairseq.tasks import FairseqTask
    from fairseq.tasks.language_modeling import LanguageModelingTask

    def check(args, num_words, is_search, takes_constraints):
        beam, nbest = getattr(args, "beam", 5), getattr(args, "nbest", 1)
        for name, value in (("beam", beam), ("nbest", nbest)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"--{name} {value} must be a whole number of at least 1")
        temperature = getattr(args, "temperature", 1.0)
        if not 0 < temperature < math.inf:
            raise UsageError(f"--temperature {temperature} must be a finite number above 0")
        # The greatest length is max_len_a times the source's, and max_len_b.
        shortest, most = getattr(args, "min_len", 1), getattr(args, "max_len_b", 200)
        share = getattr(args, "max_len_a", 0)
        if not 0 <= share < math.inf:
            raise UsageError(f"--max-len-a {share} must be a finite number of at least 0")
        if share == 0 and most < shortest:
            raise UsageError(
                f"--max-len-b {most} is less than --min-len {shortest}: give a higher one"
            )
        topk, topp = getattr(args, "sampling_topk", -1), getattr(args, "sampling_topp", -1.0)
        if topp > 1:
            raise UsageError(f"--sampling-topp {topp} must be a probability, at most 1")
        if topk > num_words:
            raise UsageError(f"--sampling-topk {topk} is more than the {num_words} words there are")
        if topk > 0 and topp > 0:
            raise UsageError(
                f"--sampling-topk {topk} does nothing beside --sampling-topp {topp}: give one of "
                "them"
            )
        if command() == "fairseq-interactive":
            check_interactive(args)
        check_language_model(getattr(args, "lm_path", None), getattr(args, "lm_weight", 0.0))
        if nbest > beam:
            raise UsageError(f"--nbest {nbest} is more than --beam {beam} finds: give a wider beam")
        for name in ("print_step", "retain_iter_history"):
            if is_search and getattr(args, name, False):
                raise UsageError(
                    f"--{name.replace('_', '-')} is for models that write a sentence in several "
                    "passes, as of --task translation_lev: leave it out"
                )
        if getattr(args, "constraints", None) and not takes_constraints:
            raise UsageError(
                f"--constraints {args.constraints} is for the lines that fairseq-interactive "
                "translates: use it there, or leave it out"
            )

    def check_interactive(args):
        path = getattr(args, "lm_path", None)
        if path is not None:
            raise UsageError(
                f"--lm-path {path} is read by fairseq-generate alone: use it there, or leave it out"
            )
        if getattr(args, "print_alignment", None) == "soft":
            raise UsageError(
                "--print-alignment soft is for fairseq-generate: use it there, or give "
                "--print-alignment hard"
            )

    def check_references(args, datasets):
        is_source_only = any(getattr(data, "tgt", data) is None for data in datasets.values())
        for name in ("score_reference", "prefix_size"):
            is_given = getattr(args, name, None)
            if is_given and (is_source_only or command() == "fairseq-interactive"):
                raise UsageError(
                    f"--{name.replace('_', '-')} needs references: use it with fairseq-generate "
                    "and data that has a target side"
                )

    def check_language_model(path, weight):
        if path is not None and weight == 0:
            raise UsageError(f"--lm-path {path} does nothing at --lm-weight 0: give a weight")
        if path is None and weight != 0:
            raise UsageError(f"--lm-weight {weight} needs --lm-path: add it, or leave both out")

    def make(original):
        def build_generator(self, models, args, seq_gen_cls=None, *rest, **kwargs):
            takes_constraints = command() != "fairseq-generate"
            takes_constraints &= not isinstance(self, LanguageModelingTask)
            num_words = len(self.target_dictionary)
            is_search = seq_gen_cls is None or issubclass(seq_gen_cls, SequenceGenerator)
            check(args, num_words, is_search, takes_constraints)
            check_references(args, getattr(self, "datasets", {}))
            return original(self, models, args, seq_gen_cls, *rest, **kwargs)

        return build_generator

    wrap(FairseqTask, "build_generator", make)


class _Blocks:
    """Batches of an evaluation, which must not come to nothing."""

    def __init__(self, batches, what):
        self.batches, self.what, self.n = batches, what, batches.n

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        found = False
        for batch in self.batches:
            found = found or "net_input" in batch
            yield batch
        if not found:
            raise UsageError(
                f"nothing was evaluated, as the model took none of {self.what}: give a smaller "
                "--tokens-per-sample, fewer shards, or a split that has text"
            )


def perplexity_of_a_part():
    """fairseq-eval-lm leaves out blocks that are too long for the model, and words that it gives
    the probability 0; where all blocks are, the perplexity is 1 to it.

    Can go when fairseq-eval-lm ends in an error there.
    """
    from fairseq.sequence_scorer import SequenceScorer
    from fairseq.tasks.language_modeling import LanguageModelingTask

    def make(original):
        def eval_lm_dataloader(self, dataset, *args, **kwargs):
            batches = original(self, dataset, *args, **kwargs)
            if command() != EVAL_LM:
                return batches
            limit, count = kwargs["max_positions"], len(dataset)
            longer = sum(dataset.size(i) > limit for i in range(count))
            if 0 < longer < count:
                raise UsageError(
                    f"{longer:,} of {count:,} blocks are longer than the {limit} tokens that the "
                    f"model takes: give --tokens-per-sample {limit} or less, and no "
                    "--sample-break-mode complete"
                )
            return _Blocks(
                batches,
                f"{len(dataset)} blocks (--tokens-per-sample {self.args.tokens_per_sample}, "
                f"--num-shards {kwargs['num_shards']}, the model's limit "
                f"{kwargs['max_positions']})",
            )

        return eval_lm_dataloader

    def make_generate(original):
        def generate(self, models, sample, **kwargs):
            found = original(self, models, sample, **kwargs)
            if command() == EVAL_LM and any(
                best["positional_scores"].isinf().any() for best, *_ in found
            ):
                raise UsageError(
                    "the model gives words of this text the probability 0, so that the perplexity "
                    "is infinite: compare such models by the loss that fairseq-validate prints"
                )
            return found

        return generate

    wrap(LanguageModelingTask, "eval_lm_dataloader", make)
    wrap(SequenceScorer, "generate", make_generate)
