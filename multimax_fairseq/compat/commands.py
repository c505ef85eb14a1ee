"""Commands: scoring, searches, the plugin's folder, models that are unknown, lines of text."""

import logging
import os
import tempfile
import warnings

import torch

from multimax_fairseq.compat.explain import LOAD_PLUGIN, plugin_hint
from multimax_fairseq.compat.patch import MONITOR, PACKAGE, wrap
from multimax_fairseq.errors import UsageError

logger = logging.getLogger(__name__)
# fairseq's placeholder for an unknown word of a reference.
UNKNOWN_IN_REFERENCE = "<<unk>>"
# Replaces it, as in fairseq's --eval-bleu. Every tokenizer keeps it as one token, and no
# translation contains it.
UNKNOWN_WORD = "UNKNOWNTOKENINREF"
# In a search, the log-probability of a word whose probability is 0.
IMPOSSIBLE = -1e4
# Regular expressions: how hydra's warnings about fairseq's use of it begin.
HYDRA_WARNINGS = (
    r"hydra\.experimental\.\w+\(\) is no longer experimental",
    r"\nThe version_base parameter is not specified",
    r"In 'config': Usage of deprecated keyword in package header",
    r"\n'.*' is validated against ConfigStore schema with the same name",
    r"\nThe strict flag in the compose API is deprecated",
    r"Future Hydra versions will no longer change working directory",
)


def hydra_warnings():
    """Each command prints 22 lines of warnings, because fairseq uses hydra's interface of 1.0.

    Can go when fairseq uses the present one.
    """
    for message in HYDRA_WARNINGS:
        warnings.filterwarnings("ignore", message, UserWarning)


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

    wrap(sacrebleu, "corpus_bleu", make_corpus_bleu)
    wrap(bleu.Scorer, "__init__", make_init)


def unknown_words_in_references():
    """fairseq-generate gives scorers of text (--scoring sacrebleu, chrf, wer) `<<unk>>` for an
    unknown word of a reference. SacreBLEU splits it into tokens that match a translation's `<unk>`.

    Here such a word matches nothing, and a warning gives the number of these references. Can go
    when fairseq-generate reads references from raw text.
    """
    from fairseq import scoring

    def make(original):
        def build_scorer(choice, tgt_dict):
            scorer = original(choice, tgt_dict)
            if hasattr(scorer, "add_string"):
                _replace_placeholders(scorer)
            return scorer

        return build_scorer

    wrap(scoring, "build_scorer", make)


def _replace_placeholders(scorer):
    """Make a scorer replace the placeholder by UNKNOWN_WORD, and warn of it."""
    add_string, result_string = scorer.add_string, scorer.result_string
    has_unknown = []

    def add(reference, hypothesis):
        has_unknown.append(UNKNOWN_IN_REFERENCE in reference)
        add_string(reference.replace(UNKNOWN_IN_REFERENCE, UNKNOWN_WORD), hypothesis)

    def result(*args):
        if any(has_unknown):
            logger.warning(
                f"{sum(has_unknown):,} of {len(has_unknown):,} references hold unknown words, "
                "which match nothing: for a score on raw text give the D- lines to fairseq-score"
            )
        return result_string(*args)

    scorer.add_string, scorer.result_string = add, result


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

    wrap(DiverseBeamSearch, "step", make)


def impossible_words():
    """Generation stops by an assertion where an end of sentence that is forced is impossible.

    A sparse output layer gives most words the score -inf; the end of sentence at the greatest
    length may be one of them, and with fewer possible words than beams the rest of the beam is
    -inf for good. In a search alone, such words get a finite score below all others. Sampling
    takes its exponential, so that where nothing else is left it begins at 0 there. Can go when
    fairseq ends such hypotheses.
    """
    from fairseq.search import Sampling
    from fairseq.sequence_generator import SequenceGenerator

    def make_step(original):
        def step(self, step, lprobs, scores, *rest, **kwargs):
            most = lprobs.amax(-1, keepdim=True)
            least = most.clamp(min=IMPOSSIBLE).masked_fill(most > IMPOSSIBLE / 100, 0.0)
            found, words, beams = original(self, step, lprobs - least, scores, *rest, **kwargs)
            return found + least[:, :, 0].gather(1, beams), words, beams

        return step

    def make(original):
        def __init__(self, models, *args, **kwargs):
            original(self, models, *args, **kwargs)
            decoders = (getattr(model, "decoder", None) for model in self.model.models)
            if all(getattr(decoder, "output_normalizer", None) is None for decoder in decoders):
                return
            step = self.model.forward_decoder

            def forward_decoder(*args, **kwargs):
                log_probs, attention = step(*args, **kwargs)
                return log_probs.clamp(min=IMPOSSIBLE), attention

            self.model.forward_decoder = forward_decoder

        return __init__

    wrap(SequenceGenerator, "__init__", make)
    wrap(Sampling, "step", make_step)


