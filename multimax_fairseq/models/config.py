"""The flags, for argparse and hydra alike, and their checks."""

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import DictConfig, OmegaConf
from torch import nn

from multimax_fairseq.compat import building_from_checkpoint
from multimax_fairseq.errors import UsageError, remedy_for
from multimax_fairseq.mappings.table import (
    SEPARATE,
    Mapping,
    Option,
    all_mappings,
    chosen_from,
    settings_of,
)
from multimax_fairseq.modules import ContinuousAttention, GatedAttention, Normalizer
from multimax_fairseq.modules.continuous_attention import CONTEXTS, DENSITIES
from multimax_fairseq.ops.backend import requested
from multimax_fairseq.ops.checks import is_finite, is_whole

logger = logging.getLogger(__name__)

PLACES = ("encoder", "decoder", "cross")
MAPPINGS = {mapping.name: mapping for mapping in all_mappings("multimax_fairseq.models")}
OUTPUTS = tuple(name for name, mapping in MAPPINGS.items() if mapping.output_options is not None)
# The options of all mappings, by their names among a model's settings.
OPTIONS = {
    name: option for mapping in MAPPINGS.values() for name, option in settings_of(mapping).items()
}

# Only where all keys are there from the start can attention be to a function of time.
DENSITY_AT = {"cross": "cross_attention", "encoder": "encoder_self_attention"}
CONTINUOUS = {f"continuous_{density}": density for density in DENSITIES}


# Settings of fairseq's own Transformers that are shares of what is computed.
SHARES = ("dropout", "attention_dropout", "activation_dropout", "adaptive_softmax_dropout")


def share_option(name: str, default: float = 0.0, help: str = "") -> Option:
    """Return an option that is a probability of dropping."""
    must = "a number of at least 0 and below 1"
    return Option(
        name, default, float, must, lambda value: is_finite(value) and 0 <= value < 1, help
    )


def _widths(text: Any) -> tuple[float, ...]:
    """Return the widths that a text lists; none where it lists anything else."""
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
            help="the same of the encoder's self-attention",
            **chosen_from(("discrete", *CONTINUOUS)),
        ),
        Option(
            "continuous_context",
            "combined",
            help="the sum of discrete and continuous context, or the continuous one alone",
            **chosen_from(CONTEXTS),
        ),
        Option(
            "continuous_bases",
            30,
            int,
            "a whole number of at least 1",
            is_whole,
            help="number of Gaussian basis functions that a sentence is a sum of",
        ),
        Option(
            "continuous_widths",
            "0.03,0.1,0.3",
            str,
            "finite numbers above 0 with commas between them, such as 0.03,0.1,0.3",
            lambda value: bool(_widths(value)),
            help="their standard deviations, a sentence being 1 long; each has as many, at even "
            "distances",
        ),
        Option(
            "continuous_ridge",
            0.1,
            float,
            "a finite number above 0",
            lambda value: is_finite(value) and value > 0,
            help="penalty of the ridge regression on them",
        ),
    )
}


@dataclass
class _SharedSettings(FairseqDataclass):
    """The settings that no mapping owns."""

    attention_normalizer: ChoiceEnum(list(MAPPINGS)) = field(  # type: ignore[valid-type]
        default="multimax", metadata={"help": "mapping from attention scores to probabilities"}
    )
    attention_normalizer_at: str = field(
        default=",".join(PLACES),
        metadata={
            "help": "comma-separated attentions that get it: encoder and decoder self-attention, "
            "cross-attention; one with a normalizer of its own as cross=sparsemax; the others "
            "keep softmax, and for softmax in all give --attention-normalizer softmax"
        },
    )
    attention_gate: bool = field(
        default=False,
        metadata={
            "help": "multiply what each attention finds by a learned gate of the query's state"
        },
    )
    output_normalizer: ChoiceEnum(list(OUTPUTS)) = field(  # type: ignore[valid-type]
        default="multimax",
        metadata={
            "help": "mapping from logits to word probabilities; the sparse ones train with "
            "--criterion entmax_loss"
        },
    )
    scalar_gradient_scale: Optional[float] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "factor on the gradients of all learned scalars; those of the output layer are "
            "also multiplied by 1/sqrt(vocabulary), so that clipping does not slow the model for "
            "them"
        },
    )
    monitor_interval: Optional[int] = field(  # noqa: UP045
        default=None,
        metadata={
            "help": "log what attention and output layer do in every so many updates, to JSON "
            "lines, TensorBoard and the like"
        },
    )


