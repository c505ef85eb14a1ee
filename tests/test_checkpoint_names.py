"""Names and shapes of the parameters that this package adds to a checkpoint.

They are literals, so that a renamed parameter fails here before an old checkpoint fails to load.
"""

import pytest
import torch
from toy_models import scatter_modulators

pytestmark = pytest.mark.long

STOCK = {
    "transformer_multimax": "transformer",
    "transformer_iwslt_de_en_multimax": "transformer_iwslt_de_en",
    "transformer_lm_multimax": "transformer_lm",
}
ENCODER = [f"encoder.layers.{i}.self_attn" for i in range(2)]
DECODER = [f"decoder.layers.{i}.self_attn" for i in range(2)]
CROSS = [f"decoder.layers.{i}.encoder_attn" for i in range(2)]
TERMS = ["low_coefficient", "low_threshold", "high_coefficient", "high_threshold"]
# For each attention, with four heads.
NORMALIZER = {
    "": {f"modulator.{name}": (2,) for name in TERMS},
    "--multimax-heads separate": {f"modulator.{name}": (4, 2) for name in TERMS},
    "--multimax-order 1": {f"modulator.{name}": (1,) for name in TERMS},
    "--multimax-terms low": {f"modulator.{name}": (2,) for name in TERMS[:2]},
    "--multimax-monotone": {f"modulator.{name}": (2,) for name in TERMS},
    "--attention-normalizer softmax --learn-temperature": {"modulator.log_temperature": ()},
    "--attention-normalizer softmax": {},
    "--attention-normalizer topk --topk 3": {},
    "--attention-normalizer sparsemax": {},
    "--attention-normalizer entmax15": {},
    "--attention-normalizer alpha_entmax": {"alpha.logit": (4,)},
    "--attention-normalizer evsoftmax": {},
}
OUTPUT = {
    "softmax": {},
    "multimax": {f"decoder.output_modulator.{name}": (2,) for name in TERMS},
    "sparsemax": {},
    "entmax15": {},
    "alpha_entmax": {},
}


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "arch, flags",
    # An architecture changes only the sizes.
    [(arch, flags) for flags in NORMALIZER for arch in STOCK if not flags or "iwslt" not in arch],
)
def test_state_dict_adds_attention_parameters(build, arch, flags):
    modules = DECODER if "_lm" in arch else [*ENCODER, *DECODER, *CROSS]
    own = NORMALIZER[flags].items()
    added = {f"{at}.normalizer.{name}": shape for at in modules for name, shape in own}
    model = build(arch, *flags.split(), "--output-normalizer", "softmax")
    assert shapes(model) == shapes(build(STOCK[arch])) | added


@pytest.mark.parametrize("arch", ["transformer_multimax", "transformer_lm_multimax"])
@pytest.mark.parametrize("output", OUTPUT)
def test_state_dict_adds_output_layer_parameters(build, arch, output):
    flags = ("--attention-normalizer", "softmax", "--output-normalizer", output)
    assert shapes(build(arch, *flags)) == shapes(build(STOCK[arch])) | OUTPUT[output]


@pytest.mark.parametrize("flags", ["--output-normalizer multimax", "--attention-gate"])
def test_load_state_dict_restores_a_single_learned_module(build, flags):
    given = ("transformer_multimax", "--attention-normalizer", "softmax", *flags.split())
    trained, loaded = scatter_modulators(build(*given)), build(*given, seed=2)
    loaded.load_state_dict(trained.state_dict())
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


# 34 words; embeddings and decoder states of 16; encoder states of 12 in each direction.
RECURRENT = {
    "encoder.embed_tokens.weight": (34, 16),
    "decoder.embed_tokens.weight": (34, 16),
    "decoder.output_projection.weight": (34, 16),
    "decoder.bridge.weight": (16, 24),
    "decoder.bridge.bias": (16,),
    "decoder.attention.query_projection.weight": (16, 16),
    "decoder.attention.key_projection.weight": (16, 24),
    "decoder.attention.score_projection.weight": (1, 16),
    "decoder.feature_projection.weight": (16, 40),
    "decoder.feature_projection.bias": (16,),
}


@pytest.mark.parametrize("kind, gates", [("gru", 3), ("lstm", 4)])
@pytest.mark.parametrize(
    "density, at",
    [("discrete", "normalizer"), ("continuous_sparsemax", "normalizer.normalizer")],
)
def test_state_dict_of_rnn_has_expected_names_and_shapes(build, kind, gates, density, at):
    expected = dict(RECURRENT)
    for end in ("l0", "l0_reverse"):
        expected |= {f"encoder.rnn.weight_ih_{end}": (gates * 12, 16)}
        expected |= {f"encoder.rnn.weight_hh_{end}": (gates * 12, 12)}
        expected |= {f"encoder.rnn.bias_{of}_{end}": (gates * 12,) for of in ("ih", "hh")}
    for part in ("word", "fed", "hidden"):
        expected[f"decoder.cell.{part}_projection.weight"] = (gates * 16, 16)
    for part in ("word", "hidden"):
        expected[f"decoder.cell.{part}_projection.bias"] = (gates * 16,)
    expected |= {f"decoder.attention.{at}.modulator.{name}": (2,) for name in TERMS}
    expected |= OUTPUT["multimax"]
    flags = ("--cell-type", kind, "--cross-attention", density, "--output-normalizer", "multimax")
    assert shapes(build("rnn_multimax", *flags)) == expected
