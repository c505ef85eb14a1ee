"""The flags of the models, for argparse and hydra, and the modules that they select.

Each option of a mapping is a flag: see `Option.setting`. The flags are made from the registry of
mappings when fairseq asks for them, so a mapping can be registered before or after this import.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import DictConfig, OmegaConf

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import (
    NORMALIZERS,
    SEPARATE_HEADS,
    Mapping,
    Option,
    chosen_from,
    settings_of,
    yes_or_no,
)
from multimax_fairseq.modules import (
    AttentionModule,
    ContinuousAttention,
    GatedAttention,
    Normalizer,
)
from multimax_fairseq.modules.continuous_attention import CONTEXTS, DENSITIES
from multimax_fairseq.ops.checks import is_finite, is_whole

# The kinds of attention: encoder self-attention, decoder self-attention, cross-attention.
ATTENTIONS = ("encoder", "decoder", "cross")
PLUGIN_REMARK = "for another one pass the --user-dir that adds it"


def output_names() -> tuple[str, ...]:
    """Return the mappings that can be an output layer."""
    return tuple(n for n, mapping in NORMALIZERS.items() if mapping.output_options is not None)


def mapping_options() -> dict[str, Option]:
    """Return the options of all mappings by their names in a model's settings."""
    return {
        name: option
        for mapping in NORMALIZERS.values()
        for name, option in settings_of(mapping).items()
    }


# Continuous attention needs all keys from the start, so decoder self-attention has none.
DENSITY_AT = {"cross": "cross_attention", "encoder": "encoder_self_attention"}
CONTINUOUS = {f"continuous_{density}": density for density in DENSITIES}


def dropout_option(name: str, default: float, help: str) -> Option:
    """Return the option of a dropout probability."""
    requirement = "a number of at least 0 and below 1"
    return Option(
        name, default, float, requirement, lambda value: is_finite(value) and 0 <= value < 1, help
    )


def parse_widths(text: Any) -> tuple[float, ...]:
    """Return the numbers of a text such as "0.03,0.1"; () if one is not a finite number above 0."""
    try:
        widths = tuple(float(word) for word in text.split(","))
    except (AttributeError, ValueError):
        return ()
    return widths if all(is_finite(width) and width > 0 for width in widths) else ()


CONTINUOUS_OPTIONS = {
    option.name: option
    for option in (
        Option(
            DENSITY_AT["cross"],
            "discrete",
            help="attend to the source's tokens, or to the source as a function of time, by a "
            "Gaussian density (continuous_softmax) or a truncated parabola (continuous_sparsemax)",
            **chosen_from(("discrete", *CONTINUOUS)),
        ),
        Option(
            DENSITY_AT["encoder"],
            "discrete",
            help="the same for the encoder's self-attention",
            **chosen_from(("discrete", *CONTINUOUS)),
        ),
        Option(
            "continuous_context",
            "combined",
            help="combined: sum of discrete and continuous context; or the continuous one alone",
            **chosen_from(CONTEXTS),
        ),
        Option(
            "continuous_bases",
            30,
            int,
            "a whole number of at least 1",
            is_whole,
            help="number of Gaussian basis functions that represent a sentence",
        ),
        Option(
            "continuous_widths",
            "0.03,0.1,0.3",
            str,
            "finite numbers above 0 with commas between them, such as 0.03,0.1,0.3",
            lambda value: bool(parse_widths(value)),
            help="their standard deviations, for a sentence of length 1; each has the same number "
            "of functions, evenly spaced",
        ),
        Option(
            "continuous_ridge",
            0.1,
            float,
            "a finite number above 0",
            lambda value: is_finite(value) and value > 0,
            help="penalty of the ridge regression on the basis functions",
        ),
    )
}


