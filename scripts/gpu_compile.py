"""What scripts/gpu_check.py reads off the compiler: registers, spills and instructions a score.

Every kernel is compiled ahead of time as a launch would have it, which needs no GPU, and beside it
the same kernel without the modulator, so that the difference is what MultiMax costs.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_reference import Finding, Place

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# What is float32 whatever the scores are.
FLOAT32 = {
    *("TOTAL", "TABLE", "SINK", "DELTA", "NORM", "SUMS", "MEANS"),
    *("FACTORS", "NLL", "SMOOTH", "TABLE_GRAD"),
}
COLUMNS = [
    *("kernel", "block", "warps", "registers", "spills", "shared KB", "loop", "a score"),
    *("MMA", "ex2/lg2", "without the modulator: registers", "loop", "a score"),
]
# Of a kernel that is nothing but the modulator.
ALONE = ["kernel", "block", "warps", "registers", "spills", "loop", "a score"]
# What a launch is specialised in besides its element type and head size; the first alone unless
# all are asked for.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"CAUSAL": True},
    "padding": {"MASKING": 1},
    "mask": {"MASKING": 2},
    "added padding": {"MASKING": 3},
    "added": {"MASKING": 4},
    "causal, dropout": {"CAUSAL": True, "DROPOUT": True},
    "causal, monotone": {"CAUSAL": True, "MONOTONE": True},
    "causal, sink": {"CAUSAL": True, "SINKS": True},
}


class Compiled(NamedTuple):
    """Counts of a whole program, but for `loop`, `mma` and `mufu`: those of its inner loop."""

    registers: int
    spills: int
    shared: int
    loop: int
    mma: int
    mufu: int


def build(kernel: Any, capability: int, element: str, arguments: dict[str, Any], **types: str):
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
        elif name.isupper() and (len(name) > 1 or name in "QKV"):
            signature[name] = types.get(name, "*fp32" if name in FLOAT32 else f"*{element}")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            floating = name in ("scale", "keep_scale", "smooth_weight", "nll_weight")
            signature[name] = "fp32" if floating else "i32"
            if name[-2:] in ("_b", "_h", "_n") and name != "t_h":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})


def read(program: Any) -> Compiled:
    """What the machine code says of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [str(tool), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)
    lines = [(int(address, 16), text) for address, text in found]
    register_count = re.search(r"REG:(\d+)", usage)
    if register_count is None or not lines:
        raise RuntimeError(f"cuobjdump said nothing of the program: {usage[-100:]!r}")
    loops = []
    for address, text in lines:
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if target is not None and (begin := int(target[1], 16)) < address:
            loops.append([t for a, t in lines if begin <= a <= address])

    def count(pattern: str, code: list[str]) -> int:
        return sum(re.search(pattern, text) is not None for text in code)

    multiplying = [loop for loop in loops if count("MMA", loop) > 0]
    # Of those over whole tiles and over the edge, the former; without products, all is in one.
    inner = min(multiplying, key=len) if multiplying else max(loops, key=len, default=[])
    return Compiled(
        registers=int(register_count[1]),
        spills=count(r"\b(LDL|STL)\b", [text for _, text in lines]),
        shared=program.metadata.shared,
        loop=len(inner),
        mma=count("MMA", inner),
        mufu=count(r"MUFU\.(EX2|LG2)", inner),
    )


def attention_arguments(
    call: Any, blocks: dict[str, int], order: int, variant: dict[str, Any]
) -> dict[str, Any]:
    """The constants of a launch, as triton_attention would pass them."""
    chosen = {"MASKING": 0, "CAUSAL": False, "DROPOUT": False, "MONOTONE": False} | variant
    exact = call.dtype == torch.float32
    normed = exact or chosen["MASKING"] > 2
    chosen["MONOTONE"] = chosen["MONOTONE"] and order > 0
    found = {"D": call.width, "WIDTH": call.width, "LOW": order, "HIGH": order} | chosen
    found |= {"CAP": 0 if call.dtype == torch.float16 else 2}
    found |= {} if chosen["MASKING"] else {"MASK": None}
    found |= {} if order else {"TABLE": None}
    if call.kernel != "key_kernel":
        found |= {"SINKS": False} | found
    if call.kernel in ("forward_kernel", "mean_kernel") and not found["SINKS"]:
        found["SINK"] = None
    if call.kernel == "mean_kernel":
        found["EXACT"] = exact
    if call.kernel in ("query_kernel", "key_kernel"):
        found |= {"NORMED": normed} | ({} if normed else {"NORM": None})
    if call.kernel == "query_kernel":
        found |= {"SUMMED": order > 0} | ({} if order else {"SUMS": None})
        found |= {} if found["SINKS"] else {"MEANS": None}
    return found | blocks


def compiled_attention(
    capability: int, call: Any, blocks: dict[str, int], variant: str, order: int
) -> tuple[Compiled, int]:
    """The program, and how many scores a tile has of each thread."""
    import multimax_fairseq.kernels.triton_attention_kernels as kernels

    arguments = attention_arguments(call, blocks, order, VARIANTS[variant])
    types = {"MASK": "*fp32" if arguments["MASKING"] > 2 else "*u8"}
    kernel = getattr(kernels, call.kernel)
    program = build(kernel, capability, NAMES[call.dtype], arguments, **types)
    return read(program), blocks["BLOCK_T"] * blocks["BLOCK_S"] // (32 * blocks["num_warps"])


