"""multimax-convert keeps the numbers and the function of a model."""

import argparse
import math
import re
import shlex
import sys

import numpy as np
import pytest
import reference
import torch
from commands import PLUGIN, ROOT, TRACEBACK, run
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from numpy_transformer import LAYERS, NumpyTransformer
from omegaconf import OmegaConf

from multimax_fairseq.analysis import parameters
from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.convert import __main__ as command
from multimax_fairseq.integrations.convert.checkpoint import refuse_output

pytestmark = pytest.mark.long

TRANSLATION, LM = "transformer_iwslt_de_en_multimax", "transformer_lm_multimax"
# The authors' format has no modulator in cross-attention.
AT = ("--attention-normalizer-at", "encoder,decoder")
BOTH = ("--output-normalizer", "multimax")
CRITERION = ("--criterion", "label_smoothed_multimax_cross_entropy")
ADAPTIVE = (
    *("--criterion", "adaptive_loss", "--adaptive-input", "--adaptive-input-cutoff", "10,20"),
    "--tie-adaptive-weights",
)
HELD = [
    (TRANSLATION, *AT, *CRITERION, "--multimax-init-std", "0.3"),
    ("transformer_multimax", "--attention-normalizer-at", "decoder", *BOTH),
    (TRANSLATION, "--attention-normalizer", "softmax", *BOTH),
    (TRANSLATION, *AT, *BOTH, "--multimax-order", "1"),
    (TRANSLATION, *AT, "--multimax-terms", "high"),
    (LM, "--output-normalizer", "softmax", "--scalar-gradient-scale", "0.5"),
    (LM, "--output-normalizer", "softmax", "--adaptive-softmax-cutoff", "10,20", *ADAPTIVE),
    (LM, "--multimax-terms", "low", "--criterion", "multimax_cross_entropy"),
]
HEAD = ["model.lm_head.multimax_ts", "model.lm_head.multimax_ranges"]


class AuthorsTransformer(NumpyTransformer):
    """The forward pass of a checkpoint in the layout of the authors' patched fairseq.

    MultiMax by the authors' formula, in self-attention and in the output layer only.
    """

    def __init__(self, state):
        super().__init__(state, "authors")

    def selu(self, at, x):
        ts, ranges = self.state[f"{at}.ts"], self.state[f"{at}.ranges"]
        relus = [np.maximum(side * (ranges[i] - x), 0) for i, side in enumerate((1, -1, 1, -1))]
        squares = ts[2] * relus[2] ** 2 + ts[3] * relus[3] ** 2
        return x + ts[0] * relus[0] + ts[1] * relus[1] + squares

    def probs(self, kind, layer, scores, excluded):
        side = "encoder" if kind == "encoder" else "decoder"
        if kind != "cross":
            scores = self.selu(f"{side}.layers.{layer}.self_attn", scores)
        return reference.softmax(scores, excluded)

    def logits(self, source, target):
        """Return (target length, words) for a sentence pair, or for a text if source is None."""
        if source is None:
            x = self.language_features(target)
        else:
            self.run(source, target)
            x = self.features["decoder", LAYERS - 1]
        return self.selu("decoder", x @ self.state["decoder.output_projection.weight"].T)

    def language_features(self, tokens):
        """Return the features of a language model; it is pre-norm if it has a final norm."""
        first = "decoder.layer_norm.weight" in self.state

        def norm(name, x, when):
            return self.norm(name, x) if when else x

        x = self.embed(tokens)
        future = np.triu(np.ones((len(tokens), len(tokens)), bool), 1)
        for layer in range(LAYERS):
            at = f"decoder.layers.{layer}"
            y = norm(f"{at}.self_attn_layer_norm", x, first)
            x = x + self.attend("decoder", layer, f"{at}.self_attn", y, y, future)
            x = norm(f"{at}.self_attn_layer_norm", x, not first)
            x = x + self.feed_forward(at, norm(f"{at}.final_layer_norm", x, first))
            x = norm(f"{at}.final_layer_norm", x, not first)
        return norm("decoder.layer_norm", x, first)


def convert(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["multimax-convert", *map(str, words)])
    command.main()


