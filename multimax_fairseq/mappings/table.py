"""The table of mappings from scores to probabilities: an entry holds all that belongs to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Option:
    """An option of a mapping: a keyword of `Normalizer`, a flag, and a key in a YAML file.

    Attributes:
        name: the keyword.
        default: the value where none is given; None where there is no such value.
        kind: int, float or bool; or the words to choose from.
        must: what a right value is, in words: "a finite number above 0".
        is_right: whether a value is right.
        help: for --help, one line.
        remark: what else to tell whoever gave a wrong value: "1 is softmax"; of `Mapping.heads`,
            which attention of the mapping reads it: "whose alpha is learned".
        setting: its name among a model's settings, which makes the flag (--multimax-order for
            multimax_order); by default the mapping's name, an underscore and the option's.
    """

    name: str
    default: Any
    kind: type | tuple[str, ...]
    must: str
    is_right: Callable[[Any], bool]
    help: str
    remark: str = ""
    setting: str = ""

    def fits(self, value: Any) -> bool:
        """Return whether a value, of whatever type, is right."""
        try:
            return bool(self.is_right(value))
        except TypeError:  # "abc" > 0
            return False

    def check(self, value: Any, called: str = "") -> None:
        """Raise ValueError for a wrong value of the option, or of what is called otherwise."""
        if not self.fits(value):
            raise ValueError(f"{called or self.name} must be {self.must}, got {value!r}")


def chosen_from(words: tuple[str, ...]) -> dict[str, Any]:
    """Return kind, must and is_right of an option that is one of these words."""
    return {"kind": words, "must": f"one of {', '.join(words)}", "is_right": words.__contains__}


def yes_or_no() -> dict[str, Any]:
    """Return kind, must and is_right of an option that is true or false."""
    # A YAML file may give text, and any text is true to Python.
    return {
        "kind": bool,
        "must": "true or false",
        "is_right": lambda value: isinstance(value, bool),
    }


def heads_option(default: str, help: str, **more: Any) -> Option:
    """Return the option whether each head learns on its own, or the heads of a layer share."""
    return Option("heads", default, help=help, **chosen_from(("shared", "separate")), **more)


# Of `Mapping.heads`.
SEPARATE = "separate"


def _as_given(num_heads: int | None, **options: Any) -> dict[str, Any]:
    return options


@dataclass(frozen=True)
class Mapping:
    """A mapping from scores to probabilities, and all that belongs to it.

    Attributes:
        name: its key in `NORMALIZERS`, and what --attention-normalizer calls it.
        label: what figures call it.
        function: of (scores, dim, mask, **arguments), as the functions of `normalizers`.
        options: of `Normalizer` and the flags.
        heads: None, or by which option the heads of a layer share what is learned, or do not;
            SEPARATE where each head of a model learns on its own.
        build: of (num_heads, **options): the arguments of the function, by name. `num_heads` is
            None where heads share. A module among them is the normalizer's submodule of that name,
            trained with the model; it is called, without arguments, for the argument itself, but
            for one named `modulator`, which is a function of the scores and given as it is. A
            parameter has the heads in its first dimension, or no dimension. By default the options
            are the arguments.
        hidden: `build` takes `hidden_size` too, and its modules are called with the hidden states
            that the queries are projections of, (B, 1, T, hidden_size).
        training: the function has an argument of this name, and is told whether the model trains.
        sums_to_one: each row of it does, where not all is excluded and no sink is an argument.
        modulated: the mapping is softmax of `modulator(scores)`, or of the scores where `build`
            gives none. Then it may be an output layer that trains with cross-entropy.
        kernel: of the function's arguments: what else `fused_attention` is given for it, by name.
            None where no fused kernel serves it. It is not asked where hidden states are read.
        output_options: of the output layer; None where it cannot be one.
        output_loss: of (logits (N, V), targets (N,), **arguments): losses (N,), where the arguments
            are those of `build` that are no modules; what trains an output layer that is not
            `modulated`.
    """

    name: str
    label: str
    function: Callable[..., Tensor]
    options: tuple[Option, ...] = ()
    heads: Option | str | None = None
    build: Callable[..., dict[str, Any]] = _as_given
    hidden: bool = False
    training: bool = False
    sums_to_one: bool = True
    modulated: bool = False
    kernel: Callable[..., dict[str, Any]] | None = None
    output_options: tuple[Option, ...] | None = None
    output_loss: Callable[..., Tensor] | None = None

    def __call__(self, *args: Any, **arguments: Any) -> Tensor:
        """Return probabilities: the function's."""
        return self.function(*args, **arguments)

    def learns(self, **options: Any) -> bool:
        """Return whether something is learned with these options; False if they are wrong."""
        own = {option.name: option for option in self.options}
        if not all(own[name].fits(value) for name, value in options.items() if name in own):
            return False
        if self.hidden:
            options["hidden_size"] = 1
        try:
            with torch.random.fork_rng(devices=[]):
                arguments = self.build(None, **options)
        except ValueError:
            return False
        modules = [value for value in arguments.values() if isinstance(value, nn.Module)]
        return any(True for module in modules for _ in module.parameters())

    def for_kernel(self, **arguments: Any) -> dict[str, Any] | None:
        """Return what a fused kernel needs for these arguments; None where none serves them."""
        if self.kernel is None:
            return None
        try:
            return self.kernel(**arguments)
        except TypeError:  # an argument that it does not know: the function may
            return None

    def setting_of(self, option: Option) -> str:
        """Return the name of one of its options among a model's settings."""
        return option.setting or f"{self.name}_{option.name}"

    def complete(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the value of each option, as given or by default.

        Raises:
            TypeError: an option that no mapping has.
            ValueError: a wrong value; an option of another mapping, with a value that is not its
                default there.
        """
        own = {option.name: given.get(option.name, option.default) for option in self.options}
        for name in given.keys() - own.keys():
            others = [o for m in NORMALIZERS.values() for o in m.options if o.name == name]
            if not others:
                raise TypeError(f"no normalizer has an option {name!r}: {self._offer()}")
            if all(given[name] != option.default for option in others):
                raise ValueError(
                    f"the normalizer {self.name!r} does not take {name}={given[name]!r}: leave it "
                    f"out; {self._offer()}"
                )
        for option in self.options:
            option.check(own[option.name])
        return own

    def _offer(self) -> str:
        names = ", ".join(option.name for option in self.options)
        return f"the options of {self.name!r} are {names or 'none'}"


NORMALIZERS: dict[str, Mapping] = {}

# Who has read the table as a whole: a mapping that comes after has no flags.
_readers: list[str] = []


def register(mapping: Mapping) -> None:
    """Add a mapping to `NORMALIZERS`; it gets its flags, labels and all else from there.

    Raises:
        TypeError: no `Mapping`.
        ValueError: a name or setting that is taken or cannot be a flag; an output layer that
            nothing can train; a kernel that is no function; heads that are no Option, SEPARATE
            or None; it comes after the flags were made.
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"a mapping must be a Mapping, got {mapping!r}")
    if _readers:
        raise ValueError(
            f"the mapping {mapping.name!r} comes too late, as {_readers[0]} has made the flags: "
            "register it before that is imported"
        )
    taken = {s for known in NORMALIZERS.values() for s in (known.name, *settings_of(known))}
    for name in (mapping.name, *settings_of(mapping)):
        if not name.isidentifier() or name in taken:
            why = "is taken" if name in taken else "cannot be a flag"
            raise ValueError(f"the mapping's name or setting {name!r} {why}: choose another")
    if mapping.output_options is not None and not (mapping.modulated or mapping.output_loss):
        raise ValueError(
            f"the mapping {mapping.name!r} has output_options, and nothing trains it as an output "
            "layer: give an output_loss, or leave them out"
        )
    if mapping.kernel is not None and not callable(mapping.kernel):
        raise ValueError(
            f"the kernel of the mapping {mapping.name!r} must be a function of its arguments, got "
            f"{mapping.kernel!r}: leave it out"
        )
    if isinstance(mapping.heads, str) and mapping.heads != SEPARATE:
        raise ValueError(
            f"the heads of the mapping {mapping.name!r} must be an Option, SEPARATE or None, got "
            f"{mapping.heads!r}"
        )
    NORMALIZERS[mapping.name] = mapping


