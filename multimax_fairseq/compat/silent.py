"""Fixes for wrong results without an error: batches, averages, searches, scores."""

import argparse
import ast
import logging
import math
import os
import struct
import sys

import numpy as np
import torch

from multimax_fairseq import bleu
from multimax_fairseq.compat import mistakes
from multimax_fairseq.compat.patch import command, replace
from multimax_fairseq.errors import UsageError, remedy_for

logger = logging.getLogger(__name__)
# fairseq's placeholder for an unknown word of a reference.
UNKNOWN_IN_REFERENCE = "<<unk>>"
# Replaces it, as in fairseq's --eval-bleu. Every tokenizer keeps it as one token, and no
# translation contains it.
UNKNOWN_WORD = "UNKNOWNTOKENINREF"
HEADER = struct.Struct("<9sQBQ")  # of an index: magic, version, code of the dtype, sentences
LANGUAGES = ("source_lang", "target_lang")
PREPARE = "prepare the data again, with fairseq-preprocess or a script of data-prep/"


def token_blocks():
    """Keep the indices of token blocks in int64, and cut past targets to the block's length.

    Cause: TokenBlockDataset stores its indices in an unsigned type that can be too small.
    numpy 2 computes in that type, so `end - 2` wraps around for a block that ends at 1. Sizes of
    65,536 tokens or more wrap around under any numpy. A signed `end - 2` of -1 counts from the end
    of the buffer, so past targets are too long.
    Remove when fairseq keeps int64 and cuts past targets.
    """
    from fairseq.data.token_block_dataset import TokenBlockDataset

    @replace(TokenBlockDataset, "_build_slice_indices")
    def _build_slice_indices(original, *args, **kwargs):
        _, block_to_dataset_index, slice_indices = original(*args, **kwargs)
        slice_indices = slice_indices.astype(np.int64)
        sizes = slice_indices[:, 1] - slice_indices[:, 0]
        return sizes, block_to_dataset_index.astype(np.int64), slice_indices

    @replace(TokenBlockDataset, "__getitem__")
    def __getitem__(original, self, index):
        item = original(self, index)
        if not self.include_targets:
            return item
        source, target, past_target = item
        return source, target, past_target[: len(target)]


def last_batch():
    """Keep the last batch in generation and validation.

    Cause: fairseq drops the last batch unless --required-batch-size-multiple (8) divides its size.
    This batch holds the longest sentences (fairseq issue 5036). In training, fairseq's batches stay
    unless there would be none: one more batch would change the order of all others.
    Remove when fairseq keeps the batch.
    """
    from fairseq.data import data_utils
    from fairseq.trainer import Trainer

    training = []

    @replace(Trainer, "get_train_iterator")
    def get_train_iterator(original, *args, **kwargs):
        training.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            training.pop()

    @replace(data_utils, "batch_by_size")
    def batch_by_size(original, indices, *args, **kwargs):
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64)
        if len(indices) == 0 and kwargs.get("max_tokens"):  # fairseq raises an IndexError
            raise UsageError(
                f"no sentence is left, as all are longer than --max-tokens "
                f"{kwargs['max_tokens']} or the positions of the model: pass larger ones"
            )
        batches = original(indices, *args, **kwargs)
        # fixed_shapes reorders and may leave out by design; elsewhere batches are slices.
        if (training and batches) or kwargs.get("fixed_shapes") is not None:
            return batches
        count = sum(map(len, batches))
        return [*batches, indices[count:]] if count < len(indices) else batches


def resumed_batches():
    """Train a resumed run on the same batches as an uninterrupted run.

    Cause: an uninterrupted run keeps the batches of its first epoch, which that epoch's seed
    shuffles. A run that resumes in a later epoch makes new batches with that epoch's seed, so
    sentences of equal length are in another order.
    Remove when fairseq uses the seed of the first epoch.
    """
    from fairseq.tasks import FairseqTask

    @replace(FairseqTask, "get_batch_iterator")
    def get_batch_iterator(original, self, dataset, *args, **kwargs):
        epoch = kwargs.get("epoch", 1)
        renews = kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
        is_reused = not renews and self.can_reuse_epoch_itr(dataset)
        if not is_reused or epoch == 1 or dataset in self.dataset_to_epoch_iter:
            return original(self, dataset, *args, **kwargs)
        iterator = original(self, dataset, *args, **{**kwargs, "epoch": 1})
        iterator.epoch = epoch
        return iterator


