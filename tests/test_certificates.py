"""Decisions so close that every fast path has to fall back, from both sides (design 4).

A fast path decides by a sum taken in another order, or by logits, with an error bound; closer than the
bound it must replay the reference's order. Random rows hardly ever come that close, so each case here
is built to: the counters show that the fallback was taken, the reference shows that it was right.
"""

import math

import numpy as np
import pytest
from mtplx._csampling import dispatch
from support import exact, rows
from support.counting import counting
from support.generators import LAST, STEP, around, scripted

from mtplx import reference, sampling
from mtplx.distributions import SamplerConfig, SparseDistribution

# Row lengths: within a block, a handful, several chunks of 512, and enough for 20 ranks to be few.
SIZES = (3, 20, 300, 513, 1100, 5000)
LONG = 6000


def kept(row):
    return np.flatnonzero(row).tolist()


def test_the_counters_have_the_names_of_the_certificates():
    names = {"nucleus_boundary", "nucleus_against_sum", "rank_tie", "categorical_draw", "correction_draw"}
    assert set(dispatch.fallback_counts()) >= names
    assert all(type(count) is int for count in dispatch.fallback_counts().values())


# ---- nucleus_boundary: top-p of given probabilities ------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 1 << 11, 1 << 30])
@pytest.mark.parametrize("n", [300, 5000])
def test_top_p_on_a_step_of_two_values(isa, n, steps):
    """Values that differ in their last digits alone are replayed as they are ranked: by value, then id."""
    low = 2.0**-13
    high = float(np.int64(np.float64(low).view(np.int64) + steps).view(np.float64))
    for seed in range(4):
        p = np.random.default_rng(seed).choice([low, high], n)
        steps_of_sum = np.cumsum(np.sort(p)[::-1])
        with counting("nucleus_boundary") as counted:
            for at in (n // 3, n // 2, n - 2):
                for top_p in around(steps_of_sum[at]):
                    expected = reference.apply_top_p_top_k(p, top_p)
                    assert kept(sampling.apply_top_p_top_k(p, top_p)) == kept(expected)
        assert counted[0] > 0


def dyadic_row(n, seed, grain=1 << 16):
    rng = np.random.default_rng(seed)
    return rng.multinomial(grain, rng.dirichlet(np.full(n, [0.2, 1.0, 5.0][seed % 3]))) / grain


@pytest.mark.parametrize("n", SIZES)
def test_top_p_on_a_partial_sum(isa, n):
    """All sums of k/2^16 are exact, so the answer is known in rational numbers as well."""
    forced = 0
    with counting("nucleus_boundary") as counted:
        for seed in range(9):
            p = dyadic_row(n, seed)
            nucleus = exact.Nucleus(p)
            ends = [*nucleus.before[1:5], *np.random.default_rng(seed).choice(nucleus.before[1:], 4)]
            for edge in ends:
                if edge >= 1:
                    continue
                for top_p in (math.nextafter(edge, 0), float(edge), math.nextafter(edge, 2)):
                    if top_p >= 1.0:
                        continue
                    expected = [i for i in nucleus.kept(top_p) if p[i] > 0]
                    assert kept(reference.apply_top_p_top_k(p, top_p)) == expected
                    assert kept(sampling.apply_top_p_top_k(p, top_p)) == expected
                    for k in (5, n // 2, n - 1):
                        expected = [i for i in nucleus.kept(top_p, k) if p[i] > 0]
                        assert kept(sampling.apply_top_p_top_k(p, top_p, k)) == expected
                    forced += 1
    assert forced > 50
    assert counted[0] >= forced


@pytest.mark.parametrize("n", SIZES)
def test_top_p_on_a_rounded_partial_sum(isa, n):
    """Sums that round: only the reference's own order has the answer."""
    forced = 0
    with counting("nucleus_boundary") as counted:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            p = reference.softmax(rng.normal(size=n) * (1 + seed % 3))
            sums = np.cumsum(np.sort(p)[::-1])
            for edge in sums[rng.integers(0, n - 1, 4)].tolist():
                for top_p in (math.nextafter(edge, 0), edge, math.nextafter(edge, 2)):
                    got = sampling.apply_top_p_top_k(p, top_p)
                    assert kept(got) == kept(reference.apply_top_p_top_k(p, top_p)), (seed, top_p)
                    forced += 1
    assert counted[0] >= forced


@pytest.mark.parametrize("n", [300, 5000])
@pytest.mark.parametrize("levels", [1, 2, 7])
def test_top_p_within_a_level_of_equal_probabilities(isa, n, levels):
    """The cut divides a level: how many of it stay is a sum of equal numbers, one by one."""
    forced = 0
    with counting("nucleus_boundary") as counted:
        for seed in range(4):
            rng = np.random.default_rng(seed)
            w = rng.random(levels)[rng.integers(0, levels, n)]
            p = w / w.sum()
            sums = np.cumsum(np.sort(p)[::-1])
            for edge in sums[rng.integers(0, n - 1, 4)].tolist():
                for top_p in (math.nextafter(edge, 0), edge, math.nextafter(edge, 2)):
                    if top_p >= 1.0:
                        continue
                    got = sampling.apply_top_p_top_k(p, top_p)
                    assert kept(got) == kept(reference.apply_top_p_top_k(p, top_p)), (seed, top_p)
                    forced += 1
    assert counted[0] >= forced


@pytest.mark.parametrize("n", [513, 5000])
def test_top_p_on_a_partial_sum_from_logits(isa, n):
    config = {"temperature": 0.7, "top_k": 0}
    forced = 0
    with counting("nucleus_boundary") as counted:
        for seed in range(4):
            x = np.random.default_rng(seed).normal(size=n) * 3
            p = sampling.softmax(x, 0.7)
            sums = np.cumsum(np.sort(p)[::-1])
            for place in (0, 3, n // 20, n // 4):
                for top_p in (np.nextafter(sums[place], 0), sums[place], np.nextafter(sums[place], 2)):
                    settings = SamplerConfig(top_p=float(top_p), **config)
                    expected = kept(reference.apply_top_p_top_k(p, float(top_p)))
                    assert kept(sampling.distribution_from_logits(x, settings)) == expected
                    assert (
                        sampling.sparse_distribution_from_logits(x, settings).token_ids.tolist() == expected
                    )
                    forced += 2
    assert counted[0] >= forced


@pytest.mark.parametrize("n", SIZES)
def test_ordinary_nuclei_are_certain(isa, n):
    with counting("nucleus_boundary") as counted:
        for seed in range(10):
            p = reference.softmax(np.random.default_rng(seed).normal(size=n) * 2)
            for top_p in (0.5, 0.9, 0.95):
                sampling.apply_top_p_top_k(p, top_p)
                sampling.distribution_from_logits(np.log(p), SamplerConfig(1.0, top_p, 0))
    assert counted[0] == 0


# ---- nucleus_against_sum: top-p among the top-k of logits ------------------------------------------

OFFSETS = (0.0, 1e-16, 1e-12, 1e-9, 1e-7, 1e-6)


def assert_composed(x, config, what=""):
    """Both calls from logits keep what the reference keeps of the face's own softmax."""
    p = sampling.softmax(x, config.temperature)
    expected = kept(reference.apply_top_p_top_k(p, config.top_p, config.top_k))
    assert sampling.sparse_distribution_from_logits(x, config).token_ids.tolist() == expected, what
    assert kept(sampling.distribution_from_logits(x, config)) == expected, what


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("scale", [0.7, 2.0, 6.0])
def test_top_p_next_to_a_sum_of_the_top_k(isa, dtype, scale):
    """The fast path knows the whole sum to some 1e-6 only; closer than that it has to take it again."""
    forced = 0
    with counting("nucleus_against_sum") as counted:
        for seed in range(4):
            x = (np.random.default_rng(seed).normal(size=LONG) * scale).astype(dtype)
            sums = np.cumsum(np.sort(sampling.softmax(x, 0.8))[::-1][:20])
            for place in (0, 2, 7, 17):
                for offset in OFFSETS:
                    for side in (-1.0, 1.0):
                        top_p = float(sums[place] * (1.0 + side * offset))
                        assert_composed(x, SamplerConfig(0.8, top_p, 20), (seed, place, side * offset))
                        forced += 2
    # Offsets up to 1e-7 are inside any bound for a float32 sum.
    assert counted[0] >= forced * 4 // 6


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e6, 1e9, 1e12])
def test_logits_far_from_zero(isa, offset):
    """In float32, 1e6 + x keeps little of x; the rough sum must not be built on it."""
    for seed in range(6):
        x = np.random.default_rng(seed).normal(size=LONG) * 2 + offset
        for temperature in (0.6, 1.0):
            sums = np.cumsum(np.sort(sampling.softmax(x, temperature))[::-1][:20])
            for place in (0, 3, 9, 17):
                for factor in (1 - 1e-3, 1 - 1e-5, 1 + 1e-7, 1 + 1e-4, 1 + 1e-2):
                    assert_composed(x, SamplerConfig(temperature, float(sums[place] * factor), 20), seed)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_top_p_next_to_a_sum_at_extreme_temperatures(isa, dtype, temperature):
    x = (np.random.default_rng(4).normal(size=LONG) * 3).astype(dtype)
    sums = np.cumsum(np.sort(sampling.softmax(x, temperature))[::-1][:20])
    for place in (0, 4, 12):
        for factor in (1 - 1e-3, 1 - 1e-6, 1 - 1e-9, 1.0, 1 + 1e-9, 1 + 1e-6, 1 + 1e-3):
            assert_composed(x, SamplerConfig(temperature, float(sums[place] * factor), 20), place)


def test_ordinary_top_k_with_top_p_is_certain(isa):
    counts = dispatch.fallback_counts()
    for seed in range(10):
        for dtype in rows.FLOAT_TYPES.values():
            x = (np.random.default_rng(seed).normal(size=LONG) * 3).astype(np.float32)
            x = np.unique(x.astype(dtype))  # short floats tie by themselves
            if x.size < 5120:
                continue
            p = np.sort(sampling.softmax(x, 0.8))[::-1]
            sums = np.cumsum(p[:20])
            top_p = float(sums[3] + sums[4]) / 2  # half a probability from either sum
            assert_composed(x, SamplerConfig(0.8, top_p, 20))
    assert dispatch.fallback_counts() == counts


# ---- rank_tie: logits that differ, probabilities that do not ---------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "top"),
    [(1.0, np.nextafter(1.0, 2), 20.0), (np.nextafter(1.0, 0), 1.0, 20.0), (1e-16, 2e-16, 20.0)],
    ids=["above 1", "below 1", "2e-16 and 1e-16"],
)
def test_neighbouring_logits_tie_and_the_lowest_id_wins(face, low, high, top):
    x = np.array([low, high, top, high])
    p = face.softmax(x)
    assert low < high
    assert p[0] == p[1] == p[3]
    for config, expected in [
        (SamplerConfig(1.0, 1.0, 2), [0, 2]),
        (SamplerConfig(1.0, 1.0, 3), [0, 1, 2]),
        (SamplerConfig(1.0, float(p[2] + p[0] / 2), 0), [0, 2]),
        (SamplerConfig(1.0, float(p[2] + p[0] / 2), 3), [0, 2]),
    ]:
        assert kept(face.distribution_from_logits(x, config)) == expected
        assert face.sparse_distribution_from_logits(x, config).token_ids.tolist() == expected