def settings_of(mapping: Mapping) -> dict[str, Option]:
    """Return the options of a mapping, by their names among a model's settings."""
    heads = (mapping.heads,) if isinstance(mapping.heads, Option) else ()
    options = (*mapping.options, *heads, *(mapping.output_options or ()))
    return {mapping.setting_of(option): option for option in options}


def all_mappings(reader: str) -> list[Mapping]:
    """Return the whole table, to which nothing can be added from here on."""
    _readers.append(reader)
    return list(NORMALIZERS.values())


def mapping_named(name: str) -> Mapping:
    """Return a named mapping; ValueError names the known ones."""
    if not isinstance(name, str) or name not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {name!r}: choose one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]


def normalize(
    name: str, scores: Tensor, dim: int = -1, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the probabilities of a named mapping.

    Equivalent to: NORMALIZERS[name](scores, dim=dim, mask=mask, **options)

    Args:
        name: a key of `NORMALIZERS`.
        scores, dim, mask: as `multimax`.
        options: what the mapping's function takes: `temperature` (softmax), `modulator`
            and `sink` (multimax), `k` (topk), `alpha` (alpha_entmax), `training` (evsoftmax,
            adaptive_temperature), `sink` (sink), `length_scale` (ssmax), `beta` and `gamma`
            (asentmax), `bias` (sigmoid).

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: an unknown name; as the mapping.
        TypeError: an option that the mapping does not take, or lacks.
    """
    return mapping_named(name).function(scores, dim=dim, mask=mask, **options)