def validation_on_training_data():
    """Train on every epoch of a subset that is also a validation subset.

    Cause: the task caches one iterator per data set. Validation exhausts it, so training takes the
    epoch for finished and skips it.
    Remove when fairseq caches the iterators of training and validation separately.
    """
    from fairseq.trainer import Trainer

    @replace(Trainer, "get_valid_iterator")
    def get_valid_iterator(original, self, subset, disable_iterator_cache=False):
        is_trained = subset == self.cfg.dataset.train_subset
        return original(self, subset, disable_iterator_cache or is_trained)


def end_of_curriculum():
    """Shuffle the batches after the first N epochs of --curriculum N.

    Cause: a later epoch reuses the first data loader, which does not shuffle. A run that is resumed
    after N epochs makes a new data loader, which does.
    Remove when fairseq sets whether a reused data loader shuffles.
    """
    from fairseq.data.iterators import EpochBatchIterator

    @replace(EpochBatchIterator, "_get_iterator_for_epoch")
    def _get_iterator_for_epoch(original, self, epoch, shuffle, *args, **kwargs):
        if self.reuse_dataloader and self.dataloader is not None:
            self.epoch_batch_sampler.shuffle = shuffle
        return original(self, epoch, shuffle, *args, **kwargs)


def older_data_format():
    """Read each sentence of fairseq's older data format at its own offset.

    Cause: fairseq reads this format through an open file (lazy) or a cache (cached). Workers share
    the position of the file that the main process opened, so they read wrong sentences. Training
    reads its first batch before the cache is filled.
    Remove when fairseq reads at the sentence's offset.
    """
    from fairseq.data import indexed_dataset

    @replace(indexed_dataset.IndexedDataset, "__getitem__")
    def __getitem__(original, self, i):
        self.check_index(i)
        shape = self.sizes[self.dim_offsets[i] : self.dim_offsets[i + 1]]
        path, offset = indexed_dataset.data_file_path(self.path), self.data_offsets[i]
        numbers = np.fromfile(path, self.dtype, shape.prod(), offset=offset * self.element_size)
        return torch.from_numpy(numbers.reshape(shape)).long() - int(self.fix_lua_indexing)

    indexed_dataset.IndexedCachedDataset = indexed_dataset.IndexedDataset  # the page cache suffices


def indexed_data():
    """Refuse an index that does not match its data, and words that are not in the dictionary.

    Cause: fairseq does not check an index, and reads an unknown word number as another word.
    Remove when fairseq checks the files that it opens.
    """
    from fairseq.data import indexed_dataset

    @replace(indexed_dataset, "make_dataset")
    def make_dataset(original, path, impl, fix_lua_indexing=False, dictionary=None):
        index = indexed_dataset.index_file_path(path)
        if os.path.isfile(index) and impl in ("mmap", "cached", "lazy"):
            with open(index, "rb") as file:
                header = file.read(HEADER.size)
            if impl == "mmap" or header[:8] not in (b"", b"TNTIDX\0\0"):
                _check_index(indexed_dataset, path, header, dictionary)
        return original(path, impl, fix_lua_indexing, dictionary)


