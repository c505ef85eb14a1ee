"""Compose fairseq's configuration from a copy of the default one, in a fifth of the time.

fairseq has hydra parse 260 options by a grammar and compose 17 files whenever a command starts.
"""

import contextlib
import copy
import functools
from pathlib import Path

import hydra
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

FAIRSEQS = {name: getattr(utils, name) for name in ("compose", "initialize")}
FOLDER = Path(utils.__file__).parents[1] / "config"


@functools.cache
def default():
    with hydra.initialize_config_dir(str(FOLDER), version_base="1.1"):
        return hydra.compose("config")


@functools.cache
def parsed(text):
    return OverridesParser.create().parse_overrides([text])[0]


def compose(_, overrides, strict):
    """Return what hydra.compose returns."""
    cfg, values = copy.deepcopy(default()), []
    for override in map(parsed, overrides):
        group = override.key_or_group
        if "." in group:
            values.append(override)
        else:
            cfg[group] = ConfigStore.instance().load(f"{group}/{override.value()}.yaml").node
    OmegaConf.set_struct(cfg, True)
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    OmegaConf.set_struct(cfg, strict)
    return cfg


utils.compose, utils.initialize = compose, lambda config_path: contextlib.nullcontext()
