"""deterministic_top_k_order, apply_top_p_top_k, apply_top_k_top_p (contract 3)."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import exact, rows
from support.ulps import assert_ulps

OFF_TOP_PS = (0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, np.nextafter(1.0, 2))
OFF_TOP_KS = (0, -1, None, 4, 5, 2**31, 2**32, 2**32 + 2, 2**40, 2**63, 2**64 + 1, -(2**70))


# ---- deterministic_top_k_order ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "top_k", "expected"),
    [
        ([0.1, 0.3, 0.3, 0.2], 2, [1, 2]),
        ([0.1, 0.3, 0.3, 0.3], 2, [1, 2]),  # the tie at the cut: lowest ids
        ([0.3, 0.1, 0.3, 0.3], 3, [0, 2, 3]),
        ([0.5, 0.25, 0.5, 0.25], 4, [0, 2, 1, 3]),
        ([0.5, 0.25, 0.5, 0.25], 3, [0, 2, 1]),
        ([7.0], 1, [0]),
        ([7.0], 5, [0]),
        ([1.0, 2.0], 0, []),
        ([1.0, 2.0], -3, []),
        ([1.0, 2.0], 2**70, [1, 0]),
        ([-0.0, 0.0, -0.0], 3, [0, 1, 2]),  # one number, three ids
        ([0.0, -0.0, 1.0], 2, [2, 0]),
        ([math.nan, 1.0, 2.0], 2, [2, 1]),
        ([math.nan, 1.0, math.nan], 3, [1, 0, 2]),
        ([math.nan, math.nan], 1, [0]),
        ([math.nan, -math.inf, math.inf], 3, [2, 1, 0]),  # NaN after -inf
        ([-1.0, -2.0, -math.inf], 2, [0, 1]),
        ([5e-324, 0.0, 1e-323], 2, [2, 0]),
        ([1.0, np.nextafter(1.0, 2)], 1, [1]),
    ],
    ids=str,
)
def test_order_by_hand(face, values, top_k, expected):
    got = face.deterministic_top_k_order(values, top_k)
    assert got.tolist() == expected
    assert got.dtype == np.int64
    assert got.flags.c_contiguous


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_order_of_worst_case_rows(face, n):
    for name, w in rows.weights(n).items():
        expected = exact.ranking(w)
        for k in {1, 2, 20, n // 2, n - 1, n, n + 1}:
            assert face.deterministic_top_k_order(w, k).tolist() == expected[: max(k, 0)], (name, k)


@pytest.mark.parametrize("V", [1023, 1024, 1500, 5000, 20_000])
def test_order_of_hundreds_of_ranks(face, V):
    rng = np.random.default_rng(V)
    rows_of = {
        "normal": rng.normal(0, 3, V),
        "tied": rng.integers(0, 7, V).astype(float),
        "one level": np.zeros(V),
        "few not NaN": np.where(rng.random(V) < 0.1, rng.normal(size=V), np.nan),
        "masked": np.where(rng.random(V) < 0.9, -np.inf, rng.normal(size=V)),
        "infinite": np.where(rng.random(V) < 0.5, np.inf, rng.normal(size=V)),
        "alternating": np.where(np.arange(V) % (V // 2048 or 1) == (V // 2048) >> 1, 1.0, 0.0),
        "ascending": np.arange(V, dtype=float),
        "descending": -np.arange(V, dtype=float),
    }
    for name, row in rows_of.items():
        expected = np.lexsort((np.arange(V), -row, np.isnan(row)))
        for k in (1, V // 256, V // 100, V // 16, V // 4, V // 4 + 1, V - 1, V):
            assert face.deterministic_top_k_order(row, k).tolist() == expected[:k].tolist(), (name, k)


@pytest.mark.parametrize("top_k", [1, 5, 20, 1000])
def test_order_over_a_whole_vocabulary_with_many_ties(face, top_k):
    values = np.random.default_rng(1).integers(0, 50, rows.VOCABULARY).astype(np.float64)
    expected = np.lexsort((np.arange(values.size), -values))[:top_k]
    assert face.deterministic_top_k_order(values, top_k).tolist() == expected.tolist()


ANY_FLOATS = st.lists(st.floats() | st.sampled_from([0.0, 1.0, math.nan]), min_size=1)


@given(ANY_FLOATS, st.integers(0, 60))
def test_order_of_any_floats(face, values, top_k):
    def key(i):
        return (math.isnan(values[i]), 0.0 if math.isnan(values[i]) else -values[i], i)

    expected = sorted(range(len(values)), key=key)[:top_k]
    assert face.deterministic_top_k_order(values, top_k).tolist() == expected


# ---- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probs", "top_p", "top_k", "kept"),
    [
        # the token that crosses the threshold stays
        ([0.5, 0.3, 0.15, 0.05], 0.6, 0, [0, 1]),
        ([0.5, 0.3, 0.15, 0.05], 0.85, 0, [0, 1, 2]),
        ([0.05, 0.15, 0.3, 0.5], 0.6, 0, [2, 3]),
        # strict: a sum equal to top_p is enough
        ([0.5, 0.25, 0.125, 0.125], 0.5, 0, [0]),
        ([0.5, 0.25, 0.125, 0.125], np.nextafter(0.5, 1), 0, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.75, 0, [0, 1]),
        ([0.5, 0.25, 0.125, 0.125], 0.875, 0, [0, 1, 2]),
        ([0.5, 0.25, 0.125, 0.125], np.nextafter(0.875, 1), 0, [0, 1, 2, 3]),
        # the first rank always stays
        ([0.1, 0.6, 0.3], 5e-324, 0, [1]),
        ([0.1, 0.6, 0.3], 0.6, 0, [1]),
        # ties: lowest ids
        ([0.25, 0.25, 0.25, 0.25], 0.5, 0, [0, 1]),
        ([0.25, 0.25, 0.25, 0.25], 1.0, 3, [0, 1, 2]),
        ([0.1, 0.2, 0.2, 0.2, 0.3], 1.0, 3, [1, 2, 4]),
        # both: each rule on the whole distribution, never renormalised over the k
        ([0.35, 0.25, 0.2, 0.05, 0.15], 0.82, 4, [0, 1, 2, 4]),
        ([0.1, 0.2, 0.3, 0.4], 0.5, 2, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], 0.35, 2, [3]),
        ([0.4, 0.3, 0.2, 0.1], 0.45, 2, [0, 1]),  # renormalised, .4/.7 > .45 would have dropped id 1
        # probabilities as given, not normalised first
        ([5.0, 3.0, 2.0], 0.9, 0, [0]),
        ([0.05, 0.03, 0.02], 0.09, 0, [0, 1, 2]),
        ([0.05, 0.03, 0.02], 0.06, 0, [0, 1]),
        # a threshold that is never reached keeps everything
        ([0.05, 0.03, 0.0], 0.99, 0, [0, 1]),
        ([0.5, 0.5, 0.0], np.nextafter(1.0, 0), 0, [0, 1]),
        ([5e-324, 1e-323], 0.5, 0, [0, 1]),
        ([5e-324, 1e-323], 1e-323, 0, [1]),
        ([1e308, 1.7e308, 1e308], 0.5, 0, [1]),
        ([1.0], 0.1, 1, [0]),
    ],
    ids=str,
)
def test_kept_by_hand(face, probs, top_p, top_k, kept):
    expected = exact.share(probs, kept)
    for got in (face.apply_top_p_top_k(probs, top_p, top_k), face.apply_top_k_top_p(probs, top_k, top_p)):
        assert np.flatnonzero(got).tolist() == kept
        assert_ulps(got, expected, 2)


def test_defaults_and_argument_order(face):
    p = [0.4, 0.3, 0.2, 0.1]
    assert_ulps(face.apply_top_p_top_k(p), p, 1)
    assert_ulps(face.apply_top_k_top_p(p), p, 1)
    assert np.flatnonzero(face.apply_top_p_top_k(p, 0.5)).tolist() == [0, 1]
    assert np.flatnonzero(face.apply_top_k_top_p(p, 1)).tolist() == [0]
    assert np.flatnonzero(face.apply_top_p_top_k(p, top_k=3, top_p=0.5)).tolist() == [0, 1]


@pytest.mark.parametrize("top_p", OFF_TOP_PS, ids=str)
@pytest.mark.parametrize("top_k", OFF_TOP_KS, ids=str)
def test_settings_that_mean_off(face, top_p, top_k):
    p = [0.4, 0.3, 0.2, 0.1]
    assert_ulps(face.apply_top_p_top_k(p, top_p, top_k), p, 1)
    # Both off still divides by the sum.
    assert_ulps(face.apply_top_p_top_k([2.0, 1.0, 1.0, 0.0], top_p, top_k), [0.5, 0.25, 0.25, 0.0], 0)


@pytest.mark.parametrize("top_p", OFF_TOP_PS, ids=str)
def test_top_k_alone(face, top_p):
    assert face.apply_top_p_top_k([1.0, 3.0, 1.0, 4.0], top_p, 2).tolist() == [0.0, 3 / 7, 0.0, 4 / 7]


@pytest.mark.parametrize("top_k", OFF_TOP_KS, ids=str)
def test_top_p_alone(face, top_k):
    got = face.apply_top_p_top_k([0.125, 0.375, 0.125, 0.375], 0.5, top_k)
    assert got.tolist() == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("top_k", [np.int32(2), np.int64(2), np.uint8(2), True + 1])
def test_integers_of_every_kind(face, top_k):
    assert np.flatnonzero(face.apply_top_p_top_k([0.1, 0.2, 0.7], np.float32(1), top_k)).tolist() == [1, 2]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 2])
def test_sums_beyond_the_range_of_float64_are_scaled(face, top_p, top_k):
    row = np.array([1.7e308, 0.85e308, 1.7e308])
    kept = exact.Nucleus(row).kept(top_p, top_k)
    got = face.apply_top_p_top_k(row, top_p, top_k)
    assert np.flatnonzero(got).tolist() == kept
    expected = np.zeros(3)
    expected[kept] = row[kept] / 2.0**10 / math.fsum(row[kept] / 2.0**10)
    assert_ulps(got, expected, 2)


# ---- against the definition on hard rows -----------------------------------------------------------


def settings_for(n):
    for top_p in (0.1, 0.5, 0.9, 0.95, 0.999, 1.0):
        for top_k in (0, 1, 5, 20, n // 2, n - 1, n):
            yield top_p, top_k


@pytest.mark.parametrize("exponent", [0, 300, 899, 900, 901, 1000, 1023])
def test_the_kept_sum_is_accurate_at_every_size_of_number(face, exponent):
    # 100 halves of the first number's last bit: rounded one by one, each is lost on the first number.
    row = np.array([1.0] + [2.0**-53] * 100)
    expected = row / math.fsum(row)
    assert_ulps(face.apply_top_p_top_k(row * 2.0**exponent), expected, 4)
    assert_ulps(face.residual_distribution(row * 2.0**exponent, np.zeros(101)), expected, 4)


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_worst_case_rows(face, n):
    for name, p in rows.probabilities(n).items():
        for top_p, top_k in settings_for(n) if n <= 1025 else [(0.9, 0), (0.95, 20), (1.0, 50)]:
            kept = exact.kept_sequentially(p, top_p, top_k)
            got = face.apply_top_p_top_k(p, top_p, top_k)
            support = [i for i in kept if p[i] > 0]
            assert np.flatnonzero(got).tolist() == support, (name, top_p, top_k)
            # 4 units against the reference, which itself sums pairwise: 2 more against the exact sum.
            assert_ulps(got, exact.share(p, kept), 6, (name, top_p, top_k))


@pytest.mark.parametrize("n", [64, 127, 640, 1000, 4099, 20_000])
def test_few_entries_among_zeros(face, n):
    """The compiled second pass skips groups of 16 that hold nothing; the last entry is in no whole group."""
    rng = np.random.default_rng(n)
    for trial in range(8):
        p = np.zeros(n)
        places = rng.choice(n, 1 + trial % max(1, n // 80), replace=False)
        p[places] = rng.integers(1, 4, places.size)
        p[-1] = 2.0
        p /= p.sum()
        for top_p, top_k in [(0.5, 0), (0.95, 0), (1.0, 2), (0.9, 5)]:
            kept = exact.kept_sequentially(p, top_p, top_k)
            out = np.full(n, 7.0)
            got = face.apply_top_p_top_k(p, top_p, top_k, out=out)
            assert got is out
            assert np.flatnonzero(got).tolist() == [i for i in kept if p[i] > 0]
            assert_ulps(got, exact.share(p, kept), 6)


@cache
def whole_vocabulary(top_p):
    """Name, row and kept ids; half a second of plain Python, so worked out once for all faces."""
    found = rows.probabilities(rows.VOCABULARY).items()
    return [(name, p, np.array(exact.kept_sequentially(p, top_p))) for name, p in found]


@pytest.mark.parametrize("top_p", [0.5, 0.999])
def test_worst_case_rows_of_a_whole_vocabulary(face, top_p):
    for name, p, kept in whole_vocabulary(top_p):
        got = face.apply_top_p_top_k(p, top_p)
        assert np.array_equal(np.flatnonzero(got), kept[p[kept] > 0]), name
        assert_ulps(got[kept], p[kept] / math.fsum(p[kept]), 6, name)


@pytest.mark.parametrize("n", [2, 5, 33, 100, 600, 3000])
def test_dyadic_rows_against_rational_arithmetic(face, n):
    """Sums of k/2^m are exact, so sequential float64 sums and rational ones must agree everywhere."""
    rng = np.random.default_rng(n)
    for trial in range(12 if n < 1000 else 3):
        p = rng.multinomial(1 << 16, rng.dirichlet(np.full(n, 0.3 + trial % 3))) / 65536.0
        nucleus = exact.Nucleus(p)
        for edge in [*nucleus.before[1:4], *rng.choice(nucleus.before[1:], 3)]:
            for top_p in (float(edge), math.nextafter(edge, 0), math.nextafter(edge, 2)):
                for top_k in (0, 7, n // 2):
                    kept = nucleus.kept(top_p, top_k)
                    got = face.apply_top_p_top_k(p, top_p, top_k)
                    assert np.flatnonzero(got).tolist() == [i for i in kept if p[i] > 0]


def test_the_running_sum_is_the_sequential_one(face):
    """Ten times 0.1 is 0.9999999999999999 one by one, and 1.0 in pairs: the contract says one by one."""
    p = np.full(16, 0.1)
    assert np.count_nonzero(face.apply_top_p_top_k(p, 0.8)) == 9  # 8 of them sum to 0.7999999999999999
    assert np.count_nonzero(face.apply_top_p_top_k(p, np.nextafter(1.0, 0))) == 10


# ---- properties ------------------------------------------------------------------------------------

PROBABILITY_ROWS = st.lists(
    st.floats(0, 1) | st.sampled_from([0.0, 0.125, 0.25, 0.5]), min_size=1, max_size=60
).filter(lambda row: max(row) > 0)


@given(PROBABILITY_ROWS, st.floats(0, 1), st.integers(0, 60))
def test_keeps_what_the_definition_keeps(face, probs, top_p, top_k):
    kept = exact.kept_sequentially(probs, top_p, top_k)
    got = face.apply_top_p_top_k(probs, top_p, top_k)
    assert np.flatnonzero(got).tolist() == [i for i in kept if got[i] > 0 or probs[i] > 0]
    assert abs(math.fsum(got) - 1.0) <= 4 * 2.0**-52
    assert (got >= 0).all()


@given(PROBABILITY_ROWS, st.floats(0.01, 0.99), st.integers(1, 60), st.randoms(use_true_random=False))
def test_permuting_ids_permutes_the_result_up_to_the_tie_rule(face, probs, top_p, top_k, random):
    order = list(range(len(probs)))
    random.shuffle(order)
    p = face.apply_top_p_top_k(probs, top_p, top_k)
    permuted = face.apply_top_p_top_k([probs[i] for i in order], top_p, top_k)
    # Which of several equal probabilities survive depends on their ids; how many of each does not. The
    # sums are over the same numbers in the same rank order, the kept sum perhaps in another.
    assert_ulps(np.sort(permuted), np.sort(p), 4)


@given(PROBABILITY_ROWS, st.floats(0.01, 0.98), st.integers(1, 59))
def test_a_wider_setting_keeps_at_least_as_much(face, probs, top_p, top_k):
    kept = set(np.flatnonzero(face.apply_top_p_top_k(probs, top_p, top_k)))
    assert kept <= set(np.flatnonzero(face.apply_top_p_top_k(probs, top_p + 0.01, top_k)))
    assert kept <= set(np.flatnonzero(face.apply_top_p_top_k(probs, top_p, top_k + 1)))
    assert kept == set(np.flatnonzero(face.apply_top_p_top_k(probs, top_p, 0))) & set(
        np.flatnonzero(face.apply_top_p_top_k(probs, 1.0, top_k))
    )