def _type_of(option: Option) -> Any:
    """Return a type that argparse and hydra both know by the option's kind."""
    kind = ChoiceEnum(list(option.kind)) if isinstance(option.kind, tuple) else option.kind
    return Optional[kind] if option.default is None else kind  # noqa: UP045


def settings_class(
    name: str, doc: str, options: dict[str, Option], base: type, module: str = __name__
) -> Any:
    """Return a dataclass of a module with these settings besides those of its base."""
    fields = [
        (
            setting,
            _type_of(option),
            field(default=option.default, metadata={"help": option.help}),
        )
        for setting, option in options.items()
    ]
    namespace = {"__module__": module, "__doc__": doc}
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace=namespace)


NormalizerConfig = settings_class(
    "NormalizerConfig", "The flags of all models of this package.", OPTIONS, _SharedSettings
)
TranslationConfig = settings_class(
    "TranslationConfig", "And of those with a source.", CONTINUOUS_OPTIONS, NormalizerConfig
)
DEFAULTS = TranslationConfig()
SETTINGS = [
    setting for setting in dataclasses.fields(TranslationConfig) if not setting.name.startswith("_")
]

# Those without which a trained model is the same.
OF_TRAINING = {"multimax_init_std", "scalar_gradient_scale", "monitor_interval"}


def mapping_settings(settings: Any) -> dict[str, Any]:
    """Return those of a model's settings, in any form, that decide how it maps its scores."""
    given = settings if isinstance(settings, dict) else vars(as_namespace(settings))
    names = (s.name for s in SETTINGS if s.name in given and s.name not in OF_TRAINING)
    return {name: given[name] for name in names}


def as_namespace(args: Any) -> argparse.Namespace:
    """Return a model's settings as the flat namespace that fairseq's Transformers read."""
    if isinstance(args, DictConfig):
        settings: Any = OmegaConf.to_container(args, resolve=True, enum_to_str=True)
        return argparse.Namespace(**settings)
    return args


def set_defaults(args: Any, **defaults: Any) -> None:
    """Fill in the settings that are missing: first the given ones, then those of the dataclass."""
    for setting in SETTINGS:
        defaults.setdefault(setting.name, setting.default)
    for name, value in defaults.items():
        setattr(args, name, getattr(args, name, value))


def check_settings(args: Any, attentions: Sequence[str] = PLACES) -> None:
    """Raise UsageError, in one sentence, for settings that cannot work together.

    A setting that does nothing is refused too, but in a checkpoint's model: earlier versions let
    it pass, and their checkpoints are to load, so that it is logged as a warning there.

    Args:
        attentions: those of `PLACES` that the model has.
    """
    for name, choices in (
        ("attention_normalizer", tuple(MAPPINGS)),
        ("output_normalizer", OUTPUTS),
    ):
        value = getattr(args, name)
        if value not in choices:
            raise UsageError(
                f"{flag(name)} {value} is not known: choose one of {', '.join(choices)}, or give "
                "the --user-dir that adds it"
            )
    if not isinstance(args.attention_gate, bool):  # a YAML file's text
        raise UsageError(f"attention_gate {args.attention_gate!r} must be true or false")
    try:
        requested()
    except ValueError as error:
        raise UsageError(str(error)) from None
    idle = _idle(args, attentions)
    _refuse_idle(args, idle, attentions)
    for name, option in {**OPTIONS, **CONTINUOUS_OPTIONS}.items():
        if name not in idle:
            check_option(args, name, option)
    is_continuous = "continuous_bases" not in idle
    if is_continuous and args.continuous_bases % len(_widths(args.continuous_widths)):
        raise UsageError(
            f"--continuous-bases {args.continuous_bases} must be a multiple of the number of "
            f"--continuous-widths {args.continuous_widths}"
        )
    scale = args.scalar_gradient_scale
    if "scalar_gradient_scale" not in idle and not (
        scale is None or is_finite(scale) and scale > 0
    ):
        raise UsageError(
            f"{_shown(args, 'scalar_gradient_scale')} must be a finite number above 0: 1 scales "
            "the output layer's alone"
        )
    if not (args.monitor_interval is None or is_whole(args.monitor_interval)):
        raise UsageError(
            f"{_shown(args, 'monitor_interval')} must be a whole number of at least 1, such as "
            "100: leave it out for no monitor"
        )
    if args.output_normalizer != "softmax" and getattr(args, "adaptive_softmax_cutoff", None):
        raise UsageError(
            f"--output-normalizer {args.output_normalizer} cannot act inside the adaptive softmax "
            "of --adaptive-softmax-cutoff: add --output-normalizer softmax or leave the cutoff out"
        )