def shared_options() -> dict[str, Option]:
    """Return the options that belong to no mapping."""
    options = (
        Option(
            "attention_normalizer",
            "multimax",
            help="mapping from attention scores to probabilities",
            remark=PLUGIN_REMARK,
            **chosen_from(tuple(NORMALIZERS)),
        ),
        Option(
            "attention_normalizer_at",
            ",".join(ATTENTIONS),
            str,
            "one text with commas between the attentions, as encoder,cross",
            lambda value: isinstance(value, str),
            help="comma-separated attentions that use it: encoder and decoder self-attention, "
            "cross-attention; cross=sparsemax gives one of them a mapping of its own; the "
            "others keep softmax; for softmax in all pass --attention-normalizer softmax",
        ),
        Option(
            "attention_gate",
            False,
            help="multiply each attention's context by a learned gate, a function of the query's "
            "hidden state",
            **yes_or_no(),
        ),
        Option(
            "output_normalizer",
            "multimax",
            help="mapping from logits to word probabilities; the sparse ones train with "
            "--criterion entmax_loss",
            remark=PLUGIN_REMARK,
            **chosen_from(output_names()),
        ),
        Option(
            "scalar_gradient_scale",
            None,
            float,
            "a finite number above 0",
            lambda value: value is None or is_finite(value) and value > 0,
            remark="with 1, only the gradients of the output layer's scalars are scaled",
            help="factor on the gradients of all learned scalars; those of the output layer are "
            "also multiplied by 1/sqrt(vocabulary size), so that they do not dominate the "
            "gradient norm that clipping reads",
        ),
        Option(
            "train_scalars_only",
            False,
            help="train the learned scalars of mappings alone and keep all other parameters, "
            "to fit them to a finished model of --finetune-from-model",
            **yes_or_no(),
        ),
        Option(
            "monitor_interval",
            None,
            int,
            "a whole number of at least 1, such as 100",
            lambda value: value is None or is_whole(value),
            remark="leave it out for no monitor",
            help="log statistics of attention and output layer every so many updates, to JSON "
            "lines, TensorBoard and the like",
        ),
    )
    return {option.name: option for option in options}


def cached_per_registry(make: Callable[[], Any]) -> Callable[[], Any]:
    """Cache the result of a function of the registry until the registry changes."""
    cached = functools.lru_cache(lambda names: make())
    return functools.wraps(make)(lambda: cached(tuple(NORMALIZERS)))


def _type_of(option: Option) -> Any:
    """Return the type of an option that argparse and hydra both know."""
    kind = ChoiceEnum(list(option.kind)) if isinstance(option.kind, tuple) else option.kind
    return Optional[kind] if option.default is None else kind  # noqa: UP045


def settings_class(
    name: str, doc: str, options: dict[str, Option], base: type, module: str = __name__
) -> Any:
    """Return a dataclass with these settings and those of its base."""
    fields = [
        (
            setting,
            _type_of(option),
            dataclasses.field(default=option.default, metadata={"help": option.help}),
        )
        for setting, option in options.items()
    ]
    namespace = {"__module__": module, "__doc__": doc}
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace=namespace)


@cached_per_registry
def normalizer_config() -> Any:
    """Return the dataclass of the flags that all models of this package have."""
    options = {**shared_options(), **mapping_options()}
    return settings_class("NormalizerConfig", "The flags of all models.", options, FairseqDataclass)


@cached_per_registry
def translation_config() -> Any:
    """Return the dataclass of the flags of encoder-decoder models."""
    doc = "The flags of encoder-decoder models."
    return settings_class("TranslationConfig", doc, CONTINUOUS_OPTIONS, normalizer_config())


@cached_per_registry
def settings() -> list[Any]:
    """Return the dataclass fields of all flags."""
    return [s for s in dataclasses.fields(translation_config()) if not s.name.startswith("_")]


# Settings that change training, but not the function of a trained model.
TRAINING_ONLY = {
    *("multimax_init_std", "scalar_gradient_scale", "train_scalars_only", "monitor_interval"),
}


