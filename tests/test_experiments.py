"""configs/ and the scripts of the papers' experiments."""

import argparse
import copy
import functools
import importlib
import json
import re
import shlex
import shutil
import sys
from types import SimpleNamespace

import hydra
import pytest
import torch
from commands import ROOT
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from multimax_fairseq.commands import runs
from multimax_fairseq.commands.stock import last_line
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

PAPER = {
    "iwslt14": ["softmax", "sparsemax", "entmax15", "evsoftmax", "multimax"],
    "wikitext103": ["softmax", "topk", "multimax_attention", "multimax"],
    "iwslt17": ["softmax", "continuous_softmax", "continuous_sparsemax"],
}
FILES = {
    file.stem: OmegaConf.load(file).groups for file in (ROOT / "configs" / "rows").glob("*.yaml")
}
ROWS = {name: [row for rows in each.values() for row in rows] for name, each in FILES.items()}
# Rows of another plugin.
PLUGINS = {
    row
    for groups in FILES.values()
    for rows in groups.values()
    for row, changes in rows.items()
    if "user_dir" in changes.get("common", {})
}


@pytest.fixture(scope="module")
def experiment():
    """scripts/experiment.py, which lets hydra compose each file once."""
    sys.path.insert(0, str(ROOT / "scripts"))
    module = importlib.import_module("experiment")
    once = functools.cache(hydra.compose)
    module.hydra = SimpleNamespace(compose=once, initialize_config_dir=hydra.initialize_config_dir)
    yield module
    module.hydra = hydra
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def lib(experiment):
    return experiment.lib


@functools.cache
def rows_of(experiment, name):
    return experiment.Experiment.read(name)


def compose(experiment, name, row):
    return experiment.compose(rows_of(experiment, name), row)


@pytest.fixture(autouse=True)
def pretend_gpu(monkeypatch):
    """Allow --fp16, which WikiText-103's rows use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def parsed(words):
    """Return the settings as fairseq-train parses them; an unknown option exits."""
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))


def as_hydra_train(experiment, name, row):
    """Return a config with fairseq's defaults, as fairseq-hydra-train composes it."""
    hydra_init(name)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiment, "hydra", hydra)
            cfg = compose(experiment, name, row)
    finally:
        del ConfigStore.instance().repo[f"{name}.yaml"]
    OmegaConf.set_struct(cfg, True)
    add_defaults(cfg)
    return cfg


# --- the configs -------------------------------------------------------------------------------


def test_rows_have_one_config_per_experiment(experiment):
    for folder in ("configs", "configs/rows"):
        assert {file.stem for file in (ROOT / folder).glob("*.yaml")} == ROWS.keys()
    for name in ROWS:  # --rows takes both
        found = experiment.Experiment.read(name)
        assert not found.groups.keys() & found.changes.keys()
    for name, rows in PAPER.items():
        found = experiment.Experiment.read(name)
        assert found.groups["paper"] == rows
        assert all(found.papers[row] for row in rows)


@pytest.mark.parametrize("name", ROWS)
def test_config_trains_the_same_model_through_hydra(experiment, name, dictionary):
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    row = "multimax" if "multimax" in ROWS[name] else ROWS[name][0]
    cfg = compose(experiment, name, row)
    command = parsed([cfg.task.data, *experiment.options(cfg)])
    through_hydra = as_hydra_train(experiment, name, row)
    for group, settings in cfg.items():
        for key, value in settings.items():
            assert through_hydra[group][key] == value, (group, key)
            if (group, key) == ("model", "_name") and not OmegaConf.is_config(command.model):
                key = "arch"  # an architecture in fairseq's old style
            assert getattr(command[group], key) == value, (group, key)
    models = []
    for each in (through_hydra, command):
        torch.manual_seed(1)
        models.append(tasks.FairseqTask.build_model(task, each.model))
    assert str(models[0]) == str(models[1])
    ours, theirs = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("name", ROWS)
def test_options_of_each_row_parse_and_build_a_model(experiment, name, dictionary):
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    for row in set(ROWS[name]) - set(PLUGINS):
        cfg = compose(experiment, name, row)
        words = [cfg.task.data, *experiment.options(cfg)]
        args = options.parse_args_and_arch(options.get_training_parser(), words)
        for settings in cfg.values():
            for key, value in settings.items():
                if key not in ("_name", "data"):
                    assert getattr(args, key) in (value, str(value)), (row, key)
        args.encoder_layers = args.decoder_layers = 1
        with torch.device("meta"):
            tasks.FairseqTask.build_model(task, args)


