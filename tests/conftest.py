"""Toy models in one process: a dictionary, a task that offers it, and builders."""

import copy
import functools
import os
import random
import tempfile
from types import SimpleNamespace

import numpy
import pytest
import torch
from commands import run
from corpus import ENGLISH, GERMAN
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess
from omegaconf import OmegaConf

import multimax_fairseq.models  # noqa: F401
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.models.learned_scalars import learned_modules

# The cache of torch.compile does not notice that an operator's schema has changed.
compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name

SIZES = (
    "--{0}-layers 2 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 4 --dropout 0"
)


RECURRENT = " ".join(
    f"--{side}-embed-dim 16 --{side}-hidden-size {size}"
    for side, size in (("encoder", 12), ("decoder", 16))
)
RECURRENT += " --dropout 0 --hidden-dropout 0"


# test_gpu.py runs tests/gpu in separate processes.
collect_ignore = ["gpu"]


def files(names):
    return [f"test_{name}.py" for name in names.split()]


# The files that take minutes come first, so that no process is left alone with one of them.
LONGEST = files("experiment_runs commands gpu data_prep analysis_figures operators models")
# What --fast leaves out: whole commands, figures, kernels in an interpreter, large or many models.
LONG = LONGEST + files(
    "added_mapping analysis_collect analysis_continuous any_call any_text beam_search benchmark "
    "build checkpoint_names compat continuous_example continuous_models convert criterions docs "
    "documents_example downloads experiments faults fuzzed_files hostile_archives "
    "hostile_checkpoints hostile_files house iwslt17 long_run mistakes monitor numerics "
    "odd_calls processes quantize quickstart rdrop recorded_models replaced_models_recorded "
    "results small_experiments symmetric_divergence trajectories transformers "
    "transformers_export transformers_files vit_example wrong_calls"
)


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="leave out the files that take long")
    parser.addoption("--all", action="store_true", help="run what is marked slow too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes or more; run with --all")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: [*LONGEST, item.path.name].index(item.path.name))
    left_out = [
        item
        for item in items
        if (config.getoption("fast") and item.path.name in LONG)
        or (not config.getoption("all") and item.get_closest_marker("slow"))
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Each test draws the same numbers whatever ran before it in its process."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def dictionary():
    words = Dictionary()
    for index in range(30):
        words.add_symbol(f"word{index}")
    return words


@pytest.fixture(scope="session")
def task(dictionary):
    """What models and criteria ask of a task."""
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        src_dict=dictionary,
        tgt_dict=dictionary,
    )


def sizes_of(arch):
    """The flags that make an architecture a toy."""
    if arch.startswith("rnn_"):
        return RECURRENT.split()
    more = SIZES.format("encoder")
    if "_lm" in arch:
        more = "--decoder-input-dim 16 --decoder-output-dim 16 --tokens-per-sample 64"
    return f"{SIZES.format('decoder')} {more}".split()


@functools.cache
def settings_of_model(arch, *flags):
    """What the command line's own parser makes of them; to compose it takes half a second."""
    is_lm = "_lm" in arch
    name = "language_modeling" if is_lm else "translation"
    parser = options.get_training_parser(name)
    args = options.parse_args_and_arch(
        parser, ["data", "--task", name, "--arch", arch, *sizes_of(arch), *flags]
    )
    return convert_namespace_to_omegaconf(args).model


@pytest.fixture
def build(task):
    """build(arch, *flags, seed=1) -> model, through the command line's own parser."""

    def build_model(arch, *flags, seed=1):
        settings = copy.deepcopy(settings_of_model(arch, *flags))
        torch.manual_seed(seed)
        return tasks.FairseqTask.build_model(task, settings)

    return build_model


def scatter_modulators(model, seed=0):
    """Move every modulator far from the identity, each elsewhere, and what else rivals learn."""
    generator = torch.Generator().manual_seed(seed)
    for _, module in learned_modules(model):
        if not isinstance(module, Modulator):
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
    for module in model.modules():
        if isinstance(module, Modulator):
            for name, parameter in module.named_parameters():
                scale = torch.tensor([0.8, 0.15])[: module.order] if "coefficient" in name else 0.5
                with torch.no_grad():
                    parameter.copy_(
                        (torch.rand(parameter.shape, generator=generator) * 2 - 1) * scale
                    )
    return model


