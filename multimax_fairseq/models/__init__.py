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

beam_search.faster_generation()
quantize.quantized_generation()