@pytest.mark.parametrize(("low", "high"), [(1.0, np.nextafter(1.0, 2)), (1e-16, 2e-16)], ids=["1", "1e-16"])
@pytest.mark.parametrize("n", [600, 1300, 5000, LONG])
def test_neighbouring_logits_across_chunks(face, n, low, high):
    """Larger logits all stand at higher ids; ranking by logits would take those."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=n) - 10.0
        tied = np.sort(rng.choice(n - 1, 12, replace=False))
        x[tied] = np.where(np.arange(12) < 6, low, high)
        x[n - 1] = 20.0
        p = face.softmax(x)
        assert len(set(p[tied].tolist())) == 1
        for k in (2, 4, 5, 8, 13):
            expected = sorted([*tied[: k - 1].tolist(), n - 1])
            for top_p in (1.0, float(p[n - 1] + (k - 1.5) * p[tied[0]])):
                config = SamplerConfig(1.0, top_p, k)
                assert kept(face.distribution_from_logits(x, config)) == expected
                assert face.sparse_distribution_from_logits(x, config).token_ids.tolist() == expected


@pytest.mark.parametrize("n", [600, 5000, LONG])
def test_a_nucleus_that_ends_among_neighbouring_logits(face, n):
    rng = np.random.default_rng(n)
    x = np.where(rng.random(n) < 0.5, 1.0, np.nextafter(1.0, 2))
    x[n // 2] = 20.0
    p = face.softmax(x, 8.0)
    others = np.delete(np.arange(n), n // 2)
    assert len(set(p[others].tolist())) == 1
    for top_p in (0.3, 0.5, 0.9):
        for k in (0, 20):
            config = SamplerConfig(8.0, top_p, k)
            count = min(np.count_nonzero(reference.apply_top_p_top_k(p, top_p, k)), n)
            expected = sorted([*others[: count - 1].tolist(), n // 2])
            assert kept(face.distribution_from_logits(x, config)) == expected
            assert face.sparse_distribution_from_logits(x, config).token_ids.tolist() == expected


def test_rank_ties_are_counted(isa):
    forced = 0
    with counting("rank_tie") as counted:
        for seed in range(10):
            rng = np.random.default_rng(seed)
            x = rng.normal(size=LONG) - 10.0
            tied = np.sort(rng.choice(LONG - 1, 10, replace=False))
            # Apart by more than exp can hide, by less than a probability shows.
            x[tied] = 1.0 + np.arange(10) * 4e-16 * (-1) ** seed
            x[LONG - 1] = 1.5
            for k in (3, 5, 8):
                assert_composed(x, SamplerConfig(1.0, 1.0, k), (seed, k))
                forced += 2
    assert counted[0] >= forced


@pytest.mark.parametrize("temperature", [1e8, 1e12, 1e15, 1e16, 1e18])
@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_temperatures_that_make_most_probabilities_equal(isa, dtype, temperature):
    """At a huge T even float32 logits tie, all over the row and at the very top."""
    for seed in range(3):
        x = (np.random.default_rng(seed).normal(size=LONG) * 3).astype(dtype)
        for top_p, k in ((1.0, 1), (1.0, 20), (10 / LONG, 20), (0.4, 0), (0.5, 3000)):
            assert_composed(x, SamplerConfig(temperature, top_p, k), (seed, top_p, k))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cuts_among_subnormal_probabilities(isa, dtype):
    """Where probabilities are multiples of 2^-1074, many logits share one."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = np.full(LONG, -760.0)
        some = rng.choice(LONG, 400, replace=False)
        x[some] = -rng.uniform([741.0, 700.0][seed % 2], 745.5, 400)
        x[some[:5]] = -rng.uniform(0.0, 3.0, 5)
        x = x.astype(dtype)
        for k in (3, 6, 12, 20, 23):
            for top_p in (1.0, 0.9, 1.0 - 1e-15, LAST):
                assert_composed(x, SamplerConfig(1.0, top_p, k), (seed, k, top_p))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("largest", [1, 2, 3, 19, 20])
