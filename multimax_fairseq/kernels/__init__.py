"""Kernels for the operations of `functional`, which alone calls them."""
