"""softmax (contract 3)."""

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import exact, rows
from support.ulps import assert_ulps

from mtplx import reference
from mtplx.distributions import NonFiniteLogitsError

# The contract allows 8 units against the reference, whose own exp, sum and division are within about 2
# of the exact value for these lengths.
AGAINST_EXACT = 10
TEMPERATURES = (0.1, 0.6, 1.0, 2.0)
LN2, LN3 = math.log(2.0), math.log(3.0)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [
        ([0.0], 1.0, [1.0]),
        ([-1e308], 1.0, [1.0]),
        ([0.0, 0.0], 1.0, [1 / 2, 1 / 2]),
        ([0.0, 0.0, -math.inf], 1.0, [1 / 2, 1 / 2, 0]),
        ([0.0, LN2, LN3], 1.0, [1 / 6, 2 / 6, 3 / 6]),
        ([0.0, LN2, LN3], 0.5, [1 / 14, 4 / 14, 9 / 14]),  # weights squared
        ([0.0, 2 * LN2, 2 * LN3], 2.0, [1 / 6, 2 / 6, 3 / 6]),
        ([5.0, 5.0 + LN3], 1.0, [1 / 4, 3 / 4]),  # only differences count
        ([-LN3, -math.inf, 0.0], 1.0, [1 / 4, 0, 3 / 4]),
        ([1e308, 0.0], 0.1, [1, 0]),  # x/T overflows
        ([-1e308, -1e307], 0.1, [0, 1]),
        ([1e308, 1e308], 0.1, [1 / 2, 1 / 2]),
        ([1.7e308, -1.7e308], 1e308, [1 / (1 + math.exp(-3.4)), 1 / (1 + math.exp(3.4))]),
        ([1.7e308, -1.7e308], 1.0, [1, 0]),  # the difference overflows
        ([1.7e308, -1.7e308, -math.inf], 0.5, [1, 0, 0]),
        ([5.0, 1.0], 1e-310, [1, 0]),
        ([5.0, 5.0], 5e-324, [1 / 2, 1 / 2]),
        ([-5.0, -1.0], 5e-324, [0, 1]),
        ([1.0, 2.0, 3.0], 1e300, [1 / 3, 1 / 3, 1 / 3]),
        ([0.0, 5e-324], 1.0, [1 / 2, 1 / 2]),
        ([0.0, 5e-324], 5e-324, [1 / (1 + math.e), math.e / (1 + math.e)]),
    ],
    ids=str,
)
def test_by_hand(face, logits, temperature, expected):
    got = face.softmax(logits, temperature)
    assert [p == 0.0 for p in got] == [p == 0.0 for p in expected]
    # The logarithms in the table are rounded: half a unit in a number near 1 is 1e-16 in the result.
    np.testing.assert_allclose(got, expected, rtol=1e-14, atol=0)


def test_by_hand_default_temperature_is_one(face):
    np.testing.assert_allclose(face.softmax([0.0, LN3]), [0.25, 0.75], rtol=1e-15)


@pytest.mark.parametrize("temperature", [0.0, -0.0, -1.0, -math.inf, np.float32(0), 0])
@pytest.mark.parametrize(
    ("logits", "winner"),
    [
        ([3.0], 0),
        ([1.0, 3.0, 2.0], 1),
        ([1.0, 3.0, 3.0], 1),  # ties: lowest id
        ([-0.0, 0.0], 0),  # equal numbers
        ([0.0, -0.0], 0),
        ([-math.inf, -math.inf, -1e308], 2),
        ([1.0, np.nextafter(1.0, 2)], 1),
        ([1e308, 1.7e308], 1),
    ],
    ids=str,
)
def test_greedy_is_exactly_one_hot(face, logits, winner, temperature):
    assert face.softmax(logits, temperature).tolist() == [float(i == winner) for i in range(len(logits))]


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_greedy_finds_the_first_maximum_at_every_place(face, n):
    for place in {0, n // 3, n // 2, n - 2, n - 1} & set(range(n)):
        x = np.linspace(-5.0, 5.0, n)
        x[place:] = 7.0
        assert np.flatnonzero(face.softmax(x, 0.0)).tolist() == [place]


def test_infinite_temperature_is_uniform_over_what_is_allowed(face):
    assert face.softmax([1.0, 1e308, -1e308, -math.inf], math.inf).tolist() == [1 / 3, 1 / 3, 1 / 3, 0.0]
    assert face.softmax([-math.inf, 2.0], math.inf).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("temperature", [math.nan, np.float32("nan")])
def test_nan_temperature_is_refused(face, temperature):
    with pytest.raises(ValueError, match="nan"):
        face.softmax([1.0, 2.0], temperature)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 5e-324, 0.7, 1.0, 1e300, math.inf])
