"""Refuses settings of a model that are invalid or have no effect."""

import argparse
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import DictConfig

from multimax_fairseq.compat import building_from_checkpoint
from multimax_fairseq.errors import UsageError, remedy_for
from multimax_fairseq.mappings.registry import NORMALIZERS, Option, settings_of
from multimax_fairseq.models.config import (
    ATTENTIONS,
    CONTINUOUS_OPTIONS,
    DENSITY_AT,
    flag,
    mapping_options,
    named_normalizers,
    normalizer_names,
    parse_widths,
    set_defaults,
    settings,
    shared_options,
    translation_config,
)

logger = logging.getLogger(__name__)


def check_settings(args: Any, attentions: Sequence[str] = ATTENTIONS) -> None:
    """Raise UsageError for an option that is invalid, or that no mapping of the model reads.

    Earlier versions saved checkpoints with options that nothing reads: they load, with a warning.

    Args:
        attentions: those of `ATTENTIONS` that the model has.
    """
    for name, option in shared_options().items():
        check_option(args, name, option)
    if args.output_normalizer != "softmax" and getattr(args, "adaptive_softmax_cutoff", None):
        raise UsageError(
            f"--output-normalizer {args.output_normalizer} cannot act inside the adaptive softmax "
            "of --adaptive-softmax-cutoff: add --output-normalizer softmax or leave the cutoff out"
        )
    read = _read_settings(args, attentions)
    options = {**mapping_options(), **CONTINUOUS_OPTIONS}
    for name in sorted(read):
        check_option(args, name, options[name])
    if "continuous_bases" in read:
        count = len(parse_widths(args.continuous_widths))
        if args.continuous_bases % count:
            raise UsageError(
                f"--continuous-bases {args.continuous_bases} must be a multiple of {count}, the "
                "number of --continuous-widths"
            )
    for fact, remedy in _without_effect(args, read, attentions):
        if not building_from_checkpoint():
            raise UsageError(f"{fact}: {remedy}")
        logger.warning("one of the checkpoint's settings does nothing: %s", fact)


def check_option(args: Any, name: str, option: Option) -> None:
    """Raise UsageError for a setting with an invalid value."""
    value = getattr(args, name, option.default)
    if option.accepts(value):
        return
    if value is None and name in mapping_options():
        raise UsageError(f"{_owner(name)[1]} needs {flag(name)}: pass {option.requirement}")
    remark = f": {option.remark}" if option.remark else ""
    raise UsageError(f"{flag(name)} {value} must be {option.requirement}{remark}")


def check_heads(args: Any) -> None:
    """Raise UsageError where the number of heads does not divide the width."""
    for side in ("encoder", "decoder"):
        width = getattr(args, f"{side}_embed_dim", None)
        heads = getattr(args, f"{side}_attention_heads", None)
        if width is not None and heads is not None and (heads < 1 or width % heads):
            raise UsageError(
                f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {width}: "
                "choose a number of heads that does"
            )


def check_keys(args: DictConfig, known: set[str]) -> None:
    """Raise UsageError for a misspelt key of a YAML file, which nothing would read."""
    for key in args:
        if key not in known and not str(key).startswith("_") and key != "arch":
            raise UsageError(f"the model has no setting {key!r}: {remedy_for(str(key), known)}")


def _read_settings(args: Any, attentions: Sequence[str]) -> set[str]:
    """Return the options that the model's mappings and densities read."""
    read = {name for kind, name in DENSITY_AT.items() if kind in attentions}
    if any(getattr(args, name) != "discrete" for name in read):
        read |= CONTINUOUS_OPTIONS.keys() - DENSITY_AT.values()
    by_kind = normalizer_names(args)
    for mapping in (NORMALIZERS[by_kind[kind]] for kind in attentions):
        read |= {mapping.setting_of(option) for option in mapping.attention_options}
    output = NORMALIZERS[args.output_normalizer]
    return read | {output.setting_of(option) for option in output.output_options or ()}


def _without_effect(
    args: Any, read: set[str], attentions: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (fact, remedy) for each setting of the user that has no effect."""
    changed = _changed_settings(args)
    at = f"--attention-normalizer-at {args.attention_normalizer_at!r}"
    by_kind = normalizer_names(args)
    used = {by_kind[kind] for kind in attentions}
    if "attention_normalizer" in changed and args.attention_normalizer not in used:
        fact = f"--attention-normalizer {args.attention_normalizer} acts nowhere, as {at}"
        yield fact, f"name some of {', '.join(attentions)} there"
    for name in sorted(changed & (mapping_options().keys() | CONTINUOUS_OPTIONS.keys()) - read):
        owner, remedy = _owner(name)
        value = getattr(args, name)
        shown = flag(name) if value is True else f"{flag(name)} {value}"
        fact = f"{shown} belongs to {owner}, which this model does not have"
        yield fact, f"leave it out, or use {remedy}"
    if "attention_normalizer_at" in changed:
        for kind in sorted(named_normalizers(args).keys() - set(attentions)):
            fact = f"{at} names {kind}, which this model does not have"
            yield fact, f"name some of {', '.join(attentions)}, or leave it out"


def _owner(name: str) -> tuple[str, str]:
    """Return what reads an option, and the flag that chooses it."""
    if name in DENSITY_AT.values():
        return name.replace("_", " "), "an architecture that has it"
    if name in CONTINUOUS_OPTIONS:
        return "continuous attention", "--cross-attention continuous_sparsemax"
    mapping = next(mapping for mapping in NORMALIZERS.values() if name in settings_of(mapping))
    if name in map(mapping.setting_of, mapping.attention_options):
        return f"{mapping.name} attention", f"--attention-normalizer {mapping.name}"
    return f"{mapping.name} output layer", f"--output-normalizer {mapping.name}"


def _changed_settings(args: Any) -> set[str]:
    """Return the settings that differ both from the defaults and from the architecture's."""
    names = [setting.name for setting in settings()]
    arch_defaults = argparse.Namespace(**{k: v for k, v in vars(args).items() if k not in names})
    arch = getattr(args, "_name", None) or getattr(args, "arch", None)
    if arch in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[arch](arch_defaults)
    set_defaults(arch_defaults)
    defaults = vars(translation_config()())
    return {
        name
        for name in names
        if getattr(args, name, defaults[name]) not in (getattr(arch_defaults, name), defaults[name])
    }
