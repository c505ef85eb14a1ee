"""Differentiable operators with fast implementations: one file each.

A file holds the plain PyTorch form, the public function (which checks its arguments), the
registration with torch.library, and the gradient. On the CPU the kernels are C++ (`cpp/`), on a GPU
Triton (`triton/`). They take float32, float16 and bfloat16; anything else runs in plain PyTorch.
"""