@pytest.mark.parametrize("group", ["common", "task", "criterion", "model"])
def test_config_refuses_an_unknown_key(experiment, group, dictionary, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "wikitext103.yaml"
    cfg = OmegaConf.load(file)
    OmegaConf.update(cfg, f"{group}.typo", 1)
    OmegaConf.save(cfg, file)
    monkeypatch.setattr(experiment, "CONFIGS", tmp_path)
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with pytest.raises((ValueError, HydraException, OmegaConfBaseException)) as refusal:
        model = as_hydra_train(experiment, "wikitext103", "low").model
        tasks.FairseqTask.build_model(task, model)
    chain = (refusal.value, refusal.value.__cause__, refusal.value.__context__)
    assert any("typo" in str(error) for error in chain)


def test_row_changes_only_its_own_keys(experiment):
    found = experiment.Experiment.read("multi30k")
    found.changes["base"] = {}
    base = OmegaConf.to_container(experiment.compose(found, "base"))
    for row, changes in found.changes.items():
        cfg = OmegaConf.to_container(experiment.compose(found, row))
        for group, settings in changes.items():
            assert {key: cfg[group].pop(key) for key in settings} == settings
        assert cfg == {
            group: {key: x for key, x in settings.items() if key not in changes.get(group, ())}
            for group, settings in base.items()
        }


def test_rows_differ_from_each_other(lib):
    for name in ROWS:
        changes = list(lib.Experiment.read(name).changes.values())
        assert all(changes.count(each) == 1 for each in changes)


@pytest.mark.parametrize("name", ["multi30k", "speeches"])
def test_plan_uses_the_plugin_of_the_row(experiment, tmp_path, name):
    found = experiment.Experiment.read(name)
    args = argparse.Namespace(
        experiment=found,
        gpus=0,
        out=tmp_path,
        data_bin=tmp_path,
        max_update=None,
        train=[],
        data="",
    )
    for row, folder in (("tempered", "user_dir/tempered"), ("low", "multimax_fairseq")):
        command = experiment.plan(args, row, 1).command
        assert command[command.index("--user-dir") + 1] == str(ROOT / folder)
    args.train = ["--user-dir=mine", "--max-update", "7"]
    given = experiment.options_of(experiment.plan(args, "low", 1).command)
    assert (given["--user-dir"], given["--max-update"]) == (("mine",), ("7",))
    args.train, args.max_update = [], 9
    given = experiment.options_of(experiment.plan(args, "low", 1).command)
    assert {*given["--max-update"], *given["--total-num-update"]} == {"9"}


def test_language_model_has_the_papers_parameters(experiment):
    words = Dictionary()
    for index in range(267_744 - len(words)):
        words.add_symbol(str(index))
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    cfg = compose(experiment, "wikitext103", "multimax")
    command = parsed([cfg.task.data, *experiment.options(cfg)])
    with torch.device("meta"):
        model = tasks.FairseqTask.build_model(task, command.model)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 156


@pytest.mark.parametrize(
    "name, key, batch",
    [
        ("iwslt14", "max_tokens", 4096),
        ("iwslt17", "batch_size", 80),
        ("adaptively_sparse", "max_tokens", 8192),
        ("wikitext103", "max_tokens", 131_072),
    ],
)
def test_fit_batch_keeps_the_batch_on_any_number_of_gpus(experiment, name, key, batch):
    composed = compose(experiment, name, "softmax")
    for gpus in (0, 1, 2, 4, 8):
        cfg = copy.deepcopy(composed)
        experiment.fit_batch(cfg, gpus)
        devices = cfg.distributed_training.distributed_world_size
        assert devices == max(gpus, 1)
        assert cfg.dataset[key] * devices * cfg.optimization.update_freq[0] == batch
        assert ("--cpu" in experiment.options(cfg)) == (gpus == 0)
        assert ("--fp16" in experiment.options(cfg)) == (gpus > 0 and name == "wikitext103")
    with pytest.raises(UsageError, match=f"--gpus 3 cannot share {batch} "):
        experiment.fit_batch(cfg, 3)


# --- evaluation --------------------------------------------------------------------------------


def test_describe_reports_differing_counts(experiment, tmp_path):
    text = {"remove_bpe": "@@ ", "tokenizer": "moses", "lowercase": True}
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(text))
    assert experiment.evaluate.describe(tmp_path, "en") == {**text, "pairs": ""}
    counts = {"train": {"expected": 10_000, "found": 9_997}, "valid": {"expected": 9, "found": 10}}
    file.write_text(json.dumps({**text, "differing_counts": counts}))
    assert experiment.evaluate.describe(tmp_path, "en") == {
        **text,
        "pairs": "train 9,997 (expected 10,000), valid 10 (expected 9)",
    }
    for wrong in ({"train": {}}, {"train": 9_997}, {"train": {"found": "a", "expected": "b"}}, 3):
        file.write_text(json.dumps({**text, "differing_counts": wrong}))
        with pytest.raises(UsageError, match="is not what data-prep/ writes"):
            experiment.evaluate.describe(tmp_path, "en")


