"""Which values count as numbers, in the arguments of a module and in flags."""

import math
from numbers import Integral, Real


def is_whole(value: object, least: int = 1) -> bool:
    """Whether a value is an integer, at least `least`, that int64 holds; neither True nor 2.0
    is one."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) < 2**63


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold, and neither NaN nor infinite; True is
    none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer past any float
        return False
