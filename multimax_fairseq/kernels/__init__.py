"""Compiled kernels: `cpu` for float32 on x86, Triton for GPUs; only `functional` calls them."""
