"""compat/silent.py: the exponential moving average against its definition."""

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA

DECAY = 0.9
PRE_NORM = ("--decoder-normalize-before",)
MODELS = [
    ("transformer_multimax", ("--share-all-embeddings", "--encoder-normalize-before", *PRE_NORM)),
    ("transformer_multimax", ()),
    ("transformer_lm_multimax", ("--share-decoder-input-output-embed", *PRE_NORM)),
]


def values(model):
    return {name: value.clone().float() for name, value in model.state_dict().items()}


def update(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("dtype, in_fp32", [("float", False), ("float", True), ("half", True)])
@pytest.mark.parametrize("arch, flags", MODELS)
def test_ema_step_decays_each_tensor_once(build, arch, flags, dtype, in_fp32):
    model = getattr(build(arch, *flags), dtype)()
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=DECAY, ema_fp32=in_fp32))
    expected = values(model)

    for updates in (1, 2, 3):
        update(model)
        ema.step(model, updates)
        now = values(model)
        expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in now}

    averaged = ema.get_model().state_dict()
    averages = ema.fp32_params if in_fp32 else averaged
    torch.testing.assert_close(dict(averages), expected)
    for name, value in averaged.items():
        assert torch.equal(value, averages[name].to(value.dtype))


@pytest.mark.parametrize("stopped_at", [3, 4, 5])
def test_ema_step_resumes_bitwise(build, stopped_at):
    config = EMAConfig(store_ema=True, ema_decay=DECAY, ema_update_freq=4)
    model = build("transformer_multimax")
    whole = EMA(model, config)

    for updates in range(1, 10):
        update(model)
        whole.step(model, updates)
        if updates == stopped_at:
            resumed = EMA(model, config)
            resumed.restore(values(whole.get_model()))
        elif updates > stopped_at:
            resumed.step(model, updates)

    expected, found = values(whole.get_model()), values(resumed.get_model())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
