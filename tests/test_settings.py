"""Settings without effect are refused by name before training."""

import argparse
import math

import pytest
from examples import EXAMPLES
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture

from multimax_fairseq import NORMALIZERS
from multimax_fairseq.compat.mistakes import check_criterion
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.checks import check_settings
from multimax_fairseq.models.config import (
    ATTENTIONS,
    DENSITY_AT,
    flag,
    set_defaults,
    settings,
    translation_config,
)
from multimax_fairseq.models.learned_scalars import LoadsSoftmaxCheckpoints
from multimax_fairseq.models.transformer_multimax import multimax_architecture

SOFTMAX, ENTMAX, TOPK, MULTIMAX = (
    ("--attention-normalizer", name) for name in ("softmax", "alpha_entmax", "topk", "multimax")
)
LANGUAGE_MODEL, TRANSLATION = "transformer_lm_multimax", "transformer_multimax"
NOWHERE = (*SOFTMAX, "--output-normalizer", "softmax")
CONTINUOUS = ("--encoder-self-attention", "continuous_softmax")
OUTPUT = ("--output-normalizer", "multimax")
FIXED = (*ENTMAX, "--entmax-alpha", "1.5", "--output-normalizer", "sparsemax")
MODULATED = "multimax attention,"
# (other flags, a flag without effect beside them, what it belongs to, flags that give it an effect)
FOREIGN = [
    ((), "--topk 5", "topk attention,", TOPK),
    ((), "--topk 0", "topk attention,", None),
    (ENTMAX, "--topk -1", "topk attention,", None),
    ((), "--softmax-temperature 2.0", "softmax attention,", SOFTMAX),
    ((), "--softmax-temperature inf", "softmax attention,", None),
    ((), "--learn-temperature", "softmax attention,", SOFTMAX),
    (("--attention-normalizer", "entmax15"), "--entmax-alpha 2.0", "alpha_entmax at", ENTMAX),
    ((), "--entmax-heads shared", "alpha_entmax attention,", ENTMAX),
    (
        FIXED,
        "--output-entmax-alpha 1.3",
        "alpha_entmax output layer,",
        ("--output-normalizer", ENTMAX[1]),
    ),
    ((), "--learn-softcap", "softcap attention,", ("--attention-normalizer", "softcap")),
    ((), "--output-softcap 20.0", "softcap output layer,", ("--output-normalizer", "softcap")),
    (NOWHERE, "--multimax-order 1", MODULATED, OUTPUT),
    (NOWHERE, "--multimax-terms high", MODULATED, OUTPUT),
    (NOWHERE, "--multimax-init-std 0.5", MODULATED, OUTPUT),
    (NOWHERE, "--multimax-monotone", MODULATED, MULTIMAX),
    (FIXED, "--multimax-monotone", MODULATED, OUTPUT),
    ((*NOWHERE, *OUTPUT), "--multimax-heads separate", "multimax attention,", MULTIMAX),
    (NOWHERE, "--multimax-sink learned", "multimax attention,", MULTIMAX),
    (NOWHERE, "--multimax-length-scale", "multimax attention,", MULTIMAX),
    ((), "--continuous-context continuous", "continuous attention,", CONTINUOUS),
    ((), "--continuous-bases 3", "continuous attention,", CONTINUOUS),
    ((), "--continuous-bases 0", "continuous attention,", None),
    ((), "--continuous-widths 0.1", "continuous attention,", CONTINUOUS),
    ((), "--continuous-ridge 1.0", "continuous attention,", CONTINUOUS),
]
# {setting of an option: (its mapping, its value in the example)}
GIVEN = {
    NORMALIZERS[name].setting_of(option): (name, example.options[option.name])
    for name, example in EXAMPLES.items()
    for option in NORMALIZERS[name].options
    if option.name in example.options
}
FOREIGN += [
    ((), f"{flag(setting)} {value}", f"{name} attention,", ("--attention-normalizer", name))
    for setting, (name, value) in GIVEN.items()
    if not any(written.split()[0] == flag(setting) for _, written, *_ in FOREIGN)
]