def test_subnormal_probabilities_that_tie(isa, dtype, largest):
    """Nearly all logits equal, so far below the largest that their weights are subnormal.

    With one largest logit the sum is 1 and the weights are the probabilities; with more, or with weights
    that are close but not equal, different weights meet in one probability.
    """
    for seed in range(4):
        rng = np.random.default_rng(seed)
        for gap in (690.0, 735.25, 741.0, 744.0, 744.75, 745.0, 745.125, 746.5):
            x = np.full(LONG, -gap)
            if seed:
                near = rng.choice(LONG, 30, replace=False)
                x[near] += rng.choice([-(2.0**-11), 2.0**-11, 0.25], 30)
            x[rng.choice(LONG, largest, replace=False)] = 0.0
            x = x.astype(dtype)
            for k in (2, 3, 20, 23):
                for top_p in (1.0, 1.0 - 1e-15):
                    assert_composed(x, SamplerConfig(1.0, top_p, k), (seed, gap, k, top_p))


def test_subnormal_ties_under_one_largest_logit_are_certain(isa):
    x = np.full(LONG, -741.0, dtype=np.float32)
    x[7] = 0.0
    with counting("rank_tie") as counted:
        assert_composed(x, SamplerConfig(1.0, 1.0, 20))
    assert counted[0] == 0
    x[8] = 0.0  # the sum is 2, and quotients round
    with counting("rank_tie") as counted:
        assert_composed(x, SamplerConfig(1.0, 1.0, 20))
    assert counted[0] > 0