@pytest.fixture
def translation_batch(dictionary):
    """Ragged sentence pairs, the source padded on the left as fairseq does, or on the right."""

    def make(sizes=((9, 7), (4, 5), (6, 1)), left_pad_source=True, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pad, eos = dictionary.pad(), dictionary.eos()
        source, target = (
            torch.full((len(sizes), max(column) + 1), pad) for column in zip(*sizes, strict=True)
        )
        for row, (source_length, target_length) in enumerate(sizes):
            words = torch.randint(4, len(dictionary), (source_length,), generator=generator)
            ids = torch.cat([words, torch.tensor([eos])])
            if left_pad_source:
                source[row, -len(ids) :] = ids
            else:
                source[row, : len(ids)] = ids
            words = torch.randint(4, len(dictionary), (target_length,), generator=generator)
            target[row, : target_length + 1] = torch.cat([words, torch.tensor([eos])])
        previous = torch.full_like(target, pad)
        previous[:, 0] = eos
        previous[:, 1:] = target[:, :-1].masked_fill(target[:, :-1].eq(eos), pad)
        return {
            "id": torch.arange(len(sizes)),
            "nsentences": len(sizes),
            "ntokens": int(target.ne(pad).sum()),
            "net_input": {
                "src_tokens": source,
                "src_lengths": source.ne(pad).sum(1),
                "prev_output_tokens": previous,
            },
            "target": target,
        }

    return make


@pytest.fixture
def lm_batch(dictionary):
    """Ragged token sequences, the shorter ones padded on the right."""

    def make(lengths=(8, 5, 3), seed=0):
        generator = torch.Generator().manual_seed(seed)
        pad, eos = dictionary.pad(), dictionary.eos()
        target = torch.full((len(lengths), max(lengths)), pad)
        for row, length in enumerate(lengths):
            target[row, :length] = torch.randint(4, len(dictionary), (length,), generator=generator)
        source = torch.cat([torch.full((len(lengths), 1), eos), target[:, :-1]], 1)
        return {
            "id": torch.arange(len(lengths)),
            "nsentences": len(lengths),
            "ntokens": int(target.ne(pad).sum()),
            "net_input": {
                "src_tokens": source.masked_fill(target.eq(pad), pad),
                "src_lengths": torch.tensor(lengths),
            },
            "target": target,
        }

    return make


def subwords(text):
    """Longer words in two, and a question."""
    lines = ["Ist das das Recht jedes Menschen ?", *text.splitlines()[:11]]
    return [
        " ".join(w if len(w) < 7 else f"{w[:4]}@@ {w[4:]}" for w in line.split()) for line in lines
    ]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """mt/, lm/ and mt-other/, whose dictionaries are other ones."""
    folder = tmp_path_factory.mktemp("data")
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        (folder / f"all.{language}").write_text("\n".join(subwords(text)) + "\n")
        (folder / f"less.{language}").write_text("\n".join(subwords(text)[:3]) + "\n")
        (folder / f"none.{language}").write_text("")
    pair = ("--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    for flags in (
        (
            *pair,
            "--trainpref",
            "all",
            "--validpref",
            "all",
            "--testpref",
            "none",
            "--destdir",
            "mt",
        ),
        (*pair, "--trainpref", "less", "--validpref", "less", "--destdir", "mt-other"),
        ("--only-source", "--trainpref", "all.en", "--validpref", "all.en", "--destdir", "lm"),
    ):
        parser = options.get_preprocessing_parser()
        named = [str(folder / w) if w[:3] in ("all", "les", "non", "mt", "lm", "mt-") else w
                 for w in flags]  # fmt: skip
        preprocess.main(parser.parse_args(named))
    return folder


@pytest.fixture(scope="session")
def checkpoint(data, tmp_path_factory):
    """checkpoint(arch, *flags, updates=7, seed=1) -> a file as fairseq-train would save it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}

    def make(arch, *flags, updates=7, seed=1):
        key = (arch, *flags, updates, seed)
        if key in made:
            return made[key]
        is_lm = "_lm" in arch
        task = "language_modeling" if is_lm else "translation"
        words = [str(data / ("lm" if is_lm else "mt")), "--task", task, "--arch", arch]
        words += sizes_of(arch)
        if is_lm:
            words += ["--sample-break-mode", "eos"]
        else:
            words += ["--source-lang", "de", "--target-lang", "en", "--share-all-embeddings"]
        args = options.parse_args_and_arch(options.get_training_parser(task), [*words, *flags])
        cfg = convert_namespace_to_omegaconf(args)
        torch.manual_seed(seed)
        model = scatter_modulators(tasks.setup_task(cfg.task).build_model(cfg.model), seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("alpha.logit", "log_temperature")):
                    parameter.add_(torch.randn_like(parameter) * 0.5)
                elif "norm" in name and "normalizer" not in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        state = {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [
                {"num_updates": updates, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
            ],
            "extra_state": {"train_iterator": {"epoch": 1}},
            "task_state": {},
        }
        made[key] = folder / f"{len(made)}.pt"
        torch.save(state, made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with mt/ and lm/, as fairseq-preprocess wrote them."""
    folder = tmp_path_factory.mktemp("text")
    for language, lines in (("de", GERMAN.splitlines()), ("en", ENGLISH.splitlines())):
        for split, part in (("train", lines), ("valid", lines[::3]), ("test", lines[1::3])):
            (folder / f"{split}.{language}").write_text("\n".join(part) + "\n")
    pref = ["--trainpref", "train", "--validpref", "valid", "--testpref", "test"]
    both = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
    run(folder, "fairseq-preprocess", *both, *pref, "--destdir", "mt")
    pref = [f"{word}.en" if word in ("train", "valid", "test") else word for word in pref]
    run(folder, "fairseq-preprocess", "--only-source", *pref, "--destdir", "lm")
    return folder