def test_translation_marks_unknown_words_of_binarised_references(experiment, tmp_path, monkeypatch):
    evaluate = experiment.evaluate
    printed = "T-0\ta b c d <<unk>>\nH-0\t-0.1\ta b c d <unk>\n"
    monkeypatch.setattr(evaluate, "run", lambda *_: printed)
    (tmp_path / "dict.en.txt").write_text("a 1\n")
    task = argparse.Namespace(source_lang="de", target_lang="en")
    given = ("checkpoint.pt", tmp_path, task, "test", 5, [], tmp_path / "log")
    binarised = evaluate.translation(*given)
    (tmp_path / "test.reference.en").write_text("a b c d word\n")
    raw = evaluate.translation(*given)
    assert binarised["value"] == raw["value"] < 100
    assert binarised["protocol"].endswith("binarised data, 1 with unknown words")
    assert binarised["signature"] == f"{raw['signature']}|unknown:1"


# --- earlier runs ------------------------------------------------------------------------------


def test_finish_refuses_another_command(experiment, tmp_path, capsys):
    folder = tmp_path / "out/softmax/seed-1"
    folder.mkdir(parents=True)
    run = runs.Run("softmax, seed 1", folder, ["fairseq-train", "--lr", "1"], "of a text", None)
    (folder / "result.json").write_text("{}")
    (folder / "command").write_text("fairseq-train --lr 2\n")
    with pytest.raises(UsageError, match="trained with another command"):
        runs.finish(run)
    run.command.extend(["--dropout", "0.1", "--clip-norm", "0.3"])
    (folder / "command").write_text("fairseq-train --lr 1 --dropout 0.3 --clip-norm 0.1\n")
    with pytest.raises(UsageError, match="trained with another command"):
        runs.finish(run)
    # The same settings in another order, by the command of another environment.
    (folder / "command").write_text("/other/fairseq-train --clip-norm 0.3 --lr 1 --dropout 0.1\n")
    assert runs.finish(run) == {}
    assert "Nothing to do: softmax, seed 1 is finished" in capsys.readouterr().out
    assert experiment.options_of(["a", "--lr=1"]) == experiment.options_of(
        ["a", "--lr", "2", "--lr", "1"]
    )


def test_finish_refuses_rows_on_different_data(tmp_path):
    folder, beside = tmp_path / "out/softmax/seed-1", tmp_path / "out/multimax/seed-1"
    run = runs.Run("softmax, seed 1", folder, ["fairseq-train"], "of a text", None)
    for path in (folder, beside):
        path.mkdir(parents=True)
        (path / "result.json").write_text("{}")
        (path / "data.sha256").write_text("of a text\n")
    runs.finish(run)
    with pytest.raises(UsageError, match="'.*seed-1' was trained on other data: runs on different"):
        runs.finish(run._replace(checksum="of another text"))
    (beside / "data.sha256").write_text("of another text\n")
    with pytest.raises(UsageError, match="'.*multimax/seed-1' was trained on other data"):
        runs.finish(run)


def test_data_checksum_depends_on_the_bytes_alone(experiment, tmp_path):
    (tmp_path / "dict.en.txt").write_text("1")
    before = experiment.data_checksum(tmp_path)
    (tmp_path / "prepared.sha256").write_text("of another version of data-prep/")
    assert experiment.data_checksum(tmp_path) == before
    (tmp_path / "dict.en.txt").write_text("2")
    assert experiment.data_checksum(tmp_path) != before