def test_ties_of_whole_rows(isa):
    for name, x in rows.logits(LONG).items():
        for temperature in (0.6, 1.0, 8.0):
            for top_p, k in ((1.0, 1), (1.0, 20), (0.5, 20), (0.999, 20), (0.3, 0), (1.0, 3000)):
                assert_composed(x, SamplerConfig(temperature, top_p, k), (name, temperature, top_p, k))


def test_ordinary_ranks_are_certain(isa):
    with counting("rank_tie") as counted:
        for seed in range(10):
            x = np.random.default_rng(seed).normal(size=LONG) * 3
            for k in (1, 5, 20):
                assert_composed(x, SamplerConfig(0.8, 1.0, k))
                assert_composed(x.astype(np.float32), SamplerConfig(0.8, 1.0, k))
    assert counted[0] == 0


# ---- categorical_draw ------------------------------------------------------------------------------

DRAW_SIZES = (2, 17, 256, 257, 600, 4096, 5000)


def spots(n, rng):
    """Places at the ends of blocks and chunks, and some others."""
    return {i for i in (0, 255, 256, 257, 511, 512, n - 2, *rng.integers(0, n, 6).tolist()) if 0 <= i < n - 1}


@pytest.mark.parametrize("n", DRAW_SIZES)
def test_draws_exactly_on_a_step(isa, n):
    forced = 0
    with counting("categorical_draw") as counted:
        for seed in range(4):
            rng = np.random.default_rng(seed)
            p = dyadic_row(n, seed)
            p[0] += STEP  # the last sum is no power of two for odd seeds
            if seed % 2 == 0:
                p[0] -= STEP
            sums = np.cumsum(p)
            for place in spots(n, rng):
                for u in around(sums[place] / sums[-1]):
                    got = sampling.sample_from_distribution(p, scripted(u))
                    assert got == reference.sample_from_distribution(p, scripted(u)) == exact.draw(p, u)
                    forced += 4 * STEP < u < LAST - 4 * STEP
    assert counted[0] >= forced > 0


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", DRAW_SIZES)
def test_draws_next_to_a_rounded_step(isa, n, dtype):
    with counting("categorical_draw") as counted:
        for seed in range(3):
            rng = np.random.default_rng(seed)
            p = (rng.dirichlet(np.ones(n)) * [1.0, 7.0, 300.0][seed]).astype(dtype)
            sums = np.cumsum(p.astype(np.float64))
            for place in spots(n, rng):
                for u in around(sums[place] / sums[-1]):
                    got = sampling.sample_from_distribution(p, scripted(u))
                    assert got == reference.sample_from_distribution(p, scripted(u)), (seed, place, u)
    assert counted[0] > 0