def check_transformer(args: Any, task: Any) -> None:
    """Raise UsageError for settings of fairseq's own Transformers that cannot work."""
    for side in ("encoder", "decoder"):
        width = getattr(args, f"{side}_embed_dim", None)
        heads = getattr(args, f"{side}_attention_heads", None)
        if width is not None and heads is not None and (heads < 1 or width % heads):
            raise UsageError(
                f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {width}: "
                "choose a number of heads that does"
            )
    if building_from_checkpoint():  # such a model was built before
        return
    for side in ("encoder", "decoder"):
        layers = getattr(args, f"{side}_layers", 0)
        if not is_whole(layers, least=0):
            raise UsageError(f"--{side}-layers {layers} must be a whole number of at least 0")
    distributed = torch.distributed
    is_one = not (distributed.is_available() and distributed.is_initialized())
    if is_one and getattr(args, "base_layers", None):
        raise UsageError(
            f"--base-layers {args.base_layers} shares layers among processes, and this is one: "
            "train on several GPUs, or leave it out"
        )
    for name in SHARES:
        if hasattr(args, name):
            check_option(args, name, share_option(name))
    for name in ("adaptive_softmax_cutoff", "adaptive_input_cutoff"):
        # A list, or a text that lists the same.
        text = str(getattr(args, name, None) or "").strip("[]").replace(" ", "")
        words = len(task.target_dictionary)
        if text and not _is_cutoff(text, words):
            raise UsageError(
                f"{flag(name)} {text} must be increasing numbers of words, at most the "
                f"dictionary's {words}, such as {words // 10},{words // 2}"
            )


def _is_cutoff(text: str, words: int) -> bool:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        return False
    return 0 < numbers[0] and numbers == sorted(set(numbers)) and numbers[-1] <= words


def check_tied(args: Any, width: str) -> None:
    """Raise UsageError where the output layer cannot have the decoder's embeddings as asked.

    Args:
        width: the setting of the embeddings' width.
    """
    name = "share_all_embeddings"
    if not getattr(args, name, False):
        name = "share_decoder_input_output_embed"
    if not getattr(args, name) or args.adaptive_softmax_cutoff:
        return
    inner, outer = getattr(args, width), args.decoder_output_dim
    if inner != outer:
        raise UsageError(
            f"{flag(name)} needs one width, got {flag(width)} {inner} and --decoder-output-dim "
            f"{outer}: make them equal"
        )
    for other in ("character_embeddings", "adaptive_input"):
        if getattr(args, other, False):
            raise UsageError(
                f"{flag(name)} needs an embedding that is one matrix, which {flag(other)} does not "
                "have: leave one of them out"
            )


def check_option(args: Any, name: str, option: Option) -> None:
    """Raise UsageError for a setting that is not what its option must be."""
    value = getattr(args, name, option.default)
    if option.fits(value):
        return
    if value is None:
        for owner, mapping in MAPPINGS.items():
            if name in settings_of(mapping):
                raise UsageError(f"the normalizer {owner} needs {flag(name)}: give {option.must}")
    remark = f": {option.remark}" if option.remark else ""
    raise UsageError(f"{flag(name)} {value} must be {option.must}{remark}")