def refused(monkeypatch, *words):
    """Return the command's error, and check that it has written nothing."""
    new = words[-1]
    with pytest.raises(SystemExit) as stopped:
        convert(monkeypatch, *words)
    assert not new.exists() and not list(new.parent.glob("*.part"))
    assert isinstance(stopped.value.code, str)
    hint, sentence = stopped.value.code.splitlines()
    assert hint == TRACEBACK
    return sentence


def load(path):
    """Return a checkpoint's model, built as by fairseq's commands, in float64, and its task."""
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return models[0].eval().double(), cfg, task


def plain(value):
    """Return settings as plain dicts."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def read(path):
    """Return (tensors, settings, the rest) of a checkpoint file."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    cfg = OmegaConf.to_container(state.pop("cfg"), resolve=True, enum_to_str=True)
    return state.pop("model"), plain(cfg), state


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert value.numpy().tobytes() == other[name].numpy().tobytes(), name


@pytest.fixture
def authors(checkpoint, tmp_path):
    """authors(arch, *flags) returns a stock checkpoint with ts and ranges in each attention and in
    the decoder, as the authors' code has it."""

    def make(arch, *flags):
        state = torch.load(checkpoint(arch, *flags), weights_only=False)
        model, generator = state["model"], torch.Generator().manual_seed(5)
        modules = [name.removesuffix(".q_proj.weight") for name in model if ".q_proj.w" in name]
        for at in [*modules, "decoder"]:
            wide = torch.tensor([0.8, 0.8, 0.15, 0.15])
            model[f"{at}.ts"] = (torch.rand(4, generator=generator) * 2 - 1) * wide
            model[f"{at}.ranges"] = torch.rand(4, generator=generator) - 0.5
        state["last_optimizer_state"] = {"state": {}}
        path = tmp_path / f"authors-{arch}.pt"
        torch.save(state, path)
        return path

    return make