def _check_index(indexed_dataset, path, header, dictionary):
    """Raise UsageError for an index that does not match the data beside it."""
    index, data = indexed_dataset.index_file_path(path), indexed_dataset.data_file_path(path)

    def refuse(file, why):
        raise UsageError(f"'{file}' is damaged or not what fairseq wrote ({why}): {PREPARE}")

    if len(header) < HEADER.size:
        refuse(index, "it ends in its header")
    magic, version, code, count = HEADER.unpack(header)
    if magic != indexed_dataset.MMapIndexedDataset.Index._HDR_MAGIC or version != 1:
        refuse(index, "its header is not fairseq's")
    dtype = np.dtype(indexed_dataset._code_to_dtype.get(code, float))
    if dtype.kind not in "iu":
        refuse(index, f"its numbers are no integers, but of type {code}")
    if os.path.getsize(index) != HEADER.size + 12 * count:
        refuse(index, f"it has {os.path.getsize(index):,} bytes for {count:,} sentences")
    if not os.path.isfile(data):
        refuse(data, "it is missing")
    numbers = np.memmap(index, np.uint8, "r", HEADER.size) if count else np.empty(0, np.uint8)
    sizes = numbers[: 4 * count].view(np.int32).astype(np.int64)
    offsets = numbers[4 * count :].view(np.int64)
    if count and (sizes.min() < 0 or offsets.min() < 0):
        refuse(index, "sizes or offsets below 0")
    if count and (offsets > os.path.getsize(data) - sizes * dtype.itemsize).any():
        refuse(data, "it ends before its last sentence")
    if dictionary is not None and os.path.getsize(data) >= dtype.itemsize:
        words = np.memmap(data, dtype, "r", shape=os.path.getsize(data) // dtype.itemsize)
        if words.min() < 0 or words.max() >= len(dictionary):
            refuse(data, f"it has words past the {len(dictionary):,} of the dictionary")


def ema_step():
    """Decay each averaged tensor once, in place.

    Cause: the state dict has one entry for each name of a tied parameter, and fairseq decays every
    entry. It then loads a state dict without version entries. The decoder of a pre-norm model takes
    it for an old checkpoint and removes its last layer norm.
    Remove when fairseq decays each tensor once, in place.
    """
    from fairseq.models.ema import EMA

    @replace(EMA, "_step_internal")
    def _step_internal(original, self, new_model, updates=None):
        parameters, model = new_model.state_dict(), self.model.state_dict()
        averages = self.fp32_params if self.config.ema_fp32 else model
        decayed = set()
        for name in model:
            average = averages[name]
            if "version" in name or average.data_ptr() in decayed:
                continue
            decayed.add(average.data_ptr())
            decay = 0 if name in self.skip_keys else self.decay
            average.mul_(decay).add_(parameters[name].to(average.dtype), alpha=1 - decay)
            model[name].copy_(average)


def ema_frequency():
    """Count --ema-update-freq from the start of the training.

    Cause: fairseq counts from the start of the process, so a resumed run averages at other updates.
    Remove when fairseq saves its count, or derives it from the number of updates.
    """
    from fairseq.models.ema import EMA

    @replace(EMA, "step")
    def step(original, self, new_model, updates=None):
        if updates is not None:
            self.update_freq_counter = (updates - 1) % max(1, self.config.ema_update_freq)
        original(self, new_model, updates)


def adaptive_tails():
    """Train and count every word of an adaptive softmax's tails.

    Cause: the loss ignores the class with the index of padding in each cluster. Padding is in the
    head, so each tail loses a real word. The fix inserts a class of probability 0 at that index.
    Remove when fairseq ignores padding in the head only.
    """
    from fairseq.criterions.adaptive_loss import AdaptiveLoss

    @replace(AdaptiveLoss, "forward")
    def forward(original, self, model, sample, reduce=True):
        def shift_tails(module, inputs, output):
            logits, targets = output
            tails = zip(logits[1:], targets[1:], strict=True)
            tails = [_skip_class(self.padding_idx, *tail) for tail in tails]
            return [logits[0], *(t[0] for t in tails)], [targets[0], *(t[1] for t in tails)]

        handle = model.decoder.adaptive_softmax.register_forward_hook(shift_tails)
        try:
            return original(self, model, sample, reduce)
        finally:
            handle.remove()


def _skip_class(index, logits, target):
    """Insert a class of probability 0 at an index, and shift the targets at and after it."""
    if target is None:
        return logits, target
    skipped = logits.new_full((len(logits), 1), -math.inf)
    logits = torch.cat([logits[:, :index], skipped, logits[:, index:]], 1)
    return logits, target + target.ge(index)


def unknown_words_in_references():
    """Count an unknown word of a reference as a mismatch, and warn of it.

    Cause: fairseq-generate writes an unknown word of a reference as `<<unk>>` for --scoring
    sacrebleu, chrf and wer. SacreBLEU splits it into tokens that match a translation's `<unk>`.
    Remove when fairseq-generate reads references from raw text.
    """
    from fairseq import scoring

    @replace(scoring, "build_scorer")
    def build_scorer(original, choice, tgt_dict):
        _choose_tokenizer(choice)
        scorer = original(choice, tgt_dict)
        if hasattr(scorer, "add_string"):
            _replace_placeholders(scorer)
        return scorer


def tokenizer_of_target_language():
    """Score --eval-bleu and --scoring sacrebleu with the tokenizer of the target language.

    Cause: fairseq splits each language with 13a, which leaves a Chinese sentence as one token. Its
    BLEU is 0 unless all characters are right, and --eval-bleu selects checkpoints by it.
    Remove when fairseq passes the target language to SacreBLEU.
    """
    from fairseq.tasks.translation import TranslationTask

    @replace(TranslationTask, "_inference_with_bleu")
    def _inference_with_bleu(original, self, *args):
        token = bleu.LANGUAGE.set(self.cfg.target_lang)  # for sacrebleu.corpus_bleu
        try:
            return original(self, *args)
        finally:
            bleu.LANGUAGE.reset(token)


def _choose_tokenizer(choice):
    """Set the tokenizer of --scoring sacrebleu; warn of BLEU4 in a language without spaces."""
    kind, language = getattr(choice, "_name", choice), mistakes.target_language()
    is_given = any(word.startswith("--sacrebleu-tokenizer") for word in sys.argv)
    is_default = getattr(choice, "sacrebleu_tokenizer", None) == bleu.DEFAULT and not is_given
    if kind == "sacrebleu" and is_default:
        bleu.metric(language)  # raises UsageError without its package
        choice.sacrebleu_tokenizer = bleu.tokenizer(language)
    elif kind == "bleu" and bleu.tokenizer(language) != bleu.DEFAULT:
        logger.warning(
            "BLEU4 compares the words between spaces, or the subwords without --remove-bpe: for "
            f"the language '{language}' add --scoring sacrebleu"
        )


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
                "which match nothing: for a score on raw text pass the D- lines to sacrebleu"
            )
        return result_string(*args)

    scorer.add_string, scorer.result_string = add, result


