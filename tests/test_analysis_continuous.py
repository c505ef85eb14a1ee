"""Analysis of continuous attention: densities in the files, the figures and the report."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import reference
import torch
from commands import run
from figure_checks import check_figure
from html_pages import Page, run_in_page
from matplotlib.patches import Rectangle
from synthetic_collection import write
from torch import nn
from toy_collection import TRANSLATION, gather, table

from multimax_fairseq.analysis import collection, figures, parameters, report
from multimax_fairseq.analysis.figures.families import families
from multimax_fairseq.analysis.recorder import Recorder
from multimax_fairseq.analysis.words import WordBoundaries
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.learned_scalars import symbols

pytestmark = pytest.mark.long

RECURRENT = "rnn_multimax"
KINDS = ("softmax", "sparsemax")
MODELS = {
    f"{arch}, {kind}": (arch, "--cross-attention", f"continuous_{kind}", *more)
    for kind in KINDS
    for arch, *more in (
        ("transformer_multimax", "--encoder-self-attention", f"continuous_{kind}"),
        (RECURRENT,),
    )
}
SOFTMAX = ("--attention-normalizer", "softmax")
SENTENCES = ((9, 7), (4, 5), (6, 1))


# --- recording ------------------------------------------------------------------------------------


@pytest.fixture
def record(build, dictionary):
    """record(a key of MODELS, *batches) -> Recorder of a model with sharp attention."""

    def make(name, *batches):
        model = build(*MODELS[name]).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith(("q_proj.weight", "score_projection.weight")):
                    parameter *= 40
        words = WordBoundaries(dictionary)
        recorder = Recorder(model, words, words, set(range(len(SENTENCES))))
        for batch in batches:
            recorder.run(batch)
        return recorder

    return make


def rows(example):
    """Yield (kind, densities of a layer, discrete probabilities, head, query) for each row."""
    for kind, layers in example["densities"].items():
        for layer, probs in zip(layers, example["attention"][kind], strict=True):
            for head, query in np.ndindex(np.shape(layer["mean"])):
                yield kind, layer, probs[head][query], head, query


@pytest.mark.parametrize("name", MODELS)
def test_recorder_densities_have_the_discrete_moments(record, translation_batch, name):
    recorder = record(name, translation_batch(SENTENCES))
    seen, partial = set(), 0
    for number, example in recorder.examples.items():
        length = SENTENCES[number][0] + 1
        time = np.arange(1, length + 1) / length
        for kind, layer, probs, head, query in rows(example):
            seen.add((kind, query))
            assert layer["kind"] == name.split()[-1]
            np.testing.assert_allclose(layer["positions"], time, atol=1e-6)
            mean, variance = (layer[key][head][query] for key in ("mean", "variance"))
            probs = np.array(probs) / np.sum(probs)  # stored with four digits
            assert mean == pytest.approx(probs @ time, abs=5e-4)
            assert variance == pytest.approx(max(probs @ time**2 - mean**2, 1e-6), abs=1e-3)
            form = reference.normal_density
            if layer["kind"] == "sparsemax":
                form = reference.truncated_parabola
                half = (1.5 * variance) ** (1 / 3)
                inside = np.abs(time - mean) < half
                start, end = layer["support"][head][query]
                assert list(inside) == [start <= k < end for k in range(length)]
                partial += not inside.all()
            else:
                inside = np.ones(length, bool)
                assert layer["support"][head][query] == [0, length]
            density = form(mean, variance)[0]
            expected = [density(t) if i else 0 for t, i in zip(time, inside, strict=True)]
            np.testing.assert_allclose(layer["values"][head][query], expected, rtol=2e-3, atol=2e-3)
    kinds = {"cross"} | (set() if name.startswith(RECURRENT) else {"encoder"})
    assert {kind for kind, _ in seen} == kinds
    assert len([query for kind, query in seen if kind == "cross"]) == 8
    assert partial or name.endswith("softmax")


@pytest.mark.parametrize("name", MODELS)
def test_head_rows_average_over_all_queries(record, translation_batch, name):
    recorder = record(name, translation_batch(SENTENCES))
    for (kind, layer), sums in recorder.sums.items():
        for head, row in enumerate(sums.head_rows()):
            found = {"support_tokens": [], "position_variance": []}
            for example in recorder.examples.values():
                if kind not in example["densities"]:
                    continue
                density = example["densities"][kind][layer]
                found["position_variance"] += density["variance"][head]
                if density["kind"] == "sparsemax":
                    found["support_tokens"] += np.diff(density["support"][head]).ravel().tolist()
            for column, values in found.items():
                expected = np.mean(values) if values else np.nan
                assert row[column] == pytest.approx(expected, rel=1e-4, nan_ok=True)
            assert row["queries"] == sum(s[0 if kind == "encoder" else 1] + 1 for s in SENTENCES)


def assert_same(one, other, rel=2e-3):
    """Nested lists and dicts of the same numbers, up to rounding: a variance that float32 has to
    1e-7 is as small as 6e-6 here, and the density's values are off by half of that share of their
    largest, next to the end of a support by more than they are."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one.keys() - {"values"}:
            assert_same(one[key], other[key], rel)
        if "values" in one:
            largest = np.max(other["values"], -1, keepdims=True)
            off = np.abs(np.subtract(one["values"], other["values"]))
            assert (off <= 1e-2 * largest + 2e-4).all()
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair, rel)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rel, abs=2e-4, nan_ok=True)
    else:
        assert one == other


