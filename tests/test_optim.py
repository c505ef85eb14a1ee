"""The optimizer treats the learned scalars separately."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim, options
from omegaconf import OmegaConf

from multimax_fairseq.errors import UsageError
from multimax_fairseq.optim.adam import ForeachAdam

ARCH = "transformer_iwslt_de_en_multimax"


def multimax_adam(parameters, *flags):
    parser = options.get_training_parser("translation")
    words = ["data", "--arch", ARCH, "--optimizer", "multimax_adam", *flags]
    kind = optim.OPTIMIZER_DATACLASS_REGISTRY["multimax_adam"]
    settings = dataclasses.asdict(kind.from_namespace(options.parse_args_and_arch(parser, words)))
    cfg = OmegaConf.create({**settings, "_name": "multimax_adam"})
    return optim.build_optimizer(cfg, list(parameters))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("normalizer", ["multimax", "alpha_entmax", "softmax"])
def test_adam_does_not_decay_learned_scalars(build, normalizer, resumed):
    flags = ("--learn-temperature",) if normalizer == "softmax" else ()
    model = build(ARCH, "--attention-normalizer", normalizer, *flags)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = multimax_adam(model.parameters(), "--weight-decay", "0.5", "--lr", "0.1")
    if resumed:
        optimizer.load_state_dict(optimizer.state_dict(), {"weight_decay": 0.4})
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    kept = before.keys() - moved
    assert {name for name in kept if before[name].abs().max() > 0} == {
        name for name in before if "normalizer" in name and before[name].abs().max() > 0
    }
    flat = torch.nn.Parameter(torch.cat([p.flatten() for p in before.values()]))  # as with --fp16
    with pytest.raises(UsageError, match="--memory-efficient-fp16"):
        multimax_adam([flat])


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0])
def test_adam_scales_the_learning_rate_of_learned_scalars(build, scale):
    """Adam's first step has the size of the learning rate for any gradient."""
    model = build(ARCH)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = multimax_adam(model.parameters(), "--scalar-lr-scale", str(scale))
    optimizer.set_lr(0.5)
    assert optimizer.get_lr() == 0.5
    optimizer.step()
    for name, parameter in model.named_parameters():
        step = before[name] - 0.5 * (scale if "modulator" in name else 1)
        torch.testing.assert_close(parameter.detach(), step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["-1.0", "nan", "inf"])
def test_adam_refuses_an_invalid_learning_rate_scale(build, scale):
    with pytest.raises(UsageError, match=f"--scalar-lr-scale {scale} must be"):
        multimax_adam(build(ARCH).parameters(), "--scalar-lr-scale", scale)


@pytest.mark.parametrize("every_update", [True, False])
def test_adam_freezes_learned_scalars_across_a_resume(build, every_update):
    """The schedule sets the learning rate at each update or, like reduce_lr_on_plateau, at
    the start."""
    model = build(ARCH)
    flags = ("--scalar-freeze-updates", "3", "--scalar-lr-scale", "0.5")
    optimizer, moved = multimax_adam(model.parameters(), *flags), []
    for update in range(5):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if update == 2:
            saved = optimizer.state_dict()
            optimizer = multimax_adam(model.parameters(), *flags)
            optimizer.load_state_dict(saved)
        if every_update or update == 0:
            optimizer.set_lr(0.1)
        optimizer.step()
        steps = {
            "modulator" in name: (before[name] - p.detach()).mean().item()
            for name, p in model.named_parameters()
        }
        assert steps[False] == pytest.approx(0.1, rel=1e-3)
        moved.append(steps[True])
    assert moved[:3] == [0, 0, 0]
    assert moved[3:] == pytest.approx([0.05, 0.05], rel=1e-3)
    saved = optimizer.state_dict()
    del saved["param_groups"][1]["updates"]  # older checkpoints lack it
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["updates"] == 0


def test_adam_keeps_zero_scalar_weight_decay_under_overrides(build):
    optimizer = multimax_adam(build(ARCH).parameters(), "--weight-decay", "0.5")
    overrides = {"weight_decay": 0.4, "lr": 0.3}
    optimizer.load_state_dict(optimizer.state_dict(), overrides)
    others, scalars = optimizer.param_groups
    assert (others["lr"], others["weight_decay"], scalars["weight_decay"]) == (0.3, 0.4, 0.0)


def test_foreach_adam_takes_dense_gpu_parameters(build):
    many = multimax_adam(build(ARCH).parameters()).optimizer
    dense, sparse = torch.ones(2), torch.ones(2).to_sparse()
    for is_cuda, grad, is_fast in (
        (True, None, True), (True, dense, True), (True, sparse, False), (False, dense, False),
    ):  # fmt: skip
        assert many.is_fast(SimpleNamespace(is_cuda=is_cuda, grad=grad)) == is_fast


def test_adam_treats_learned_scalars_alike_by_default(build):
    optimizer = multimax_adam(build(ARCH).parameters())
    assert (optimizer.cfg.scalar_lr_scale, optimizer.cfg.scalar_freeze_updates) == (1.0, 0)


def test_adam_refuses_a_negative_number_of_frozen_updates(build):
    with pytest.raises(UsageError, match="--scalar-freeze-updates -1 must be a whole number"):
        multimax_adam(build(ARCH).parameters(), "--scalar-freeze-updates", "-1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_foreach_adam_equals_adam_bitwise(build, dtype, monkeypatch):
    """Some parameters have no gradient, or get one later."""
    flags = ("--weight-decay", "0.1", "--scalar-lr-scale", "0.3", "--adam-betas", "(0.9, 0.98)")
    models = [build(ARCH).to(dtype) for _ in range(2)]
    optimizers = [multimax_adam(model.parameters(), *flags) for model in models]
    many = optimizers[1].optimizer
    monkeypatch.setattr(many, "is_fast", lambda parameter: True)
    monkeypatch.setattr(many, "MAX_ELEMENTS", 20_000)
    taken = []

    def updated(parameters, group):
        taken.append(len(parameters))
        ForeachAdam._update(many, parameters, group)

    monkeypatch.setattr(many, "_update", updated)
    for update in range(4):
        torch.manual_seed(update)
        for number, pair in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            grad = torch.randn(pair[0].shape).to(dtype)
            for parameter in pair:
                parameter.grad = None if number % 5 > update else grad.clone()
        for optimizer in optimizers:
            if update == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.set_lr(0.01 * (update + 1))
            optimizer.step()
        one, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
        assert torch.equal(one, other) and one.isfinite().all()
    assert max(taken) > 5 and len(taken) > 8
    kept, found = (optimizer.optimizer.state for optimizer in optimizers)
    for one, other in zip(kept.values(), found.values(), strict=True):
        assert one["step"] == other["step"] and one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in ("exp_avg", "exp_avg_sq"))
