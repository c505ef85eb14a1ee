"""Runs checkpoints on data and writes the tables that figures and reports read.

    parameters.csv    the learned parameters of mappings, one number per row
    heads.csv         metrics of each head
    layers.csv        metrics of each layer
    histograms.csv    histograms of the scores and probabilities of each layer
    temperatures.csv  sparsity and multi-modality of softmax over temperatures, on the same scores
    output.csv        the predicted distribution, by the rank of the target word
    examples.json     a few sentences with attention, roll-out and densities over positions
    collection.json   the checkpoints, their settings, the data, and the versions of all packages

The column `place` has the kind of attention: encoder, decoder or cross. Layers and heads count from
0. An empty cell is undefined.

Patch similarity and the mean average distance compare the outputs of a layer of the encoder or the
decoder. Patch similarity is the mean absolute cosine between two tokens. The mean average distance
is one minus the mean cosine. The roll-out of cross-attention continues through the encoder to the
source. The target of an example is the decoder's input.

For continuous attention, scores and probabilities come from its discrete part, and the variance
from the score function. The support, in tokens, is that of a truncated parabola. It is empty for a
Gaussian, which has unbounded support.
"""

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from tqdm import tqdm

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq.analysis import writing
from multimax_fairseq.analysis.recorder import Recorder
from multimax_fairseq.analysis.words import WordBoundaries
from multimax_fairseq.compat.untrusted import unwrapped
from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.mappings.registry import NORMALIZERS
from multimax_fairseq.models.config import as_namespace, settings
from multimax_fairseq.models.loading import build, read, set_up_task
from multimax_fairseq.signature import data_checksum, signature

logger = logging.getLogger(__name__)

EXAMPLES, LONGEST_EXAMPLE = 4, 32
# Bounds the memory of a batch to a few hundred MB, for any lengths and model.
TOKENS_AT_ONCE, SCORES_AT_ONCE = 4000, 1 << 22


def collect(
    checkpoints: list[Path],
    data: Path,
    subset: str,
    max_sentences: int,
    out: Path,
    command: list[str],
) -> None:
    """Write the files above to a folder, complete or not at all.

    Args:
        checkpoints: of one run, in any order.
        data: a folder of fairseq-preprocess.
        subset: the data set in it.
        max_sentences: how many of its sentences, or blocks of text, from the first on.
        out: the folder; an earlier collection in it is replaced, and other files in it are kept.
        command: the command line, for collection.json.

    Raises:
        UsageError: something is missing, empty, or does not match.
    """
    for path in checkpoints:
        if not path.is_file():
            raise no_file("checkpoint", path)
    if re.search(r"[/*?\[]", subset):
        raise UsageError(f"--subset '{subset}' must be a name, such as valid or test")
    if max_sentences < 1:
        raise UsageError(f"--max-sentences {max_sentences} must be at least 1")
    with writing.temporary_folder(out) as folder:
        tables = writing.empty_tables()
        described: list[dict[str, Any]] = []
        examples: dict[int, list[Any]] = {}
        task, seen = None, dict[str, int]()
        for path in checkpoints:
            state = read(path, data)
            task = task or _task(state, path, data, subset)
            state["model"] = unwrapped(state["model"])
            model, about = _load(state, path, task, data)
            del state
            for other in described:
                _check_same_run(about, other)
            recorder, seen = _record(model, task, subset, max_sentences, path)
            described.append({**about, **_normalizers(about["settings"], model, recorder)})
            examples[about["updates"]] = [e for _, e in sorted(recorder.examples.items())]
            for (kind, layer), sums in recorder.sums.items():
                writing.add_attention(tables, about["updates"], kind, layer, sums)
            _add_output(tables, about["updates"], model, recorder)
        described.sort(key=lambda about: about["updates"])
        metadata = {
            "command": command,
            **signature(),
            "data": {"folder": str(data), "sha256": data_checksum(data)},
            "subset": subset,
            **seen,
            "epsilon": "the mean of the scores that the query may attend to",
            "reference": "1 / the number of keys that the query may attend to",
            "checkpoints": described,
        }
        writing.write(out, folder, tables, examples[max(examples)], metadata)


# --- the model and the data -----------------------------------------------------------------------


def _task(state: dict[str, Any], path: Path, data: Path, subset: str) -> Any:
    """Return the checkpoint's task, with the subset loaded."""
    task = set_up_task(state, path, data)
    # The names that fairseq reads: of one language pair in both orders, or of one text.
    languages: Any = getattr(task.cfg, "source_lang", None), getattr(task.cfg, "target_lang", None)
    pairs = [f".{'-'.join(pair)}.*" for pair in (languages, languages[::-1]) if all(pair)] or [""]

    def files_of(name: str) -> list[Path]:
        return [file for pair in pairs for file in data.glob(f"{name}{pair}.bin")]

    files = files_of(subset)
    if not files:
        names = {file.name.split(".")[0] for file in data.glob("*.bin")}
        known = sorted(name for name in names if files_of(name))
        raise UsageError(
            f"data folder '{data}' has no subset '{subset}': pass --subset "
            f"{' or '.join(known) or 'and a folder that fairseq-preprocess wrote'}"
        )
    if all(file.stat().st_size == 0 for file in files):
        raise UsageError(
            f"subset '{subset}' of '{data}' is empty: pass another --subset, or prepare the data "
            "again"
        )
    task.load_dataset(subset)
    if getattr(task.dataset(subset), "tgt", True) is None:
        raise UsageError(
            f"subset '{subset}' of '{data}' has no target side: pass another --subset, or prepare "
            "the data again"
        )
    return task


