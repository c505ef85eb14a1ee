"""The models. fairseq imports this package under `--user-dir`, which registers everything."""

from multimax_fairseq import compat

compat.apply()

from multimax_fairseq import criterions, optim  # noqa: E402, F401
from multimax_fairseq.models import (  # noqa: E402, F401
    beam_search,
    quantize,
    rnn_multimax,
    transformer_lm_multimax,
    transformer_multimax,
)

compat.on_build_generator(beam_search.build_generator)
compat.on_generation_flags(quantize.add_generation_args)
compat.on_settings_of_flags(quantize.override_module_args)
compat.on_prepare_for_inference(quantize.prepare_for_inference)
