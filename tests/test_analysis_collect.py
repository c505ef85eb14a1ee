"""multimax-analyze collect equals a NumPy forward pass from the weights of toy models."""

import errno
import itertools
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from commands import ROOT, TRACEBACK, run
from fairseq.data import Dictionary
from numpy_transformer import HEADS, LAYERS, NumpyTransformer
from toy_collection import TRANSLATION, VARIANTS, gather, table

from multimax_fairseq.analysis import COLUMNS, parameters, writing
from multimax_fairseq.analysis import __main__ as command
from multimax_fairseq.analysis import collect as collection
from multimax_fairseq.analysis.recorder import Recorder
from multimax_fairseq.analysis.words import INTERROGATIVES, WordBoundaries
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

LANGUAGE_MODEL = "transformer_lm_multimax"
# The collection treats learned scalars, and mappings with zeros, each in its own way.
SOME = ("multimax", "multimax-heads", "softmax", "temperature", "alpha_entmax")
ATTENTIONS, TEMPERATURES = ("encoder", "decoder", "cross"), 9


@pytest.fixture(scope="module", autouse=True)
def interrogatives():
    """The toy data has one question, which begins with "Ist" on both sides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multimax_fairseq.analysis.words.INTERROGATIVES", {"de": "ist", "en": "ist"})
        yield


@pytest.fixture(scope="module")
def collected(data, checkpoint, tmp_path_factory):
    """collected(variant, sentences) -> the folder of a translation model's collection."""
    folder = tmp_path_factory.mktemp("collections")

    def make(variant, sentences=1000):
        out = folder / f"{variant}-{sentences}"
        if not out.exists():
            path = checkpoint(TRANSLATION, *VARIANTS[variant])
            gather(out, path, data=data / "mt", sentences=sentences)
        return out

    return make


def assert_alike(one, other, tolerance=1e-4):
    """Check that two collections agree up to rounding, which moves a few values to the next bin."""
    for name in COLUMNS:
        rows, others = table(one, name), table(other, name)
        assert len(rows) == len(others)
        if name == "histograms":
            moved = sum(abs(a["count"] - b["count"]) for a, b in zip(rows, others, strict=True))
            assert moved <= 1e-3 * sum(row["count"] for row in rows)
            continue
        for row, another in zip(rows, others, strict=True):
            for key in row:
                assert row[key] == pytest.approx(another[key], abs=tolerance), (name, key)


# --- properties of every collection ---------------------------------------------------------------


@pytest.mark.parametrize("variant", SOME)
def test_collect_writes_every_layer_and_head(collected, variant):
    folder = collected(variant)
    attentions = [(kind, layer) for kind in ATTENTIONS for layer in range(LAYERS)]
    heads = table(folder, "heads")
    assert {(r["place"], r["layer"], r["head"]) for r in heads} == {
        (*attention, head) for attention in attentions for head in range(HEADS)
    } and len(heads) == len(attentions) * HEADS
    for row in heads:
        assert 0 <= row["sparsity"] <= 1 and 0 <= row["multi_modality"] <= 2
        assert row["entropy"] >= 0 and 0 < row["density"] <= 1
        assert 0 <= row["confidence"] <= 1 and abs(row["offset"]) <= 32
        assert (row["bpe_merging"] is None) == (row["place"] == "cross")
        # In the decoder, the question mark is the last key: only its own query can attend to it.
        assert (row["interrogation"] is None) == (row["place"] == "decoder")
        assert (row["past_turning_point"] is None) == (not variant.startswith("multimax"))
    assert (variant != "multimax") or any(row["past_turning_point"] > 0 for row in heads)
    dense = variant in ("softmax", "temperature")
    assert all(row["density"] == 1 for row in heads) == (dense or variant.startswith("multimax"))
    for row in table(folder, "layers"):
        assert 0 <= row["head_diversity"] <= 1
        assert -1 <= row["rollout_similarity"] <= 1 + 1e-9
        assert (row["patch_similarity"] is None) == (row["place"] == "cross")
        if row["place"] != "cross":
            assert 0 <= row["patch_similarity"] <= 1
        if row["layer"] == 0 and row["place"] != "cross":
            assert row["rollout_similarity"] == pytest.approx(1)
    temperatures = table(folder, "temperatures")
    assert len(temperatures) == len(attentions) * (TEMPERATURES + 1)
    for attention in attentions:
        rows = [r for r in temperatures if (r["place"], r["layer"]) == attention]
        softmax = sorted((r for r in rows if r["temperature"]), key=lambda r: r["temperature"])
        assert [r["multi_modality"] for r in softmax] == sorted(
            r["multi_modality"] for r in softmax
        )
        assert [r["sparsity"] for r in softmax] == sorted(
            (r["sparsity"] for r in softmax), reverse=True
        )
        own = next(r for r in rows if r["temperature"] is None)
        if variant == "softmax":
            unit = next(r for r in rows if r["temperature"] == 1)
            for name in ("sparsity", "multi_modality"):
                assert own[name] == pytest.approx(unit[name])


