"""The two faces on 20,000 random cases: the promises of contract 1.

`fuzz_parity.py` runs as many more of the same cases as one likes; its case numbers are those below.
"""

import dataclasses

import numpy as np
import pytest
from mtplx._csampling import dispatch
from support import exact
from support.cases import SETTINGS, SHAPES, SMALL, TEMPERATURES, TOP_KS, TOP_PS, WHOLE, make_case
from support.parity import Expected, compare_rows, mismatches

from mtplx import reference, sampling
from mtplx.distributions import SparseDistribution

CASES, CHUNK = 20_000, 500


@pytest.fixture
def restored_isa():
    before = dispatch.active_isa()
    yield
    dispatch.use_isa(before)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_cases(restored_isa, first):
    wrong = []
    isas = dispatch.available_isas()
    for number in range(first, first + CHUNK):
        expected = Expected(make_case(number))
        isa = isas[number % len(isas)]
        dispatch.use_isa(isa)
        wrong += [f"{expected.case}: {isa}: {line}" for line in mismatches(expected)]
    assert not wrong, "\n".join([f"{len(wrong)} mismatches", *wrong[:20]])


def test_the_cases_are_those_that_were_asked_for():
    assert len(SETTINGS) == len(TEMPERATURES) * len(TOP_PS) * len(TOP_KS) == 175
    sample = [make_case(number) for number in range(1750)]
    combinations = {
        (case.temperature, case.top_p, min(case.top_k, 21)) for case in sample if case.logits.size > 20
    }
    assert len(combinations) == 175
    sizes = np.array([case.target.size for case in sample])
    assert sizes.min() == 1
    assert np.count_nonzero(sizes > SMALL / 2) > 50
    assert np.count_nonzero(sizes < 20) > 300
    assert any(make_case(number).target.size == WHOLE for number in range(4000))
    assert {case.shape for case in sample} == set(SHAPES)
    assert {str(case.logits.dtype) for case in sample} >= {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        ">f8",
        "int64",
    }
    assert any(np.isneginf(case.logits.astype(np.float64)).any() for case in sample)


def test_a_case_is_the_same_every_time():
    for number in (0, 17, 594, 1999):
        for field in dataclasses.fields(make_case(number)):
            one, two = (getattr(make_case(number), field.name) for _ in range(2))
            assert one.tobytes() == two.tobytes() if isinstance(one, np.ndarray) else one == two
    assert make_case(3, seed=1).logits.tobytes() != make_case(3, seed=2).logits.tobytes()


