"""The kernels as operators of torch: torch.ops.multimax_fairseq.modulate, .tails, .attention,
.attention_step, .output_loss, .output_scores, .best_scores, .best_outputs and .dropout, each with
its checks, its fake form, its gradient and its rule for autocast.

On the CPU they are C++ (or Triton's, where TRITON_INTERPRET=1 has it interpreted), on a GPU Triton.
They serve float32, float16 and bfloat16 and refuse what they cannot take; that plain PyTorch takes
it instead is for `functional` to decide. Defined at the lower level of torch.library: the wrappers
of the higher one cost more than a decoding step's attention.

A `table` is (1 or heads, 8) float32, a modulator's parameters in the order of
`functional.modulator.pack`, or (1 or heads, 12) with the tails of a monotone one.
"""

from multimax_fairseq.kernels.operators.attend import (
    STEP_SIZES,
    attention,
    attention_backward,
    attention_step,
    serves,
)
from multimax_fairseq.kernels.operators.definition import (
    DTYPES,
    MAX_DROPOUT,
    capability,
    check_device,
    differentiable_once,
    interpreted,
    needs_gradient,
    on_triton,
    traced,
    transformed,
)
from multimax_fairseq.kernels.operators.drop import dropout
from multimax_fairseq.kernels.operators.modulator import (
    modulate,
    modulate_backward,
    tails,
)
from multimax_fairseq.kernels.operators.output import (
    OutputLoss,
    best_outputs,
    best_scores,
    mixed,
    output_loss,
    output_loss_parts,
    output_scores,
)

__all__ = [
    "DTYPES",
    "MAX_DROPOUT",
    "STEP_SIZES",
    "OutputLoss",
    "attention",
    "attention_backward",
    "attention_step",
    "best_outputs",
    "best_scores",
    "capability",
    "check_device",
    "differentiable_once",
    "dropout",
    "interpreted",
    "mixed",
    "modulate",
    "modulate_backward",
    "needs_gradient",
    "on_triton",
    "output_loss",
    "output_loss_parts",
    "output_scores",
    "serves",
    "tails",
    "traced",
    "transformed",
]