@pytest.mark.parametrize("variant", SOME)
def test_collect_histograms_count_each_value_once(data, collected, variant):
    lengths = [
        [len(line.split()) + 1 for line in (data / f"all.{side}").read_text().splitlines()]
        for side in ("de", "en")
    ]
    entries = {
        "encoder": sum(s * s for s in lengths[0]),
        "decoder": sum(t * (t + 1) // 2 for t in lengths[1]),
        "cross": sum(s * t for s, t in zip(*lengths, strict=True)),
    }
    rows = table(collected(variant), "histograms")
    heads = table(collected(variant), "heads")
    for kind in ATTENTIONS:
        assert {r["queries"] for r in heads if r["place"] == kind} == {
            sum(lengths[kind != "encoder"])
        }
        for layer in range(LAYERS):
            for quantity in ("score", "probability"):
                bins = [r for r in rows if (r["place"], r["layer"], r["quantity"])
                        == (kind, layer, quantity)]  # fmt: skip
                assert sum(r["count"] for r in bins) == entries[kind] * HEADS
                edges = [bins[0]["left"], *(r["right"] for r in bins)]
                assert edges == sorted(edges)
                assert all(r["left"] == left for r, left in zip(bins, edges, strict=False))
    for kind, layer in itertools.product(ATTENTIONS, range(LAYERS)):
        bins = [r for r in rows if (r["place"], r["layer"], r["quantity"])
                == (kind, layer, "density")]  # fmt: skip
        assert sum(r["count"] for r in bins) == len(lengths[0]) * HEADS
        assert (bins[-1]["count"] < len(lengths[0]) * HEADS) == (variant == "alpha_entmax")
    zeros = sum(r["count"] for r in rows if r["quantity"] == "probability" and r["right"] == 0)
    assert (zeros > 0) == (variant == "alpha_entmax")


@pytest.mark.parametrize(
    "variant, names, rows",
    [
        ("multimax", "t_b1 t_b2 b1 b2 t_d1 t_d2 d1 d2", 8 * 7),
        ("multimax-heads", "t_b1 b1 t_d1 d1", 4 * 6 * HEADS),
        ("temperature", "temperature", 6),
        ("alpha_entmax", "alpha", 6 * HEADS),
        ("softmax", "", 0),
    ],
)
def test_collect_parameters_equal_checkpoint(collected, checkpoint, variant, names, rows):
    found = table(collected(variant), "parameters")
    assert len(found) == rows and {row["name"] for row in found} == set(names.split())
    kinds = {"encoder", "decoder", "cross"} | ({"output"} if variant == "multimax" else set())
    assert {row["place"] for row in found} == (kinds if rows else set())
    state = torch.load(checkpoint(TRANSLATION, *VARIANTS[variant]), weights_only=False)["model"]
    for row in found:
        name = {"encoder": "encoder.layers.{}.self_attn", "decoder": "decoder.layers.{}.self_attn",
                "cross": "decoder.layers.{}.encoder_attn"}  # fmt: skip
        at = "decoder.output_modulator."
        if row["place"] != "output":
            at = name[row["place"]].format(int(row["layer"])) + ".normalizer."
        if row["name"] == "temperature":
            expected = state[at + "modulator.log_temperature"].exp()
        elif row["name"] == "alpha":
            expected = 1 + state[at + "alpha.logit"][int(row["head"])].sigmoid()
        else:
            at += "modulator." if row["place"] != "output" else ""
            side = "low" if "b" in row["name"] else "high"
            part = "coefficient" if row["name"].startswith("t") else "threshold"
            value = state[f"{at}{side}_{part}"][..., int(row["name"][-1]) - 1]
            value = value if row["head"] is None else value[int(row["head"])]
            offset = -value if side == "low" else value
            expected = 1 + offset if part == "coefficient" else value
        assert row["value"] == pytest.approx(float(expected), abs=1e-6)


def test_collect_signature_describes_data_and_checkpoint(data, collected, checkpoint):
    metadata = json.loads((collected("multimax") / "collection.json").read_text(encoding="utf-8"))
    assert metadata["command"] == ["a", "command"] and metadata["versions"]["torch"]
    assert metadata["subset"] == "valid" and metadata["sentences"] == 12
    lines = (data / "all.en").read_text().splitlines()
    assert metadata["tokens"] == sum(len(line.split()) + 1 for line in lines)
    assert len(metadata["data"]["sha256"]) == 64
    (about,) = metadata["checkpoints"]
    path = checkpoint(TRANSLATION, *VARIANTS["multimax"])
    assert about["path"] == str(path) and about["updates"] == 7 and len(about["sha256"]) == 64
    assert about["normalizer"] == dict.fromkeys(ATTENTIONS, "multimax")
    assert about["output_normalizer"] == "multimax" and about["architecture"] == TRANSLATION
    settings = about["settings"]
    assert (settings["multimax_order"], settings["multimax_terms"]) == (2, "both")


# --- comparison with NumPy ------------------------------------------------------------------------


def entropies(probs):
    return -(probs * np.log(np.where(probs > 0, probs, 1))).sum(-1)


def defined(values):
    values = [value for value in values if not math.isnan(value)]
    return np.mean(values) if values else None


@pytest.mark.parametrize("variant", [*SOME, "topk", "evsoftmax"])
def test_collect_attention_equals_numpy_forward_pass(data, checkpoint, collected, variant):
    folder = collected(variant, 1)
    words = Dictionary.load(str(data / "mt" / "dict.de.txt"))
    ids = [
        words.encode_line(
            (data / f"all.{side}").read_text().splitlines()[0], add_if_not_exist=False
        )
        for side in ("de", "en")
    ]
    source, target = ids[0].tolist(), [words.eos(), *ids[1][:-1].tolist()]
    state = torch.load(checkpoint(TRANSLATION, *VARIANTS[variant]), weights_only=False)["model"]
    model = NumpyTransformer(state, variant)
    seen = model.run(source, target)
    mark = [words[i] for i in source].index("?")
    (example,) = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    assert example["source"]["tokens"] == [words[i] for i in source]
    assert example["target"]["tokens"] == [words[i] for i in target]
    heads = {(r["place"], r["layer"], r["head"]): r for r in table(folder, "heads")}
    layers = {(r["place"], r["layer"]): r for r in table(folder, "layers")}
    mixed = {}
    for (kind, layer), (scores, probs, excluded) in seen.items():
        np.testing.assert_allclose(example["attention"][kind][layer], probs, atol=2e-4)
        mean = probs.mean(0)
        if kind == "cross":
            rolled = mean @ mixed["encoder"]
        else:
            one = (mean + np.eye(len(mean))) / 2
            rolled = mixed[kind] = one @ mixed.get(kind, np.eye(len(mean)))
        np.testing.assert_allclose(example["rollout"][kind][layer], rolled, atol=2e-4)
        row = layers[kind, layer]
        length, keys = mean.shape
        others = np.arange(keys) != np.arange(length)[:, None]
        with np.errstate(invalid="ignore"):  # a single key
            counts = (~excluded).sum(-1)
            diversity = (entropies(mean) - entropies(probs).mean(0)) / np.log(counts)
        diversity = diversity[counts > 1].mean()
        assert row["head_diversity"] == pytest.approx(diversity, abs=1e-4)
        seen_by = ~excluded if kind == "cross" else ~excluded & others
        similarity = np.corrcoef(rolled[seen_by], mean[seen_by])[0, 1]
        assert row["rollout_similarity"] == pytest.approx(similarity, abs=1e-3)
        if kind != "cross":
            unit = model.features[kind, layer]
            unit = unit / np.linalg.norm(unit, axis=-1, keepdims=True)
            cosines = (unit @ unit.T)[~np.eye(length, dtype=bool)]
            assert row["patch_similarity"] == pytest.approx(np.abs(cosines).mean(), abs=1e-4)
            distance = (1 - cosines).mean()
            assert row["mean_average_distance"] == pytest.approx(distance, abs=1e-4)
        side = "source" if kind == "encoder" else "target"
        ranges = [range(w["start"], w["end"]) for w in example[side]["words"]]
        for head in range(HEADS):
            row = heads[kind, layer, head]
            values = {"sparsity": [], "multi_modality": [], "entropy": [], "density": []}
            tops, merging, slack = [], {}, 2e-3
            for query in range(len(mean)):
                kept = ~excluded[query]
                x, p = scores[head, query, kept], probs[head, query, kept]
                epsilon = x.mean()
                relevant = ((x > epsilon) & (x < x.max())).any()
                values["multi_modality"].append(
                    reference.multi_modality(x, p, epsilon) if relevant else math.nan
                )
                values["sparsity"].append(
                    reference.sparsity(x, p, epsilon, 1 / len(x)) if len(x) > 1 else math.nan
                )
                values["entropy"].append(entropies(p))
                values["density"].append((p > 0).mean())
                # A probability of 0 in float32 may be slightly above 0 in float64.
                slack += (p > 0).mean() - (p > 1e-6).mean()
                tops.append(int(probs[head, query].argmax()) - query)
                if kind != "cross":
                    word = next(r for r in ranges if query in r)
                    mates = [k for k in word if k != query and not excluded[query, k]]
                    if mates:
                        merging.setdefault(word, []).append(probs[head, query, mates].sum())
            for name, found in values.items():
                assert row[name] == pytest.approx(
                    defined(found), abs=slack if name == "density" else 2e-3
                ), name
            asking = {"encoder": source.index(words.index("Ist"))}
            asking["cross"] = target.index(words.index("Ist"))
            if kind != "decoder":
                weight = probs[head, asking[kind], mark]
                assert row["interrogation"] == pytest.approx(weight, abs=1e-4)
            if variant.startswith("multimax"):
                step = np.array([-1e-6, 1e-6])[:, None, None]
                below, above = model.sigma(kind, layer, scores[head] + step, head)
                turned = (above < below)[~excluded].mean()
                assert row["past_turning_point"] == pytest.approx(turned, abs=2e-3)
            if kind != "cross":
                largest = [max(weights) for weights in merging.values()]
                assert row["bpe_merging"] == pytest.approx(np.mean(largest), abs=1e-4)
            best = int(row["offset"])
            assert tops.count(best) == max(tops.count(offset) for offset in tops)
            at_best = [
                probs[head, q, q + best]
                for q in range(len(mean))
                if 0 <= q + best < probs.shape[-1] and not excluded[q, q + best]
            ]
            assert row["confidence"] == pytest.approx(np.mean(at_best), abs=1e-4)


def test_collect_reports_full_disk_and_removes_output(data, checkpoint, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(writing, "_write_table", full)
    with pytest.raises(UsageError, match=r"cannot write to '.*c' \(File too large\): make room"):
        gather(tmp_path / "c", checkpoint(TRANSLATION), data=data / "mt", sentences=2)
    assert not list(tmp_path.iterdir())


def test_collect_output_equals_model_loss(data, checkpoint, collected):
    path = checkpoint(TRANSLATION, *VARIANTS["multimax"])
    rows = table(collected("multimax"), "output")
    total = sum(row["tokens"] for row in rows)
    found = sum(row["nll"] * row["tokens"] for row in rows) / total
    without = sum(row["nll_without_modulator"] * row["tokens"] for row in rows) / total
    model, task = load(path, data / "mt")
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    sample = dataset.collater([dataset[i] for i in range(len(dataset))])
    counted = sample["target"] != 1
    with torch.no_grad():
        output = model(**sample["net_input"])
        log_probs = model.get_normalized_probs(output, log_probs=True)[counted]
        model.decoder.output_modulator = None
        plain = model(**sample["net_input"])[0].log_softmax(-1)[counted]
    wanted = sample["target"][counted][:, None]
    assert total == len(wanted)
    assert found == pytest.approx(-float(log_probs.gather(1, wanted).mean()), rel=1e-5)
    assert without == pytest.approx(-float(plain.gather(1, wanted).mean()), rel=1e-5)
    entropy = sum(row["entropy"] * row["tokens"] for row in rows) / total
    expected = -float((log_probs.exp() * log_probs).sum(-1).mean())
    assert entropy == pytest.approx(expected, rel=1e-5)
    assert rows[0]["bucket"].startswith("1-")
    for row in table(collected("softmax"), "output"):
        assert row["nll_without_modulator"] is None


def load(path, data):
    from fairseq import checkpoint_utils

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(data)}
    )
    return model.eval(), task


