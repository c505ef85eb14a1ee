"""multimax-analyze trajectories reads and draws the monitor's logs."""

import json
import re
import sys

import pytest
from commands import PLUGIN, refused, run
from figure_checks import check_figure
from train_commands import MODEL_LANGUAGE, TRANSLATE

from multimax_fairseq.analysis import training_log
from multimax_fairseq.analysis.collection import KINDS
from multimax_fairseq.analysis.figures import trajectories
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

PREFIX = "2026-01-01 00:00:00 | INFO | train_inner | "


def line(done, start="", **figures):
    """Return a log line of fairseq; in the names, two underscores stand for a slash."""
    named = {key.replace("__", "/").replace("_at_", "."): value for key, value in figures.items()}
    found = {"num_updates": done, **{f"monitor/{key}": v for key, v in named.items()}}
    return json.dumps({f"{start}{key}": f"{value:g}" for key, value in found.items()})


def values(log, kind, name):
    table = log.values[(log.values["kind"] == kind) & (log.values["name"] == name)]
    return list(zip(table["updates"], table["layer"], table["value"], strict=True))


def legend(figure):
    return [entry.get_text() for entry in figure.legends[0].get_texts()]


def test_analyze_file_commands_run_without_fairseq_and_hydra(tmp_path):
    program = """if True:
        import sys
        for name in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
            sys.modules[name] = None
        from multimax_fairseq.analysis.__main__ import main
        for command in ("plot", "report", "trajectories"):
            sys.argv = ["multimax-analyze", command, "nothing", "--out", "x"]
            try:
                main()
            except SystemExit as error:
                print(error)
    """
    said = run(tmp_path, sys.executable, "-c", program)
    assert said.count("multimax-analyze: error: ") == said.count("'nothing") == 3
    assert "Traceback (" not in said


def test_read_accepts_all_forms_of_log_lines(tmp_path):
    written = [
        "| INFO | fairseq_cli.train | {'monitor/interval': 2}",
        PREFIX + line(2, updates=2, encoder_at_1__entropy=0.5, output__top1=0.25),
        PREFIX + line(3),
        PREFIX + line(4, updates=4, encoder_at_1__entropy=0.625),
        line(4, "train_", updates=4, encoder_at_1__entropy=0.625),  # an epoch's line of --log-file
        PREFIX + line(6, updates=6, encoder_at_1__entropy=9),
        PREFIX + '{"num_updates": "7", "monitor/updates": "7", "monitor/enc',  # a crash
        PREFIX + line(6, updates=6, encoder_at_1__entropy=0.75, encoder_at_1__t_b1_at_3=2),
    ]
    file = tmp_path / "train.log"
    file.write_text("\n".join(written) + "\n")
    log = training_log.read(file)
    assert values(log, "encoder", "entropy") == [(2, 1, 0.5), (4, 1, 0.625), (6, 1, 0.75)]
    assert values(log, "encoder", "t_b1") == [(6, 1, 2)]
    ((updates, _, value),) = values(log, "output", "top1")
    assert (updates, value) == (2, 0.25)
    assert len(log.values) == 5


