"""The kernels compiled ahead of time for two GPUs, which needs no GPU."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from multimax_fairseq.ops.row_function import FUNCTIONS, ON_TRITON, WITH_PARAMETER

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

# The most that every GPU of these compute capabilities, 8.x and 9.0, offers a program.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
FLOAT32 = set(
    "TOTAL PARAMETERS SINK DELTA NORM SUMS MEANS FACTORS NLL LOSS PARAMETERS_GRAD".split()
)
FLOAT32 |= set("STATISTICS PARAMETER MEAN GRAD_PARAMETER".split())


def build_kernel(kernel, capability, element, arguments, **types):
    """Compile with these constants, everything else as a launch would pass it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = dict(arguments)
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in arguments:
            signature[name], constants[(index,)] = "constexpr", arguments[name]
        elif name.isupper() and len(name) > 1 or name in "QKV":
            signature[name] = types.get(name, "*fp32" if name in FLOAT32 else f"*{element}")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            floating = name in ("scale", "keep_scale") or name.endswith("_weight")
            signature[name] = "fp32" if floating else "i32"
            if name[-2:] in ("_b", "_h", "_n") and name != "t_h":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    # Some versions of the compiler spill a register or two before the loop, which costs nothing.
    assert count_spills(compiled.asm["cubin"]) <= 8


def count_spills(program):
    """The instructions of a compiled program that load or store spilled registers."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        words = [tool, "-sass", file.name]
        code = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "EXIT" in code
    return len(re.findall(r"\b(LDL|STL)\b", code))


@pytest.mark.parametrize(
    "capability, element, size, orders, masking, causal, dropout, columns",
    [
        (90, "bf16", 64, (2, 2), 0, True, False, 12),
        (90, "bf16", 64, (0, 0), 0, True, False, 3),
        (80, "fp16", 128, (0, 0), 4, True, False, 0),
        (80, "fp32", 32, (1, 2), 1, False, True, 8),
    ],
)
def test_attention_kernels_fit_shared_memory(
    capability, element, size, orders, masking, causal, dropout, columns
):
    import multimax_fairseq.ops.triton.attention_kernels as kernels
    from multimax_fairseq.ops.triton.launches import Call, candidates

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[element]
    summed, normed = columns > 0, element == "fp32" or masking > 2
    arguments = {"D": size, "WIDTH": 1 << (size - 1).bit_length(), "CAP": 2 * (element != "fp16")}
    arguments |= {"LOW": orders[0], "HIGH": orders[1], "MASKING": masking, "COLUMNS": columns}
    arguments |= {"CAUSAL": causal, "DROPOUT": dropout}
    arguments |= ({} if masking else {"MASK": None}) | ({} if summed else {"PARAMETERS": None})
    later = {"NORMED": normed} | ({} if normed else {"NORM": None})
    sinks = {"SINKS": dropout} | ({} if dropout else {"SINK": None})
    for name, constants in (
        ("forward_kernel", sinks),
        ("mean_kernel", sinks | {"EXACT": element == "fp32"}),
        ("query_kernel", later | {"SUMMED": summed, "SINKS": dropout}),
        ("key_kernel", later),
    ):
        if name == "mean_kernel" and not normed:
            continue
        types = {"MASK": "*fp32" if masking > 2 else "*u8"}
        for launch in candidates(Call(name, dtype, arguments["WIDTH"], True), capability):
            chosen = arguments | constants | launch.arguments()
            build_kernel(getattr(kernels, name), capability, element, chosen, **types)


@pytest.mark.parametrize(
    "function, capability, element, size, masking, causal, dropout",
    [
        ("alpha_entmax", 80, "fp16", 128, 1, False, False),
        ("topk", 80, "fp32", 32, 4, True, False),
        *(
            (function, 90, "bf16", 64, 0, True, True)
            for function in ON_TRITON
            if function not in ("alpha_entmax", "topk")
        ),
    ],
)
def test_row_kernels_fit_shared_memory(
    function, capability, element, size, masking, causal, dropout
):
    import multimax_fairseq.ops.triton.row_kernels as kernels
    from multimax_fairseq.ops.triton.row_attention import launch_of

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[element]
    arguments = {"D": size, "WIDTH": size, "FUNCTION": FUNCTIONS.index(function)}
    arguments |= {"MASKING": masking, "CAUSAL": causal, "DROPOUT": dropout}
    arguments |= {} if masking else {"MASK": None}
    arguments |= {} if function in WITH_PARAMETER else {"PARAMETER": None}
    types = {"MASK": "*fp32" if masking > 2 else "*u8"}
    # The backward kernels of the other functions differ only by `_gradient`.
    rest = ("row_query_kernel", "row_key_kernel") if capability == 80 else ()
    for name in ("row_forward_kernel", *rest):
        launch = launch_of(dtype, size, capability).arguments()
        del launch["STAGES"]
        build_kernel(getattr(kernels, name), capability, element, arguments | launch, **types)


@pytest.mark.parametrize(
    "capability, element, columns", [(90, "bf16", 12), (80, "fp32", 12), (90, "bf16", 3)]
)
def test_cross_entropy_kernel_fits_shared_memory(capability, element, columns):
    import multimax_fairseq.ops.triton.cross_entropy as kernels

    arguments = {"ORDER": 2, "BLOCK": kernels.BLOCK, "num_warps": kernels.WARPS, "num_stages": 3}
    arguments |= {"COLUMNS": columns, "CAP": 2, "GRADIENT": True, "SUMMED": True}
    arguments |= {"ENTROPY": columns == 3}
    build_kernel(kernels.loss_kernel, capability, element, arguments, TARGET="*i64")


@pytest.mark.parametrize(
    "capability, element, columns", [(90, "bf16", 12), (80, "fp32", 12), (90, "bf16", 3)]
)
def test_modulator_kernels_fit_shared_memory(capability, element, columns):
    import multimax_fairseq.ops.triton.modulator as kernels

    arguments = {"COLUMNS": columns, "PIECE": kernels.PIECE, "BLOCK": kernels.BLOCK}
    arguments |= {"num_warps": kernels.WARPS, "num_stages": 3}
    build_kernel(kernels.modulate_kernel, capability, element, arguments, OUT="*fp32")
    build_kernel(kernels.modulate_backward_kernel, capability, element, arguments, GRAD="*fp32")
    kinds = {"OUT": "*fp32", "JACOBIAN": "*fp32"}
    build_kernel(
        kernels.tails_kernel, capability, element, {"num_warps": 1, "num_stages": 3}, **kinds
    )