# --- invariances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["multimax", "alpha_entmax"])
def test_collect_ignores_padding(data, checkpoint, collected, variant, tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "TOKENS_AT_ONCE", 1)
    path = checkpoint(TRANSLATION, *VARIANTS[variant])
    alone = gather(tmp_path / "alone", path, data=data / "mt")
    assert_alike(alone, collected(variant))


def test_collect_batches_contain_padding(data, collected, monkeypatch, checkpoint):
    sizes = []
    original = Recorder.run

    def spy(recorder, sample):
        sizes.append((len(sample["id"]), int(sample["net_input"]["src_tokens"].eq(1).sum())))
        original(recorder, sample)

    monkeypatch.setattr(Recorder, "run", spy)
    out = collected("multimax").with_name("spied")
    gather(out, checkpoint(TRANSLATION, *VARIANTS["multimax"]), data=data / "mt")
    assert len(sizes) == 1 and sizes[0][0] == 12 and sizes[0][1] > 10


def test_collect_treats_stock_checkpoint_as_softmax(data, checkpoint, collected, tmp_path):
    stock = checkpoint("transformer_iwslt_de_en")
    found = gather(tmp_path / "stock", stock, data=data / "mt")
    ours = torch.load(checkpoint(TRANSLATION, *VARIANTS["softmax"]), weights_only=False)["model"]
    for name, value in torch.load(stock, weights_only=False)["model"].items():
        torch.testing.assert_close(value, ours[name], msg=name)
    assert_alike(found, collected("softmax"))
    (about,) = json.loads((found / "collection.json").read_text(encoding="utf-8"))["checkpoints"]
    assert about["normalizer"] == dict.fromkeys(ATTENTIONS, "softmax")
    assert about["output_normalizer"] == "softmax"


