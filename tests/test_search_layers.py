"""The faster layers for beam search compute the same function."""

import pytest
import torch
from toy_models import scatter_modulators, stock_model

from multimax_fairseq.models import search_layers
from multimax_fairseq.models.search_layers import (
    LAYERS,
    KernelLinear,
    faster_layers,
    torch_is_narrow,
)

ARCH = "transformer_multimax"
# (source length, target length)
SIZES = ((9, 2), (4, 2), (1, 2), (6, 2), (6, 2))


@pytest.mark.parametrize("narrow", [False, True])
def test_faster_layers_keep_the_outputs(
    task, build, dictionary, translation_batch, monkeypatch, narrow
):
    monkeypatch.setattr(search_layers, "torch_is_narrow", lambda: narrow)
    monkeypatch.setattr(search_layers, "MIN_PRODUCTS", 0)
    sample = translation_batch(SIZES)
    for model in (scatter_modulators(build(ARCH)).eval(), stock_model(task)):
        wanted = model(**sample["net_input"])[0]
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        faster_layers([model])
        layers = [m for name, m in model.named_modules() if name.rpartition(".")[2] in LAYERS]
        assert {type(layer) for layer in layers} == {KernelLinear if narrow else torch.nn.Linear}
        for context in (torch.no_grad(), torch.enable_grad()):
            with context:
                found = model(**sample["net_input"])[0]
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert found.requires_grad
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name])
            is_turned = not narrow and any(f".{layer}.weight" in name for layer in LAYERS)
            assert value.is_contiguous() != (is_turned and min(value.shape) > 1)


@pytest.mark.parametrize(
    "name, capability, narrow",
    [
        ("AMD EPYC (family 26, model 2)", "AVX512", True),
        ("AMD EPYC (family 26, model 2)", "AVX2", False),
        ("AMD EPYC (family 25, model 17)", "AVX512", False),
        ("Intel(R) Xeon(R) Processor (family 6, model 207)", "AVX512", False),
        ("aarch64 CPU", "DEFAULT", False),
    ],
)
def test_torch_is_narrow_on_recent_amd_processors(monkeypatch, name, capability, narrow):
    monkeypatch.setattr(search_layers, "processor", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert torch_is_narrow.__wrapped__() == narrow


@pytest.mark.parametrize("narrow", [False, True])
def test_faster_layers_skip_unsupported_layers(monkeypatch, narrow):
    class Doubled(torch.nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    monkeypatch.setattr(search_layers, "torch_is_narrow", lambda: narrow)
    layers = {"fc1": Doubled(4, 3), "fc2": torch.nn.Linear(4, 3, device="meta")}
    layers["other"] = torch.nn.Linear(4, 3)
    kinds = {name: type(layer) for name, layer in layers.items()}
    faster_layers([torch.nn.ModuleDict(layers)])
    assert {name: type(layer) for name, layer in layers.items()} == kinds
    assert all(layer.weight.is_contiguous() for layer in layers.values())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kernel_linear_equals_torch_without_a_kernel(monkeypatch, dtype):
    monkeypatch.setattr(search_layers, "MIN_PRODUCTS", 0)
    x, layer = torch.randn(5, 4, dtype=dtype), torch.nn.Linear(4, 3, dtype=dtype)
    expected = layer(x)
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    layer = KernelLinear(layer)
    assert torch.equal(layer(x), expected)


def test_kernel_linear_has_the_gradient_of_torch(monkeypatch):
    monkeypatch.setattr(search_layers, "MIN_PRODUCTS", 0)
    x, layer = torch.randn(5, 4), torch.nn.Linear(4, 3)
    layer = KernelLinear(layer)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(3, -1))
