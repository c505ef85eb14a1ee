"""The configs have the papers' settings; what a paper leaves open is marked in the config."""

import importlib
import json
import sys

import iwslt14
import iwslt17
import kftt
import pytest
import wmt
import yaml
from commands import ROOT
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

sys.path.insert(0, str(ROOT / "scripts"))
experiment = importlib.import_module("experiment")
sys.path.pop(0)

# {experiment: {setting: its value in the paper}}
PAPERS = {
    # Zhou et al. 2024, section 5.1.3
    "iwslt14": {
        "model.encoder_layers": 6,
        "model.decoder_layers": 6,
        "task.eval_bleu_args.beam": 5,
    },
    # Zhou et al. 2024, section 5.1.2
    "wikitext103": {
        "model.decoder_layers": 6,
        "optimization.lr": [5e-4],
        "optimization.max_update": 50_000,
        "dataset.max_tokens": 2048,
        "distributed_training.distributed_world_size": 4,
    },
    # Martins et al. 2020, section 4 and Table 4
    "iwslt17": {
        "dataset.batch_size": 80,
        "model.encoder_embed_dim": 620,
        "model.decoder_embed_dim": 620,
        "model.encoder_hidden_size": 500,  # of each direction; 1000 together
        "model.decoder_hidden_size": 1000,
        "model.dropout": 0.0,
        "model.hidden_dropout": 0.2,
        "model.continuous_bases": 30,
        "model.continuous_widths": "0.03,0.1,0.3",
        "optimization.max_epoch": 100,
        "optimization.lr": [2e-4],
        "optimizer._name": "adam",
        "optimizer.weight_decay": 0.0,
        "lr_scheduler._name": "reduce_lr_on_plateau",
        "lr_scheduler.lr_shrink": 0.7,
        "task.eval_bleu_args.beam": 5,
        "task.eval_bleu_args.max_len_b": 80,
    },
    # Correia et al. 2019, "Experiments"
    "adaptively_sparse": {
        **{f"model.{side}_layers": 6 for side in ("encoder", "decoder")},
        **{f"model.{side}_attention_heads": 8 for side in ("encoder", "decoder")},
        **{f"model.{side}_embed_dim": 512 for side in ("encoder", "decoder")},
        **{f"model.{side}_ffn_embed_dim": 2048 for side in ("encoder", "decoder")},
        "model.attention_normalizer_at": "encoder,decoder,cross",
        "dataset.max_tokens": 8192,
        "lr_scheduler._name": "inverse_sqrt",
        "lr_scheduler.warmup_updates": 20_000,
        "checkpoint.best_checkpoint_metric": "accuracy",
        "checkpoint.maximize_best_checkpoint_metric": True,
        "dataset.validate_interval_updates": 5000,
    },
}
# Settings of this project's own: names, folders, logs, how a checkpoint is kept.
OWN = {"hydra", "_name", "data", "source_lang", "target_lang", "user_dir", "seed", "log_format"}
OWN |= {"log_interval", "save_dir", "save_interval_updates", "keep_interval_updates"}
OWN |= {"no_epoch_checkpoints", "distributed_world_size", "update_freq", "attention_normalizer"}
OWN |= {"output_normalizer", "validate_interval", "report_accuracy"}
MARKS = ("our choice", "recipe", "Vaswani", "see above")


def compose(name, row=None, data_set=""):
    """The settings that fairseq-train parses from a row's command."""
    found = experiment.Experiment.read(name)
    cfg = experiment.compose(found, row or next(iter(found.changes)), data_set)
    cfg.common.fp16 = False  # parsed on a machine without a GPU
    words = [cfg.task.data, *experiment.options(cfg)]
    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, words))


def value_of(cfg, path):
    for key in path.split("."):
        cfg = json.loads(cfg) if isinstance(cfg, str) else cfg
        cfg = cfg[key] if isinstance(cfg, dict) else getattr(cfg, key)
    return cfg


@pytest.mark.parametrize("name", PAPERS)
def test_config_equals_the_paper(name):
    cfg = compose(name)

    assert {path: value_of(cfg, path) for path in PAPERS[name]} == PAPERS[name]


@pytest.mark.parametrize(
    "data_set, interval", [("iwslt17", 5000), ("kftt", 5000), ("wmt16", 10_000), ("wmt14", 10_000)]
)
def test_adaptively_sparse_validates_as_often_as_the_paper(data_set, interval):
    cfg = compose("adaptively_sparse", "softmax", data_set)

    assert cfg.dataset.validate_interval_updates == interval
    assert cfg.checkpoint.save_interval_updates == interval


def test_adaptively_sparse_learns_one_alpha_per_head():
    model = compose("adaptively_sparse", "alpha_entmax").model

    assert (model.entmax_alpha, model.entmax_heads) == (None, "separate")


def test_data_prep_learns_the_papers_merges():
    assert iwslt14.MERGES == 10_000  # fairseq's recipe
    assert {iwslt17.MERGES, kftt.MERGES, wmt.MERGES} == {32_000}


def test_iwslt14_has_three_runs():
    assert experiment.Experiment.read("iwslt14").seeds == [1, 2, 3]


def leaves(node, path=()):
    """Yield (path, line number) of each setting in a YAML mapping."""
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            yield from leaves(value, (*path, key.value))
        else:
            yield (*path, key.value), value.start_mark.line


@pytest.mark.parametrize("name", PAPERS)
def test_config_marks_what_the_paper_leaves_open(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    lines = text.splitlines()

    unmarked = [
        ".".join(path)
        for path, line in leaves(yaml.compose(text))
        if not OWN & set(path)
        and not any(known.startswith(".".join(path)) for known in PAPERS[name])
        and not any(mark in lines[line] for mark in MARKS)
    ]

    assert not unmarked