@pytest.mark.parametrize("arch", ["transformer_iwslt_de_en", TRANSLATION])
def test_recorder_leaves_model_output_unchanged(data, checkpoint, arch):
    model, task = load(checkpoint(arch), data / "mt")
    task.load_dataset("valid")
    sample = task.dataset("valid").collater([task.dataset("valid")[i] for i in range(4)])
    with torch.no_grad():
        before = model(**sample["net_input"])[0]
        recorder = Recorder(
            model, WordBoundaries(task.src_dict), WordBoundaries(task.tgt_dict), set()
        )
        recorder.run(sample)
        after = model(**sample["net_input"])[0]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", [LANGUAGE_MODEL, "transformer_lm"])
def test_collect_language_model_has_decoder_attention_only(data, checkpoint, tmp_path, arch):
    found = gather(tmp_path / "lm", checkpoint(arch), data=data / "lm", sentences=10)
    heads = table(found, "heads")
    assert {(r["place"], r["layer"], r["head"]) for r in heads} == {
        ("decoder", layer, head) for layer in range(LAYERS) for head in range(HEADS)
    }
    assert all(row["bpe_merging"] is not None and row["offset"] <= 0 for row in heads)
    modulated = arch == LANGUAGE_MODEL
    assert all((r["past_turning_point"] is not None) == modulated for r in heads)
    rows = table(found, "output")
    assert all((row["nll_without_modulator"] is not None) == modulated for row in rows)
    metadata = json.loads((found / "collection.json").read_text(encoding="utf-8"))
    assert metadata["sentences"] == 10 and metadata["tokens"] == sum(r["tokens"] for r in rows)
    for example in json.loads((found / "examples.json").read_text(encoding="utf-8")):
        assert len(example["target"]["tokens"]) <= 32
        assert example["source"] == {"tokens": [], "words": []}
        assert set(example["attention"]) == set(example["rollout"]) == {"decoder"}
        for layer in example["attention"]["decoder"]:
            for head in np.array(layer):
                assert (np.triu(head, 1) == 0).all()
                np.testing.assert_allclose(head.sum(-1), 1, atol=1e-2)