def mapping_settings(args: Any) -> dict[str, Any]:
    """Return the settings that decide how a model maps its scores, from settings in any form."""
    values = args if isinstance(args, dict) else vars(as_namespace(args))
    names = (s.name for s in settings() if s.name in values and s.name not in TRAINING_ONLY)
    return {name: values[name] for name in names}


def as_namespace(args: Any) -> argparse.Namespace:
    """Return a model's settings as the flat namespace that fairseq's Transformers read."""
    if isinstance(args, DictConfig):
        values: Any = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
        return argparse.Namespace(**values)
    return args


def set_defaults(args: Any, **defaults: Any) -> None:
    """Fill in the settings that are missing: first the given ones, then those of the dataclass."""
    for setting in settings():
        defaults.setdefault(setting.name, setting.default)
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


def _options(args: Any, mapping: Mapping, *, of_output: bool = False) -> dict[str, Any]:
    """Return the options of a mapping, in attention or in the output layer."""
    options = (mapping.output_options or ()) if of_output else mapping.options
    return {option.name: getattr(args, mapping.setting_of(option)) for option in options}


def normalizer_names(args: Any) -> dict[str, str]:
    """Return {kind: name of its mapping} for all of `ATTENTIONS`."""
    return {**dict.fromkeys(ATTENTIONS, "softmax"), **named_normalizers(args)}


def named_normalizers(args: Any) -> dict[str, str]:
    """Return {kind: name of its mapping} for the attentions in --attention-normalizer-at."""
    names: dict[str, str] = {}
    for part in filter(str.strip, args.attention_normalizer_at.split(",")):
        kind, equals, own = (word.strip() for word in part.partition("="))
        for word, known in ((kind, ATTENTIONS), (own if equals else "softmax", tuple(NORMALIZERS))):
            if word not in known:
                raise UsageError(
                    f"--attention-normalizer-at {args.attention_normalizer_at} has the unknown "
                    f"{word!r}: choose from {', '.join(known)}"
                )
        if kind in names:
            raise UsageError(
                f"--attention-normalizer-at {args.attention_normalizer_at} names {kind} twice: "
                "name it once"
            )
        names[kind] = own or args.attention_normalizer
    return names


def build_normalizer(
    args: Any,
    name: str,
    num_heads: int | None = None,
    hidden_size: int | None = None,
    *,
    of_output: bool = False,
) -> Normalizer:
    """Return the `Normalizer` that the flags select; num_heads is None for the output layer.

    Its parameters are drawn from a fork of the random generator, so the other parameters and the
    dropout masks equal those of the stock model.
    """
    mapping = NORMALIZERS[name]
    heads = mapping.heads
    if isinstance(heads, Option):
        heads = getattr(args, mapping.setting_of(heads))
    with torch.random.fork_rng(devices=[]):
        options = _options(args, mapping, of_output=of_output)
        return Normalizer(
            name, num_heads if heads == SEPARATE_HEADS else None, hidden_size, **options
        )


def build_attention(
    args: Any, kind: str, num_heads: int, hidden_size: int, head_size: int
) -> AttentionModule:
    """Return the attention that the flags select for one of `ATTENTIONS`.

    Args:
        hidden_size: size of the hidden states that are projected to queries.
        head_size: size of each head's context.
    """
    attention: AttentionModule
    normalizer = build_normalizer(args, normalizer_names(args)[kind], num_heads, hidden_size)
    density = getattr(args, DENSITY_AT.get(kind, ""), "discrete")
    if density == "discrete":
        attention = normalizer
    else:
        attention = ContinuousAttention(
            normalizer,
            CONTINUOUS[density],
            args.continuous_context,
            num_bases=args.continuous_bases,
            widths=parse_widths(args.continuous_widths),
            ridge=args.continuous_ridge,
        )
    if args.attention_gate:
        with torch.random.fork_rng(devices=[]):
            attention = GatedAttention(attention, hidden_size, num_heads, head_size)
    return attention


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
