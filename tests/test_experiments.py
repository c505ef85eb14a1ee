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

from multimax_fairseq.errors import UsageError

ROWS = {
    "iwslt14": ["softmax", "entmax15", "evsoftmax", "multimax", "sparsemax"],
    "wikitext103": ["softmax", "multimax", "multimax_attention", "topk"],
    "iwslt17": ["softmax", "continuous_softmax", "continuous_sparsemax"],
    "quickstart_translation": ["softmax", "multimax"],
    "quickstart_lm": ["softmax", "multimax"],
}
RIVALS = ["adaptive_temperature", "asentmax", "gate", "multimax_sink", "sigmoid", "sink"]
RIVALS += ["softmax1", "softpick", "ssmax"]
PAPER = ROWS["wikitext103"]
for name, more in (("iwslt14", []), ("wikitext103", ["both", "low"])):
    ROWS[name] = ["softmax", *sorted([*ROWS[name][1:], *RIVALS, *more])]
CONFIGS = [f"{name}_{row}" for name, rows in ROWS.items() for row in rows]
# Rows that are entries of one file, with what each changes; by experiment.
LISTED = {
    name: [
        row
        for rows in OmegaConf.load(ROOT / "configs" / "rows" / f"{name}.yaml").values()
        for row in rows
    ]
    for name in ("multi30k", "speeches")
}
# Of a plugin of their own, which test_added_mapping.py trains.
TEMPERED = ("tempered", "output_temperature")
ENTRIES = [f"{name}_{row}" for name, rows in LISTED.items() for row in rows if row not in TEMPERED]


def compose(plan, name):
    experiment = next(known for known in (*ROWS, *LISTED) if name.startswith(f"{known}_"))
    return plan.compose(experiment, name.removeprefix(f"{experiment}_"))


@pytest.fixture(scope="module")
def experiment():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("experiment")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def plan(experiment):
    return importlib.import_module("experiment_plan")


@pytest.fixture(autouse=True)
def pretend_gpu(monkeypatch):
    """So that --fp16, which WikiText-103's rows ask for, is not refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def parsed(words):
    """What fairseq-train makes of its command line; it ends the process at an unknown option."""
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))


def as_hydra_train(plan, name):
    """A config with fairseq's own settings beneath, as fairseq-hydra-train has it."""
    file = next((listed for listed in LISTED if name in ENTRIES and name.startswith(listed)), name)
    hydra_init(file)
    try:
        cfg = compose(plan, name)
    finally:
        del ConfigStore.instance().repo[f"{file}.yaml"]
    OmegaConf.set_struct(cfg, True)
    add_defaults(cfg)
    return cfg


@functools.cache
def both_ways(plan, name):
    """A config as fairseq-hydra-train has it, and as fairseq-train has it from its command line: a
    second to compose, so nobody may change them."""
    cfg = compose(plan, name)
    return as_hydra_train(plan, name), parsed([cfg.task.data, *plan.options(cfg)])


# --- the configs -------------------------------------------------------------------------------


def test_there_is_a_config_for_each_row_and_no_other(plan):
    files = sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))
    # What an experiment's rows share, and each row.
    assert files == sorted([*ROWS, *CONFIGS, *LISTED])
    found = {name: plan.groups(name) for name in (*ROWS, *LISTED)}
    for name, rows in (ROWS | LISTED).items():
        assert sorted(sum(found[name].values(), [])) == sorted(rows)
        assert found[name]["paper"][0] == "softmax"
    assert found["iwslt14"]["mappings"] == RIVALS
    assert found["wikitext103"]["paper"] == PAPER


@pytest.mark.parametrize("name", [*CONFIGS, *ENTRIES])
def test_a_config_and_its_command_line_are_the_same_settings(plan, name):
    command = both_ways(plan, name)[1]
    for group, settings in compose(plan, name).items():
        for key, value in settings.items():
            if (group, key) == ("model", "_name"):  # else an architecture of fairseq's old kind
                key = key if OmegaConf.is_config(command.model) else "arch"
            assert getattr(command[group], key) == value, (group, key)