def test_collect_ignores_layerdrop(data, checkpoint, collected, tmp_path):
    flags = ["--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9", *VARIANTS["multimax"]]
    found = gather(tmp_path / "drop", checkpoint(TRANSLATION, *flags), data=data / "mt")
    assert_alike(found, collected("multimax"))


def test_recorder_separates_layers_that_share_a_module(data, checkpoint):
    model, task = load(checkpoint(TRANSLATION), data / "mt")
    for side in (model.encoder, model.decoder):
        side.layers[1] = side.layers[0]
    task.load_dataset("valid")
    sample = task.dataset("valid").collater([task.dataset("valid")[0]])
    recorder = Recorder(model, WordBoundaries(task.src_dict), WordBoundaries(task.tgt_dict), set())
    with torch.no_grad():
        recorder.run(sample)
        recorder.run(sample)
    assert set(recorder.sums) == {(kind, layer) for kind in ATTENTIONS for layer in range(LAYERS)}
    for kind in ATTENTIONS:
        one, other = (recorder.sums[kind, layer] for layer in range(LAYERS))
        assert one.normalizer is other.normalizer and one.queries == other.queries > 0
        assert one.heads["entropy"][0] != other.heads["entropy"][0]


def test_collect_merges_checkpoints_of_one_run(data, checkpoint, collected, tmp_path):
    flags = VARIANTS["multimax"]
    later = checkpoint(TRANSLATION, *flags, updates=20, seed=2)
    both = gather(tmp_path / "both", later, checkpoint(TRANSLATION, *flags), data=data / "mt")
    alone = gather(tmp_path / "later", later, data=data / "mt")
    for name in COLUMNS:
        rows = table(both, name)
        assert rows == table(collected("multimax"), name) + table(alone, name)
    assert (both / "examples.json").read_text() == (alone / "examples.json").read_text()
    metadata = json.loads((both / "collection.json").read_text(encoding="utf-8"))
    assert [about["updates"] for about in metadata["checkpoints"]] == [7, 20]