def _refuse_idle(args: Any, idle: dict[str, tuple[str, str]], attentions: Sequence[str]) -> None:
    """Refuse the settings that somebody gave and that do nothing; of a checkpoint, name them."""
    usual = _usual(args)

    def given(name: str) -> bool:
        # argparse does not tell a default that was typed from one that was not.
        default = getattr(DEFAULTS, name)
        return getattr(args, name, default) not in (getattr(usual, name), default)

    wrong = []
    named, chosen = _named(args), places(args)
    listed = [part.partition("=")[0].strip() for part in args.attention_normalizer_at.split(",")]
    is_asked = given("attention_normalizer_at")
    if is_asked:
        asked = f"--attention-normalizer-at {args.attention_normalizer_at!r}"
        if not named:
            fact = f"{asked} names no attention"
            wrong.append((fact, f"name some of {', '.join(attentions)}, or leave it out"))
        for place in sorted({place for place in named if listed.count(place) > 1}):
            wrong.append((f"{asked} names {place} twice", "name it once"))
    unused = args.attention_normalizer not in [chosen[place] for place in attentions]
    # Where all that are named have a normalizer of their own, nobody meant the default to act.
    if unused and (given("attention_normalizer") or not named.keys() & set(attentions)):
        fact = (
            f"{_shown(args, 'attention_normalizer')} acts nowhere, as --attention-normalizer-at "
            f"{args.attention_normalizer_at!r} gives it to none of {', '.join(attentions)}"
        )
        wrong.append((fact, "name one of these there, or give --attention-normalizer softmax"))
    for name, (owner, remedy) in idle.items():
        if given(name):
            fact = f"{_shown(args, name)} belongs to {owner}, which this model does not have"
            wrong.append((fact, f"leave it out, or give {remedy}"))
    if is_asked:
        for place in sorted(named.keys() - set(attentions)):
            fact = f"{asked} names {place}, which this model does not have"
            wrong.append((fact, f"name some of {', '.join(attentions)}, or leave it out"))
    for fact, remedy in wrong:
        if not building_from_checkpoint():
            raise UsageError(f"{fact}: {remedy}")
        logger.warning("one of the checkpoint's settings does nothing: %s", fact)