@pytest.mark.parametrize(
    "arch, becomes",
    [
        ("transformer_iwslt_de_en", TRANSLATION),
        ("transformer_wmt_en_de", "transformer_multimax"),
        ("transformer_lm", LM),
        ("transformer_lm_gpt2_tiny", LM),
    ],
)
def test_from_authors_keeps_the_logits(authors, tmp_path, monkeypatch, arch, becomes):
    path, new = authors(arch, "--activation-fn", "relu"), tmp_path / "ours.pt"
    convert(monkeypatch, "from-authors", path, new)
    model, cfg, task = load(new)
    is_lm = "_lm" in arch
    assert cfg.model._name == becomes
    assert cfg.model.attention_normalizer_at == ("decoder" if is_lm else "encoder,decoder")
    theirs = AuthorsTransformer(read(path)[0])
    words = torch.randint(4, len(task.target_dictionary), (2, 9), generator=torch.Generator())
    source, target = words[:1, :6], words[1:]
    if is_lm:
        logits, _ = model(target)
    else:
        logits, _ = model(source, torch.tensor([6]), target)
    expected = theirs.logits(None if is_lm else source[0].numpy(), target[0].numpy())
    # fairseq's table of positions is in float32.
    np.testing.assert_allclose(logits[0].detach().numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("arch, flags", [(arch, flags) for arch, *flags in HELD])
def test_to_authors_and_back_is_the_identity(checkpoint, tmp_path, monkeypatch, arch, flags):
    path = checkpoint(arch, *flags)
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    convert(monkeypatch, "to-authors", path, theirs)
    convert(monkeypatch, "from-authors", theirs, ours)
    (model, settings, rest), again = read(path), read(ours)
    assert_same_bits(model, again[0])
    assert again[1:] == (settings, rest)
    # Without the authors' parameters, the file loads into stock fairseq strictly.
    state = torch.load(theirs, weights_only=False)
    added = {n: state["model"].pop(n) for n in list(state["model"]) if n.endswith(("ts", "ranges"))}
    attentions = sum(".q_proj.weight" in name for name in model)
    assert len(added) == 2 * (attentions + 1) and all(v.shape == (4,) for v in added.values())
    torch.save(state, theirs)
    stock, cfg, _ = load(theirs)
    assert "multimax" not in type(stock).__module__ and "multimax" not in str(cfg.criterion)
    assert_same_bits(state["model"], {n: v for n, v in model.items() if n in state["model"]})
    assert {name for name in model if name not in state["model"]} == {
        name for name in model if "modulator" in name
    }


def test_to_authors_ignores_the_monitor(checkpoint, tmp_path, monkeypatch):
    path = checkpoint(LM, "--monitor-interval", "5")
    convert(monkeypatch, "to-authors", path, tmp_path / "theirs.pt")


@pytest.mark.parametrize("arch", ["transformer_lm", "transformer"])
def test_parameters_read_names_multimax_convert(authors, arch):
    with pytest.raises(UsageError, match="of the authors' code: convert it first with multimax-c"):
        parameters.read(authors(arch))


def test_conversion_unwraps_distributed_names(checkpoint, tmp_path, monkeypatch):
    path, plain, wrapped, theirs = (
        checkpoint(TRANSLATION, *AT),
        *(tmp_path / f"{name}.pt" for name in ("plain", "wrapped", "theirs")),
    )
    state = torch.load(path, weights_only=False)
    state["model"] = {f"module.{name}": value for name, value in state["model"].items()}
    torch.save(state, wrapped)
    convert(monkeypatch, "to-authors", path, plain)
    convert(monkeypatch, "to-authors", wrapped, theirs)
    assert_same_bits(read(plain)[0], read(theirs)[0])


@pytest.mark.parametrize("arch", ["transformer_iwslt_de_en", "transformer_lm"])
def test_from_authors_and_back_drops_unused_modulators(authors, tmp_path, monkeypatch, arch):
    path, ours, again = authors(arch), tmp_path / "ours.pt", tmp_path / "again.pt"
    convert(monkeypatch, "from-authors", path, ours)
    convert(monkeypatch, "to-authors", ours, again)
    before, after = read(path)[0], read(again)[0]
    for name in before:
        if ".encoder_attn.ts" in name or ".encoder_attn.ranges" in name:
            before[name] = torch.zeros(4)
    assert_same_bits(before, after)


def test_conversion_keeps_sparse_yaml_settings(checkpoint, tmp_path, monkeypatch):
    path, theirs, ours = (tmp_path / f"{name}.pt" for name in ("yaml", "theirs", "ours"))
    state = torch.load(checkpoint(TRANSLATION, *AT), weights_only=False)
    names = "encoder_layers encoder_embed_dim encoder_ffn_embed_dim encoder_attention_heads"
    names = f"{names} {names.replace('encoder', 'decoder')}".split()
    all_settings = vars(state["cfg"]["model"])
    few = ["_name", "share_all_embeddings", "attention_normalizer_at", *names]
    state["cfg"]["model"] = {name: all_settings[name] for name in few}
    torch.save(state, path)
    convert(monkeypatch, "to-authors", path, theirs)
    convert(monkeypatch, "from-authors", theirs, ours)
    before, after = read(path), read(ours)
    assert_same_bits(before[0], after[0])
    assert before[1:] == after[1:] and before[1]["model"].keys() == set(few)
    load(ours)


def test_from_authors_ignores_an_outdated_record(checkpoint, tmp_path, monkeypatch):
    """The stored settings no longer match the modulators."""
    path, theirs, ours = checkpoint(TRANSLATION, *AT), tmp_path / "theirs.pt", tmp_path / "ours.pt"
    convert(monkeypatch, "to-authors", path, theirs)
    state = torch.load(theirs, weights_only=False)
    state["model"]["decoder.ts"] += torch.arange(4)
    torch.save(state, theirs)
    convert(monkeypatch, "from-authors", theirs, ours)
    model, settings, _ = read(ours)
    assert settings["model"]["output_normalizer"] == "multimax"
    low, high = (model[f"decoder.output_modulator.{s}_coefficient"] for s in ("low", "high"))
    assert (low.tolist(), high.tolist()) == ([0, 2], [1, 3])


def test_from_authors_converts_an_adaptive_softmax(authors, tmp_path, monkeypatch):
    flags = ("--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss")
    ours = tmp_path / "ours.pt"
    convert(monkeypatch, "from-authors", authors("transformer_lm", *flags), ours)
    model, *_ = load(ours)
    assert model.decoder.output_modulator is None
    assert model.decoder.layers[0].self_attn.normalizer.name == "multimax"


def test_from_authors_keeps_half_precision(authors, tmp_path, monkeypatch):
    path, ours, again = authors("transformer_lm"), tmp_path / "ours.pt", tmp_path / "again.pt"
    state = torch.load(path, weights_only=False)
    for name, value in state["model"].items():
        state["model"][name] = value.half() if value.is_floating_point() else value
    torch.save(state, path)
    convert(monkeypatch, "from-authors", path, ours)
    convert(monkeypatch, "to-authors", ours, again)
    assert_same_bits(state["model"], read(again)[0])


# --- PaddleFleet ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--multimax-order", "1"), ("--multimax-terms", "high")])
def test_to_paddlefleet_and_back_is_the_identity(checkpoint, tmp_path, monkeypatch, flags):
    path, head, ours = checkpoint(LM, *flags), tmp_path / "head.npz", tmp_path / "ours.pt"
    convert(monkeypatch, "to-paddlefleet", path, head)
    (model, settings, rest), arrays = read(path), np.load(head)
    assert sorted(arrays) == sorted(HEAD)
    for start, side in enumerate(("low", "high")):
        for kind, name in zip(("coefficient", "threshold"), HEAD, strict=True):
            value = model.get(f"decoder.output_modulator.{side}_{kind}", torch.zeros(0))
            expected = [*value.tolist(), 0, 0][:2]
            assert arrays[name].dtype == np.float32 and arrays[name][start::2].tolist() == expected
    # Load into a model with another normalizer.
    state = torch.load(path, weights_only=False)
    for name, value in state["model"].items():
        if "output_modulator" in name:
            value.fill_(0.5)
    other = tmp_path / "other.pt"
    torch.save(state, other)
    convert(monkeypatch, "from-paddlefleet", head, other, ours)
    again = read(ours)
    assert_same_bits(model, again[0])
    assert again[1:] == (settings, rest)


def test_from_paddlefleet_keeps_the_logits(checkpoint, tmp_path, monkeypatch):
    path, head, ours = (
        checkpoint(LM, "--output-normalizer", "softmax"),
        *(tmp_path / name for name in ("head.npz", "ours.pt")),
    )
    ts, ranges = np.array([0.25, -0.5, 0.125, -0.25]), np.array([-0.5, 0.25, 0.125, -0.125])
    np.savez(head, **dict(zip(HEAD, (ts, ranges), strict=True)))
    convert(monkeypatch, "from-paddlefleet", head, path, ours)
    words = torch.arange(4, 12)[None]
    with torch.no_grad():
        (x, _), (logits, _) = load(path)[0](words), load(ours)[0](words)
    square = ts[2] * (ranges[2] - x).relu() ** 2 + ts[3] * (x - ranges[3]).relu() ** 2
    expected = x + ts[0] * (ranges[0] - x).relu() + ts[1] * (x - ranges[1]).relu() + square
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


# --- user errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, flags, parts",
    [
        (
            TRANSLATION,
            "",
            [
                "MultiMax in cross-attention",
                "has softmax there: train with --attention-normalizer-at",
            ],
        ),
        (
            LM,
            "--attention-normalizer sparsemax",
            ["sparsemax in the decoder's self-attention", "--attention-normalizer multimax"],
        ),
        (TRANSLATION, "--attention-normalizer topk --topk 3", ["top-k in the encoder's"]),
        (LM, "--multimax-heads separate", ["--multimax-heads separate cannot be represented"]),
        (LM, "--multimax-monotone", ["--multimax-monotone cannot be represented"]),
        (
            LM,
            "--attention-normalizer softmax --learn-temperature",
            ["--learn-temperature cannot be represented"],
        ),
        (LM, "--output-normalizer entmax15", ["1.5-entmax in the output layer"]),
        (
            LM,
            "--attention-normalizer softmax --output-normalizer softmax",
            ["has no modulator", "trained with MultiMax"],
        ),
        ("rnn_multimax", "", ["'rnn_multimax' cannot be converted", LM]),
        (
            TRANSLATION,
            "--attention-normalizer-at encoder,decoder --cross-attention continuous_softmax",
            ["--cross-attention continuous_softmax cannot be represented"],
        ),
    ],
)
def test_to_authors_names_an_unsupported_part(
    checkpoint, tmp_path, monkeypatch, arch, flags, parts
):
    path = checkpoint(arch, *flags.split())
    sentence = refused(monkeypatch, "to-authors", path, tmp_path / "theirs.pt")
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--output-normalizer softmax", ["output layer has no MultiMax"]),
        ("--output-normalizer sparsemax", ["sparsemax in the output layer"]),
        ("--multimax-monotone", ["--multimax-monotone cannot be represented"]),
    ],
)
def test_to_paddlefleet_names_an_unsupported_part(checkpoint, tmp_path, monkeypatch, flags, parts):
    path = checkpoint(LM, *flags.split())
    sentence = refused(monkeypatch, "to-paddlefleet", path, tmp_path / "head.npz")
    assert all(part in sentence for part in parts), sentence


