"""Data: what numpy 2 changed under fairseq, short and long blocks of text, the last batch, files
that fairseq-preprocess has not written."""

import os
import struct
import types

import numpy as np
import torch

from multimax_fairseq.compat.patch import command, wrap
from multimax_fairseq.errors import UsageError


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

    wrap(np, "percentile", make)


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

    wrap(TokenBlockDataset, "_build_slice_indices", make)
    wrap(TokenBlockDataset, "__getitem__", make_getitem)


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
            try:
                batches = original(indices, *args, **kwargs)
            except IndexError:  # where it looks for its last batch
                if len(indices) > 0:
                    raise
                limit = kwargs.get("max_tokens")
                tokens = f"--max-tokens {limit}, " if limit else ""
                raise UsageError(
                    f"no sentence is left, as all are longer than {tokens}--max-source-positions, "
                    "--max-target-positions or the model allow: give larger ones, or other data"
                ) from None
            # fixed_shapes reorders and may leave out by design; elsewhere batches are slices.
            if (training and batches) or kwargs.get("fixed_shapes") is not None:
                return batches
            kept = sum(map(len, batches))
            return [*batches, indices[kept:]] if kept < len(indices) else batches

        return batch_by_size

    wrap(Trainer, "get_train_iterator", make_train_iterator)
    wrap(data_utils, "batch_by_size", make)


def same_batches():
    """A run that is resumed in a later epoch orders the sentences of one length anew.

    An uninterrupted run keeps the batches of its first epoch, drawn by that epoch's seed; a resumed
    one draws its own, and so trains otherwise. Can go when fairseq keeps to the first epoch's.
    """
    from fairseq.tasks import FairseqTask

    def make(original):
        def get_batch_iterator(self, dataset, *args, **kwargs):
            epoch = kwargs.get("epoch", 1)
            anew = kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
            is_kept = not anew and self.can_reuse_epoch_itr(dataset)
            if not is_kept or epoch == 1 or dataset in self.dataset_to_epoch_iter:
                return original(self, dataset, *args, **kwargs)
            iterator = original(self, dataset, *args, **{**kwargs, "epoch": 1})
            iterator.epoch = epoch
            return iterator

        return get_batch_iterator

    wrap(FairseqTask, "get_batch_iterator", make)


def validation_on_training_data():
    """Validation exhausts the batches of a subset that is also trained.

    The task caches one iterator for each data set. Validation exhausts it, so training sees a
    finished epoch and skips it.
    Can go when fairseq caches the iterators of training and validation separately.
    """
    from fairseq.trainer import Trainer

    def make(original):
        def get_valid_iterator(self, subset, disable_iterator_cache=False):
            is_trained = subset == self.cfg.dataset.train_subset
            return original(self, subset, disable_iterator_cache or is_trained)

        return get_valid_iterator

    wrap(Trainer, "get_valid_iterator", make)


def end_of_curriculum():
    """--curriculum N never ends: a later epoch reuses the data loader that does not shuffle.

    A run that is resumed after N epochs makes a new one, which does. Can go when fairseq tells the
    data loader that it reuses whether to shuffle.
    """
    from fairseq.data.iterators import EpochBatchIterator

    def make(original):
        def _get_iterator_for_epoch(self, epoch, shuffle, *args, **kwargs):
            if self.reuse_dataloader and self.dataloader is not None:
                self.epoch_batch_sampler.shuffle = shuffle
            return original(self, epoch, shuffle, *args, **kwargs)

        return _get_iterator_for_epoch

    wrap(EpochBatchIterator, "_get_iterator_for_epoch", make)


def data_in_parts():
    """The default --upsample-primary -1 gives train a negative number of copies beside train1.

    Here -1 means 1, as in fairseq's multilingual_translation. Can go when translation has this
    default too.
    """
    from fairseq.data import ConcatDataset

    def make(original):
        def __init__(self, datasets, sample_ratios=1):
            if not isinstance(sample_ratios, int):
                sample_ratios = [1 if ratio == -1 else ratio for ratio in sample_ratios]
            original(self, datasets, sample_ratios)

        return __init__

    wrap(ConcatDataset, "__init__", make)