@pytest.mark.parametrize(
    "files",
    [
        {"command": "of a text\nscripts/imdb.sh --rows softmax\n"},
        {"result.json": '{"command": "leaderboard.sh --rows softmax"}'},
    ],
    ids=["imdb", "leaderboard"],
)
def test_finish_recognises_older_folders(tmp_path, files):
    folder = tmp_path / "out/softmax/seed-1"
    folder.mkdir(parents=True)
    for name, text in ({"result.json": "{}"} | files).items():
        (folder / name).write_text(text)
    run = runs.Run("a run", folder, ["scripts/a.sh", "--rows", "softmax"], "of a text", None)
    assert runs.finish(run) is not None
    with pytest.raises(UsageError, match="trained with another command"):
        runs.finish(run._replace(command=["scripts/a.sh", "--rows", "multimax"]))
    if "command" in files:
        with pytest.raises(UsageError, match="trained on other data"):
            runs.finish(run._replace(checksum="of another text"))


@pytest.mark.parametrize("name", PAPER)
def test_parse_takes_the_papers_rows_by_default(experiment, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["experiment.py", name, "--gpus", "0"])
    assert experiment.parse(name).rows == PAPER[name]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--rows=", "--rows has the unknown ''"),
        ("--rows x", "--rows has the unknown 'x'"),
        ("--dropout 0.3", "unrecognized --dropout 0.3: pass fairseq-train's options after --"),
        ("-- --seed 7", "--seed after -- is not possible: pass --seeds"),
        ("-- --lr 1 --save-dir=x", "--save-dir after -- is not possible: pass --out"),
        ("--gpus -1", "--gpus -1: this machine has"),
    ],
)
def test_parse_refuses_wrong_options(experiment, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["experiment.py", "multi30k", "--gpus", "0", *words.split()])
    with pytest.raises(UsageError) as error:
        experiment.parse("multi30k")
    assert str(error.value).startswith(said)


# --- killed processes, clusters ----------------------------------------------------------------


def test_last_checkpoint_restores_a_missing_name(tmp_path):
    last = tmp_path / "checkpoint_last.pt"
    assert runs.last_checkpoint(tmp_path) == last and not last.exists()
    for name in ("checkpoint_1_8.pt", "checkpoint_2_10.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_text(name)
    runs.last_checkpoint(tmp_path)
    assert last.read_text() == "checkpoint_2_10.pt"
    last.write_text("its own")
    runs.last_checkpoint(tmp_path)
    assert last.read_text() == "its own" and len(list(tmp_path.iterdir())) == 4


# The fields of hydra-submitit-launcher 1.2, which is not installed for the tests.
OF_SLURM = "_target_ submitit_folder name nodes tasks_per_node gpus_per_node cpus_per_task mem_gb"
OF_SLURM += " timeout_min partition max_num_timeout stderr_to_stdout"


def test_slurm_launcher_starts_one_process_per_task():
    file = ROOT / "configs" / "hydra" / "launcher" / "slurm.yaml"
    command = re.search(r"--multirun((?:.*\\\n)+.*)", file.read_text())[1]
    words = shlex.split(command.replace("\\\n#", ""))
    name, overrides = words[words.index("--config-name") + 1], [w for w in words if "=" in w]
    assert f"hydra/launcher={file.stem}" in overrides
    hydra_init(name)
    try:
        with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.1"):
            cfg = hydra.compose(name, overrides, return_hydra_config=True)
            alone = hydra.compose(name)
    finally:
        del ConfigStore.instance().repo[f"{name}.yaml"]
    launcher, sweep, wanted = cfg.hydra.launcher, cfg.hydra.sweep, cfg.distributed_training
    assert set(launcher) == set(OF_SLURM.split())
    assert launcher._target_.endswith("SlurmLauncher") and sweep.dir == sweep.subdir == "."
    assert wanted.distributed_world_size == launcher.nodes * launcher.tasks_per_node
    assert launcher.tasks_per_node == launcher.gpus_per_node
    assert wanted.distributed_port > 0  # else fairseq trains on each node alone
    tokens = [
        c.distributed_training.distributed_world_size
        * c.dataset.max_tokens
        * c.optimization.update_freq[0]
        for c in (cfg, alone)
    ]
    assert tokens == [131_072, 131_072]
    assert cfg.model == alone.model


@pytest.mark.parametrize(
    "said, last",
    [
        ("", "no output"),
        ("a\n\n", "a"),
        ("a\nb: error: c\n", "b: error: c"),
    ],
)
def test_last_line_finds_the_error(said, last):
    assert last_line(said) == last