@pytest.mark.parametrize("name", MODELS)
def test_recorder_ignores_padding_on_either_side(record, translation_batch, name):
    left = record(name, translation_batch(SENTENCES))
    right = record(name, translation_batch(SENTENCES, left_pad_source=False))
    assert_same(left.examples, right.examples)
    for kind, sums in left.sums.items():
        assert_same(sums.head_rows(), right.sums[kind].head_rows())


def test_recorder_joins_the_steps_of_a_recurrent_decoder(record, translation_batch):
    name = f"{RECURRENT}, sparsemax"
    batch = translation_batch(SENTENCES)
    recorder = record(name, batch, batch)
    assert set(recorder.sums) == {("cross", 0)} and recorder.densities == {"cross": "sparsemax"}
    (example, *_) = recorder.examples.values()
    # Without encoder attention there is no roll-out.
    assert example["rollout"] == {} and set(example["attention"]) == {"cross"}
    ((heads,),) = example["attention"].values()
    assert np.shape(heads) == (1, 8, 10)
    np.testing.assert_allclose(np.sum(heads, -1), 1, atol=1e-3)
    assert recorder.sums["cross", 0].queries == 2 * sum(length + 1 for _, length in SENTENCES)
    with torch.no_grad():
        _, extra = recorder.model(**batch["net_input"])
    np.testing.assert_allclose(heads[0], extra["attn"][0][0], atol=1e-4)


def test_recorder_refuses_unknown_normalizers(build, dictionary):
    model, words = build("transformer_multimax"), WordBoundaries(dictionary)
    model.decoder.layers[0].encoder_attn.normalizer = nn.Identity()
    with pytest.raises(UsageError, match="by a Identity.*rnn_multimax"):
        Recorder(model, words, words, set())


def test_recorder_max_tokens_keeps_the_positions(build, dictionary, translation_batch):
    words = WordBoundaries(dictionary)
    model = build(*MODELS["transformer_multimax, sparsemax"]).eval()
    recorder = Recorder(model, words, words, {0}, max_tokens=5)
    recorder.run(translation_batch(((9, 7),)))
    (layer, _) = recorder.examples[0]["densities"]["cross"]
    np.testing.assert_allclose(layer["positions"], np.arange(1, 6) / 10)
    assert np.shape(layer["values"]) == (4, 5, 5)
    assert np.max(layer["support"]) <= 5


# --- the files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected(data, checkpoint, tmp_path_factory):
    """collected(arch, *flags) -> the folder with the collection of a model."""
    folder, made = tmp_path_factory.mktemp("continuous"), {}

    def make(arch, *flags):
        if (arch, *flags) not in made:
            path = checkpoint(arch, *flags)
            made[arch, *flags] = gather(folder / str(len(made)), path, data=data / "mt")
        return made[arch, *flags]

    return make


