"""Every test that takes `face` runs on the definition and on each kernel table this machine can run."""

import pytest
from hypothesis import HealthCheck, settings
from mtplx._csampling import dispatch

from mtplx import reference, sampling

ISAS = dispatch.available_isas()

# Derandomised: a run on a loaded machine and a run in CI see the same examples. The fixtures below hold
# no state that an example could change, so sharing one between examples is harmless.
settings.register_profile(
    "mtplx",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("mtplx")


@pytest.fixture(params=["reference", *ISAS], ids=["reference", *(f"sampling-{name}" for name in ISAS)])
def face(request):
    """`mtplx.reference`, then `mtplx.sampling` on each instruction set."""
    if request.param == "reference":
        yield reference
        return
    before = dispatch.active_isa()
    dispatch.use_isa(request.param)
    yield sampling
    dispatch.use_isa(before)


@pytest.fixture(params=ISAS)
def isa(request):
    """Name of the instruction set that `mtplx.sampling` runs on during the test."""
    before = dispatch.active_isa()
    dispatch.use_isa(request.param)
    yield request.param
    dispatch.use_isa(before)