def test_to_paddlefleet_ignores_separate_heads(checkpoint, tmp_path, monkeypatch):
    head = tmp_path / "head.npz"
    convert(monkeypatch, "to-paddlefleet", checkpoint(LM, "--multimax-heads", "separate"), head)
    assert all(np.load(head)[name].shape == (4,) for name in HEAD)


def without(*names):
    return lambda state: [state["model"].pop(name) for name in names]


def spoil(name, value):
    return lambda state: state["model"].update({name: value})


def rename(state):
    settings = state["cfg"]["model"]
    settings = settings if isinstance(settings, dict) else vars(settings)
    settings.update(arch="fconv", _name="fconv")


AT_0 = "decoder.layers.0.self_attn"


@pytest.mark.parametrize(
    "change, parts",
    [
        (without(f"{AT_0}.ts"), [f"lacks {AT_0}.ts"]),
        (without("decoder.ts"), ["lacks decoder.ts"]),
        (spoil(f"{AT_0}.ts", torch.zeros(3)), [f"ts of {AT_0}", "[3]"]),
        (
            spoil("decoder.ts", torch.tensor([0, 0, 0, torch.nan])),
            ["decoder.ts", "not finite"],
        ),
        (rename, ["'fconv'", "the authors' code has"]),
        (lambda state: state.update(cfg=None), ["no model and settings"]),
        (lambda state: state.pop("model"), ["fairseq-train wrote"]),
        (
            lambda state: state["cfg"]["task"].update(f="${oc.env:HOME}"),
            ["calls a resolver"],
        ),
        (lambda state: state.update(run=argparse.ArgumentParser), ["argparse.ArgumentParser"]),
    ],
)
def test_from_authors_refuses_a_damaged_checkpoint(authors, tmp_path, monkeypatch, change, parts):
    path = authors("transformer_lm")
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    sentence = refused(monkeypatch, "from-authors", path, tmp_path / "new.pt")
    assert all(part in sentence for part in parts), sentence


