"""A mapping added by a --user-dir works in every command without a change to the package."""

import inspect
import json
import re

import pandas as pd
import pytest
import torch
from commands import ROOT, refused, run
from corpus import ENGLISH, GERMAN
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention

from multimax_fairseq import (
    NORMALIZERS,
    Mapping,
    Modulator,
    Normalizer,
    normalize,
    register,
    replace_softmax,
    scaled_dot_product_attention,
)
from multimax_fairseq.integrations.transformers import attach
from multimax_fairseq.mappings.registry import (
    RESERVED_OPTIONS,
    RESERVED_PARAMETERS,
    Option,
    yes_or_no,
)
from multimax_fairseq.models.learned_scalars import learned_modules
from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops import native

pytestmark = pytest.mark.long

PLUGIN = ("--user-dir", ROOT / "user_dir/added_mapping")
TINY = [
    *("--encoder-layers", "1", "--encoder-embed-dim", "8", "--encoder-attention-heads", "2"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "8", "--decoder-attention-heads", "2"),
    *("--encoder-ffn-embed-dim", "8", "--decoder-ffn-embed-dim", "8"),
]
TRAIN = [
    *("--arch", "transformer_iwslt_de_en_multimax", *TINY, "--attention-normalizer", "sharpened"),
    *("--optimizer", "multimax_adam", "--weight-decay", "0.01", "--lr", "0.05", "--seed", "1"),
    *("--max-tokens", "400", "--max-update", "4", "--no-epoch-checkpoints", "--num-workers", "0"),
]
FACTORS = [
    f"{name}.normalizer.sharpness.factor"
    for name in (
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data-bin/ and with model/, trained on it."""
    folder = tmp_path_factory.mktemp("added")
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        (folder / f"text.{language}").write_text(text, encoding="utf-8")
    text = [word for part in ("train", "valid", "test") for word in (f"--{part}pref", "text")]
    pair = ("--source-lang", "de", "--target-lang", "en", "--destdir", "data-bin")
    run(folder, "fairseq-preprocess", *pair, *text)
    flags = ("--sharpened-start", "1.5", "--save-dir", "model")
    log = run(folder, "fairseq-train", "data-bin", *PLUGIN, *TRAIN, *flags)
    (folder / "train.log").write_text(log, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def collected(folder):
    words = ("collect", "model/checkpoint_last.pt", "data-bin", *PLUGIN, "--max-sentences", "8")
    run(folder, "multimax-analyze", *words, "--out", "collected")
    return folder / "collected"


@pytest.mark.skipif(native.library() is None, reason="no CPU kernels for this machine")
def test_training_uses_the_kernel_of_the_added_mapping(folder):
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "attention: cpp backend" in log and "attention: plain backend" not in log


KERNEL = """
import os
from pathlib import Path
import added_mapping, torch
from multimax_fairseq import scaled_dot_product_attention
from multimax_fairseq.ops.decoding import KVCache, decoding_attention

def attend(backend, sign=1):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 70, 32, requires_grad=True) for _ in range(3)]
    factor = sign * torch.tensor([0.5, 1.0, 2.0])[:, None, None]
    factor.requires_grad_()
    output = scaled_dot_product_attention(
        *inputs, normalizer="sharpened", is_causal=True, backend=backend, sharpness=factor
    )
    return [output, *torch.autograd.grad(output.square().sum(), [*inputs, factor])]

for sign in (1, -1):
    torch.testing.assert_close(attend("cpp", sign), attend("plain", sign), rtol=1e-4, atol=1e-4)
query, cache = torch.randn(5, 3, 32), (torch.randn(9, 3, 32), torch.randn(9, 3, 32))
ancestors, factor = torch.randint(9, (5, 7)), torch.tensor([0.5, 1.0, 2.0])[:, None, None]
step = decoding_attention(query, 3, 32, **added_mapping.kernel(factor))
key, value = (x[ancestors].transpose(1, 2) for x in cache)
whole = scaled_dot_product_attention(
    query[:, :, None], key, value, normalizer="sharpened", scale=0.3, sharpness=factor,
    backend="plain",
)
torch.testing.assert_close(step(query, KVCache(*cache, ancestors), 0.3), whole[:, :, 0])
compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
attended = {"normalizer": "sharpened", "sharpness": factor, "backend": "cpp"}
given = [torch.randn(1, 3, 5, 32) for _ in range(3)]
torch.testing.assert_close(
    compiled(*given, **attended), scaled_dot_product_attention(*given, **attended)
)
print("equal")

# A header may include others, and its path may be relative. A parameter without a gradient is
# refused.
text = Path(added_mapping.HEADER).read_text().replace("learns = true", "learns = false")
Path("fixed.h").write_text("#include <bitset>" + chr(10) + text)
added_mapping.HEADER = "fixed.h"
torch.testing.assert_close(
    scaled_dot_product_attention(*given, **attended),
    scaled_dot_product_attention(*given, **attended | {"backend": "plain"}),
)
print("again")
try:
    attend("cpp")
