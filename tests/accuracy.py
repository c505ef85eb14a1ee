"""Compares the accuracy of kernels with that of plain PyTorch."""


def assert_as_accurate(fast, plain, exact, rounding=5e-7):
    """Check that the error is at most twice that of plain PyTorch in the same precision.

    A sum that is exact by chance gives no tolerance. `rounding` is relative to the exact norm; the
    default is four times that of float32.
    """
    for index, (ours, theirs, true) in enumerate(zip(fast, plain, exact, strict=True)):
        norm, error, plain_error = true.norm(), (ours - true).norm(), (theirs - true).norm()
        assert error <= 2 * plain_error + rounding * norm, (index, error, plain_error, norm)