def compiled_loss(
    capability: int, dtype: torch.dtype, monotone: bool, order: int
) -> tuple[Compiled, int]:
    import multimax_fairseq.kernels.triton_cross_entropy as kernels

    arguments = {
        **{"ORDER": order, "MONOTONE": monotone and order > 0, "GRADIENT": True},
        **{"SUMMED": order > 0, "CAP": 1 if dtype == torch.float16 else 2},
        **{"BLOCK": kernels.BLOCK, "num_warps": kernels.WARPS, "num_stages": 3},
    }
    arguments |= {} if order else {"TABLE": None, "TABLE_GRAD": None}
    program = build(kernels.loss_kernel, capability, NAMES[dtype], arguments, TARGET="*i64")
    return read(program), kernels.BLOCK // (32 * kernels.WARPS)


def alone(capability: int, label: str, name: str, dtype: torch.dtype, monotone: bool) -> Finding:
    """A kernel of the modulator by itself, whose scores come from memory and go back there."""
    import multimax_fairseq.kernels.triton_modulator as kernels

    arguments = {"MONOTONE": monotone, "PIECE": kernels.PIECE, "BLOCK": kernels.BLOCK}
    arguments |= {"num_warps": kernels.WARPS, "num_stages": 3}
    # The modulated scores are float32, and so is what comes back to them.
    types = {"OUT": "*fp32"} if name == "modulate_kernel" else {"GRAD": "*fp32"}
    found = read(build(getattr(kernels, name), capability, NAMES[dtype], arguments, **types))
    scores = kernels.BLOCK // (32 * kernels.WARPS)
    row = [label, kernels.BLOCK, kernels.WARPS, found.registers, found.spills, found.loop]
    row += [f"{found.loop / scores:.1f}"]
    title = f"Compiled for sm_{capability}: the modulator by itself"
    note = "instructions that spill"
    return Finding(found.spills, 0, note, (title, ALONE, [[*map(str, row)]]))


def compare(
    capability: int,
    label: str,
    block: str,
    warps: int,
    make: Callable[[int], tuple[Compiled, int]],
) -> Finding:
    """A kernel at the order 2, and without the modulator."""
    from multimax_fairseq.kernels.launches import shared_memory

    (ours, scores), (softmax, _) = make(2), make(0)
    for found in (ours, softmax):
        if found.shared > shared_memory(capability):
            raise RuntimeError(
                f"{label}: {found.shared} bytes of shared memory, above what all have"
            )
    row = [label, block, warps, ours.registers, f"{ours.spills}/{softmax.spills}"]
    row += [
        f"{ours.shared / 1024:.0f}",
        ours.loop,
        f"{ours.loop / scores:.1f}",
        ours.mma,
        ours.mufu,
    ]
    row += [softmax.registers, softmax.loop, f"{softmax.loop / scores:.1f}"]
    note = f"instructions that spill; {softmax.spills} of them without the modulator"
    title = f"Compiled for sm_{capability}: instructions of the inner loop, and a score"
    return Finding(ours.spills + softmax.spills, 0, note, (title, COLUMNS, [[*map(str, row)]]))


def checks(place: Place) -> dict[str, Callable[[], Finding]]:
    """A kernel with its launch each; those of bfloat16 and heads of 64 unless all are asked for."""
    from multimax_fairseq.kernels.launches import is_heavy
    from multimax_fairseq.kernels.triton_attention import launches

    capabilities = [80, 90]
    if place.is_gpu:
        major, minor = torch.cuda.get_device_capability()
        capabilities = [10 * major + minor]
    found: dict[str, Callable[[], Finding]] = {}
    for capability in capabilities:
        for call, blocks in launches(capability):
            if not place.full and (call.dtype, call.width) != (torch.bfloat16, 64):
                continue
            for variant in VARIANTS if place.full else ["causal"]:
                chosen = VARIANTS[variant]
                added = chosen.get("MASKING", 0) > 2
                if call.kernel == "mean_kernel" and call.dtype != torch.float32 and not added:
                    continue  # its numbers are another kernel's there
                if "SINKS" in chosen and call.kernel == "key_kernel":
                    continue  # which does not know of it
                if is_heavy(**chosen) == call.is_heavy:
                    add_attention(found, capability, call, blocks, variant)
        for dtype in NAMES if place.full else [torch.bfloat16]:
            for monotone in (False, True) if place.full else (False,):
                kind = f"{NAMES[dtype]}{', monotone' if monotone else ''}"
                add_loss(found, capability, f"loss {kind}", dtype, monotone)
                for name in ("modulate_kernel", "modulate_backward_kernel"):
                    label = f"{name.removesuffix('_kernel')} {kind}"
                    found[f"sm_{capability} {label}"] = functools.partial(
                        alone, capability, label, name, dtype, monotone
                    )
    return found


def add_attention(
    found: dict[str, Callable[[], Finding]],
    capability: int,
    call: Any,
    blocks: dict[str, int],
    variant: str,
) -> None:
    block = f"{blocks['BLOCK_T']}x{blocks['BLOCK_S']}"
    label = f"{call.kernel.removesuffix('_kernel')} {NAMES[call.dtype]} {call.width}, {variant}"
    name = f"sm_{capability} {label}, {block}"
    make = functools.partial(compiled_attention, capability, call, blocks, variant)
    found[name] = functools.partial(compare, capability, label, block, blocks["num_warps"], make)


def add_loss(
    found: dict[str, Callable[[], Finding]],
    capability: int,
    label: str,
    dtype: torch.dtype,
    monotone: bool,
) -> None:
    import multimax_fairseq.kernels.triton_cross_entropy as kernels

    make = functools.partial(compiled_loss, capability, dtype, monotone)
    found[f"sm_{capability} {label}"] = functools.partial(
        compare, capability, label, str(kernels.BLOCK), kernels.WARPS, make
    )
