"""A fix for --replace-unk, which replaces the unknown words of a translation."""

import copy

from multimax_fairseq.compat.patch import command, replace
from multimax_fairseq.errors import UsageError

# What fairseq's parser stores for --replace-unk without a file.
NO_FILE = "@@ "


def replaced_unknown_words():
    """Replace each <unk> of a translation by the source word with the largest attention weight.

    Cause: fairseq opens a file "@@ " if none is given, reads an alignment that the generator does
    not return in that form, and counts words after it has joined subwords. In fairseq-interactive
    it reads the source without its unknown words. The fix replaces tokens before subwords are
    joined, and takes the source's words from the input or from the data of --dataset-impl raw.
    Remove when fairseq replaces tokens by the attention weights.
    """
    if command() not in ("fairseq-generate", "fairseq-interactive"):
        return
    from fairseq import utils
    from fairseq.tasks import TASK_REGISTRY, FairseqTask
    from fairseq_cli import interactive

    replacement = _Replacement()

    @replace(utils, "load_align_dict")
    def load_align_dict(original, path):
        if path is None:
            return None
        replacement.translations = {} if path == NO_FILE else _read(path)
        return {}  # fairseq-generate then reads source and reference from the raw text

    @replace(interactive, "make_batches")
    def make_batches(original, lines, cfg, task, max_positions, encode_fn):
        for batch in original(lines, cfg, task, max_positions, encode_fn):
            replacement.texts = [encode_fn(lines[index]) for index in batch.ids.tolist()]
            yield batch

    @replace(utils, "post_process_prediction")
    def post_process_prediction(original, *args, tgt_dict, align_dict, **kwargs):
        words = replacement.dictionary or tgt_dict
        return original(*args, tgt_dict=words, align_dict=None, **kwargs)

    def inference_step(original, self, generator, models, sample, *args, **kwargs):
        if replacement.translations is None:
            return original(self, generator, models, sample, *args, **kwargs)
        for model in models:
            model.decoder.need_attn = True  # recurrent and convolutional decoders read it
        hypotheses = original(self, generator, models, sample, *args, **kwargs)
        replacement.apply(self, sample, hypotheses)
        return hypotheses

    for task in {FairseqTask, *TASK_REGISTRY.values()}:
        if "inference_step" in vars(task):
            replace(task, "inference_step")(inference_step)


def _read(path):
    """Return {source word: target word} of a file with one pair in each line."""
    pairs = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.split()
            if len(words) != 2:
                raise UsageError(
                    f"line {number:,} of --replace-unk '{path}' has {len(words)} words: write a "
                    "source word and its translation in each line"
                )
            pairs[words[0]] = words[1]
    return pairs


class _Replacement:
    """The words that replace <unk>, and a target dictionary that also has these words."""

    def __init__(self):
        self.translations = None  # {source word: target word} under --replace-unk
        self.texts = None  # of the current batch, in fairseq-interactive
        self.dictionary = None

    def apply(self, task, sample, hypotheses):
        """Replace <unk> in the hypotheses of a batch."""
        if self.dictionary is None:
            self.dictionary = copy.deepcopy(task.target_dictionary)
        sources = sample["net_input"]["src_tokens"].tolist()
        texts = self.texts or _raw_texts(task, sample) or [""] * len(sources)
        for source, text, found in zip(sources, texts, hypotheses, strict=True):
            words = _source_words(task.source_dictionary, source, text)
            for hypothesis in found:
                self._replace(hypothesis, words)

    def _replace(self, hypothesis, words):
        """Replace <unk> in a hypothesis; `words` are {position in the source: word}."""
        unknown = self.dictionary.unk()
        tokens = hypothesis["tokens"].clone()
        columns = tokens.eq(unknown).nonzero().flatten().tolist()
        if not columns or not words:
            return
        weights = hypothesis["attention"]  # (S, T)
        if not weights.numel():
            raise UsageError(
                "--replace-unk needs attention weights, which this model does not return: leave "
                "it out"
            )
        positions = list(words)
        best = weights[positions][:, columns].argmax(0).tolist()
        for column, row in zip(columns, best, strict=True):
            word = words[positions[row]]
            tokens[column] = self.dictionary.add_symbol(self.translations.get(word, word))
        hypothesis["tokens"] = tokens


def _raw_texts(task, sample):
    """Return the sources of a batch if their data is raw text; None otherwise."""
    for dataset in task.datasets.values():  # the one subset that fairseq-generate loads
        source = getattr(dataset, "src", None)
        while hasattr(source, "dataset"):
            source = source.dataset
        if hasattr(source, "get_original_text"):
            return [source.get_original_text(index) for index in sample["id"].tolist()]
    return None


def _source_words(dictionary, tokens, text):
    """Return {position: word} of a source, without its symbols; `text` has unknown words too."""
    from fairseq.tokenizer import tokenize_line

    symbols = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
    positions = [index for index, token in enumerate(tokens) if token not in symbols]
    words = tokenize_line(text)
    return {
        index: words[number] if number < len(words) else dictionary[tokens[index]]
        for number, index in enumerate(positions)
    }