except ValueError as error:
    print(error)

Path("wrong.h").write_text("struct Sharpened : RowFunction { no type; };")
added_mapping.HEADER = "wrong.h"
torch.testing.assert_close(attend("auto"), attend("plain"))
for backend, variable in (("cpp", "auto"), ("auto", "cpp")):
    os.environ["MULTIMAX_BACKEND"] = variable
    try:
        attend(backend)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(native.library() is None, reason="no CPU kernels for this machine")
def test_kernel_of_the_added_mapping_equals_plain_pytorch(tmp_path):
    output = run(tmp_path, "python", "-c", KERNEL, PYTHONPATH=str(ROOT / "user_dir"))
    assert {"equal", "again"} <= set(output.splitlines())
    assert "no gradient: detach it, or define learns and parameter_gradient in fixed.h" in output
    assert "plain PyTorch replaces the row function Sharpened of wrong.h: 'c++' failed: " in output
    assert output.count("Sharpened of wrong.h did not compile, but the backend 'cpp' is") == 2


SHARPENED = """
import added_mapping, torch
from multimax_fairseq import normalize
for dtype in (torch.float16, torch.bfloat16):
    largest = torch.finfo(dtype).max
    scores = torch.tensor([largest, -largest, 0.0], dtype=dtype, requires_grad=True)
    probs = normalize("sharpened", scores, sharpness=torch.tensor(1.5, dtype=dtype))
    probs[0].backward()
    print(probs.tolist(), scores.grad.isfinite().all().item())
"""


def test_sharpened_is_finite_in_half_precision(tmp_path):
    output = run(tmp_path, "python", "-c", SHARPENED, PYTHONPATH=str(ROOT / "user_dir"))
    assert output.splitlines()[-2:] == ["[1.0, 0.0, 0.0] True"] * 2