@pytest.mark.parametrize("name", [*CONFIGS, *ENTRIES])
def test_a_config_is_the_same_through_hydra(plan, name):
    """None of fairseq's defaults hides what the rows share."""
    through_hydra = both_ways(plan, name)[0]
    for group, settings in compose(plan, name).items():
        for key, value in settings.items():
            assert through_hydra[group][key] == value, (group, key)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_stands_both_in_a_row_and_in_what_rows_share(name):
    row = OmegaConf.load(ROOT / "configs" / f"{name}.yaml")
    (_, base) = row.pop("defaults")
    assert base == next(experiment for experiment in ROWS if name.startswith(f"{experiment}_"))
    shared = OmegaConf.load(ROOT / "configs" / f"{base}.yaml")
    assert {"checkpoint", "model"} <= set(row) <= {"checkpoint", "model", "optimizer"}
    assert not any(set(row[group]) & set(shared[group]) for group in row)


@pytest.mark.parametrize("name", [*CONFIGS, *ENTRIES])
def test_a_config_builds_the_same_model_through_hydra(plan, name, dictionary):
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    # To draw the numbers of all would take minutes.
    is_drawn = name.endswith("_multimax")
    models = []
    for cfg in both_ways(plan, name):
        torch.manual_seed(1)
        with torch.device("cpu" if is_drawn else "meta"):
            models.append(tasks.FairseqTask.build_model(task, copy.deepcopy(cfg.model)))
    assert str(models[0]) == str(models[1])
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.shape == theirs[key].shape
        assert not is_drawn or torch.equal(value, theirs[key])