@pytest.mark.parametrize("n", DRAW_SIZES)
def test_draws_at_the_ends_of_the_interval(isa, n):
    for name, p in rows.probabilities(n).items():
        for u in (0.0, STEP, 2 * STEP, LAST - STEP, LAST):
            got = sampling.sample_from_distribution(p, scripted(u))
            assert got == reference.sample_from_distribution(p, scripted(u)), (name, u)
            assert p[got] > 0


@pytest.mark.parametrize("n", [600, 5000])
def test_draws_from_rows_of_mostly_zeros(isa, n):
    """Steps of height 0 before, between and after; the sums before the first entry are exactly 0."""
    rng = np.random.default_rng(n)
    for _ in range(20):
        p = np.zeros(n)
        where = np.sort(rng.choice(n, 3, replace=False))
        p[where] = 0.25, 0.5, 0.25
        for u in [v for edge in (0.0, 0.25, 0.75, 1.0) for v in around(edge)]:
            got = sampling.sample_from_distribution(p, scripted(u))
            assert got == where[0 if u < 0.25 else 1 if u < 0.75 else 2]


@pytest.mark.parametrize("n", [2, 600, 5000])
def test_draws_from_subnormal_weights(isa, n):
    """u times a subnormal sum has no digits left; relative bounds say nothing there."""
    rng = np.random.default_rng(n)
    for top in (2, 50):
        p = rng.integers(0, top, n) * 5e-324
        p[n // 2] = 5e-324
        sums = np.cumsum(p)
        for place in spots(n, rng):
            for u in [*around(sums[place] / sums[-1]), float(rng.random())]:
                got = sampling.sample_from_distribution(p, scripted(u))
                assert got == reference.sample_from_distribution(p, scripted(u)), (top, place, u)


def test_ordinary_draws_are_certain(isa):
    with counting("categorical_draw") as counted:
        for n in DRAW_SIZES:
            p = np.random.default_rng(n).dirichlet(np.ones(n))
            rng = np.random.default_rng(n)
            for _ in range(30):
                sampling.sample_from_distribution(p, rng)
    assert counted[0] == 0


# ---- correction_draw -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", DRAW_SIZES[1:])  # of two differences only one is positive: no step between
def test_corrections_exactly_on_a_step(isa, n):
    forced = 0
    with counting("correction_draw") as counted:
        for seed in range(6):
            rng = np.random.default_rng(seed)
            p, q = dyadic_row(n, seed), dyadic_row(n, seed + 100)
            # Rejected at u = LAST: the draft has more of it than the target.
            if not (q > p).any():
                continue
            token = int(np.argmax(q - p))
            sums = np.cumsum(np.maximum(p - q, 0.0))
            for place in spots(n, rng):
                for u in around(sums[place] / sums[-1]):
                    got = sampling.verify_one_token(p, q, token, scripted(LAST, u))
                    assert got == reference.verify_one_token(p, q, token, scripted(LAST, u)), (seed, place, u)
                    assert got.token_id == exact.verified(p, q, token, [LAST, u])[1]
                    forced += 4 * STEP < u < LAST - 4 * STEP
    assert counted[0] >= forced > 0


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", DRAW_SIZES[1:])
def test_corrections_next_to_a_rounded_step(isa, n, dtype):
    with counting("correction_draw") as counted:
        for seed in range(3):
            rng = np.random.default_rng(seed)
            p, q = rng.dirichlet(np.ones(n), 2).astype(dtype)
            token = int(np.argmax(q.astype(np.float64) - p.astype(np.float64)))
            sums = np.cumsum(np.maximum(p.astype(np.float64) - q.astype(np.float64), 0.0))
            for place in spots(n, rng):
                for u in around(sums[place] / sums[-1]):
                    got = sampling.verify_one_token(p, q, token, scripted(LAST, u))
                    assert got == reference.verify_one_token(p, q, token, scripted(LAST, u)), (seed, place, u)
    assert counted[0] > 0


@pytest.mark.parametrize("n", DRAW_SIZES)
def test_corrections_of_mixed_kinds_on_a_step(isa, n):
    rng = np.random.default_rng(n)
    p, q = dyadic_row(n, 1), dyadic_row(n, 2)
    token = int(np.argmax(q - p))
    sparse = [SparseDistribution(np.flatnonzero(row), row[row > 0], n) for row in (p, q)]
    sums = np.cumsum(np.maximum(p - q, 0.0))
    for target, draft in ((p, sparse[1]), (sparse[0], q), (sparse[0], sparse[1])):
        for place in spots(n, rng):
            for u in around(sums[place] / sums[-1]):
                got = sampling.verify_one_token(target, draft, token, scripted(LAST, u))
                assert got.token_id == exact.verified(p, q, token, [LAST, u])[1]


@pytest.mark.parametrize("n", DRAW_SIZES)
def test_coins_exactly_on_the_acceptance_probability(isa, n):
    """u = a accepts, the next number above does not; a itself must be the quotient to the last bit."""
    rng = np.random.default_rng(n)
    for _ in range(30):
        p, q = rng.dirichlet(np.ones(n), 2)
        token = int(np.argmax(q - p))
        a = p[token] / q[token]
        for u in around(a):
            expected = exact.verified(p, q, token, [u, 0.5])
            for face in (reference, sampling):
                got = face.verify_one_token(p, q, token, scripted(u, 0.5))
                assert (got.accepted, got.token_id) == expected
                assert got.accepted == (u <= a)


def test_ordinary_corrections_are_certain(isa):
    with counting("correction_draw") as counted:
        for n in DRAW_SIZES:
            p, q = np.random.default_rng(n).dirichlet(np.ones(n), 2)
            rng = np.random.default_rng(n)
            for _ in range(30):
                sampling.verify_one_token(p, q, int(np.argmax(q - p)), rng)
    assert counted[0] == 0