def source_only_data():
    """Training and validation on data without a target side end in a TypeError of the model.

    Can go when fairseq checks what a criterion needs.
    """
    from fairseq.tasks.translation import TranslationTask

    def make(original):
        def load_dataset(self, split, *args, **kwargs):
            original(self, split, *args, **kwargs)
            needs_target = command() in ("fairseq-train", "fairseq-hydra-train", "fairseq-validate")
            if needs_target and self.datasets[split].tgt is None:
                raise UsageError(
                    f"split '{split}' in '{self.cfg.data}' has no {self.cfg.target_lang} text, "
                    f"which {command()} needs: prepare the data without --only-source"
                )

        return load_dataset

    wrap(TranslationTask, "load_dataset", make)


def older_format():
    """Data of fairseq's older format is read through an open file or a cache, and both fail.

    Training reads its first batch before the cache is filled: KeyError. Workers share the position
    of the file that the main process opened, so they read wrong sentences.
    Here each sentence is read at its own offset. Can go when fairseq does so.
    """
    from fairseq.data import indexed_dataset

    def make(original):
        def __getitem__(self, i):
            self.check_index(i)
            shape = self.sizes[self.dim_offsets[i] : self.dim_offsets[i + 1]]
            path, offset = indexed_dataset.data_file_path(self.path), self.data_offsets[i]
            numbers = np.fromfile(path, self.dtype, shape.prod(), offset=offset * self.element_size)
            return torch.from_numpy(numbers.reshape(shape)).long() - int(self.fix_lua_indexing)

        return __getitem__

    indexed_dataset.IndexedCachedDataset = indexed_dataset.IndexedDataset  # the page cache suffices
    wrap(indexed_dataset.IndexedDataset, "__getitem__", make)


HEADER = struct.Struct("<9sQBQ")  # of an index: magic, version, type of the numbers, how many
PREPARE = "prepare the data again, with fairseq-preprocess or a script of data-prep/"


def indexed_data():
    """fairseq takes an index at its word, and meets what is wrong where a sentence is read.

    By then a run may have gone on for hours; a word that the dictionary lacks is an error of the
    GPU, or the row of another word. Can go when fairseq checks what it opens.
    """
    from fairseq.data import indexed_dataset

    def make(original):
        def make_dataset(path, impl, fix_lua_indexing=False, dictionary=None):
            index = indexed_dataset.index_file_path(path)
            if os.path.isfile(index) and impl in ("mmap", "cached", "lazy"):
                with open(index, "rb") as file:
                    header = file.read(HEADER.size)
                if impl == "mmap" or header[:8] not in (b"", b"TNTIDX\0\0"):
                    _check_index(indexed_dataset, path, header, dictionary)
            return original(path, impl, fix_lua_indexing, dictionary)

        return make_dataset

    wrap(indexed_dataset, "make_dataset", make)


def _check_index(indexed_dataset, path, header, dictionary):
    """Refuse an index that is not what fairseq-preprocess writes of the data beside it."""
    index, data = indexed_dataset.index_file_path(path), indexed_dataset.data_file_path(path)

    def refuse(file, why):
        raise UsageError(f"'{file}' is damaged or not what fairseq wrote ({why}): {PREPARE}")

    if len(header) < HEADER.size:
        refuse(index, "it ends in its header")
    magic, version, code, count = HEADER.unpack(header)
    if magic != indexed_dataset.MMapIndexedDataset.Index._HDR_MAGIC or version != 1:
        refuse(index, "it begins otherwise")
    if code not in indexed_dataset._code_to_dtype:
        refuse(index, f"there is no type {code} of numbers")
    if os.path.getsize(index) != HEADER.size + 12 * count:
        refuse(index, f"it has {os.path.getsize(index):,} bytes for {count:,} sentences")
    if not os.path.isfile(data):
        refuse(data, "it is missing")
    dtype = np.dtype(indexed_dataset._code_to_dtype[code])
    if dtype.kind not in "iu":
        refuse(index, f"words are no numbers of {dtype}")
    numbers = np.memmap(index, np.uint8, "r", HEADER.size) if count else np.empty(0, np.uint8)
    sizes = numbers[: 4 * count].view(np.int32).astype(np.int64)
    starts = numbers[4 * count :].view(np.int64)
    if count and (sizes.min() < 0 or starts.min() < 0):
        refuse(index, "sizes or places below 0")
    if count and (starts > os.path.getsize(data) - sizes * dtype.itemsize).any():
        refuse(data, "it ends before its last sentence")
    if dictionary is not None and os.path.getsize(data) >= dtype.itemsize:
        words = np.memmap(data, dtype, "r", shape=os.path.getsize(data) // dtype.itemsize)
        if words.min() < 0 or words.max() >= len(dictionary):
            refuse(data, f"it has words past the {len(dictionary):,} of the dictionary")
