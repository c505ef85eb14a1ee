"""What a checkpoint holds: the names and shapes of all that a model has beyond fairseq's own.

They are written out, so that a renamed parameter shows here before a checkpoint fails to load.
"""

import pytest

STOCK = {
    "transformer_multimax": "transformer",
    "transformer_iwslt_de_en_multimax": "transformer_iwslt_de_en",
    "transformer_lm_multimax": "transformer_lm",
}
ENCODER = [f"encoder.layers.{i}.self_attn" for i in range(2)]
DECODER = [f"decoder.layers.{i}.self_attn" for i in range(2)]
CROSS = [f"decoder.layers.{i}.encoder_attn" for i in range(2)]
TERMS = ["low_coefficient", "low_threshold", "high_coefficient", "high_threshold"]
# Of each attention, whose models here have four heads.
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
    # The sizes of an architecture are all that it changes.
    [(arch, flags) for flags in NORMALIZER for arch in STOCK if not flags or "iwslt" not in arch],
)
def test_what_attentions_add_to_a_checkpoint(build, arch, flags):
    places = DECODER if "_lm" in arch else [*ENCODER, *DECODER, *CROSS]
    own = NORMALIZER[flags].items()
    added = {f"{at}.normalizer.{name}": shape for at in places for name, shape in own}
    model = build(arch, *flags.split(), "--output-normalizer", "softmax")
    assert shapes(model) == shapes(build(STOCK[arch])) | added


@pytest.mark.parametrize("arch", STOCK)
@pytest.mark.parametrize("output", OUTPUT)
def test_what_the_output_layer_adds_to_a_checkpoint(build, arch, output):
    flags = ("--attention-normalizer", "softmax", "--output-normalizer", output)
    assert shapes(build(arch, *flags)) == shapes(build(STOCK[arch])) | OUTPUT[output]
