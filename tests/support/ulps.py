"""Distances in units in the last place of the expected value."""

import numpy as np


def ulps_apart(got, want, dtype=np.float64):
    """Largest distance, in units in the last place of `want` (the smallest subnormal where `want` is 0)."""
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    with np.errstate(all="ignore"):
        # Both conversions are exact, or (to float32) what the unit is to be of; so is the difference of
        # numbers that are close to each other.
        unit = np.spacing(np.abs(want).astype(dtype)).astype(np.float64)
        distance = np.abs(got - want) / unit
        distance[got == want] = 0.0
    return np.inf if np.isnan(distance).any() else float(distance.max(initial=0.0))


def assert_ulps(got, want, most, what="", dtype=np.float64):
    apart = ulps_apart(got, want, dtype)
    assert apart <= most, f"{what}: {apart:.3g} units in the last place apart, {most} allowed"