FAULTS = {
    "softmax": lambda real: lambda x, T=1.0, out=None: real(x, T, out=out) * (1 + 2.0**-48),
    "deterministic_top_k_order": lambda real: lambda values, k: real(values, k)[::-1],
    "apply_top_p_top_k": lambda real: lambda p, top_p=1.0, top_k=0: real(p, np.nextafter(top_p, 2), top_k),
    "residual_distribution": lambda real: (
        lambda p, q: real(p, np.asarray(p)) if type(p) is np.ndarray else real(p, q)
    ),
    "sample_from_distribution": lambda real: lambda p, rng: max(real(p, rng) - 1, 0),
    "verify_one_token": lambda real: lambda p, q, x, rng: real(q, p, x, rng),
    "acceptance_probability": lambda real: lambda p, q, x: float(np.float32(real(p, q, x))),
    "total_variation": lambda real: lambda p, q: real(p, q) + 1e-11,
    "distribution_entropy": lambda real: lambda p: float(np.float32(real(p))),
    "speculative_output_marginal": lambda real: lambda p, q: real(q, p),
    "apply_penalties": lambda real: lambda x, *rest: real(np.asarray(x, dtype=np.float64) + 1e-9, *rest),
    "distribution_from_logits": lambda real: (
        lambda x, config, **more: real(x, dataclasses.replace(config, top_p=0.5), **more)
    ),
    "sparse_distribution_from_logits": lambda real: (
        lambda x, config, **more: real(x, dataclasses.replace(config, top_k=7), **more)
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_in_any_function_is_a_mismatch(monkeypatch, name):
    monkeypatch.setattr(sampling, name, FAULTS[name](getattr(sampling, name)))
    assert any(list(mismatches(Expected(make_case(number)))) for number in range(100))


def test_dyadic_rows_against_rational_numbers(isa):
    """Sums of k/2^m are exact in float64: two works of one hand are not compared alone."""
    dyadic = (
        case for case in map(make_case, range(3000)) if case.shape == "dyadic" and case.target.size <= 600
    )
    for case in list(dyadic)[:80]:
        p = case.target.astype(np.float64)
        nucleus = exact.Nucleus(p)
        if (p * 2.0**24 % 1.0).any():  # scaled, so its sums are rounded
            continue
        for top_p, top_k in ((case.top_p, case.top_k), (case.edge, 0), (case.edge, case.top_k)):
            expected = [i for i in nucleus.kept(top_p, top_k) if p[i] > 0]
            assert np.flatnonzero(sampling.apply_top_p_top_k(p, top_p, top_k)).tolist() == expected, str(case)
            assert np.flatnonzero(reference.apply_top_p_top_k(p, top_p, top_k)).tolist() == expected, str(
                case
            )


# ---- rows of anything ------------------------------------------------------------------------------

NASTY = [
    np.nan,
    np.inf,
    -np.inf,
    -1.0,
    -0.0,
    0.0,
    5e-324,
    1e-310,
    1e-300,
    0.25,
    0.5,
    1.0,
    1e300,
    1.7e308,
    -1.7e308,
]
LENGTHS = (1, 1, 2, 3, 5, 16, 17, 40, 257, 600, 1300)


def nasty_row(rng):
    n = int(rng.choice(LENGTHS))
    row = rng.choice(NASTY, n)
    if rng.random() < 0.7:  # mostly harmless
        row = np.where(rng.random(n) < rng.choice([0.0, 1.0 / n, 0.1]), row, rng.random(n))
    with np.errstate(all="ignore"):
        return row.astype(rng.choice(["f8", "f8", "f8", "f4", ">f8"]))


def outcome(call):
    """What a call does, in a form that compares with ==."""
    try:
        with np.errstate(all="ignore"):
            result = call()
    except Exception as error:
        return ("error", type(error))
    if isinstance(result, np.ndarray):
        return "row", result
    if hasattr(result, "probs"):
        return "sparse", result.token_ids.tolist(), result.vocab_size, result.probs
    return "value", result


def same_outcome(one, two, most):
    if one[0] != two[0] or one[1:-1] != two[1:-1]:
        return False
    if isinstance(one[-1], np.ndarray):
        return not list(compare_rows("", two[-1], one[-1], most))
    if one[0] == "value" and isinstance(one[1], float):
        # A distance of rows as given, which may be as large as they are.
        return one[1] == two[1] or abs(one[1] - two[1]) <= 1e-12 * max(1.0, abs(one[1]))
    return one == two


def nasty_calls(p, q, rng):
    token = int(rng.integers(-1, p.size + 1))
    top_p, top_k = float(rng.choice([0.0, 0.3, 0.9, 1.0, np.nan])), int(rng.integers(-1, p.size + 2))
    temperature = float(rng.choice([0.0, 1e-310, 0.7, 1.0, 1e308, np.inf]))
    sparse = []
    for row in (p, q):
        try:
            sparse.append(
                SparseDistribution(np.arange(row.size), np.abs(row), row.size + int(rng.integers(0, 2)))
            )
        except ValueError:
            sparse.append(SparseDistribution([0], [1.0], row.size))
    yield "order", 0, lambda f: f.deterministic_top_k_order(p, top_k)
    yield "truncate", 4, lambda f: f.apply_top_p_top_k(p, top_p, top_k)
    yield "softmax", 8, lambda f: f.softmax(p, temperature)
    yield "entropy", 0, lambda f: f.distribution_entropy(p)
    yield "draw", 0, lambda f: f.sample_from_distribution(p, np.random.default_rng(1))
    for a, b in ((p, q), (p, sparse[1]), (sparse[0], q), (sparse[0], sparse[1])):
        yield "residual", 4, lambda f, a=a, b=b: f.residual_distribution(a, b)
        yield "accept", 0, lambda f, a=a, b=b: f.acceptance_probability(a, b, token)
        yield "distance", 0, lambda f, a=a, b=b: f.total_variation(a, b)
        yield "verify", 0, lambda f, a=a, b=b: f.verify_one_token(a, b, token, np.random.default_rng(1))


@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_rows_of_anything_have_the_same_outcome(isa, first):
    """Values that are no probabilities: the same numbers, or an error of the same class."""
    raised = 0
    for number in range(first, first + 250):
        rng = np.random.default_rng([9, number])
        p = nasty_row(rng)
        q = rng.permutation(p) if rng.random() < 0.3 else nasty_row(rng)
        if rng.random() < 0.8:
            q = np.resize(q, p.size)
        for name, most, call in nasty_calls(p, q, rng):
            expected, got = (outcome(lambda f=f, call=call: call(f)) for f in (reference, sampling))
            raised += expected[0] == "error"
            assert same_outcome(expected, got, most), (number, name, expected, got)
    assert raised > 250