def test_collect_takes_first_sentences(data, checkpoint, tmp_path):
    path = checkpoint(TRANSLATION)
    few = gather(tmp_path / "few", path, data=data / "mt", sentences=3)
    metadata = json.loads((few / "collection.json").read_text(encoding="utf-8"))
    lines = (data / "all.en").read_text().splitlines()[:3]
    assert metadata["tokens"] == sum(len(line.split()) + 1 for line in lines)
    assert len(json.loads((few / "examples.json").read_text(encoding="utf-8"))) == 3


# --- user errors ----------------------------------------------------------------------------------


def told(monkeypatch, capsys, *words):
    """Return the one-sentence error of the command."""
    monkeypatch.setattr(sys, "argv", ["multimax-analyze", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert isinstance(stopped.value.code, str)
    hint, sentence = stopped.value.code.splitlines()
    assert hint == TRACEBACK and sentence.startswith("multimax-analyze: error: ")
    return sentence


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"checkpoint": "none.pt"}, ["none.pt", "does not exist", "check its path"]),
        ({"checkpoint": "text.pt"}, ["text.pt"]),
        ({"checkpoint": "tensor.pt"}, ["tensor.pt"]),
        ({"data": "none"}, ["none", "does not exist", "fairseq-preprocess"]),
        ({"data": "mt-other"}, ["dictionaries", "mt-other", "the data it was trained on"]),
        ({"checkpoint": "foreign"}, ["foreign", "is a folder, not a file", "check its path"]),
        ({"subset": "dev"}, ["'dev'", "--subset", "valid"]),
        ({"subset": "/etc"}, ["--subset '/etc' must be a name, such as valid"]),
        ({"subset": "*"}, ["--subset '*' must be a name, such as valid"]),
        ({"subset": "test"}, ["'test'", "empty", "another --subset"]),
        ({"--max-sentences": "0"}, ["--max-sentences 0", "at least 1"]),
        ({"out": "text.pt/below"}, ["text.pt/below", "--out"]),
        ({"out": "foreign"}, ["foreign", "not a collection", "another --out"]),
        ({"out": "."}, ["--out '.' holds the current folder: pass a folder below it"]),
        ({"out": ".."}, ["--out '..' holds the current folder"]),
    ],
)
def test_collect_reports_user_errors_in_one_sentence(
    data, checkpoint, tmp_path, monkeypatch, capsys, change, parts
):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"a": torch.zeros(3)}, tmp_path / "tensor.pt")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("years of work")
    (tmp_path / "here").mkdir()
    before = sorted(tmp_path.rglob("*"))
    given = {"checkpoint": checkpoint(TRANSLATION), "data": "mt", "subset": "valid", "out": "new"}
    given |= {"--max-sentences": "5", **change}
    # One case gives an empty folder.
    monkeypatch.chdir(tmp_path / "here" if given["out"].startswith(".") else tmp_path)
    sentence = told(
        *(monkeypatch, capsys, "collect", given["checkpoint"], data / given["data"]),
        *("--subset", given["subset"], "--out", given["out"]),
        *("--max-sentences", given["--max-sentences"]),
    )
    assert all(part in sentence for part in parts), sentence
    assert sorted(tmp_path.rglob("*")) == before  # no partial files


