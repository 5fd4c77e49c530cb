"""What the benchmarks share: vocabularies, inputs, and the packages that are compared.

    pytest benches                                  every file, some ten minutes
    pytest benches/bench_draws.py -k 151936         one kernel, one vocabulary
    pytest benches --benchmark-group-by=case        implementations side by side

A test names for every implementation how to make its call, already bound to its arguments; it runs once for
each, in a group of that name. One that is not installed is skipped. All run on one thread.

`mtplx bench` measures the rows that have a goal, in turns, and with glibc's allocator as in a process that
samples all day; MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824 gives the same here.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

from mtplx.bench import LLM_INPUTS

VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
SECONDS = 0.2  # per benchmark, unless --benchmark-max-time says more

# Without the plugin the fixture below cannot exist; the tests of the package do without it.
collect_ignore_glob = [] if find_spec("pytest_benchmark") else ["bench_*.py"]

Make = Callable[[], Callable[[], Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "implementation" in callspec.params:
            group = callspec.params["implementation"]
            item.add_marker(pytest.mark.benchmark(group=group, max_time=SECONDS))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_group_stats(benchmarks: list[Any], group_by: str) -> list[tuple[str, list[Any]]] | None:
    """``--benchmark-group-by=case``: the implementations of one case side by side."""
    if group_by != "case":
        return None
    cases: dict[str, list[Any]] = {}
    for bench in benchmarks:
        case = bench["name"].replace(bench["params"]["implementation"], "*")
        cases.setdefault(case, []).append(bench)
    return sorted(cases.items())


@pytest.fixture(params=VOCABULARIES, ids=lambda V: f"V={V}")
def vocab(request: pytest.FixtureRequest) -> int:
    V: int = request.param
    return V


@pytest.fixture(params=tuple(LLM_INPUTS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def compare(benchmark: Any, implementation: str) -> Callable[..., Any]:
    """``compare(reference=..., compiled=...)`` times the one whose turn it is and returns its result."""

    def run(**makers: Make) -> Any:
        if implementation in ("torch", "onnxruntime", "numba"):
            pytest.importorskip(implementation)
        return benchmark(makers[implementation]())

    return run