def _load(
    state: dict[str, Any], path: Path, task: Any, data: Path
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of a checkpoint, and its entry in collection.json."""
    updates = state["optimizer_history"][-1]["num_updates"]
    model, cfg = build(state, path, task, data)
    args = as_namespace(cfg.model)
    about = {
        "path": str(path),
        "sha256": _hash_file(path),
        "updates": updates,
        "architecture": getattr(args, "arch", None) or args._name,
        "seed": cfg.common.seed,
        "settings": {
            setting.name: getattr(args, setting.name)
            for setting in settings()
            if setting.name != "monitor_interval" and hasattr(args, setting.name)
        },
    }
    return model, about


def _check_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    paths = f"checkpoints '{one['path']}' and '{other['path']}'"
    for key in ("architecture", "seed", "settings"):
        if (mine := one[key]) != (theirs := other[key]):
            if key == "settings":
                key = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
                mine, theirs = mine.get(key), theirs.get(key)
            raise UsageError(
                f"{paths} are not of one run ({key} {mine} and {theirs}): collect each, then "
                "compare them"
            )
    if one["updates"] == other["updates"]:
        raise UsageError(f"{paths} both have {one['updates']:,} updates: pass one of them")


def _normalizers(settings: dict[str, Any], model: Any, recorder: Recorder) -> dict[str, Any]:
    own = ("output_modulator", "output_normalizer")  # of our decoders
    is_softmax = all(getattr(model.decoder, name, None) is None for name in own)
    output = "softmax" if is_softmax else settings["output_normalizer"]
    normalizers = {kind: sums.normalizer.name for (kind, _), sums in recorder.sums.items()}
    labels = {name: NORMALIZERS[name].label for name in (*normalizers.values(), output)}
    return {
        "normalizer": normalizers,
        "densities": recorder.densities,
        "output_normalizer": output,
        "labels": labels,
    }


def _record(
    model: Any, task: Any, subset: str, max_sentences: int, path: Path
) -> tuple[Recorder, dict[str, int]]:
    """Run the model over the data; return the recorder, and the amount of data seen."""
    dataset = task.dataset(subset)
    lengths = utils.resolve_max_positions(task.max_positions(), model.max_positions())
    first = np.arange(min(max_sentences, len(dataset)))
    indices, too_long = dataset.filter_indices_by_size(first, lengths)
    if len(indices) == 0:
        raise UsageError(
            f"subset '{subset}' has no sentence that fits the model ({len(too_long):,} are longer "
            f"than {lengths}): pass another --subset"
        )
    if len(too_long):
        logger.warning(f"{len(too_long):,} sentences are longer than {lengths}: left out")
    is_translation = task.source_dictionary is not None and hasattr(model, "encoder")
    short = [i for i in indices if dataset.num_tokens(i) <= LONGEST_EXAMPLE] or list(indices)
    recorder = Recorder(
        model,
        WordBoundaries(task.source_dictionary, task.cfg.source_lang) if is_translation else None,
        WordBoundaries(task.target_dictionary, getattr(task.cfg, "target_lang", None)),
        {int(i) for i in short[:EXAMPLES]},
        LONGEST_EXAMPLE,
    )
    heads = max(sums.size for sums in recorder.sums.values())
    tokens = 0
    bar = tqdm(total=len(indices), unit=" sentences", desc=path.name, disable=None)
    with bar:
        for batch in _batches(indices, dataset, heads):
            sample = dataset.collater([dataset[i] for i in batch])
            try:
                recorder.run(sample)
            except UsageError as error:
                raise UsageError(f"checkpoint '{path}': {error}") from error
            tokens += sample["ntokens"]
            bar.update(len(batch))
    seen = {"sentences": len(indices), "tokens": int(tokens), "too_long": len(too_long)}
    return recorder, seen


def _batches(indices: np.ndarray, dataset: Any, heads: int) -> Iterator[list[int]]:
    """Yield batches of sentences of similar length that fit into memory."""
    batch: list[int] = []
    for index in sorted(indices.tolist(), key=dataset.num_tokens):
        length, size = dataset.num_tokens(index), len(batch) + 1
        too_many = size * length > TOKENS_AT_ONCE or size * heads * length**2 > SCORES_AT_ONCE
        if batch and too_many:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def _add_output(tables: writing.Tables, updates: int, model: Any, recorder: Recorder) -> None:
    modulator = getattr(model.decoder, "output_modulator", None)
    if modulator is not None:
        tables["parameters"] += writing.parameter_rows(updates, "output", None, modulator)
    tables["output"] += [{"updates": updates, **row} for row in recorder.output.rows()]


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