BOTH = (
    *("--cross-attention", "continuous_sparsemax"),
    *("--encoder-self-attention", "continuous_softmax"),
)


def test_collect_discrete_columns_equal_discrete_attention(collected, checkpoint):
    folder, discrete = collected(TRANSLATION, *BOTH), collected(TRANSLATION)
    heads, others = table(folder, "heads"), table(discrete, "heads")
    for row, other in zip(heads, others, strict=True):
        gaussian, parabola = row["place"] == "encoder", row["place"] == "cross"
        assert (row["position_variance"] is not None) == (gaussian or parabola)
        assert (row["support_tokens"] is not None) == parabola
        assert other["support_tokens"] is other["position_variance"] is None
        for key in other:
            # The input of the encoder's first attention is the same.
            if gaussian and row["layer"] == 0 and key != "position_variance":
                assert row[key] == pytest.approx(other[key], abs=1e-5), key
        assert row["past_turning_point"] is not None
    assert table(folder, "parameters") == table(discrete, "parameters")
    for found in (parameters.read(checkpoint(TRANSLATION, *flags)) for flags in (BOTH, ())):
        assert {"encoder layer 1, self-attention", "decoder layer 2, cross-attention"} < set(found)
        assert list(found["decoder layer 1, cross-attention"])[:2] == ["t_b1", "t_b2"]
    found = parameters.read(checkpoint(RECURRENT, "--cross-attention", "continuous_softmax"))
    assert set(found) == {"cross-attention"}
    added = symbols("encoder_attn.normalizer.normalizer.own.factor", torch.ones(2))
    assert list(added) == ["own.factor"]


def test_collection_label_names_the_densities(collected):
    found = collection.read(collected(TRANSLATION, *BOTH))
    assert found.checkpoint()["densities"] == {"encoder": "softmax", "cross": "sparsemax"}
    assert found.label == "MultiMax / continuous softmax / continuous sparsemax"
    assert collection.read(collected(TRANSLATION)).label == "MultiMax"


def test_report_supports_recurrent_models(collected):
    flags = ("--cross-attention", "continuous_sparsemax", *SOFTMAX)
    folder = collected(RECURRENT, *flags)
    found = collection.read(folder)
    assert found.kinds() == ["cross"] and set(found.heads["head"]) == {0}
    assert found.layers["rollout_similarity"].isna().all()
    drawn = {entry.name: entry for entry in figures.draw([found])}
    assert {"source-densities-cross", "pareto", "output-layer"} <= set(drawn)
    assert not {"rollout-example", "rollout", "over-smoothing"} & set(drawn)
    for name in ("source-densities-cross", "pareto", "positional-heads"):
        check_figure(drawn[name])
    (heads,) = (table for table in report.tables(found) if table.title == "Heads")
    assert heads.head[-3:] == ["support tokens", "position variance", "mass"]
    discrete = collection.read(collected(RECURRENT, *SOFTMAX))
    (heads,) = (table for table in report.tables(discrete) if table.title == "Heads")
    assert "support tokens" not in heads.head
    assert [entry.name for entry in figures.draw([discrete, found])]


def test_read_accepts_older_collections(tmp_path):
    write(tmp_path / "old", "softmax", layers=1, heads=2, updates=(3,))
    found = collection.read(tmp_path / "old")
    assert found.heads[["support_tokens", "position_variance"]].isna().all(axis=None)
    assert found.label == "softmax" and "densities" not in found.examples[0]


# --- figures and page -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A collection with a Gaussian in the encoder and a parabola in cross-attention."""
    folder = tmp_path_factory.mktemp("made") / "collection"
    densities = {"encoder": "softmax", "cross": "sparsemax"}
    return write(folder, "softmax", layers=2, heads=3, updates=(40,), continuous=densities)


@pytest.fixture(scope="module")
def example(made):
    return json.loads((made / "examples.json").read_text(encoding="utf-8"))[0]


