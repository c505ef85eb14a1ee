"""Compares the accuracy of kernels with that of plain PyTorch."""

import torch


def assert_as_accurate(fast, plain, exact):
    """Check that the error is at most twice that of plain PyTorch in the same precision."""
    for index, (ours, theirs, true) in enumerate(zip(fast, plain, exact, strict=True)):
        # A sum that is exact by chance gives no tolerance.
        rounding = 4 * torch.finfo(torch.float32).eps * true.norm()
        error, plain_error = (ours - true).norm(), (theirs - true).norm()
        assert error <= 2 * plain_error + rounding, (index, error, plain_error, true.norm())
