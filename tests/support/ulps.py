"""Distances in units in the last place of the expected value."""

import numpy as np


def ulps_apart(got, want, dtype=np.float64):
    """Largest distance, in units in the last place of `want` (the smallest subnormal where `want` is 0)."""
    got, want = np.asarray(got), np.asarray(want, dtype=dtype)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    got, want = got.astype(np.longdouble), want.astype(np.longdouble)
    unit = np.spacing(np.abs(want).astype(dtype)).astype(np.longdouble)
    with np.errstate(all="ignore"):
        distance = np.where(got == want, 0, np.abs(got - want) / unit)
    return float(np.max(np.where(np.isnan(distance), np.inf, distance), initial=0))


def assert_ulps(got, want, most, what="", dtype=np.float64):
    apart = ulps_apart(got, want, dtype)
    assert apart <= most, f"{what}: {apart:.3g} units in the last place apart, {most} allowed"