def repeated_ngrams():
    """--no-repeat-ngram-size does nothing without fairseq's own CUDA extension.

    The plain form compares the end of a buffer that is padded to the greatest length, and knows no
    n of 1. Where a word is forced, as those of a prefix are, there is nothing to choose from: it
    stays. Can go when fairseq cuts the buffer at the step.
    """
    from fairseq import sequence_generator
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    if sequence_generator.NGramRepeatBlock is not NGramRepeatBlock:
        return

    class RepeatBlock(NGramRepeatBlock):  # a class, as TorchScript takes no wrapped method
        def forward(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
            if self.use_extension:
                return self.call_cuda_extension(tokens, lprobs, bsz, beam_size, step)
            tokens = tokens[:, : step + 1]
            blocked = lprobs.clone()
            if self.no_repeat_ngram_size == 1:
                blocked.scatter_(1, tokens[:, 1:], float("-inf"))
            else:
                blocked = self._no_repeat_ngram(tokens, blocked, bsz, beam_size, step)
            is_forced = blocked.eq(float("-inf")).all(1, keepdim=True)
            return torch.where(is_forced, lprobs, blocked)

    sequence_generator.NGramRepeatBlock = RepeatBlock


def results():
    """fairseq-generate empties the earlier file of --results-path before it checks anything, and
    leaves half of one where it stops. Can go when fairseq-generate writes it aside.
    """
    from fairseq_cli import generate

    def make(original):
        def main(args):
            folder = getattr(args, "results_path", None)  # of the command line
            if folder is None:
                return original(args)
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as args.results_path:
                found = original(args)
                name = f"generate-{args.gen_subset}.txt"
                os.replace(os.path.join(args.results_path, name), os.path.join(folder, name))
            return found

        return main

    wrap(generate, "main", make)


def resolve(path):
    """--user-dir multimax_fairseq means this package, unless the current folder has a package of
    that name; a folder without modules, as the one that holds a clone, is none."""
    if path == os.path.basename(PACKAGE) and not os.path.isfile(f"{path}/__init__.py"):
        return PACKAGE
    return path


def user_dir():
    """A --user-dir that does not exist is reported as a path alone, without the option's name.

    And where this package is imported already, fairseq takes its models for registered. Can go
    when fairseq names the option and imports the models.
    """
    from fairseq import utils
    from fairseq.models import import_models

    def make(original):
        def import_user_module(args):
            asked = getattr(args, "user_dir", None)
            if asked is not None:
                args.user_dir = resolve(asked)
                if os.path.realpath(args.user_dir) == os.path.realpath(PACKAGE):
                    name = os.path.basename(PACKAGE)
                    return import_models(os.path.join(PACKAGE, "models"), f"{name}.models")
            try:
                return original(args)
            except FileNotFoundError as error:
                if error.errno is not None:  # from the module itself
                    raise
                raise UsageError(
                    f"--user-dir '{asked}' does not exist; for this plugin give {PACKAGE}"
                ) from error

        return import_user_module

    wrap(utils, "import_user_module", make)


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
                raise UsageError(plugin_hint(name) or f"there is no model '{name}'; {LOAD_PLUGIN}")
            return original(cfg, *args, **kwargs)

        return build_model

    wrap(models, "build_model", make)


def progress_lines():
    """Every figure that is logged is in every line of text, and is null in JSON once it was shown.

    The hundreds of a model's own figures would hide the loss. Text leaves them out, and JSON has
    them in the lines that follow their update. Can go when fairseq lets a figure choose its lines.
    """
    from fairseq.logging import progress_bar

    def make(shown):
        def make_format(original):
            def _format_stats(self, stats, *args, **kwargs):
                kept = {
                    key: value
                    for key, value in stats.items()
                    if not key.removeprefix("train_").startswith(MONITOR) or shown(value)
                }
                return original(self, kept, *args, **kwargs)

            return _format_stats

        return make_format

    wrap(progress_bar.BaseProgressBar, "_format_stats", make(lambda value: False))
    wrap(progress_bar.JsonProgressBar, "_format_stats", make(lambda value: value is not None))