def test_from_authors_refuses_other_files(authors, checkpoint, tmp_path, monkeypatch):
    new, whole = tmp_path / "new.pt", authors("transformer_lm")
    assert "does not exist" in refused(monkeypatch, "from-authors", tmp_path / "none.pt", new)
    text, cut = tmp_path / "text.pt", tmp_path / "cut.pt"
    text.write_text("no checkpoint")
    cut.write_bytes(whole.read_bytes()[:-1000])
    for file, why in ((text, "is text, not a checkpoint"), (cut, "is damaged or incomplete")):
        assert why in refused(monkeypatch, "from-authors", file, new)
    sentence = refused(monkeypatch, "from-authors", checkpoint("transformer_lm"), new)
    assert "has no ts and ranges" in sentence and "--finetune-from-model" in sentence
    sentence = refused(monkeypatch, "from-authors", checkpoint(LM), new)
    assert f"'{LM}'" in sentence


def test_convert_keeps_an_existing_file(authors, tmp_path, monkeypatch):
    path = authors("transformer_lm")
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="exists already"):
        convert(monkeypatch, "from-authors", path, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "arrays, parts",
    [
        (None, ["does not exist"]),
        ({}, ["lm_head.multimax_ts"]),
        ({HEAD[0]: np.zeros(4)}, [HEAD[1]]),
        ({HEAD[0]: np.zeros(4), HEAD[1]: np.zeros(4, np.uint16)}, ["uint16", "float32"]),
        ({HEAD[0]: np.zeros(4), HEAD[1]: np.zeros(5)}, ["ranges of", "[5]"]),
        ({HEAD[0]: np.full(4, np.inf), HEAD[1]: np.zeros(4)}, ["ts of", "finite"]),
        ({name: np.array([object()] * 4) for name in HEAD}, ["allow_pickle=False"]),
    ],
)
def test_from_paddlefleet_refuses_wrong_arrays(checkpoint, tmp_path, monkeypatch, arrays, parts):
    head = tmp_path / "head.npz"
    if arrays is not None:
        np.savez(head, allow_pickle=True, **arrays)
    new = tmp_path / "new.pt"
    sentence = refused(monkeypatch, "from-paddlefleet", head, checkpoint(LM), new)
    assert all(part in sentence for part in parts), sentence