def diverse_beams():
    """Look up a sentence of --diverse-beam-groups by its row in the batch.

    Cause: fairseq uses a sentence's number in the data set as its row in the batch. It reads
    another sentence's row, or fails for a number past the size of the batch.
    Remove when fairseq passes the position in the batch.
    """
    from fairseq.search import DiverseBeamSearch

    @replace(DiverseBeamSearch, "step")
    def step(
        original, self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None
    ):
        if original_batch_idxs is not None:
            if step == 0:
                self.sentences = original_batch_idxs
            match = original_batch_idxs.unsqueeze(1) == self.sentences.unsqueeze(0)
            original_batch_idxs = match.long().argmax(dim=1)
        return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)


def repeated_ngrams():
    """Block repeated n-grams on a CPU too; a forced word, as in a prefix, stays.

    Cause: without fairseq's CUDA extension, --no-repeat-ngram-size has no effect. fairseq compares
    the end of a buffer that is padded to the greatest length. It also does not support n = 1.
    Remove when fairseq cuts the buffer at the current step.
    """
    from fairseq import sequence_generator
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    if sequence_generator.NGramRepeatBlock is not NGramRepeatBlock:
        return

    class RepeatBlock(NGramRepeatBlock):
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


def partial_perplexity():
    """Refuse a perplexity that would leave out blocks or words.

    Cause: fairseq-eval-lm leaves out blocks that are too long for the model, and words of
    probability 0. If it leaves out all blocks, it prints a perplexity of 1.
    Remove when fairseq-eval-lm ends in an error instead.
    """
    from fairseq.sequence_scorer import SequenceScorer
    from fairseq.tasks.language_modeling import LanguageModelingTask

    @replace(LanguageModelingTask, "eval_lm_dataloader")
    def eval_lm_dataloader(original, self, dataset, *args, **kwargs):
        limit, count = kwargs["max_positions"], len(dataset)
        longer = sum(dataset.size(i) > limit for i in range(count))
        if command() == "fairseq-eval-lm" and (longer or count == 0):
            raise UsageError(
                f"{longer:,} of {count:,} blocks are longer than the {limit} tokens that the "
                f"model takes, so fairseq would leave them out: pass --tokens-per-sample "
                f"{limit} or less, and no --sample-break-mode complete"
            )
        return original(self, dataset, *args, **kwargs)

    @replace(SequenceScorer, "generate")
    def generate(original, self, models, sample, **kwargs):
        hypotheses = original(self, models, sample, **kwargs)
        if command() == "fairseq-eval-lm" and any(
            best["positional_scores"].isinf().any() for best, *_ in hypotheses
        ):
            raise UsageError(
                "the model gives words of this text the probability 0, so the perplexity is "
                "infinite: compare such models by the loss that fairseq-validate prints"
            )
        return hypotheses