@pytest.mark.parametrize("group", ["common", "task", "criterion", "model"])
@pytest.mark.parametrize("name", ["iwslt14_multimax", "wikitext103_low"])
def test_an_unknown_key_is_refused(plan, name, group, dictionary, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"{name}.yaml"
    cfg = OmegaConf.load(file)
    OmegaConf.update(cfg, f"{group}.typo", 1)
    OmegaConf.save(cfg, file)
    monkeypatch.setattr(plan, "CONFIGS", tmp_path)
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with pytest.raises((ValueError, HydraException, OmegaConfBaseException)) as refusal:
        tasks.FairseqTask.build_model(task, as_hydra_train(plan, name).model)
    chain = (refusal.value, refusal.value.__cause__, refusal.value.__context__)
    assert any("typo" in str(error) for error in chain)


def test_rows_differ_in_their_attention_and_output_alone(plan):
    chosen = {"attention_normalizer", "output_normalizer", "multimax_order", "multimax_terms"}
    chosen |= {"cross_attention", "multimax_sink", "attention_gate", "topk"}
    for name, rows in ROWS.items():
        whole = []
        for row in rows:
            cfg = OmegaConf.to_container(plan.compose(name, row))
            assert cfg["checkpoint"].pop("save_dir") == f"results/{name}/{row}/seed-1"
            own = tuple((key, cfg["model"].pop(key, None)) for key in sorted(chosen))
            # MultiMax may be held at softmax at first, by an optimizer that softmax has no use for.
            held = [cfg["model"].pop("multimax_init_std", None)]
            held += [cfg["optimizer"].pop(key, None) for key in ("_name", "scalar_freeze_updates")]
            assert row != "softmax" or held == [None, "adam", None]
            assert own not in [other for other, _ in whole]
            whole.append((own, cfg))
        assert all(cfg == whole[0][1] for _, cfg in whole)


@pytest.mark.parametrize("name", LISTED)
def test_an_entry_changes_what_it_says_and_nothing_else(plan, name):
    base, seen = OmegaConf.to_container(plan.compose(name, "multimax")), []
    for rows in plan.listed(name).values():
        for row, changes in rows.items():
            cfg = OmegaConf.to_container(plan.compose(name, row))
            assert cfg not in seen
            seen.append(copy.deepcopy(cfg))
            for group, settings in OmegaConf.to_container(changes).items():
                assert {key: cfg[group].pop(key) for key in settings} == settings
            others = {
                group: {k: v for k, v in base[group].items() if k not in changes.get(group, ())}
                for group in base
            }
            assert cfg == others


@pytest.mark.parametrize("name", LISTED)
def test_a_row_may_have_a_plugin_of_its_own(plan, tmp_path, name):
    words = argparse.Namespace(
        experiment=name, gpus=0, out=tmp_path, data_bin=tmp_path, max_update=None, train=[]
    )
    for row, folder in (("tempered", "user_dir/tempered"), ("low", "multimax_fairseq")):
        command = plan.plan(words, row, 1).command
        assert command[command.index("--user-dir") + 1] == str(ROOT / folder)
    words.train = ["--user-dir=mine", "--max-update", "7"]
    run = plan.plan(words, "low", 1)
    assert (run.plugin, run.updates) == ("mine", 7)
    words = argparse.Namespace(**vars(words) | {"max_update": 9, "train": []})
    asked = plan.options_of(plan.plan(words, "low", 1).command)
    assert {*asked["--max-update"], *asked["--total-num-update"]} == {"9"}


def test_the_language_model_has_the_papers_parameters(plan):
    words = Dictionary()
    for index in range(267_744 - len(words)):
        words.add_symbol(str(index))
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    cfg = compose(plan, "wikitext103_multimax")
    command = parsed([cfg.task.data, *plan.options(cfg)])
    with torch.device("meta"):
        model = tasks.FairseqTask.build_model(task, command.model)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 156


@pytest.mark.parametrize(
    "name, key, batch",
    [
        ("iwslt14_multimax", "max_tokens", 4096),
        ("iwslt17_softmax", "batch_size", 80),
        *((f"wikitext103_{row}", "max_tokens", 131_072) for row in ROWS["wikitext103"]),
    ],
)
@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_the_batch_is_the_same_on_any_number_of_gpus(plan, name, key, batch, gpus):
    cfg = compose(plan, name)
    plan.fit(cfg, gpus)
    devices = cfg.distributed_training.distributed_world_size
    assert devices == max(gpus, 1)
    assert cfg.dataset[key] * devices * cfg.optimization.update_freq[0] == batch
    assert ("--cpu" in plan.options(cfg)) == (gpus == 0)
    assert ("--fp16" in plan.options(cfg)) == (gpus > 0 and "wikitext" in name)
    with pytest.raises(UsageError, match=f"--gpus 3 cannot share {batch} "):
        plan.fit(cfg, 3)


# --- what data preparation leaves --------------------------------------------------------------


def test_a_description_of_the_data_tells_where_its_counts_differ(experiment, tmp_path):
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


# --- what an earlier run leaves -----------------------------------------------------------------


def test_a_run_goes_on_with_its_own_command_and_data_alone(experiment, plan, tmp_path, capsys):
    data, folder = tmp_path / "data" / "data-bin", tmp_path / "run"
    data.mkdir(parents=True)
    folder.mkdir()
    run = plan.Run(
        "iwslt14", "softmax", 1, folder, data, "plugin", ["fairseq-train", "--lr", "1"], 3
    )
    (folder / "result.json").touch()
    (folder / "command").write_text("fairseq-train --lr 2\n")
    with pytest.raises(UsageError, match="trained with another command"):
        experiment.finish(run, 0)
    run.command.extend(["--dropout", "0.1", "--clip-norm", "0.3"])
    (folder / "command").write_text("fairseq-train --lr 1 --dropout 0.3 --clip-norm 0.1\n")
    with pytest.raises(UsageError, match="trained with another command"):
        experiment.finish(run, 0)
    # The same in another order.
    (folder / "command").write_text("fairseq-train --clip-norm 0.3 --lr 1 --dropout 0.1\n")
    experiment.finish(run, 0)
    assert "Nothing to do: iwslt14 softmax, seed 1" in capsys.readouterr().out
    assert plan.options_of(["a", "--lr=1"]) == plan.options_of(["a", "--lr", "2", "--lr", "1"])


def test_a_run_goes_on_with_the_bytes_of_its_data_whatever_made_them(experiment, plan, tmp_path):
    data, other = tmp_path / "data-bin", tmp_path / "other"
    run = plan.Run("iwslt14", "softmax", 1, tmp_path / "run", data, "plugin", ["fairseq-train"], 3)
    for folder in (data, other, run.folder):
        folder.mkdir()
    for folder, content in ((data, "1"), (other, "2")):
        (folder / "dict.en.txt").write_text(content)
    (run.folder / "result.json").touch()
    (run.folder / "data.sha256").write_text(experiment.digest(data) + "\n")
    (data / "prepared.sha256").write_text("of another version of data-prep/")
    experiment.finish(run, 0)
    with pytest.raises(UsageError, match="trained on other data than '.*other'"):
        experiment.finish(run._replace(data=other), 0)


def test_rows_of_one_table_have_the_same_data(experiment, plan, tmp_path):
    data, beside = tmp_path / "data-bin", tmp_path / "out/softmax/seed-1"
    folder = tmp_path / "out/multimax/seed-1"
    for place in (data, beside, folder):
        place.mkdir(parents=True)
    (data / "dict.en.txt").write_text("1")
    (folder / "result.json").touch()
    run = plan.Run("iwslt14", "multimax", 1, folder, data, "plugin", ["fairseq-train"], 3)
    (beside / "data.sha256").write_text("of another text\n")
    with pytest.raises(UsageError, match="'.*softmax/seed-1' was trained on other data than '"):
        experiment.finish(run, 0)
    (beside / "data.sha256").write_text(experiment.digest(data) + "\n")
    experiment.finish(run, 0)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--max-update 0", "--max-update 0 must be at least 1"),
        ("--rows=", "--rows names none"),
        ("--rows x", "--rows has the unknown 'x'"),
        ("--dropout 0.3", "unrecognized --dropout 0.3: give fairseq-train's options after --"),
        ("-- --seed 7", "--seed after -- is the script's own: give --seeds"),
        ("-- --lr 1 --save-dir=x", "--save-dir after -- is the script's own: give --out"),
        ("-- --help", "--help after -- is the script's own"),
        ("-- --disable-validation", "--disable-validation after -- is the script's own"),
        ("-- --no-save", "--no-save after -- is the script's own"),
        ("-- --log-format json", "--log-format after -- is the script's own"),
        ("--gpus -1", "--gpus -1: this machine shows"),
        ("--out /a:b", "--out '/a:b' has a ':', where fairseq would split it"),
        ("--data-bin /a:b/data-bin", "--data-bin '/a:b/data-bin' has a ':'"),
        (f"--out {__file__}", f"--out '{__file__}' is a file"),
    ],
)
def test_what_a_run_could_not_be_found_by_is_refused(experiment, monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["experiment.py", "multi30k", "--gpus", "0", *words.split()])
    with pytest.raises(UsageError) as error:
        experiment.parse("multi30k")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--max-update", "--max-update '' after -- must be one whole number"),
        ("--max-update x", "--max-update 'x' after -- must be one whole number"),
        ("--user-dir", "--user-dir after -- needs the folder of a plugin"),
    ],
)
def test_an_option_of_training_without_its_value_is_refused(plan, tmp_path, words, said):
    given = argparse.Namespace(
        experiment="multi30k", gpus=0, out=tmp_path, data_bin=tmp_path, max_update=None
    )
    given.train = words.split()
    with pytest.raises(UsageError, match=said):
        plan.plan(given, "softmax", 1)