@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_logits_without_a_distribution_are_refused_with_their_counts(face, dtype, temperature):
    for n in (1, 2, 17, 40, 600):
        for place in {0, n // 2, n - 1}:
            for bad, nan_count in ((math.nan, 1), (math.inf, 0)):
                x = np.linspace(-3, 3, n).astype(dtype)
                x[place] = bad
                with pytest.raises(NonFiniteLogitsError) as caught:
                    face.softmax(x, temperature)
                error = caught.value
                assert (error.nan_count, error.inf_count, error.vocab_size) == (nan_count, 1 - nan_count, n)
        with pytest.raises(NonFiniteLogitsError) as caught:
            face.softmax(np.full(n, -np.inf, dtype=dtype), temperature)
        assert (caught.value.nan_count, caught.value.inf_count) == (0, n)


def test_nan_is_seen_beside_every_other_value(face):
    # Vector max and min drop a NaN or keep it by the order of their operands.
    for n in range(1, 70):
        for other in (-math.inf, 0.0, 5.0, math.inf):
            x = np.full(n, other)
            x[n - 1] = 1.0
            x[n // 2] = math.nan
            with pytest.raises(NonFiniteLogitsError) as caught:
                face.softmax(x, 0.7)
            assert caught.value.nan_count == 1


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_against_sixty_digits(face, temperature):
    for n in (1, 2, 3, 5, 8, 16, 17, 33, 64):
        for name, x in rows.logits(n).items():
            expected = exact.softmax(x, temperature)
            assert_ulps(face.softmax(x, temperature), expected, AGAINST_EXACT, name)


def test_subnormal_probabilities_against_sixty_digits(face):
    x = np.concatenate([[0.0], -np.linspace(690.0, 746.0, 300)])
    expected = np.array(exact.softmax(x))
    assert np.count_nonzero((expected > 0) & (expected < 2.0**-1022)) > 100
    got = face.softmax(x)
    small = expected < 2.0**-1022
    # One subnormal unit for exp (design 4), one for the division.
    assert np.abs(got[small] - expected[small]).max() <= 2 * 5e-324
    assert_ulps(got[~small], expected[~small], AGAINST_EXACT)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("n", rows.LENGTHS)
def test_worst_case_rows_against_the_reference(face, n, temperature):
    for name, x in rows.logits(n).items():
        got = face.softmax(x, temperature)
        assert_ulps(got, reference.softmax(x, temperature), 8, name)
        assert not got[np.isneginf(x)].any(), name


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [1, 17, 255, 513, 5000])
def test_every_float_type_is_its_float64_value(face, n, dtype):
    x = (np.random.default_rng(n).normal(size=n) * 4).astype(dtype)
    for temperature in (0.0, 0.7, 1.0, math.inf):
        got = face.softmax(x, temperature)
        assert got.dtype == np.float64
        assert_ulps(got, reference.softmax(x.astype(np.float64), temperature), 8)


def test_sixteen_bit_floats_of_every_finite_value(face):
    """All 63,488 finite float16 and 65,280 finite bfloat16 numbers, subnormal ones included."""
    every = np.arange(65536, dtype=np.uint16)
    for dtype, exponent, temperature in ((np.float16, 0x7C00, 4000.0), (ml_dtypes.bfloat16, 0x7F80, 1e37)):
        x = every[every & exponent != exponent].view(dtype)
        assert_ulps(face.softmax(x, temperature), reference.softmax(x.astype(np.float64), temperature), 8)
        assert int(face.softmax(x, 0.0).argmax()) == int(x.astype(np.float64).argmax())


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_the_sum_has_no_bias_on_a_whole_vocabulary(face, dtype):
    # 16-bit valued logits repeat the same few exponentials, so a plain running sum drifts one way.
    x = (np.random.default_rng(5).normal(size=rows.VOCABULARY) * 3).astype(np.float16).astype(dtype)
    total = math.fsum(face.softmax(x, 0.7).tolist())
    # A correctly rounded sum would leave the rounding of V divisions, whose errors are independent.
    assert abs(total - 1.0) <= 8 * 2.0**-53


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [1, 2, 17, 255, 513, 5000])
def test_float32_result_is_within_four_of_its_own_units(face, n, dtype):
    x = (np.random.default_rng(n).normal(size=n) * 4).astype(dtype)
    for temperature in (0.0, 0.3, 1.0, 2.0, math.inf):
        out = np.full(n, 7.0, dtype=np.float32)
        assert face.softmax(x, temperature, out=out) is out
        assert_ulps(out, reference.softmax(x.astype(np.float64), temperature), 4, dtype=np.float32)


def test_float32_result_keeps_masked_entries_at_zero_and_small_ones_alive(face):
    x = np.array([0.0, -90.0, -100.0, -104.0, -200.0, -math.inf], dtype=np.float32)
    out = face.softmax(x, 1.0, out=np.empty(6, dtype=np.float32))
    want = np.array(exact.softmax(x.astype(np.float64)))
    assert_ulps(out, want, 4, dtype=np.float32)  # subnormal float32 units below 1.2e-38
    assert out[-1] == 0.0
    assert out[-2] == 0.0
    assert out[1] > 0.0


@pytest.mark.parametrize("n", [2, 17, 600])
def test_shifting_by_a_whole_number_changes_no_bit(face, n):
    # x - max is exact for small integers, before and after the shift.
    x = np.random.default_rng(n).integers(-20, 20, n).astype(np.float64)
    assert face.softmax(x).tobytes() == face.softmax(x + 1024.0).tobytes()


@given(st.lists(st.floats(-1e3, 1e3) | st.just(-math.inf), min_size=1, max_size=80), st.floats(0.05, 20))
def test_sums_to_one_and_keeps_the_order(face, logits, temperature):
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    p = face.softmax(logits, temperature)
    assert abs(math.fsum(p) - 1.0) <= 8 * 2.0**-53
    assert (p >= 0.0).all()
    for (x, a), (y, b) in pairwise(sorted(zip(logits, p.tolist(), strict=True))):
        # exp is not promised to be monotone in its last place; 8 units are.
        assert b >= a * (1 - 8 * 2.0**-52), (x, y)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_permuting_logits_permutes_probabilities(face, logits, random):
    order = list(range(len(logits)))
    random.shuffle(order)
    p = face.softmax(logits, 0.8)
    # Only the sum's order changes: a unit of the sum for each side, and the rounding of the division.
    assert_ulps(face.softmax([logits[i] for i in order], 0.8), p[order], 4)
