"""The kernels of row functions against the mappings in plain PyTorch, in float64."""

import pytest
import torch
from plain import DEVICE, assert_as_accurate, attention_inputs, make_mask

from multimax_fairseq import normalize, scaled_dot_product_attention
from multimax_fairseq.ops.row_function import ON_TRITON

MAPPINGS = {
    "topk": ("topk", {"k": 4}),
    "topk of one": ("topk", {"k": 1}),
    "evsoftmax": ("evsoftmax", {}),
    "evsoftmax in training": ("evsoftmax", {"training": True}),
    "sparsemax": ("sparsemax", {}),
    "entmax15": ("entmax15", {}),
    "alpha_entmax": ("alpha_entmax", {"alpha": torch.tensor([1.1, 1.7])[:, None, None]}),
    "sigmoid": ("sigmoid", {}),
    "sigmoid with a bias": ("sigmoid", {"bias": -2.0}),
    "softpick": ("softpick", {}),
}
EACH = pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)


def on_device(mapping):
    name, arguments = mapping
    return name, {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
    }


def attend(mapping, inputs, grad, backend, **options):
    """Return the output, and the gradients of query, key, value and a learned parameter."""
    name, arguments = on_device(mapping)
    inputs = [part.detach().requires_grad_() for part in inputs]
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    learned = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    learned = {n: x.to(wide).requires_grad_() for n, x in learned.items()}
    output = scaled_dot_product_attention(
        *inputs, normalizer=name, backend=backend, **{**arguments, **learned}, **options
    )
    return [output.detach(), *torch.autograd.grad(output, [*inputs, *learned.values()], grad)]


def assert_equals_plain(mapping, dtype, shape, **options):
    *inputs, grad = attention_inputs(*shape, dtype)
    ours, plain = (attend(mapping, inputs, grad, kind, **options) for kind in ("triton", "plain"))
    doubled = [part.double() for part in inputs]
    assert_as_accurate(ours, plain, attend(mapping, doubled, grad.double(), "plain", **options))


def test_evsoftmax_selects_by_the_exact_mean():
    """512 scores, one of them above the others by less than the rounding error of their sum."""
    query = torch.ones(1, 1, 1, 16, device=DEVICE)
    key = torch.zeros(1, 1, 512, 16, device=DEVICE)
    key[..., 0] = 100.0
    key[0, 0, 7, 0] = 100.002
    value = torch.arange(512.0, device=DEVICE)[None, None, :, None].expand(-1, -1, -1, 16)
    output = scaled_dot_product_attention(
        query, key, value, normalizer="evsoftmax", scale=1.0, backend="triton"
    )
    assert (output == 7).all()


def test_every_function_is_tested():
    assert {name for name, _ in MAPPINGS.values()} == {*ON_TRITON}


@EACH
@pytest.mark.parametrize(
    "dtype, shape, kind, is_causal",
    [
        (torch.float32, (1, 2, 20, 37, 24), "full", True),
        (torch.bfloat16, (2, 2, 17, 33, 32), "padding", False),
    ],
)
def test_row_attention_equals_plain_pytorch(mapping, dtype, shape, kind, is_causal):
    mask = make_mask(kind, *shape[:4])
    allowed = None if mask is None else ~mask
    assert_equals_plain(mapping, dtype, shape, attn_mask=allowed, is_causal=is_causal)


@pytest.mark.parametrize("name, dtype", [("topk", torch.float32), ("alpha_entmax", torch.float16)])
def test_row_attention_adds_float_masks(name, dtype):
    shape = (1, 2, 20, 37, 16)
    assert_equals_plain(MAPPINGS[name], dtype, shape, attn_mask=make_mask("key bias", *shape[:4]))


@EACH
def test_row_attention_gives_nan_for_nan(mapping):
    *inputs, _ = attention_inputs(1, 2, 20, 37, 16)
    inputs[0][0, 0, 3, 0] = torch.nan
    name, arguments = mapping
    arguments = {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
    }
    output = scaled_dot_product_attention(*inputs, normalizer=name, backend="triton", **arguments)
    is_wrong = output.isnan().any(-1)
    assert is_wrong[0, 0, 3] and is_wrong.sum() == 1


@EACH
def test_row_attention_uses_one_dropout_mask_in_both_passes(mapping):
    name, arguments = mapping
    arguments = {
        n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()
    }
    query, key, value, grad = attention_inputs(1, 2, 20, 32, 32)
    identity = torch.eye(32, device=DEVICE).expand_as(key).contiguous()

    def dropped(*inputs):
        torch.manual_seed(5)
        return scaled_dot_product_attention(
            *inputs, normalizer=name, dropout_p=0.3, backend="triton", **arguments
        )

    kept = dropped(query, key, identity) != 0  # the output is the probabilities
    inputs = [part.requires_grad_() for part in (query, key, value)]
    found = torch.autograd.grad(dropped(*inputs), inputs, grad)
    doubled = [part.detach().double().requires_grad_() for part in inputs]
    probs = normalize(name, doubled[0] @ doubled[1].mT / 32**0.5, **arguments)
    output = (probs * kept / 0.7) @ doubled[2]
    for ours, right in zip(found, torch.autograd.grad(output, doubled, grad.double()), strict=True):
        assert (ours - right).norm() <= 1e-4 * right.norm()