# --- what a killed process leaves --------------------------------------------------------------


def test_a_run_that_was_killed_before_its_last_checkpoint_was_named_has_one(experiment, tmp_path):
    last = tmp_path / "checkpoint_last.pt"
    assert experiment.last_checkpoint(tmp_path) == last and not last.exists()
    for name in ("checkpoint_1_8.pt", "checkpoint_2_10.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_text(name)
    experiment.last_checkpoint(tmp_path)
    assert last.read_text() == "checkpoint_2_10.pt"
    last.write_text("its own")
    experiment.last_checkpoint(tmp_path)
    assert last.read_text() == "its own" and len(list(tmp_path.iterdir())) == 4


# Of the fields of hydra-submitit-launcher 1.2, which the tests do without.
OF_SLURM = "_target_ submitit_folder name nodes tasks_per_node gpus_per_node cpus_per_task mem_gb"
OF_SLURM += " timeout_min partition max_num_timeout stderr_to_stdout"


def test_the_job_of_a_cluster_is_the_row_that_it_names_with_a_process_a_task():
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
        ("", "it said nothing"),
        ("a\n\n", "a"),
        ("a\nb: error: c\n", "b: error: c"),
    ],
)
def test_what_a_failed_command_said_last(experiment, said, last):
    assert experiment.evaluate.last_line(said) == last