def checked(*flags):
    """Check flags as a model with all three attentions does."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # as fairseq's
    gen_parser_from_dataclass(parser, translation_config()(), delete_default=True)
    args = parser.parse_args(flags)
    set_defaults(args)
    check_settings(args, ATTENTIONS)


@pytest.mark.parametrize("beside, setting, owner, home", FOREIGN)
def test_check_settings_refuses_an_option_of_another_mapping(beside, setting, owner, home):
    checked(*beside)
    with pytest.raises(UsageError) as error:
        checked(*beside, *setting.split())
    message = str(error.value)
    assert message.startswith(f"{setting} belongs to {owner}") and "\n" not in message
    assert ": leave it out, or use " in message
    if home is not None:
        checked(*beside, *setting.split(), *home)


def test_settings_all_have_a_refusal_case():
    chosen = {"--attention-normalizer", "--attention-normalizer-at", "--output-normalizer"}
    always = (
        *DENSITY_AT.values(),
        "attention_gate",
        "monitor_interval",
        "scalar_gradient_scale",
        "train_scalars_only",
    )
    chosen |= {flag(name) for name in always}
    flags = {flag(setting.name) for setting in settings()}
    assert {setting.split()[0] for _, setting, *_ in FOREIGN} == flags - chosen


@pytest.mark.parametrize(
    "flags, found",
    [
        ("--continuous-bases 0", "--continuous-bases 0 must be a whole number"),
        ("--continuous-bases 32", "--continuous-bases 32 must be a multiple of 3, the number of"),
        ("--continuous-widths 0.1,0", "--continuous-widths 0.1,0 must be finite numbers above 0"),
        ("--continuous-widths 0.1,", "--continuous-widths 0.1, must be finite numbers above 0"),
        ("--continuous-ridge 0", "--continuous-ridge 0.0 must be a finite number above 0"),
        ("--continuous-ridge nan", "--continuous-ridge nan must be a finite number above 0"),
    ],
)
def test_check_settings_refuses_wrong_continuous_options(flags, found):
    with pytest.raises(UsageError) as error:
        checked(*CONTINUOUS, *flags.split())
    assert str(error.value).startswith(found)


def test_build_model_refuses_a_density_without_its_attention(build):
    flags = ("--cross-attention", "continuous_softmax", "--no-cross-attention")
    with pytest.raises(UsageError, match="continuous_softmax belongs to cross attention, which"):
        build(TRANSLATION, *flags)


def test_check_settings_allows_an_option_of_one_attention():
    checked("--attention-normalizer-at", "cross", "--softmax-temperature", "0.5")
    checked("--attention-normalizer-at", "encoder,cross=topk", "--topk", "3")


@pytest.mark.parametrize(
    "arch, flags",
    [
        (LANGUAGE_MODEL, ("--attention-normalizer-at", "decoder,cross=topk")),
        (TRANSLATION, ("--no-cross-attention", "--attention-normalizer-at", "encoder,cross=topk")),
    ],
)
def test_build_model_ignores_the_mapping_of_a_missing_attention(build, arch, flags):
    with pytest.raises(UsageError, match="--topk 3 belongs to topk attention"):
        build(arch, *flags, "--topk", "3")


@pytest.mark.parametrize(
    "arch, normalizer, attentions, parts",
    [
        (TRANSLATION, "entmax15", "cross=sparsemax", ("entmax15 acts nowhere", "'cross=sparse")),
    ],
)
def test_build_model_refuses_a_normalizer_without_effect(
    build, arch, normalizer, attentions, parts
):
    words = ("--attention-normalizer-at", attentions, "--output-normalizer", "softmax")
    with pytest.raises(UsageError) as error:
        build(arch, "--attention-normalizer", normalizer, *words)
    message = str(error.value)
    assert all(part in message for part in parts) and "\n" not in message


@pytest.mark.parametrize(
    "arch, flags, missing",
    [
        (LANGUAGE_MODEL, ("--attention-normalizer-at", "decoder,cross=sparsemax"), "cross"),
        (LANGUAGE_MODEL, ("--attention-normalizer-at", "decoder=entmax15,encoder"), "encoder"),
        ("rnn_multimax", ("--attention-normalizer-at", "cross,decoder=sparsemax"), "decoder"),
        (
            TRANSLATION,
            ("--no-cross-attention", "--attention-normalizer-at", "encoder,cross=sparsemax"),
            "cross",
        ),
    ],
)
def test_build_model_refuses_a_missing_attention(build, arch, flags, missing):
    with pytest.raises(UsageError, match=f" names {missing}, which this model does not have: name"):
        build(arch, *flags)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("attention_gate", "false", "--attention-gate false must be true or false"),
        ("cross_attention", None, "--cross-attention None must be one of discrete"),
        ("scalar_gradient_scale", math.nan, "--scalar-gradient-scale nan must be a finite number"),
        ("scalar_gradient_scale", -1.0, "--scalar-gradient-scale -1.0 must be a finite number"),
        ("topk", None, "--attention-normalizer topk needs --topk: pass "),
    ],
)
def test_check_settings_refuses_wrong_types_of_a_yaml_file(name, value, said):
    settings = argparse.Namespace(attention_normalizer="topk", topk=3, **{"_name": TRANSLATION})
    set_defaults(settings, output_normalizer="softmax")
    check_settings(settings)
    setattr(settings, name, value)
    with pytest.raises(UsageError) as error:
        check_settings(settings)
    assert str(error.value).startswith(said)


def test_build_model_allows_options_of_the_architecture(build):
    """An architecture may set options of its own normalizer, and train with another one."""
    name = "transformer_multimax_with_settings"
    if name not in ARCH_CONFIG_REGISTRY:

        @register_model_architecture("transformer_multimax", name)
        def with_settings(args):
            own = {"multimax_heads": "separate", "multimax_order": 1}
            set_defaults(args, output_normalizer="softmax", **own)
            multimax_architecture(args)

    assert build(name).encoder.layers[0].self_attn.normalizer.modulator.num_heads == 4
    build(name, *SOFTMAX)
    build(name, *SOFTMAX, "--multimax-order", "2")
    with pytest.raises(UsageError, match="--multimax-terms low belongs to multimax attention"):
        build(name, *SOFTMAX, "--multimax-terms", "low")


def test_check_criterion_leaves_other_plugins_alone(build, task):
    class Theirs(CrossEntropyCriterion):
        pass

    model, output = build(TRANSLATION, "--output-normalizer", "sparsemax"), "--output-normalizer"
    check_criterion(model, Theirs(task, sentence_avg=False))
    with pytest.raises(UsageError, match=f"{output} sparsemax"):
        check_criterion(model, CrossEntropyCriterion(task, sentence_avg=False))


def test_check_resumed_refuses_another_mapping():
    check = LoadsSoftmaxCheckpoints.check_resumed
    before = {"attention_normalizer": "multimax", "topk": None, "multimax_init_std": 0.02}
    with pytest.raises(UsageError, match="^--attention-normalizer is topk, but was multimax"):
        check(before | {"topk": 5, "attention_normalizer": "topk"}, before)
    with pytest.raises(UsageError, match="^--topk is 5, but was None"):
        check(before | {"topk": 5}, before)
    check(before | {"multimax_init_std": 0.0, "encoder_layers": 3}, before)
    check(before, {})  # an older version did not save them
