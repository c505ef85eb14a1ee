"""compat/silent.py: batches, and files that fairseq-preprocess did not write."""

import pickle
import struct
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, LanguagePairDataset, data_utils, indexed_dataset
from fairseq.dataclass.configs import FairseqConfig
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from multimax_fairseq import compat
from multimax_fairseq.compat.silent import HEADER
from multimax_fairseq.errors import UsageError


@pytest.fixture(autouse=True)
def fixed_fairseq():
    compat.apply()


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, kept", [(12, 8), (8, 8), (3, 3)])
def test_get_train_iterator_drops_incomplete_last_batch(count, kept):
    batches = []

    def get_batch_iterator(**_):
        options = {"max_sentences": 8, "required_batch_size_multiple": 8}
        batches.extend(data_utils.batch_by_size(np.arange(count), lambda _: 5, None, **options))
        return MagicMock()

    trainer = MagicMock()
    trainer.task.get_batch_iterator = get_batch_iterator
    Trainer.get_train_iterator(trainer, epoch=1, load_dataset=False)
    assert np.concatenate(batches).tolist() == list(range(kept))


@pytest.mark.parametrize("form", [list, iter])
def test_batch_by_size_accepts_list_and_iterator(form):
    options = {"max_sentences": 8, "required_batch_size_multiple": 8}
    batches = data_utils.batch_by_size(form(range(12)), lambda _: 5, None, **options)
    assert all(isinstance(batch, np.ndarray) for batch in batches)
    assert np.concatenate(batches).tolist() == list(range(12))


class Sentences(torch.utils.data.Dataset):
    """40 sentences of one length, so that only the seed determines their order."""

    sizes = np.full(40, 5)

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return torch.full((5,), index % 20 + 4)


def pairs(dictionary, is_kept=True):
    class Pairs(LanguagePairDataset):
        can_reuse_epoch_itr_across_epochs = is_kept

    one = (Sentences(), Sentences.sizes, dictionary)
    return Pairs(*one, *one)


def iterator_of(task, dataset, epoch, **options):
    return task.get_batch_iterator(dataset, max_sentences=4, seed=1, epoch=epoch, **options)


@pytest.mark.parametrize(
    "options, is_kept",
    [
        ({}, True),
        ({}, False),
        ({"disable_iterator_cache": True}, True),
        ({"update_epoch_batch_itr": True}, True),
    ],
)
def test_get_batch_iterator_reuses_first_epoch_batches(dictionary, options, is_kept):
    def batches(epoch):
        task = TranslationTask(TranslationConfig(), dictionary, dictionary)
        iterator = iterator_of(task, pairs(dictionary, is_kept), epoch, **options)
        return [list(map(int, batch)) for batch in iterator.frozen_batches]

    assert (batches(1) == batches(3)) == (is_kept and not options)


def test_get_batch_iterator_counts_epochs(dictionary):
    task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    dataset = pairs(dictionary)
    for epoch in (1, 2, 3):
        iterator = iterator_of(task, dataset, epoch)
        assert iterator.next_epoch_idx == epoch
        list(iterator.next_epoch_itr())


def test_get_valid_iterator_on_training_data_keeps_epochs(dictionary):
    task = TranslationTask(TranslationConfig(), dictionary, dictionary)
    task.datasets["train"] = pairs(dictionary)
    trainer = MagicMock(task=task, data_parallel_world_size=1, data_parallel_rank=0)
    trainer.model.max_positions.return_value = (1024, 1024)
    trainer.cfg = OmegaConf.structured(FairseqConfig())
    trainer.cfg.dataset.batch_size = 8
    trainer.cfg.dataset.num_workers = 0

    def validate():
        iterator = Trainer.get_valid_iterator(trainer, "train")
        return list(iterator.next_epoch_itr(shuffle=False, set_dataset_epoch=False))

    training = Trainer.get_train_iterator(trainer, epoch=1, load_dataset=False)
    validated = [len(validate())]  # the dry run before the first epoch
    trained = []
    for epoch in (1, 2):
        assert training.next_epoch_idx == epoch
        epoch_batches = training.next_epoch_itr()
        trained.append([next(epoch_batches)])
        validated.append(len(validate()))  # --validate-interval-updates
        trained[-1] += list(epoch_batches)
        training = Trainer.get_train_iterator(trainer, epoch + 1, load_dataset=False)

    assert validated == [5, 5, 5]
    for batches in trained:
        assert sorted(torch.cat([batch["id"] for batch in batches]).tolist()) == list(range(40))


# --- files ---------------------------------------------------------------------------------------


def five_words():
    dictionary = Dictionary()
    dictionary.add_symbol("a")
    return dictionary


def written(folder, words, dtype=np.uint16, name="train"):
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
    builder.add_item(torch.tensor(words))
    builder.finalize(str(folder / f"{name}.idx"))
    return str(folder / name)


@pytest.mark.parametrize("dtype, word", [(np.uint16, 5), (np.int32, 5), (np.int32, -1)])
def test_load_indexed_dataset_refuses_out_of_range_words(dtype, word, tmp_path):
    path = written(tmp_path, [4, 2], dtype)
    assert data_utils.load_indexed_dataset(path, five_words(), "mmap")[0].tolist() == [4, 2]
    path = written(tmp_path, [4, word], dtype)
    with pytest.raises(UsageError, match="words past the 5 of the dictionary"):
        data_utils.load_indexed_dataset(path, five_words(), "mmap")


def test_load_indexed_dataset_refuses_sizes_beyond_the_data(tmp_path):
    path = written(tmp_path, [4, 2])
    index = bytearray((tmp_path / "train.idx").read_bytes())
    struct.pack_into("<i", index, HEADER.size, 3 << 29)
    (tmp_path / "train.idx").write_bytes(index)
    with pytest.raises(UsageError, match="it ends before its last sentence"):
        data_utils.load_indexed_dataset(path, five_words(), "mmap")


def translation_task(folder):
    config = TranslationConfig(data=str(folder), source_lang="de", target_lang="en")
    config.dataset_impl, config.required_seq_len_multiple = None, 1
    return TranslationTask(config, five_words(), five_words())


def test_load_dataset_combines_each_shard_once(tmp_path):
    for split, words in (("train", [4, 2]), ("train1", [4, 4, 2])):
        for language in ("de", "en"):
            written(tmp_path, words, name=f"{split}.de-en.{language}")
    task = translation_task(tmp_path)

    task.load_dataset("train", combine=True)

    pairs = task.dataset("train")
    assert [pair["source"].tolist() for pair in pairs] == [[4, 2], [4, 4, 2]]
    assert pairs.sizes.tolist() == [[2, 2], [3, 3]]


@pytest.mark.parametrize("impl", ["lazy", "cached", None])
def test_load_indexed_dataset_reads_pickled_legacy_formats(impl, tmp_path):
    sentences = [[3, 1], [1, 2, 4, 0], [2]]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "train.bin"))
    for sentence in sentences:
        builder.add_item(torch.tensor(sentence))
    builder.finalize(str(tmp_path / "train.idx"))

    data = data_utils.load_indexed_dataset(str(tmp_path / "train"), five_words(), impl)
    in_order = [data[index].tolist() for index in range(3)]
    received = pickle.loads(pickle.dumps(data))  # a pickled copy has no open file

    assert in_order == sentences
    assert [received[index].tolist() for index in (2, 0)] == [sentences[2], sentences[0]]
    assert data.sizes.tolist() == [2, 4, 1] and len(data) == 3
