"""multimax-analyze plot, report and compare, on synthetic collections."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import fork_server
import numpy as np
import pandas as pd
import pytest
import synthetic_collection
from commands import refused, run
from figure_checks import check_figure
from html_pages import Page, open_page, run_in_page
from reference import sigma

from multimax_fairseq.analysis import __main__, collection, figures, report
from multimax_fairseq.analysis.figures.modulators import percent
from multimax_fairseq.analysis.figures.smoothing import draw_rollout
from multimax_fairseq.errors import UsageError

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("error"),  # matplotlib warns about labels that do not fit
]

SMALL = {"layers": 2, "heads": 3, "updates": (10, 40)}
TRANSLATIONS = ("softmax", "multimax", "alpha_entmax")  # the others are language models
# All mappings share the code of the figures. These learn nothing, learn parameters, or have zeros.
NAMES = (*TRANSLATIONS, "sparsemax")
ALWAYS = {
    "sparsity-multi-modality",
    "pareto",
    "over-smoothing",
    "over-smoothing-updates",
    "rollout",
    "rollout-example",
    "simplex-2d",
    "simplex-3d",
    "head-diversity",
    "positional-heads",
    "output-layer",
}
OF_A_KIND = {"weight-histograms", "weight-distributions"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{normalizer: collection}, and "lm": a language model with an output modulator."""
    root = tmp_path_factory.mktemp("collections")
    found = {
        name: synthetic_collection.write(
            root / name, name, language_model=name not in TRANSLATIONS, seed=seed, **SMALL
        )
        for seed, name in enumerate(NAMES)
    }
    found["lm"] = synthetic_collection.write(root / "lm", language_model=True, **SMALL)
    return found


@pytest.fixture(scope="module")
def drawn(folders):
    """drawn(name) returns {figure name: Drawn} of a collection."""
    kept = {}

    def draw(name):
        if name not in kept:
            found = figures.draw([collection.read(folders[name])])
            kept[name] = {entry.name: entry for entry in found}
        return kept[name]

    return draw


# --- the figures -------------------------------------------------------------------------------


def test_figures_have_labels_and_legends(drawn):
    """Each figure once."""
    entries = {}
    for name in ("softmax", "lm", "sparsemax", "alpha_entmax", "multimax"):
        entries |= drawn(name)
    for entry in entries.values():
        check_figure(entry)


@pytest.mark.parametrize("name", [*NAMES, "lm"])
def test_draw_yields_exactly_the_figures_with_data(drawn, name):
    kinds = ["encoder", "decoder", "cross"] if name in TRANSLATIONS else ["decoder"]
    wanted = ALWAYS | {f"{figure}-{kind}" for figure in OF_A_KIND for kind in kinds}
    wanted |= {"bpe-merging-heads"}
    if name in ("sparsemax", "alpha_entmax"):
        wanted |= {"density", "density-distribution"}
    if name in TRANSLATIONS:
        wanted |= {"interrogation-heads"}
    if name in ("multimax", "lm"):
        kinds = [*kinds, "output"] if name == "lm" else kinds
        wanted |= {"parameters"}
        wanted |= {f"modulators-{kind}" for kind in kinds}
        wanted |= {f"parameter-trajectories-{kind}" for kind in kinds}
    if name == "alpha_entmax":
        wanted |= {"alpha-trajectories", "alpha-distribution"}
    assert set(drawn(name)) == wanted


def test_draw_one_checkpoint_with_first_order_per_head(tmp_path):
    folder = synthetic_collection.write(
        tmp_path / "one", order=1, separate=True, updates=(7,), layers=1, heads=2
    )
    found = {entry.name: entry for entry in figures.draw([collection.read(folder)])}
    assert not [name for name in found if "trajectories" in name or name.endswith("updates")]
    (axis, _) = found["modulators-encoder"].figure.axes
    assert len(axis.lines) == 3  # the identity and two heads
    for name in ("modulators-encoder", "parameters", "simplex-3d"):
        check_figure(found[name])