def test_from_paddlefleet_refuses_other_files(checkpoint, tmp_path, monkeypatch):
    head, new = tmp_path / "head.npz", tmp_path / "new.pt"
    head.write_bytes(b"PK\x03\x04 cut off")
    assert "head.npz" in refused(monkeypatch, "from-paddlefleet", head, checkpoint(LM), new)
    with head.open("wb") as file:
        np.save(file, np.zeros(4))
    assert "numpy.savez" in refused(monkeypatch, "from-paddlefleet", head, checkpoint(LM), new)
    np.savez(head, **dict.fromkeys(HEAD, np.ones(4)))
    low = checkpoint(LM, "--multimax-terms", "low")
    sentence = refused(monkeypatch, "from-paddlefleet", head, low, new)
    assert "terms 'low' cannot represent" in sentence and "order 2" in sentence


# --- the commands ---------------------------------------------------------------------------------


def test_convert_commands_of_the_docs_keep_probabilities(authors, checkpoint, data, tmp_path):
    """Hypotheses of fairseq-generate have the probability of the authors' formula."""
    theirs = AuthorsTransformer(read(authors("transformer_iwslt_de_en"))[0])
    (tmp_path / "authors-transformer_iwslt_de_en.pt").rename(tmp_path / "authors.pt")
    (tmp_path / "ours-lm.pt").write_bytes(checkpoint(LM).read_bytes())
    page = (ROOT / "docs" / "your-data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash\n((?:multimax-convert .*\n)+)```", page, re.MULTILINE)
    for line in block.splitlines():
        program, *words = shlex.split(line)
        assert program == "multimax-convert"
        printed = run(tmp_path, "python", "-m", "multimax_fairseq.integrations.convert", *words)
        assert f"written: {words[-1]}" in printed
    valid = ("--gen-subset", "valid", "--required-batch-size-multiple", "1")
    output = run(
        *(tmp_path, "fairseq-generate", data / "mt", *PLUGIN, "--path", "ours.pt", *valid),
        *("--beam", "5", "--max-len-b", "12"),
    )
    words = Dictionary.load(str(data / "mt" / "dict.de.txt"))
    sources = re.findall(r"^S-(\d+)\t(.*)$", output, re.MULTILINE)
    found = dict(re.findall(r"^H-(\d+)\t(.*)$", output, re.MULTILINE))
    assert len(sources) == 12
    for number, source in sources:
        score, hypothesis = found[number].split("\t")
        ids = [words.encode_line(line, add_if_not_exist=False) for line in (source, hypothesis)]
        previous = torch.cat([ids[1][-1:], ids[1][:-1]])
        logits = theirs.logits(ids[0].numpy(), previous.numpy())
        log_probs = torch.from_numpy(logits).log_softmax(-1) / math.log(2)
        expected = log_probs[range(len(ids[1])), ids[1].long()].mean()
        assert float(score) == pytest.approx(float(expected), abs=2e-4)
    output = run(
        *(tmp_path, "fairseq-eval-lm", data / "lm", *PLUGIN, "--path", "with-head.pt", *valid),
        *("--sample-break-mode", "eos"),
    )
    lines = (data / "all.en").read_text().splitlines()
    assert f"Evaluated {sum(len(line.split()) + 1 for line in lines)} tokens" in output