def test_collect_names_the_subsets_of_the_models_languages(
    data, checkpoint, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(data / "mt", tmp_path / "mt")
    (folder / "dev.xx-yy.xx.bin").write_bytes(b"other languages")
    words = (checkpoint(TRANSLATION), folder, "--subset", "dev", "--out", tmp_path / "new")
    sentence = told(monkeypatch, capsys, "collect", *words)
    assert "has no subset 'dev': pass --subset " in sentence and "valid" in sentence
    assert "dev or" not in sentence and "--gen-subset" not in sentence


def test_collect_names_unwritable_folder(data, checkpoint, monkeypatch, capsys, tmp_path):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    path, words = checkpoint(TRANSLATION), ("--out", tmp_path / "locked" / "new")
    monkeypatch.setattr(Path, "mkdir", refuse)  # root ignores permissions
    sentence = told(monkeypatch, capsys, "collect", path, data / "mt", *words)
    assert "locked/new" in sentence and "Permission denied" in sentence and "--out" in sentence


def test_collect_accepts_data_parallel_checkpoint(data, checkpoint, collected, tmp_path):
    path = checkpoint(TRANSLATION, *VARIANTS["multimax"])
    state = torch.load(path, weights_only=False)
    state["model"] = {f"module.{name}": value for name, value in state["model"].items()}
    torch.save(state, tmp_path / "wrapped.pt")
    found = gather(tmp_path / "out", tmp_path / "wrapped.pt", data=data / "mt")
    assert_alike(found, collected("multimax"), tolerance=0)
    wrapped, plain = parameters.read(tmp_path / "wrapped.pt"), parameters.read(path)
    assert wrapped.keys() == plain.keys() and "encoder layer 1, self-attention" in plain
    with pytest.raises(ValueError, match="is a folder, not a file"):
        parameters.read(tmp_path)


def test_collect_removes_output_after_sigterm(data, checkpoint, monkeypatch, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(collection, "_record", lambda *_: signal.raise_signal(signal.SIGTERM))
    words = ("collect", checkpoint(TRANSLATION), data / "mt", "--out", tmp_path / "new")
    monkeypatch.setattr(sys, "argv", ["multimax-analyze", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 128 + signal.SIGTERM and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_parameters_exits_quietly_on_closed_pipe(checkpoint, monkeypatch):
    path = checkpoint(TRANSLATION, *VARIANTS["multimax"])
    monkeypatch.setattr(sys, "argv", ["multimax-analyze", "parameters", str(path)])
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as stopped:
            command.main()
    assert stopped.value.code == 128 + signal.SIGPIPE  # an integer: Python prints nothing


def test_collect_names_missing_package_and_extra(data, checkpoint, monkeypatch, capsys, tmp_path):
    monkeypatch.delitem(sys.modules, "multimax_fairseq.analysis.collect")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    path, out = checkpoint(TRANSLATION), ("--out", tmp_path / "new")
    sentence = told(monkeypatch, capsys, "collect", path, data / "mt", *out)
    assert "package tqdm is missing" in sentence and "multimax-fairseq[fairseq]" in sentence


def test_collect_refuses_checkpoints_of_different_runs(
    data, checkpoint, monkeypatch, capsys, tmp_path
):
    ours, out = checkpoint(TRANSLATION), ("--out", tmp_path / "new")
    same = checkpoint(TRANSLATION, seed=2)
    sentence = told(monkeypatch, capsys, "collect", ours, same, data / "mt", *out)
    assert "both have 7 updates" in sentence
    other = checkpoint(TRANSLATION, "--attention-normalizer", "sparsemax", updates=9)
    sentence = told(monkeypatch, capsys, "collect", ours, other, data / "mt", *out)
    assert "not of one run (attention_normalizer sparsemax and multimax)" in sentence
    stock = checkpoint("transformer_iwslt_de_en", updates=9)
    sentence = told(monkeypatch, capsys, "collect", ours, stock, data / "mt", *out)
    assert "not of one run" in sentence and "compare" in sentence
    joined = checkpoint(TRANSLATION, "--cross-self-attention", "--no-cross-attention")
    sentence = told(monkeypatch, capsys, "collect", joined, data / "mt", *out)
    assert "--cross-self-attention" in sentence
    assert not list(tmp_path.iterdir())


def test_collect_keeps_previous_collection_after_failure(data, checkpoint, tmp_path, monkeypatch):
    path, backend = checkpoint(TRANSLATION), os.environ.get("MULTIMAX_BACKEND")
    out = gather(tmp_path / "out", path, data=data / "mt", sentences=2)
    (out / "note.txt").write_text("of the first")
    (out / "figures").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(writing, "_write_json", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gather(out, path, data=data / "mt", sentences=3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (out / "note.txt").exists()
    (tmp_path / "link").symlink_to("out")
    gather(tmp_path / "link", path, data=data / "mt", sentences=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "out"]
    assert (tmp_path / "link").is_symlink() and (out / "figures").is_dir()
    assert (out / "note.txt").read_text() == "of the first"
    metadata = json.loads((out / "collection.json").read_text(encoding="utf-8"))
    assert metadata["sentences"] == 3 and os.environ.get("MULTIMAX_BACKEND") == backend


def test_replace_collection_restores_previous_after_failure(tmp_path, monkeypatch):
    out, rename = tmp_path / "out", Path.rename
    out.mkdir()
    (out / "collection.json").write_text("the first")

    def failing(path, target):
        if path.suffix == ".part":
            raise OSError(errno.EIO, "of the disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="of the disk"), writing.temporary_folder(out) as folder:
        writing._replace_collection(out, folder)
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "collection.json").read_text() == "the first"


def test_collect_truncates_long_examples(data, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(collection, "LONGEST_EXAMPLE", 2)
    out = gather(tmp_path / "out", checkpoint(TRANSLATION), data=data / "mt", sentences=2)
    shown = json.loads((out / "examples.json").read_text(encoding="utf-8"))
    assert [len(example["target"]["tokens"]) for example in shown] == [2, 2]


def test_collect_command_equals_function(data, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("multimax_fairseq.analysis.words.INTERROGATIVES", INTERROGATIVES)
    path = checkpoint(TRANSLATION, *VARIANTS["multimax"])
    words = ("python", "-m", "multimax_fairseq.analysis", "collect", path, data / "mt")
    output = run(
        *(tmp_path, *words, "--out", "new", "--user-dir", ROOT / "multimax_fairseq"),
        MULTIMAX_BACKEND="cpp",
    )
    assert output.strip().splitlines()[-1].startswith("Collected in new")
    assert_alike(tmp_path / "new", gather(tmp_path / "here", path, data=data / "mt"))