def test_generate_scores_equal_teacher_forced_scores(folder):
    """Incremental decoding and teacher forcing give the same scores."""
    words = (*PLUGIN, "--path", "model/checkpoint_last.pt", "--beam", "3", "--max-len-b", "9")
    step = run(folder, "fairseq-generate", "data-bin", *words)
    pieces = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", step, re.MULTILINE)
    assert len(pieces) == len(ENGLISH.splitlines())
    hypotheses = sorted((int(number), float(score), text) for number, score, text in pieces)
    for language, lines in (
        ("de", GERMAN.splitlines()),
        ("en", [text for _, _, text in hypotheses]),
    ):
        (folder / f"again.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabularies = ("--srcdict", "data-bin/dict.de.txt", "--tgtdict", "data-bin/dict.en.txt")
    pair = ("--source-lang", "de", "--target-lang", "en", "--destdir", "again-bin")
    run(folder, "fairseq-preprocess", *pair, "--testpref", "again", *vocabularies)
    whole = run(folder, "fairseq-generate", "again-bin", *words, "--score-reference")
    scores = dict(re.findall(r"^H-(\d+)\t(\S+)\t", whole, re.MULTILINE))
    for number, score, _ in hypotheses:
        assert float(scores[str(number)]) == pytest.approx(score, abs=1e-3)


def test_parameters_command_prints_the_learned_sharpness(folder):
    state = torch.load(folder / "model/checkpoint_last.pt", weights_only=False)["model"]
    for name in FACTORS:
        assert state[name].shape == (1,) and state[name] != 1.5
    words = ("model/checkpoint_last.pt", *PLUGIN)
    printed = run(folder, "multimax-analyze", "parameters", *words)
    assert "sharpness.factor" in printed.splitlines()[0]
    for name in ("encoder layer 1, self-attention", "decoder layer 1, cross-attention"):
        assert name in printed
    values = {f"{float(state[name]):.4f}" for name in FACTORS}
    assert values <= set(printed.split())


def test_collect_and_report_label_the_added_mapping(collected):
    signed = json.loads((collected / "collection.json").read_text(encoding="utf-8"))
    (checkpoint,) = signed["checkpoints"]
    assert set(checkpoint["normalizer"].values()) == {"sharpened"}
    assert checkpoint["settings"]["sharpened_start"] == 1.5
    heads = pd.read_csv(collected / "heads.csv")
    assert len(heads) == 3 * 2 and heads["entropy"].gt(0).all()
    parameters = pd.read_csv(collected / "parameters.csv")
    assert set(parameters["name"]) == {"sharpness.factor"} and len(parameters) == 3
    # The report does not import the user_dir.
    run(collected.parent, "multimax-analyze", "report", "collected")
    assert "sharpened softmax" in (collected / "report.html").read_text(encoding="utf-8")


def test_train_refuses_flags_of_another_mapping(folder):
    words = ("--attention-normalizer", "multimax", "--sharpened-start", "2")
    sentence = refused(folder, "fairseq-train", "data-bin", *PLUGIN, *TRAIN, *words)
    assert sentence.startswith("--sharpened-start 2.0 belongs to sharpened attention,")


def test_finetune_initializes_missing_parameters(folder):
    state = torch.load(folder / "model/checkpoint_last.pt", weights_only=False)
    for name in FACTORS:
        del state["model"][name]
    torch.save(state, folder / "softmax.pt")
    words = ("--finetune-from-model", "softmax.pt", "--max-update", "1", "--lr", "0")
    output = run(
        *(folder, "fairseq-train", "data-bin", *PLUGIN, *TRAIN, *words),
        *("--sharpened-start", "1.25", "--save-dir", "tuned"),
    )
    assert "all else as in a new model" in output
    tuned = torch.load(folder / "tuned/checkpoint_last.pt", weights_only=False)["model"]
    assert all(tuned[name] == 1.25 for name in FACTORS)


TEMPERED = """
import tempered, torch
from multimax_fairseq import Normalizer
scores = torch.randn(2, 3, 4)
for name in ("multimax", "softmax"):
    found, expected = Normalizer(f"tempered_{name}"), Normalizer(name)
    if name == "multimax":
        expected.modulator.load_state_dict(found.modulator[1].state_dict())
    torch.testing.assert_close(found(scores), expected(scores))
print("equal")
"""


def test_tempered_mappings_learn_in_attention_and_output(folder):
    """They start as MultiMax and softmax; training changes the temperatures."""
    output = run(folder, "python", "-c", TEMPERED, PYTHONPATH=str(ROOT / "user_dir"))
    assert output.endswith("equal\n")
    train = ["tempered_multimax" if word == "sharpened" else word for word in TRAIN]
    words = ["--user-dir", ROOT / "user_dir/tempered", "--save-dir", "tempered"]
    words += ["--criterion", "multimax_cross_entropy", "--output-normalizer", "tempered_softmax"]
    output = run(folder, "fairseq-train", "data-bin", *train, *words)
    assert "the loss computes all logits, as the stock criterion does" in output
    state = torch.load(folder / "tempered/checkpoint_last.pt", weights_only=False)["model"]
    learned = [value for name, value in state.items() if name.endswith("log_temperature")]
    assert len(learned) == 4 and all(value != 0 for value in learned)


@pytest.mark.parametrize(
    "mapping, part",
    [
        (Mapping("softmax", "twice", NORMALIZERS["softmax"].function), "'softmax' is taken"),
        (Mapping("soft max", "blank", NORMALIZERS["softmax"].function), "'soft max' cannot be"),
        (
            Mapping(
                "other",
                "a flag of somebody else",
                NORMALIZERS["softmax"].function,
                options=(Option("x", True, help="", setting="multimax_order", **yes_or_no()),),
            ),
            "'multimax_order' is taken",
        ),
        (
            Mapping("other", "untrained", NORMALIZERS["topk"].function, output_options=()),
            "set output_loss",
        ),
        (
            Mapping("other", "of some heads", NORMALIZERS["topk"].function, heads="some"),
            "must be an Option, SEPARATE_HEADS or None, got 'some'",
        ),
        (Mapping("other", "no mask", lambda scores, dim: scores), "the parameters dim and mask"),
        (
            Mapping(
                *("other", "a default", lambda scores, dim, mask, start: scores),
                options=(Option("start", -1.0, float, "above 0", lambda x: x > 0, help=""),),
            ),
            "the default of other's option 'start' must be above 0, got -1.0",
        ),
        (
            Mapping(
                *("other", "a kernel", lambda scores, dim, mask, start: scores),
                kernel=lambda begin: {},
            ),
            "has the parameter 'begin', which its function lacks",
        ),
        (
            Mapping("other", "scaled", lambda scores, dim, mask, scale: scores),
            "has the parameter 'scale', .* rename it",
        ),
        (
            Mapping(
                *("other", "named", NORMALIZERS["softmax"].function),
                options=(Option("num_heads", True, help="", **yes_or_no()),),
            ),
            "has the option 'num_heads', .* rename it",
        ),
    ],
)
def test_register_refuses_invalid_mappings(mapping, part, monkeypatch):

    before = dict(NORMALIZERS)
    with pytest.raises(ValueError, match=part):
        register(mapping)
    assert before == NORMALIZERS


def test_reserved_names_are_those_of_the_packages_arguments():
    def arguments(*functions):
        return {name for function in functions for name in inspect.signature(function).parameters}

    free = {"scores", "dim", "mask", "modulator", "options", "settings"}
    functions = arguments(scaled_dot_product_attention, normalize)
    assert functions - free == RESERVED_PARAMETERS
    assert arguments(Normalizer, replace_softmax, attach) - free == RESERVED_OPTIONS


def test_attention_passes_a_modulator_to_any_mapping_that_takes_one(monkeypatch):
    def function(scores, dim=-1, mask=None, *, modulator):
        return normalize("softmax", modulator(scores), dim, mask)

    monkeypatch.setitem(NORMALIZERS, "own", Mapping("own", "own", function))
    query, modulator = torch.randn(1, 2, 3, 4), Modulator(init_std=0.5)
    found, expected = (
        scaled_dot_product_attention(query, query, query, normalizer=name, modulator=modulator)
        for name in ("own", "multimax")
    )
    torch.testing.assert_close(found, expected)


def test_complete_refuses_values_of_another_type():
    above_zero = Option("start", 1.0, float, "above 0", lambda x: x > 0, help="")
    mapping = Mapping(
        "other",
        "other",
        NORMALIZERS["softmax"].function,
        options=(above_zero,),
        build=lambda num_heads, start: {"factor": torch.full((1,), start)},
    )
    for wrong in ("abc", None):
        with pytest.raises(ValueError, match=f"start must be above 0, got {wrong!r}"):
            mapping.complete({"start": wrong})


class OfHidden(torch.nn.Module):
    """Computes one number per query with a learned matrix."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, size))

    def forward(self, hidden):
        return hidden @ self.weight.mT


def test_learned_modules_excludes_matrices(monkeypatch):
    softmax = NORMALIZERS["softmax"].function
    mapping = Mapping(
        "of_hidden",
        "of hidden states",
        lambda scores, dim=-1, mask=None, *, gain: softmax(scores * gain, dim, mask),
        build=lambda num_heads, hidden_size: {"gain": OfHidden(hidden_size)},
        hidden=True,
    )
    monkeypatch.setitem(NORMALIZERS, mapping.name, mapping)
    model = torch.nn.ModuleDict(
        {
            "a": Normalizer("of_hidden", hidden_size=4),
            "b": Normalizer("multimax"),
        }
    )
    assert [name for name, _ in learned_modules(model)] == ["a.gain", "b.modulator"]
    assert [name for name, _ in learned_modules(model, matrices=False)] == ["b.modulator"]
    query, hidden = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    found = [
        model["a"].attend(query, query, query, hidden=hidden, need_probs=needed)[0]
        for needed in (False, True)
    ]
    torch.testing.assert_close(*found)


class Mean(AttentionModule):
    """Gives all keys the same probability, whatever the scores."""

    def attention(self, inputs, need_probs=False):
        assert inputs.mask is None
        return inputs.value.mean(-2, keepdim=True).expand(inputs.query.shape), None


def test_multihead_attention_accepts_a_custom_attention():
    torch.manual_seed(0)
    attention = SoftmaxMultiheadAttention(8, 2, self_attention=True)
    attention = MultiheadAttention(attention, Mean()).eval()
    x = torch.randn(5, 3, 8)
    output, probs = attention(x, x, x, need_weights=False)
    expected = attention.out_proj(attention.v_proj(x).mean(0, keepdim=True)).expand_as(x)
    torch.testing.assert_close(output, expected)
    assert probs is None


def test_register_adds_flags_after_the_models_are_imported(tmp_path):
    lines = (
        "import argparse",
        "from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY",
        "from hydra.core.config_store import ConfigStore",
        "import multimax_fairseq.models",
        "from multimax_fairseq import Mapping, NORMALIZERS, Option, register",
        "option = Option('start', 1.5, float, 'above 0', lambda x: x > 0, help='')",
        "function = NORMALIZERS['softmax'].function",
        "register(Mapping('late', 'late', function, options=(option,)))",
        "for arch in ('transformer_multimax', 'transformer_lm_multimax', 'rnn_multimax'):",
        "    parser = argparse.ArgumentParser()",
        "    ARCH_MODEL_REGISTRY[arch].add_args(parser)",
        "    words = ['--attention-normalizer', 'late', '--late-start', '2']",
        "    args = parser.parse_args(words)",
        "    print(arch, args.attention_normalizer, args.late_start)",
        "name = 'transformer_lm_multimax'",
        "print(MODEL_DATACLASS_REGISTRY[name]().late_start)",
        "print(ConfigStore.instance().load(f'model/{name}.yaml').node.late_start)",
    )
    printed = run(tmp_path, "python", "-c", "\n".join(lines))
    for arch in ("transformer_multimax", "transformer_lm_multimax", "rnn_multimax"):
        assert f"{arch} late 2.0" in printed
    assert printed.split()[-2:] == ["1.5", "1.5"]
