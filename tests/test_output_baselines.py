"""user_dir/output_baselines: its two output layers, and models trained with them."""

import copy
import math
import sys

import numpy as np
import pytest
import torch
from commands import ROOT, run

PLUGIN = ("--user-dir", ROOT / "user_dir/output_baselines")


@pytest.fixture(scope="module")
def plugin():
    """The plugin's module; its mapping and models are taken out of the registries afterwards."""
    from fairseq import models

    from multimax_fairseq import NORMALIZERS

    tables = [NORMALIZERS, *(t for n, t in vars(models).items() if n.endswith("_REGISTRY"))]
    before = [dict(table) for table in tables]
    sys.path.insert(0, str(ROOT / "user_dir"))
    import output_baselines

    yield output_baselines
    sys.path.remove(str(ROOT / "user_dir"))
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def test_piecewise_linear_starts_as_the_identity(plugin):
    x = torch.linspace(-50, 50, 1001).double()
    torch.testing.assert_close(plugin.PiecewiseLinear().double()(x), x, rtol=1e-6, atol=1e-5)


def test_piecewise_linear_interpolates_and_learns(plugin):
    module = plugin.PiecewiseLinear(segments=5, bound=2.0).double()
    torch.nn.init.normal_(module.raw_slope)
    slopes = np.log1p(np.exp(module.raw_slope.detach().numpy()))
    knots = np.linspace(-2, 2, 6)
    levels = np.concatenate([[-2], -2 + np.cumsum(0.8 * slopes)])
    x = torch.linspace(-1.99, 1.99, 101).double()
    expected = np.interp(x.numpy(), knots, levels)
    torch.testing.assert_close(module(x), torch.from_numpy(expected))
    assert module(torch.tensor(-4.0).double()).item() == pytest.approx(-2 - 2 * slopes[0])
    assert module(torch.tensor(5.0).double()).item() == pytest.approx(levels[-1] + 3 * slopes[-1])

    def function(x, raw_slope):
        return torch.func.functional_call(module, {"raw_slope": raw_slope}, (x,))

    inputs = (torch.randn(20).double().requires_grad_(), module.raw_slope)
    assert torch.autograd.gradcheck(function, inputs)


def test_learned_soft_cap_learns_its_cap(plugin):
    module, x = plugin.LearnedSoftCap().double(), 60 * torch.randn(20).double()
    torch.testing.assert_close(module(x), 50 * (x / 50).tanh(), rtol=1e-6, atol=1e-6)

    def function(x, log_cap):
        return torch.func.functional_call(module, {"log_cap": log_cap}, (x,))

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), module.log_cap))


def test_output_functions_compute_in_the_wider_dtype(plugin):
    for module in (plugin.PiecewiseLinear(), plugin.LearnedSoftCap()):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        x = 20 * torch.randn(50).double()
        assert torch.equal(module(x), copy.deepcopy(module).double()(x))
        assert torch.equal(module(x.half()), module(x.half().float()))


def test_mixture_of_softmaxes_is_the_sum_of_its_parts(plugin):
    layer = plugin.MixtureOfSoftmaxes(torch.nn.Linear(6, 9).double(), components=3).double()
    features = torch.randn(4, 6).double()
    found = layer(features).detach()

    expected = torch.zeros(4, 9).double()
    shares = torch.softmax(features @ layer.gate.weight.T, -1)
    hidden = torch.tanh(features @ layer.latent.weight.T + layer.latent.bias)
    for part in range(3):
        own = hidden[:, 6 * part : 6 * (part + 1)]
        logits = own @ layer.weight.T + layer.bias
        expected += shares[:, part : part + 1] * torch.softmax(logits, -1)
    torch.testing.assert_close(found.exp(), expected)
    torch.testing.assert_close(found.softmax(-1), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--arch", "transformer_lm_multimax", "--output-normalizer", "piecewise_linear"),
        ("--arch", "transformer_lm_mixture", "--output-normalizer", "softmax"),
    ],
    ids=["piecewise-linear", "mixture"],
)
def test_language_model_trains_and_evaluates(data, tmp_path, flags):
    sizes = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16"
    sizes += " --decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"
    train = "--share-decoder-input-output-embed --tokens-per-sample 16 --max-tokens 128"
    train += " --criterion multimax_cross_entropy --optimizer adam --lr 0.01 --max-update 8"
    train += " --num-workers 0 --no-epoch-checkpoints --save-dir model"
    words = ("--task", "language_modeling", *flags, *sizes.split(), *train.split())
    run(tmp_path, "fairseq-train", data / "lm", *PLUGIN, *words)
    checkpoint = tmp_path / "model/checkpoint_last.pt"
    output = run(
        *(tmp_path, "fairseq-eval-lm", data / "lm", "--path", checkpoint, *PLUGIN),
        *("--tokens-per-sample", "16", "--max-tokens", "128", "--num-workers", "0"),
        *("--gen-subset", "valid"),
    )
    perplexity = float(output.split("Perplexity: ")[1].split()[0])
    state = torch.load(checkpoint, weights_only=False)["model"]
    assert 1 < perplexity < len(state["decoder.embed_tokens.weight"])
    learned = [key for key in state if "raw_slope" in key or ".latent." in key]
    assert learned and all(state[key].isfinite().all() for key in learned)
    if "raw_slope" in learned[0]:
        assert (state[learned[0]] - math.log(math.e - 1)).abs().max() > 0