def test_conversion_names_a_mapping_of_another_plugin():
    settings = argparse.Namespace(output_normalizer="tempered_multimax")
    with pytest.raises(UsageError, match="'tempered_multimax'"):
        refuse_output(settings)


def test_to_authors_keeps_half_precision(checkpoint, tmp_path, monkeypatch):
    state = torch.load(checkpoint(TRANSLATION, *AT, *BOTH), weights_only=False)  # our own file
    state["model"] = {name: value.bfloat16() for name, value in state["model"].items()}
    torch.save(state, tmp_path / "half.pt")
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    convert(monkeypatch, "to-authors", tmp_path / "half.pt", theirs)
    assert {value.dtype for value in read(theirs)[0].values()} == {torch.bfloat16}
    convert(monkeypatch, "from-authors", theirs, ours)
    again = read(ours)[0]
    assert again.keys() == state["model"].keys()
    assert all(torch.equal(value, again[name]) for name, value in state["model"].items())


def test_from_authors_keeps_the_authors_settings(checkpoint, tmp_path, monkeypatch):
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    convert(monkeypatch, "to-authors", checkpoint(TRANSLATION, *AT), theirs)
    state = torch.load(theirs, weights_only=False)  # our own file
    state["multimax_fairseq"]["settings"] |= {"dropout": 0.9, "of_a_later_version": 1}
    torch.save(state, theirs)
    convert(monkeypatch, "from-authors", theirs, ours)
    settings = read(ours)[1]["model"]
    assert settings["dropout"] == 0 and "of_a_later_version" not in settings


def test_from_authors_reads_old_checkpoints(authors, tmp_path, monkeypatch):
    """Old checkpoints have args, which fairseq prefers to cfg."""
    path, new = authors("transformer_iwslt_de_en", "--activation-fn", "relu"), tmp_path / "new.pt"
    state = torch.load(path, weights_only=False)  # our own file
    state["args"], state["cfg"] = state["cfg"]["model"], None
    torch.save(state, path)
    convert(monkeypatch, "from-authors", path, new)
    assert load(new)[1].model._name == TRANSLATION


def test_conversion_drops_optimizer_and_ema(checkpoint, tmp_path, monkeypatch):
    path, new = checkpoint(TRANSLATION, *AT), tmp_path / "new.pt"
    state = torch.load(path, weights_only=False)  # our own file
    of_old = {"ema": {}, "ema_fp32_params": {}}
    state["last_optimizer_state"], state["extra_state"] = {"state": {}}, {"kept": 1, **of_old}
    torch.save(state, tmp_path / "old.pt")
    convert(monkeypatch, "to-authors", tmp_path / "old.pt", new)
    state = torch.load(new, weights_only=False)
    assert "last_optimizer_state" not in state and state["extra_state"]["kept"] == 1
    assert not of_old.keys() & state["extra_state"].keys()


def test_to_authors_accepts_a_model_without_cross_attention(checkpoint, tmp_path, monkeypatch):
    path = checkpoint(TRANSLATION, "--no-cross-attention")
    convert(monkeypatch, "to-authors", path, tmp_path / "theirs.pt")
    convert(monkeypatch, "from-authors", tmp_path / "theirs.pt", tmp_path / "ours.pt")
    assert_same_bits(read(path)[0], read(tmp_path / "ours.pt")[0])


def test_from_paddlefleet_refuses_an_adaptive_softmax(checkpoint, tmp_path, monkeypatch):
    head, new = tmp_path / "head.npz", tmp_path / "new.pt"
    np.savez(head, **dict.fromkeys(HEAD, np.ones(4)))
    flags = ("--output-normalizer", "softmax", "--adaptive-softmax-cutoff", "10,20", *ADAPTIVE)
    sentence = refused(monkeypatch, "from-paddlefleet", head, checkpoint(LM, *flags), new)
    assert "an adaptive softmax has no MultiMax" in sentence