def inferred_languages():
    """Save the languages that fairseq infers from the data, for `check_languages`.

    Cause: the task infers them in its own copy of the settings, so the checkpoint has None.
    Remove when fairseq saves them.
    """
    from fairseq.trainer import Trainer

    @replace(Trainer, "state_dict")
    def state_dict(original, self):
        state = original(self)
        settings = state["cfg"]["task"]
        for name in LANGUAGES:
            if isinstance(settings, dict) and settings.get(name, "") is None:
                settings[name] = getattr(self.task.cfg, name)
        return state


def check_languages(path, state, task, overrides):
    """Raise UsageError if a command asks for other languages than a checkpoint's.

    Cause: fairseq-generate and fairseq-interactive take the languages from the task that the
    command built, or infer them from the data. fairseq-validate and Python pass them as overrides.
    A joined dictionary works in both directions. A user's override of its languages
    stays.
    Remove when fairseq compares them.
    """
    settings = state.get("args") or state.get("cfg")
    if isinstance(settings, dict):
        settings = settings.get("task")
    if isinstance(settings, argparse.Namespace):
        settings = vars(settings)
    own = settings if isinstance(settings, dict) else {}
    overrides = overrides or {}
    if task is None:
        asked = overrides
        overrides = ast.literal_eval(overrides.get("model_overrides", "{}"))
    else:
        settings = task.args if task.cfg is None else task.cfg
        asked = {name: getattr(settings, name, None) for name in LANGUAGES}
    own, asked = ([each.get(name) for name in LANGUAGES] for each in (own | overrides, asked))
    if any(a and b and a != b for a, b in zip(own, asked, strict=True)):
        source, target = own
        asked = [b or a for a, b in zip(own, asked, strict=True)]
        remedy = "leave source_lang and target_lang out"
        if command():
            remedy = (
                f"pass --source-lang {source} --target-lang {target} and their data; if only the "
                f'names differ, pass --model-overrides "{dict(zip(LANGUAGES, asked, strict=True))}"'
            )
        raise UsageError(
            f"'{path}' translates from {source} to {target}, not from {asked[0]} to {asked[1]}: "
            f"{remedy}"
        )


def model_overrides():
    """Refuse an unknown key of --model-overrides.

    Cause: fairseq ignores a misspelt key.
    Remove when fairseq names it.
    """
    from fairseq import checkpoint_utils

    @replace(checkpoint_utils, "overwrite_args_by_name")
    def overwrite_args_by_name(original, cfg, overrides):
        user_overrides = overrides
        if command() == "fairseq-validate":  # passes its own flags as overrides too
            user_overrides = ast.literal_eval(overrides.get("model_overrides", "{}"))
        known = setting_names(cfg, user_overrides)
        for name in user_overrides if command() else ():
            if name not in known and name not in cfg:
                raise UsageError(
                    f"--model-overrides: the checkpoint has no setting {name!r} of model, task "
                    f"or criterion: {remedy_for(name, known)}"
                )
        return original(cfg, overrides)


def setting_names(cfg, overrides):
    """Return the names of a checkpoint's settings, for a namespace also those with defaults."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    known = set()
    for group in ("model", "task", "criterion"):
        settings = cfg.get(group)
        if isinstance(settings, argparse.Namespace):
            parser = argparse.ArgumentParser()
            arch = overrides.get("arch") or getattr(settings, "arch", None)
            if arch in ARCH_MODEL_REGISTRY:
                ARCH_MODEL_REGISTRY[arch].add_args(parser)
            known |= set(vars(settings)) | {action.dest for action in parser._actions}
        elif hasattr(settings, "keys"):
            known |= set(settings)
    return known