@pytest.mark.filterwarnings("error")
def test_draw_shows_attention_beside_densities(made, example):
    drawn = {entry.name: entry for entry in figures.draw([collection.read(made)])}
    assert {name for name in drawn if "densities" in name} == {
        "source-densities-encoder",
        "source-densities-cross",
    }
    for kind in ("encoder", "cross"):
        entry = drawn[f"source-densities-{kind}"]
        weights, shown = entry.figure.axes[:2]
        layer, head = (int(n) - 1 for n in re.findall(r"\d+", shown.get_title()))
        density = example["densities"][kind][layer]
        moves = [
            np.var(m) / np.mean(v)
            for one in example["densities"][kind]
            for m, v in zip(one["mean"], one["variance"], strict=True)
        ]
        assert np.argmax(moves) == 3 * layer + head
        np.testing.assert_allclose(
            weights.images[0].get_array(), example["attention"][kind][layer][head]
        )
        np.testing.assert_allclose(shown.images[0].get_array(), density["values"][head])
        side = example["source" if kind == "encoder" else "target"]
        names = [label.get_text() for label in shown.get_yticklabels()]
        assert names == side["tokens"]
        assert [t.get_text() for t in shown.get_xticklabels()] == example["source"]["tokens"]
        # Token l has the position l / L and is drawn around l - 1.
        (means,) = shown.lines
        keys = len(example["source"]["tokens"])
        np.testing.assert_allclose((means.get_xdata() + 1) / keys, density["mean"][head], atol=1e-4)
        boxes = [patch for patch in shown.patches if isinstance(patch, Rectangle)]
        found = [(b.get_y() + 0.5, b.get_x() + 0.5, b.get_x() + 0.5 + b.get_width()) for b in boxes]
        expected = [(q, *ends) for q, ends in enumerate(density["support"][head])]
        assert found == (expected if kind == "cross" else [])
        check_figure(entry)


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    """A report without figures."""
    out = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(figures, "draw", lambda _: iter(()))
        list(report.report(collection.read(made), out))
    return out / "report.html"


def test_report_describes_densities_only_if_collected(page, tmp_path, monkeypatch):
    words = "the density of the chosen query over the sentence"
    found = Page(page)
    assert words in found.text and "density" in found.ids
    assert not re.search(r"https?://", found.source)
    write(tmp_path / "old", "softmax", layers=1, heads=2, updates=(3,))
    monkeypatch.setattr(figures, "draw", lambda _: iter(()))
    list(report.report(collection.read(tmp_path / "old"), tmp_path))
    found = Page(tmp_path / "report.html")
    assert words not in found.text and "density" not in found.ids


def expected_curve(example, kind, layer, heads, queries, times):
    density = example["densities"][kind][layer]
    form = {"softmax": reference.normal_density, "sparsemax": reference.truncated_parabola}
    total = np.zeros(len(times))
    for head in heads:
        for query in queries:
            moments = density["mean"][head][query], density["variance"][head][query]
            values = [form[density["kind"]](*moments)[0](t) for t in times]
            total += np.maximum(values, 0)
    return total / (len(heads) * len(queries))