def _idle(args: Any, attentions: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return (what it belongs to, how to get that) for each setting that does nothing here."""
    chosen = places(args)
    used, output = {chosen[place] for place in attentions}, args.output_normalizer
    found: dict[str, tuple[str, str]] = {}
    something_learned = False
    for name, mapping in MAPPINGS.items():
        of_output = mapping.output_options or ()
        for option in (*mapping.options, *of_output):
            kinds = {"attention": option in mapping.options, "output layer": option in of_output}
            acts = kinds["attention"] and name in used or kinds["output layer"] and name == output
            if not acts:
                flag_word = "attention" if kinds["attention"] else "output"
                owner = f"{name} {' or '.join(kind for kind, has in kinds.items() if has)}"
                found[mapping.setting_of(option)] = (owner, f"--{flag_word}-normalizer {name}")
        learns = mapping.learns(**_options(args, mapping))
        if not mapping.hidden:  # which learns matrices
            something_learned |= learns and (name in used or name == output and mapping.modulated)
        if isinstance(mapping.heads, Option) and not (learns and name in used):
            fixed = [
                flag(mapping.setting_of(option))
                for option in mapping.options
                if not learns and _options(args, mapping)[option.name] != option.default
            ]
            remedy = " without ".join([f"--attention-normalizer {name}", *fixed])
            owner = f"{name} attention {mapping.heads.remark}".strip()
            found[mapping.setting_of(mapping.heads)] = (owner, remedy)
    if not something_learned:
        found["scalar_gradient_scale"] = (
            "learned scalars",
            "a normalizer that learns some, such as --attention-normalizer multimax",
        )
    is_discrete = True
    for place, name in DENSITY_AT.items():
        if place not in attentions:
            found[name] = (name.replace("_", " "), "an architecture that has it")
        elif getattr(args, name, "discrete") != "discrete":
            is_discrete = False
    if is_discrete:
        for name in CONTINUOUS_OPTIONS.keys() - DENSITY_AT.values():
            found[name] = ("continuous attention", "--cross-attention continuous_sparsemax")
    return found


def _options(args: Any, mapping: Mapping, *, of_output: bool = False) -> dict[str, Any]:
    """Return the options of a mapping, in attention or in the output layer, as the settings say."""
    options = (mapping.output_options or ()) if of_output else mapping.options
    return {option.name: getattr(args, mapping.setting_of(option)) for option in options}


def _usual(args: Any) -> argparse.Namespace:
    """Return the settings as they are where nobody gives any: what an architecture of a user's own
    sets is no mistake of whoever trains it."""
    names = {setting.name for setting in SETTINGS}
    usual = argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in names})
    name = getattr(args, "_name", None) or getattr(args, "arch", None)
    if name in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[name](usual)
    set_defaults(usual)
    return usual


def check_keys(args: DictConfig, known: set[str]) -> None:
    """Raise UsageError for a key that nothing would read, which is a slip of the pen."""
    for key in args:
        if key not in known and not str(key).startswith("_") and key != "arch":
            raise UsageError(f"the model has no setting {key!r}: {remedy_for(str(key), known)}")


def places(args: Any) -> dict[str, str]:
    """Return the normalizer of each attention."""
    return {**dict.fromkeys(PLACES, "softmax"), **_named(args)}


def _named(args: Any) -> dict[str, str]:
    """Return the normalizer of each attention that --attention-normalizer-at names."""
    chosen: dict[str, str] = {}
    if not isinstance(args.attention_normalizer_at, str):  # a YAML file's list
        raise UsageError(
            f"--attention-normalizer-at {args.attention_normalizer_at} must be one text: write the "
            "attentions with commas between them, as encoder,cross"
        )
    for part in args.attention_normalizer_at.split(","):
        place, equals, own = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        for word, known in ((place, PLACES), (own if equals else "softmax", tuple(MAPPINGS))):
            if word not in known:
                raise UsageError(
                    f"--attention-normalizer-at {args.attention_normalizer_at} has the unknown "
                    f"{word!r}: choose from {', '.join(known)}"
                )
        chosen[place] = own or args.attention_normalizer
    return chosen


def build_normalizer(
    args: Any,
    name: str,
    num_heads: int | None = None,
    hidden_size: int | None = None,
    *,
    of_output: bool = False,
) -> Normalizer:
    """Return the normalizer that the flags ask for; num_heads None has no heads to tell apart.

    Drawn from a fork of the random generator, so that all other parameters, and dropout after
    them, are those of the stock model.
    """
    mapping = MAPPINGS[name]
    heads = mapping.heads
    if isinstance(heads, Option):
        heads = getattr(args, mapping.setting_of(heads))
    with torch.random.fork_rng(devices=[]):
        options = _options(args, mapping, of_output=of_output)
        return Normalizer(name, num_heads if heads == SEPARATE else None, hidden_size, **options)


def build_attention(
    args: Any, place: str, num_heads: int, hidden_size: int, head_size: int
) -> nn.Module:
    """Return the module with `attend` that the flags ask for at one of `PLACES`.

    Args:
        hidden_size: of the states that the queries are projections of.
        head_size: of each head's context.
    """
    attention: nn.Module
    normalizer = build_normalizer(args, places(args)[place], num_heads, hidden_size)
    chosen = getattr(args, DENSITY_AT.get(place, ""), "discrete")
    if chosen == "discrete":
        attention = normalizer
    else:
        attention = ContinuousAttention(
            normalizer,
            CONTINUOUS[chosen],
            args.continuous_context,
            num_bases=args.continuous_bases,
            widths=_widths(args.continuous_widths),
            ridge=args.continuous_ridge,
        )
    if args.attention_gate:
        with torch.random.fork_rng(devices=[]):
            attention = GatedAttention(attention, hidden_size, num_heads, head_size)
    return attention


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(args: Any, name: str) -> str:
    """Return a setting as it is written on the command line."""
    value = getattr(args, name)
    return flag(name) if value is True else f"{flag(name)} {value}"