def test_draw_one_sided_modulators_and_temperatures(tmp_path):
    folder = synthetic_collection.write(
        tmp_path / "low", language_model=True, updates=(7,), layers=1, heads=2
    )
    table = pd.read_csv(folder / "parameters.csv")
    table[table["name"].isin(["t_b1", "t_b2", "b1", "b2"])].to_csv(
        folder / "parameters.csv", index=False
    )
    found = {entry.name: entry for entry in figures.draw([collection.read(folder)])}
    check_figure(found["modulators-decoder"])
    check_figure(found["parameters"])
    folder = synthetic_collection.write(tmp_path / "t", "softmax", temperature=True, **SMALL)
    found = {entry.name: entry for entry in figures.draw([collection.read(folder)])}
    for name in ("parameters", "parameter-trajectories-cross", "simplex-2d"):
        check_figure(found[name])


# --- content of the figures --------------------------------------------------------------------


def lines_of(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


def test_pareto_names_its_lines_and_markers(drawn):
    (legend,) = drawn("multimax")["pareto"].figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["layer 1", "layer 2", "softmax, T = 0.25 to 4", "the model's own mapping"]


@pytest.mark.parametrize("queries, keys, layers", [(4, 4, 2), (20, 12, 3)])
def test_rollout_texts_do_not_overlap(queries, keys, layers):
    weights = np.ones((layers, 2, queries, keys)) / keys
    sides = {"target": queries, "source": keys}
    example = {name: {"tokens": ["token"] * count} for name, count in sides.items()}
    example["attention"] = {"cross": weights}
    figure = draw_rollout(example, list(weights[:, 0]), "cross")
    figure.savefig(io.BytesIO(), dpi=figure.dpi)
    texts = [
        text
        for axis in figure.axes
        for text in (axis.title, axis.xaxis.label, axis.yaxis.label)
        if text.get_text()
    ]
    boxes = [text.get_window_extent() for text in texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_modulators_follow_the_papers_equation(drawn, folders):
    figure = drawn("multimax")["modulators-cross"].figure
    table = pd.read_csv(folders["multimax"] / "parameters.csv")
    table = table[(table["updates"] == 40) & (table["place"] == "cross")]
    heads = pd.read_csv(folders["multimax"] / "heads.csv")
    for layer in range(2):
        axis = next(a for a in figure.axes if a.get_title() == f"layer {layer + 1}")
        own = table[table["layer"] == layer].set_index("name")["value"]
        identity, curve = (line.get_xydata() for line in axis.lines)
        np.testing.assert_allclose(identity[:, 0], identity[:, 1])
        wanted = sigma(
            curve[:, 0], *([own[f"{s}1"], own[f"{s}2"]] for s in ("t_b", "t_d", "b", "d"))
        )
        np.testing.assert_allclose(curve[:, 1], wanted, atol=1e-9)
        chosen = heads[(heads["updates"] == 40) & (heads["place"] == "cross")]
        share = chosen[chosen["layer"] == layer]["past_turning_point"].mean()
        assert axis.texts[0].get_text().endswith(percent(share))


def test_draw_adapts_to_monotone_sink_and_temperature(folders):
    """A monotone modulator has a monotone curve; sinks and temperatures omit some figures."""
    found = collection.read(folders["multimax"])
    found.checkpoint()["settings"]["multimax_monotone"] = True
    ((drawn,), *_) = figures.modulators.modulators_of(found, "cross").values()
    assert (np.diff(figures.modulators.modulated(drawn, np.linspace(-90, 90, 999))) >= 0).all()
    assert figures.simplex.learned_mappings(found, "cross")
    found.parameters.loc[found.parameters.index[-1], ["kind", "name"]] = "cross", "sink.score"
    assert not figures.simplex.learned_mappings(found, "cross")
    found = collection.read(folders["multimax"])
    assert figures.modulators.modulators(found, "cross") is not None
    row = {**found.parameters.iloc[-1], "kind": "cross", "name": "temperature"}
    found.parameters.loc[len(found.parameters)] = row
    assert figures.modulators.modulators(found, "cross") is None


def test_percent_never_rounds_to_zero():
    words = {0: "0 %", 1: "100 %", 0.997: "100 %", 0.5: "50 %", 0.0004: "0.04 %", 1e-7: "1e-05 %"}
    assert {share: percent(share) for share in words} == words


def test_pareto_shows_the_collections_numbers(drawn, folders):
    table = pd.read_csv(folders["sparsemax"] / "temperatures.csv")
    table = table[(table["updates"] == 40) & (table["layer"] == 1)]
    (axis,) = drawn("sparsemax")["pareto"].figure.axes
    own = table[table["temperature"].isna()][["sparsity", "multi_modality"]].to_numpy()
    np.testing.assert_allclose(lines_of(axis)["layer 2"], own)
    line = table.dropna().sort_values("temperature")[["sparsity", "multi_modality"]].to_numpy()
    assert any(np.allclose(d.get_xydata(), line) for d in axis.lines if len(d.get_xdata()) > 2)


def test_heatmaps_show_the_collections_numbers(drawn, folders):
    heads = pd.read_csv(folders["softmax"] / "heads.csv")
    heads = heads[(heads["updates"] == 40) & (heads["place"] == "encoder")]
    axis = drawn("softmax")["sparsity-multi-modality"].figure.axes[0]
    np.testing.assert_allclose(
        axis.images[0].get_array(), heads["sparsity"].to_numpy().reshape(2, 3)
    )
    axis = drawn("softmax")["positional-heads"].figure.axes[0]
    offsets = [int(text.get_text()) for text in axis.texts]
    assert offsets == heads["offset"].tolist()


def test_over_smoothing_shows_patch_similarity(drawn, folders):
    layers = pd.read_csv(folders["softmax"] / "layers.csv").dropna(subset="patch_similarity")
    axes = drawn("softmax")["over-smoothing"].figure.axes
    assert len(axes) == layers["place"].nunique() == 2
    for axis, (_, own) in zip(axes, layers.groupby("place", sort=False), strict=True):
        shown = [line.get_ydata() for line in axis.lines]
        expected = [rows["patch_similarity"] for _, rows in own.groupby("updates")]
        np.testing.assert_allclose(shown, expected)


def test_density_distribution_shows_heads_and_sentences_of_all_layers(drawn, folders):
    table = pd.read_csv(folders["alpha_entmax"] / "histograms.csv")
    table = table[(table["quantity"] == "density") & (table["updates"] == 40)]
    axes = drawn("alpha_entmax")["density-distribution"].figure.axes
    for axis, (_, own) in zip(axes, table.groupby("place", sort=False), strict=True):
        counts = own.groupby("left")["count"].sum()
        line = lines_of(axis)["40 updates"]
        np.testing.assert_allclose(line[::2, 0], np.linspace(0, 0.95, 20), atol=1e-12)
        np.testing.assert_allclose(line[1::2, 1], counts / counts.sum())


def test_weight_distributions_rise_from_zero_share_to_one(drawn, folders):
    table = pd.read_csv(folders["sparsemax"] / "histograms.csv")
    table = table[(table["quantity"] == "probability") & (table["updates"] == 40)]
    figure = drawn("sparsemax")["weight-distributions-decoder"].figure
    for layer, axis in enumerate(figure.axes):
        own = table[table["layer"] == layer]
        zeros = own[own["right"] == 0]["count"].sum() / own["count"].sum()
        line = lines_of(axis)["40 updates"]
        assert line[0, 1] == pytest.approx(zeros) and zeros > 0.5
        assert line[-1, 1] == pytest.approx(1)
        assert (np.diff(line[:, 1]) >= 0).all()
    marked = lines_of(drawn("sparsemax")["weight-histograms-decoder"].figure.axes[0])
    assert "exactly 0: 40 updates" in marked
    assert not any(
        "exactly" in label
        for label in lines_of(drawn("softmax")["weight-histograms-cross"].figure.axes[0])
    )


@pytest.mark.parametrize("labels", ["first and last bin open", "empty ends"])
def test_bins_accept_open_ends(tmp_path, labels):
    folder = synthetic_collection.write(
        tmp_path / "c", language_model=True, updates=(1,), layers=1, heads=1
    )
    if labels == "empty ends":
        table = pd.read_csv(folder / "histograms.csv")
        table.replace([np.inf, -np.inf], np.nan).to_csv(folder / "histograms.csv", index=False)
    table = collection.read(folder).histograms
    left, right, share = collection.bins(table[table["quantity"] == "score"])
    assert left[0] == -np.inf and right[-1] == np.inf and share.sum() == pytest.approx(1)
    assert (left[1:] == right[:-1]).all()


def test_simplex_figures_show_weights(drawn):
    for axis in drawn("multimax")["simplex-3d"].figure.axes:
        for line in getattr(axis, "lines", []):
            if hasattr(line, "get_data_3d") and line.get_label()[0] != "_":
                np.testing.assert_allclose(np.sum(line.get_data_3d(), 0), 1, atol=1e-6)
    panels = drawn("softmax")["simplex-2d"].figure.axes
    for axis, other in zip(panels, (-2, 2), strict=False):
        known = lines_of(axis)
        x, weight = known["softmax"].T
        np.testing.assert_allclose(weight, 1 / (1 + np.exp(other - x)), atol=1e-9)
        x, weight = known["sparsemax"].T
        np.testing.assert_allclose(weight, np.clip((x - other + 1) / 2, 0, 1), atol=1e-9)


# --- several collections -----------------------------------------------------------------------

COMPARED = ("softmax", "multimax", "alpha_entmax")


def test_differences_ignore_the_path_of_the_data(folders):
    one, other = (collection.read(folders["softmax"]) for _ in range(2))
    other.metadata["data"]["folder"] = "/another/data-bin"
    assert not report.differences([one, other])
    other.metadata["data"]["sha256"] = "1" * 64
    assert "differ in their data" in report.differences([one, other])[0]


def test_draw_shows_every_compared_model(folders):
    found = collection.read_all([folders[name] for name in COMPARED])
    names = set()
    for entry in figures.draw(found):
        names.add(entry.name)
        check_figure(entry)
        shown = {text.get_text() for legend in entry.figure.legends for text in legend.texts}
        assert {"softmax", "MultiMax", "α-entmax"} <= shown, entry.name
    kinds = ("encoder", "decoder", "cross")
    assert names == {"pareto", "over-smoothing", "rollout", "density", "head-diversity"} | {
        "density-distribution",
        "output-layer",
        *(f"{figure}-{kind}" for figure in OF_A_KIND for kind in kinds),
    }


def test_draw_compares_language_and_translation_models(folders):
    for entry in figures.draw(collection.read_all([folders["lm"], folders["softmax"]])):
        check_figure(entry)


def test_read_all_gives_distinct_labels(folders, tmp_path):
    other = shutil.copytree(folders["softmax"], tmp_path / "other")
    found = collection.read_all([folders["softmax"], other, folders["lm"], other])
    labels = [entry.label for entry in found]
    assert labels == ["softmax (softmax)", "softmax (other) 2", "MultiMax", "softmax (other) 4"]


def test_differences_name_other_measurements(folders, tmp_path):
    other = shutil.copytree(folders["lm"], tmp_path / "other")
    metadata = json.loads((other / "collection.json").read_text(encoding="utf-8"))
    metadata["epsilon"] = 0.5
    (other / "collection.json").write_text(json.dumps(metadata), encoding="utf-8")
    (words,) = report.differences(collection.read_all([folders["lm"], other]))
    assert "epsilon" in words
    assert report.differences(collection.read_all([folders["lm"], folders["softmax"]])) == []


# --- the commands and their pages --------------------------------------------------------------


def check_page(file, figures):
    page = Page(file)
    images = [r for r in page.resources if r.startswith("data:image/png;base64,iVBOR")]
    assert len(images) == len(page.resources) == len(figures)
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp|import\(", page.source)
    assert {f"#{name}" for name in figures} <= set(page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    return page


@pytest.fixture
def analyze(monkeypatch, capsys):
    """analyze(*arguments) runs the command in this process and returns its output."""

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["multimax-analyze", *map(str, arguments)])
        __main__.main()
        return capsys.readouterr().out

    return run_here


@pytest.fixture
def draw_only(monkeypatch):
    """draw_only(*names) draws no figures but these, which saves seconds."""

    def keep(*names):
        kept = [entry for entry in figures.CATALOGUE if entry.name in names]
        monkeypatch.setattr(figures, "CATALOGUE", kept)

    return keep


def drawn_names(output):
    return re.findall(r"^drawn: (\S+)$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def pages(folders, tmp_path_factory):
    """A report with all figures, and the figures' names that the command printed."""
    out, printed = tmp_path_factory.mktemp("report"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        words = ["multimax-analyze", "report", str(folders["multimax"]), "--out", str(out)]
        patch.setattr(sys, "argv", words)
        __main__.main()
    output = printed.getvalue()
    assert output.rstrip().endswith(f"written: {out / 'report.html'}")
    return out / "report.html", drawn_names(output)


def test_plot_writes_every_figure_as_png_and_svg(folders, tmp_path, analyze, draw_only):
    draw_only("pareto", "density", "weight-histograms")
    folder = shutil.copytree(folders["sparsemax"], tmp_path / "c")
    names = drawn_names(analyze("plot", folder))
    assert {f"{n}.{form}" for n in names for form in ("png", "svg")} == {
        file.name for file in (folder / "figures").iterdir()
    }
    assert set(names) == {"pareto", "density", "weight-histograms-decoder"}
    for name in names:
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (folder / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert "</svg>" in svg and "<text" in svg


def test_report_contains_every_figure_and_table(pages, folders, drawn):
    file, names = pages
    assert set(names) == set(drawn("multimax"))
    page = check_page(file, names)
    text = page.text
    assert "MultiMax: what the model has learned" in text
    for words in ("multimax-analyze collect checkpoint.pt", "0" * 40, "transformer", "epsilon"):
        assert words in text, words
    table = pd.read_csv(folders["multimax"] / "parameters.csv")
    for value in table[table["updates"] == 40]["value"]:
        assert report.number(value) in text
    for entry in drawn("multimax").values():
        assert entry.caption[:40] in text
    assert (len(list(file.parent.iterdir()))) == 1


def test_positional_heads_counts_heads_by_offset(folders):
    found = collection.read(folders["multimax"])
    (table,) = report.positional_heads(found)
    heads = pd.read_csv(folders["multimax"] / "heads.csv")
    heads = heads[heads["updates"] == 40]
    assert sum(int(row[2]) for row in table.rows) == len(heads)
    for kind, position, count, median in table.rows:
        own = heads[heads["place"].map(collection.KINDS) == kind]
        own = own[own["offset"] == int(position)]["confidence"]
        assert int(count) == len(own) and float(median) == pytest.approx(own.median(), abs=1e-4)


def test_report_omits_attention_view_without_examples(folders, tmp_path, draw_only):
    draw_only("pareto", "rollout-example")
    folder = shutil.copytree(folders["sparsemax"], tmp_path / "c")
    (folder / "examples.json").write_text("[]", encoding="utf-8")
    names = list(report.report(collection.read(folder), folder))
    page = check_page(folder / "report.html", names)
    assert "matrix" not in page.ids and names == ["pareto"]


def test_report_escapes_words_in_the_script(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda _: iter(()))
    folder = shutil.copytree(folders["lm"], tmp_path / "c")
    examples = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
    examples[0]["target"]["tokens"][0] = "</script><b>"
    (folder / "examples.json").write_text(json.dumps(examples), encoding="utf-8")
    list(report.report(collection.read(folder), folder))
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert "</script><b>" not in source
    found = re.search(r'id="examples">(.*?)</script>', source, re.DOTALL)
    assert json.loads(found[1]) == examples


def test_compare_writes_figures_and_a_page(folders, tmp_path, analyze, draw_only):
    draw_only("pareto", "over-smoothing", "output-layer", "rollout-example")
    out = tmp_path / "new" / "out"
    given = [folders["lm"], folders["sparsemax"]]
    output = analyze("compare", *given, "--out", out)
    names = drawn_names(output)
    assert names == ["pareto", "over-smoothing", "output-layer"]  # the other is of one collection
    page = check_page(out / "compare.html", names)
    assert "MultiMax and sparsemax" in page.text
    tables = [pd.read_csv(folder / "heads.csv") for folder in given]
    for table in tables:
        assert report.number(table[table["updates"] == 40]["density"].mean()) in page.text
    quality, settings, *_ = report.comparison(collection.read_all(given))
    assert quality.rows[0][0] == "perplexity per token" and len(quality.rows[0]) == 3
    assert all(len(set(row[1:])) > 1 for row in settings.rows)
    assert "normalizer: decoder" in [row[0] for row in settings.rows]
    assert {f"{name}.svg" for name in names} < {file.name for file in out.iterdir()}


# --- the interactive view ----------------------------------------------------------------------


def test_report_script_joins_subwords_and_averages_heads(folders):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node: the script's functions did not run (the page was only parsed)")
    examples = json.loads((folders["multimax"] / "examples.json").read_text(encoding="utf-8"))
    script = (report.TEMPLATES / "attention.js").read_text(encoding="utf-8")
    asked = [
        (kind, layer, head, join)
        for kind in ("encoder", "decoder", "cross")
        for layer in (0, 1)
        for head in (0, "mean", "rollout")[: 2 if kind == "cross" else 3]
        for join in (False, True)
    ]
    code = f"""{script}
const example = {json.dumps(examples[0])};
const asked = {json.dumps(asked)};
console.log(JSON.stringify(asked.map((a) => view(example, ...a))));"""
    done = subprocess.run([node], input=code, capture_output=True, text=True, check=True)
    for (kind, layer, head, join), found in zip(asked, json.loads(done.stdout), strict=True):
        heads = np.array(examples[0]["attention"][kind][layer])
        matrix = heads.mean(0) if head == "mean" else heads[0]
        if head == "rollout":
            matrix = np.array(examples[0]["rollout"][kind][layer])
        queries = examples[0]["source" if kind == "encoder" else "target"]
        keys = examples[0]["target" if kind == "decoder" else "source"]
        if join:
            rows = [matrix[w["start"] : w["end"]].mean(0) for w in queries["words"]]
            matrix = np.array(
                [[row[w["start"] : w["end"]].sum() for w in keys["words"]] for row in rows]
            )
        np.testing.assert_allclose(found["matrix"], matrix, atol=1e-9)
        assert found["keys"] == (
            [word["word"] for word in keys["words"]] if join else keys["tokens"]
        )
        assert len(found["queries"]) == len(matrix)


DRIVE = """
<script>
const found = [];
const note = () => found.push([
  document.getElementById("message").textContent,
  document.querySelectorAll("#matrix tbody tr").length,
  document.querySelectorAll("#matrix tbody tr:first-child td").length,
]);
const set = (id, value) => {
  const element = document.getElementById(id);
  if (element.type === "checkbox") element.checked = value; else element.value = value;
  element.dispatchEvent(new Event("change"));
};
const press = (key) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
note();
set("kind", "cross"); set("layer", "1"); set("head", "2"); note();
set("join", false); note();
document.querySelector("#matrix tbody tr:nth-child(2) td:nth-child(4)").click(); note();
press("ArrowDown"); press("ArrowLeft"); note();
set("sentence", "1"); note();
const images = [...document.images].every((image) => image.naturalWidth > 300);
document.title = JSON.stringify({ found, images });
</script>
"""


def test_report_attention_view_updates_in_a_browser(pages, folders, tmp_path):
    seen = run_in_page(pages[0], DRIVE, tmp_path)
    assert seen["images"]
    examples = json.loads((folders["multimax"] / "examples.json").read_text(encoding="utf-8"))
    told = [words for words, _, _ in seen["found"]]
    sizes = [tuple(size) for _, *size in seen["found"]]
    sides = {side: examples[0][side] for side in ("source", "target")}
    words = {side: len(found["words"]) for side, found in sides.items()}
    tokens = {side: len(found["tokens"]) for side, found in sides.items()}
    by_word, by_token = (words["target"], words["source"]), (tokens["target"], tokens["source"])
    assert sizes == [(words["source"],) * 2, by_word, *[by_token] * 4]
    head = examples[0]["attention"]["cross"][1][2]

    def said(query, key):
        query_word = sides["target"]["tokens"][query]
        key_word = sides["source"]["tokens"][key]
        return f"“{query_word}” gives “{key_word}” the weight {head[query][key]:.4f}."

    # The heading of a row is its first cell: the fourth cell is the third key.
    assert told[2:5] == [said(0, 0), said(1, 2), said(2, 1)]


# Uses every option of every control.
NARROW = """
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const seen = { dark, wide: 0, faint: [], tried: 0 };
const look = () => {
  seen.tried += 1;
  seen.wide = Math.max(seen.wide, inside.documentElement.scrollWidth);
};
look();
for (const control of inside.querySelectorAll("select")) {
  for (const option of [...control.options]) {
    control.value = option.value;
    control.dispatchEvent(new Event("change"));
    if (!inside.querySelector("#matrix tbody td")) throw new Error("no matrix: " + option.text);
    look();
  }
}
for (const box of inside.querySelectorAll("input[type=checkbox]")) { box.click(); look(); }
for (const link of inside.querySelectorAll("a")) {
  if (!inside.querySelector(link.getAttribute("href"))) throw new Error("nowhere: " + link.href);
}
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = (colour) => parts(colour).slice(0, 3)
  .map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
for (const element of inside.body.querySelectorAll("*:not(script):not(option)")) {
  if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
  let behind = element;
  const ground = () => getComputedStyle(behind).backgroundColor;
  while (parts(ground())[3] === 0) behind = behind.parentElement;
  const [low, high] = [getComputedStyle(element).color, ground()]
    .map(luminance).sort((one, other) => one - other);
  if ((high + 0.05) / (low + 0.05) < 4.5) seen.faint.push(element.outerHTML.slice(0, 80));
}
document.title = JSON.stringify(seen);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_fits_a_phone_screen_with_readable_contrast(pages, tmp_path, scheme):
    page = json.dumps(pages[0].read_text(encoding="utf-8")).replace("</", "<\\/")
    (tmp_path / "frame.html").write_text(
        '<body><iframe style="width: 360px; height: 740px; border: 0"></iframe><script>'
        'const frame = document.querySelector("iframe"); frame.onload = () => {'
        f"const inside = frame.contentDocument;{NARROW}}}; frame.srcdoc = {page};</script></body>",
        encoding="utf-8",
    )
    seen = open_page(tmp_path / "frame.html", tmp_path, scheme)
    assert seen["dark"] == (scheme == "dark") and seen["tried"] > 10
    assert seen["wide"] <= 360 and not seen["faint"], seen


# --- user errors -------------------------------------------------------------------------------


def test_analyze_reports_user_errors_in_one_sentence(folders, tmp_path, analyze, draw_only):
    draw_only("pareto")
    words = refused(tmp_path, "multimax-analyze", "plot", "nowhere")
    assert "nowhere/collection.json' does not exist" in words
    assert "multimax-analyze collect" in words
    (tmp_path / "file").touch()
    for command, out, wanted in (
        ("report", tmp_path / "file" / "out", "Not a directory"),
        ("plot", tmp_path / "file", "File exists"),
        ("compare", tmp_path / "new", "two collections or more"),
    ):
        with pytest.raises(SystemExit, match=rf"\nmultimax-analyze: error: .*{wanted}"):
            analyze(command, folders["lm"], "--out", out)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [*collection.COLUMNS, "examples", "collection"])
def test_read_names_a_missing_or_damaged_file(folders, tmp_path, name):
    folder = shutil.copytree(folders["lm"], tmp_path / "c")
    file = next(folder.glob(f"{name}.*"))
    damages = ["", "[1, 2"]
    if file.suffix == ".csv":
        damages.append(file.read_text(encoding="utf-8").replace("updates", "steps", 1))
    file.unlink()
    with pytest.raises(UsageError, match=rf"{file.name}' does not exist: pass a folder"):
        collection.read(folder)
    for text in damages:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="collect again") as caught:
            collection.read(folder)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_analyze_names_missing_package_and_extra(folders, tmp_path):
    (tmp_path / "pandas.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'pandas'\", name='pandas')", encoding="utf-8"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    # Not in a fork of the server, which may have imported it.
    program = fork_server.REAL / "multimax-analyze"
    words = run(tmp_path, program, "plot", folders["lm"], code=1, PYTHONPATH=path)
    assert "Traceback" not in words
    assert "multimax-analyze: error: the package pandas is missing" in words
    assert "multimax-fairseq[analysis]" in words


def test_figures_import_without_fairseq_and_pyplot(tmp_path):
    code = """if True:
        import sys
        from multimax_fairseq.analysis import collection, figures, report
        print("fairseq" in sys.modules, "matplotlib.pyplot" in sys.modules)
    """
    assert run(tmp_path, sys.executable, "-c", code).split()[-2:] == ["False", "False"]


def test_plot_writes_chosen_figures_for_a_paper(folders, tmp_path, analyze):
    words = ["--only", "pareto", "modulators-encoder", "--format", "pdf", "png", "--no-title"]
    names = drawn_names(analyze("plot", folders["multimax"], "--out", tmp_path, *words))
    assert sorted(names) == ["modulators-encoder", "pareto"]
    assert {file.suffix for file in tmp_path.iterdir()} == {".pdf", ".png"}
    assert (tmp_path / "pareto.pdf").read_bytes().startswith(b"%PDF")
    analyze("plot", folders["multimax"], "--out", tmp_path, "--only", "pareto", "--width", "17")
    found = re.search(r'<svg [^>]*width="([\d.]+)pt"', (tmp_path / "pareto.svg").read_text())
    assert float(found[1]) == pytest.approx(17 / 2.54 * 72)


def test_plot_names_the_nearest_figure(folders, tmp_path):
    words = ("plot", folders["multimax"], "--only", "paretos")
    sentence = refused(tmp_path, "multimax-analyze", *words)
    assert sentence == "there is no figure 'paretos': did you mean 'pareto'?"
    words = ("plot", folders["softmax"], "--out", "new", "--only", "modulators-encoder")
    sentence = refused(tmp_path, "multimax-analyze", *words)
    assert "has no data for modulators-encoder: leave --only out" in sentence
    words = ("plot", folders["multimax"], "--out", "new", "--only", "pareto", "--width", "3")
    sentence = refused(tmp_path, "multimax-analyze", *words)
    assert sentence == "--width 3 is too narrow for pareto: pass a larger one"