def test_read_all_gives_distinct_labels(tmp_path):
    files = [tmp_path / "a" / "train.log", tmp_path / "b" / "train.log", tmp_path / "other.log"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(line(2, updates=2, encoder_at_0__entropy=1) + "\n")
    logs = training_log.read_all([*files, files[0]])
    assert [log.label for log in logs] == ["a/train 1", "b/train", "other", "a/train 4"]


@pytest.mark.parametrize("content", ["", line(2), "{monitor/", "[monitor/]", '{"monitor/x": "1"}'])
def test_read_refuses_a_log_without_values(tmp_path, content):
    file = tmp_path / "train.log"
    file.write_text(content + "\n")
    with pytest.raises(UsageError, match="has no lines in JSON: train with --monitor-int"):
        training_log.read(file)
    with pytest.raises(UsageError, match="does not exist"):
        training_log.read(tmp_path / "other.log")


@pytest.fixture(scope="module")
def logs(text, tmp_path_factory):
    """Logs of a translation model, a language model, and a run without the monitor."""
    folder = tmp_path_factory.mktemp("logs")
    words = ["--log-format", "json", "--monitor-interval", "2", "--no-save"]
    for name, data, model in (
        ("translation", "mt", [*TRANSLATE, "--encoder-layers", "2"]),
        ("language", "lm", MODEL_LANGUAGE),
    ):
        written = ["--log-file", folder / f"{name}.log"]
        run(text, "fairseq-train", data, *PLUGIN, *model, *words, *written)
    plain = re.sub(r', "[a-z_]*monitor/[^,}]*', "", (folder / "language.log").read_text())
    (folder / "plain.log").write_text(plain)
    return folder


def test_trajectories_draws_one_run(logs):
    log = training_log.read(logs / "translation.log")
    drawn = {entry.name.partition("-")[2]: entry for entry in trajectories.draw([log])}
    for entry in drawn.values():
        check_figure(entry)
    figure = drawn["encoder"].figure
    # One panel for each value that changes.
    table = log.values[log.values["kind"] == "encoder"]
    changing = table.groupby("name")["value"].nunique() > 1
    assert len(figure.axes) == changing.sum() >= 12
    panel = next(axis for axis in figure.axes if axis.get_ylabel() == "entropy (nats)")
    for layer, curve in enumerate(panel.get_lines()):
        found = list(zip(*curve.get_data(), strict=True))
        logged = [(u, v) for u, at, v in values(log, "encoder", "entropy") if at == layer]
        assert found == logged and [updates for updates, _ in found] == [2, 4, 6]
    assert legend(figure) == ["layer 1", "layer 2"]
    assert len(drawn["training"].figure.axes) == 2  # the learning rate is constant


def test_trajectories_draws_two_runs(logs):
    runs = training_log.read_all([logs / "translation.log", logs / "language.log"])
    drawn = {entry.name.partition("-")[2]: entry for entry in trajectories.draw(runs)}
    assert {*drawn} == {"training", *KINDS}
    for entry in drawn.values():
        check_figure(entry)
    figure = drawn["decoder"].figure
    shown = legend(figure)
    assert shown == ["translation", "language"]
    first, *_ = figure.axes
    assert first.get_ylabel() == "sparsity (0 to 1)" and len(first.get_lines()) == 2
    means = runs[0].values.query("kind == 'encoder' and name == 'entropy'")
    means = means.groupby("updates")["value"].mean()
    panel = drawn["encoder"].figure.axes[2]
    assert panel.get_lines()[0].get_ydata().tolist() == means.tolist()


def test_trajectories_draws_losses_without_the_monitor(logs):
    printed = run(logs, "multimax-analyze", "trajectories", "plain.log", "--out", "plain")
    assert "written: plain" in printed
    files = {f"trajectories-training.{form}" for form in ("png", "svg")}
    assert {file.name for file in (logs / "plain").iterdir()} == files
    log = training_log.read(logs / "plain.log")
    (entry,) = trajectories.draw([log])
    curves = {axis.get_ylabel(): axis.get_lines()[0].get_data() for axis in entry.figure.axes}
    text = (logs / "plain.log").read_text()
    lines = [json.loads(found) for found in re.findall(r'{"epoch.*}', text)]
    for side, start in (("training", ""), ("validation", "valid_")):
        logged = [x for x in lines if f"{start}loss" in x]
        expected = {int(x[f"{start}num_updates"]): float(x[f"{start}loss"]) for x in logged}
        found = curves[f"{side} loss (bits per token)"]
        assert len(expected) > 1 and dict(zip(*found, strict=True)) == expected


def test_trajectories_omits_values_that_stay_constant(tmp_path):
    file = tmp_path / "train.log"
    file.write_text(
        "".join(
            line(n, updates=n, encoder_at_0__entropy=n, encoder_at_0__zeros=0) + "\n"
            for n in (2, 4)
        )
    )
    (entry,) = trajectories.draw([training_log.read(file)])
    assert [axis.get_ylabel() for axis in entry.figure.axes] == ["entropy (nats)"]


def test_trajectories_refuses_a_missing_log(logs):
    assert "log 'none.log' does not" in refused(
        logs, "multimax-analyze", "trajectories", "none.log"
    )