def test_attention_script_maps_densities_to_columns(example):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the script's functions did not run")
    script = (report.TEMPLATES / "attention.js").read_text(encoding="utf-8")
    asked = [
        (kind, layer, head, join, query)
        for kind in ("encoder", "cross", "decoder")
        for layer, head, join, query in (
            (0, 1, False, 4),
            (1, "mean", False, 2),
            (0, 2, True, 4),
            (1, "mean", True, 1),
            (0, "rollout", False, 0),
        )
    ]
    code = f"""{script}
const example = {json.dumps(example)};
const whole = example.source.tokens.map((_, k) => ({{ start: k, end: k + 1 }}));
console.log(JSON.stringify({json.dumps(asked)}.map((a) => {{
  const parts = densities(example, ...a);
  const columns = a[3] ? example.source.words : whole;
  return parts.length ? overColumns(parts, whole.length, columns) : null;
}})));"""
    done = subprocess.run([node], input=code, capture_output=True, text=True, check=True)
    tokens = len(example["source"]["tokens"])
    for (kind, layer, head, join, query), found in zip(asked, json.loads(done.stdout), strict=True):
        if kind == "decoder" or head == "rollout":
            assert found is None
            continue
        heads = range(3) if head == "mean" else [head]
        queries = [query]
        columns = [(k, k + 1) for k in range(tokens)]
        if join:
            side = example["source" if kind == "encoder" else "target"]
            word = side["words"][query]
            queries = range(word["start"], word["end"])
            columns = [(w["start"], w["end"]) for w in example["source"]["words"]]
        x, values = np.array(found["points"]).T
        assert x[0] == 0 and x[-1] == len(columns) and (np.diff(x) >= 0).all()
        # A token's part of the column begins half a token before its position.
        edges = [start for start, _ in columns] + [columns[-1][1]]
        times = (np.interp(x, range(len(edges)), edges) + 0.5) / tokens
        expected = expected_curve(example, kind, layer, heads, queries, times)
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
        supports = [
            example["densities"][kind][layer]["support"][h][q] for h in heads for q in queries
        ]
        inside = [
            any(first <= k < last for first, last in supports for k in range(*column))
            for column in columns
        ]
        assert found["inside"] == inside


DRIVE = """
<script>
const found = [];
const set = (id, value) => {
  const element = document.getElementById(id);
  if (element.type === "checkbox") element.checked = value; else element.value = value;
  element.dispatchEvent(new Event("change"));
};
const note = () => {
  const path = document.querySelector("#matrix svg path");
  const marked = (where) => [...document.querySelectorAll(where)].map((e) => e.textContent);
  found.push({
    told: document.getElementById("message").textContent,
    width: path && path.getBoundingClientRect().width,
    columns: document.querySelector("#matrix tbody tr").getBoundingClientRect().width,
    heads: marked("#matrix th.inside"),
    words: marked("#keys .inside"),
  });
};
set("join", false); set("kind", "cross"); set("layer", "1"); set("head", "0");
document.querySelector("#matrix tbody tr:nth-child(7) td:nth-child(4)").click(); note();
set("kind", "encoder"); note();
set("kind", "decoder"); note();
document.title = JSON.stringify({ found });
</script>
"""


def test_report_page_shows_densities_in_a_browser(page, example, tmp_path):
    cross, encoder, decoder = run_in_page(page, DRIVE, tmp_path)["found"]
    density = example["densities"]["cross"][1]
    start, end = density["support"][0][6]
    words = example["source"]["tokens"][start:end]
    assert cross["heads"] == cross["words"] == words and 0 < len(words) < 11
    assert cross["told"].endswith(
        f"has its mean at {density['mean'][0][6]:.2f}, and in its support: {' '.join(words)}."
    )
    assert 0.5 * cross["columns"] < cross["width"] < cross["columns"]
    assert encoder["width"] and encoder["heads"] == encoder["words"] == []
    assert re.search(r"Its density over the sentence has its mean at 0\.\d\d\.$", encoder["told"])
    assert decoder["width"] is None and "density" not in decoder["told"]


def test_densities_command_draws_densities_of_mass_one(tmp_path):
    assert "drawn: densities" in run(tmp_path, "multimax-analyze", "densities", "--out", "drawn")
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {
        "densities.png",
        "densities.svg",
    }
    drawn = families()
    axes = [axis for axis in drawn.figure.axes if axis.get_label() != "<colorbar>"]
    for line in [line for axis in axes for line in axis.lines]:
        mass = np.trapezoid(line.get_ydata(), line.get_xdata())
        # A Gaussian has 0.3 % beyond the panel's ends, the Laplace density 5 %.
        expected = 1 - np.exp(-3) if line.get_label() == "Laplace" else 1
        assert mass == pytest.approx(expected, abs=3e-3)
    planes = [image.get_array() for axis in axes for image in axis.images]
    assert [plane.sum() * 0.02**2 for plane in planes] == pytest.approx([1, 1], abs=6e-3)
    check_figure(drawn)
