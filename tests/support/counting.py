"""How often certificates have fallen back."""

from contextlib import contextmanager

from mtplx._csampling import dispatch


@contextmanager
def counting(name):
    """Collects how often the named certificate has fallen back inside the block."""
    counted = []
    before = dispatch.fallback_counts()[name]
    yield counted
    counted.append(dispatch.fallback_counts()[name] - before)
