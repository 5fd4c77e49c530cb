"""Faults that were reported against other samplers, by topic; each docstring names the fault.

The general tests cover most of these as well. They stand here once more because each did happen.
"""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from support import exact, rows
from support.generators import LAST, scripted
from support.statistics import law_refuted
from support.ulps import assert_ulps

from mtplx.distributions import SamplerConfig, SparseDistribution

V = rows.VOCABULARY


def kept(row):
    return np.flatnonzero(row).tolist()


def one_hot(token, n):
    row = np.zeros(n)
    row[token] = 1.0
    return row


# ---- the nucleus -----------------------------------------------------------------------------------


def test_nucleus_includes_the_crossing_token(face):
    """Fault: the token that carries the sum over top_p was dropped, leaving less than top_p."""
    p = np.array([0.04, 0.4, 0.06, 0.3, 0.2])
    assert kept(face.apply_top_p_top_k(p, 0.5)) == [1, 3]
    assert kept(face.apply_top_p_top_k(p, 0.75)) == [1, 3, 4]
    assert_ulps(face.apply_top_p_top_k(p, 0.5)[[1, 3]], [0.4 / 0.7, 0.3 / 0.7], 2)


def test_nucleus_stops_at_an_exact_sum(face):
    """Fault: `<=` in place of `<` let one token too many in when the sum hits top_p exactly."""
    p = np.array([1 / 16, 1 / 2, 1 / 16, 1 / 8, 1 / 4])
    for top_p, expected in ((1 / 2, [1]), (3 / 4, [1, 4]), (7 / 8, [1, 3, 4]), (15 / 16, [0, 1, 3, 4])):
        assert kept(face.apply_top_p_top_k(p, top_p)) == expected


@pytest.mark.parametrize("top_p", [LAST, 1.0 - 1e-9, 0.9999999])
def test_threshold_that_is_not_reached_before_the_end(face, top_p):
    """Fault: with top_p just below 1 no rank crossed it, and the search ran past the last index."""
    flat = np.full(V, 1.0 / V)
    got = face.apply_top_p_top_k(flat, top_p)
    # The mass of all but the last 1e-7 of them is reached with 15 tokens to go.
    assert np.count_nonzero(got) >= V - 16
    assert np.count_nonzero(face.apply_top_p_top_k(flat, LAST)) == V
    assert abs(math.fsum(got) - 1.0) < 1e-12


@pytest.mark.parametrize("top_p", [1e-3, 1e-9, 1e-18, 1e-301, 5e-324])
def test_tiny_threshold_keeps_the_best_token(face, top_p):
    """Fault: a tiny top_p kept nothing at all, and sampling from nothing crashed or gave id 0."""
    for seed in range(5):
        w = np.exp(np.random.default_rng(seed).normal(size=3000))
        w[1234] = 500.0
        assert np.array_equal(face.apply_top_p_top_k(w / w.sum(), top_p), one_hot(1234, 3000))


def test_ties_at_the_edge_of_the_nucleus(face):
    """Fault: an unstable sort chose other tied tokens from call to call, or kept too many of them."""
    flat = np.full(1 << 13, 2.0**-13)
    expected = list(range(1 << 11))
    for _ in range(4):
        assert kept(face.apply_top_p_top_k(flat, 0.25)) == expected


def test_nucleus_is_measured_before_top_k(face):
    """Fault: probabilities were renormalised over the top k before top_p was applied to them."""
    p = np.array([0.3, 0.05, 0.25, 0.2, 0.05, 0.05, 0.05, 0.05])
    assert kept(face.apply_top_p_top_k(p, 0.7, 3)) == [0, 2, 3]  # over the three alone .55/.75 > .7
    assert kept(face.apply_top_p_top_k(p, 0.5, 3)) == [0, 2]


def test_long_running_sum_places_the_cut(face):
    """Fault: a float32 running sum over a large vocabulary stopped growing, so the cut was far off."""
    n = 120_000
    flat = np.full(V, 1.0 / V)
    assert np.count_nonzero(face.apply_top_p_top_k(flat, (n + 0.5) / V)) == n + 1
    head = np.full(V, 0.25 / (V - 1))
    head[99] = 0.75
    top_p = 0.75 + 0.25 * (n + 0.5) / (V - 1)
    assert np.count_nonzero(face.apply_top_p_top_k(head, top_p)) == n + 2


# ---- top-k -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 13, 64, 500, 2047])
def test_exactly_k_of_many_ties(face, k):
    """Fault: "everything at least as likely as the k-th" kept all tied tokens, not k."""
    assert kept(face.apply_top_p_top_k(np.full(2048, 2.0**-11), 1.0, k)) == list(range(k))
    p = np.array([0.1, 0.2, 0.2, 0.3, 0.2])
    assert kept(face.apply_top_p_top_k(p, 1.0, 3)) == [1, 2, 3]


@pytest.mark.parametrize("k", [0, -1, -(2**33), 6, 7, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**33 + 3, 2**63])
def test_sentinels_for_no_top_k(face, k):
    """Fault: a huge or negative top_k wrapped around in a 32-bit cast and became a small k."""
    p = np.array([0.3, 0.25, 0.2, 0.15, 0.0625, 0.0375])
    assert_ulps(face.apply_top_p_top_k(p, 1.0, k), p / p.sum(), 2)
    config = SamplerConfig(1.0, 1.0, k)
    assert np.count_nonzero(face.distribution_from_logits(np.log(p), config)) == 6
    assert face.sparse_distribution_from_logits(np.log(p), config).token_ids.size == 6


def test_k_beyond_a_vector_width(face):
    """Fault: a selection kernel built for k up to 32 returned unnormalised or wrong sets above it."""
    p = np.random.default_rng(3).permutation(700) + 1.0
    p /= p.sum()
    ranked = np.argsort(-p)
    for k in (1, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 129, 255, 257, 699):
        expected = np.zeros(700)
        expected[ranked[:k]] = p[ranked[:k]] / math.fsum(p[ranked[:k]])
        assert_ulps(face.apply_top_p_top_k(p, 1.0, k), expected, 4)


@pytest.mark.parametrize("n", range(1, 40))
def test_softmax_tail_of_every_length(face, n):
    """Fault: the last, incomplete vector of a row was read past its end or left out of the sum."""
    x = np.random.default_rng(n).normal(size=n) * 5
    memory = np.full(n + 16, 300.0)  # what lies behind the row would swamp it
    memory[:n] = x
    assert_ulps(face.softmax(memory[:n]), exact.softmax(x), 10)


# ---- temperature and bad logits --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-7, 1e-20, 1e-200, 1e-310])
def test_tiny_temperature_is_greedy(face, temperature):
    """Fault: x/T overflowed to inf, inf - inf to NaN, and the argmax of NaN was token 0."""
    x = np.array([-1.5, 3.25, 40.0, 12.0, -60.0], dtype=np.float16)
    assert np.array_equal(face.softmax(x, temperature), one_hot(2, 5))
    assert np.array_equal(face.softmax([0.0, 1.5e308], temperature), one_hot(1, 2))


def test_huge_temperature_with_opposite_extremes(face):
    """Fault: max - min overflowed although the scaled difference is small."""
    sigmoid = 1.0 / (1.0 + math.exp(-3.2))
    np.testing.assert_allclose(face.softmax([-1.6e308, 1.6e308], 1e308), [1 - sigmoid, sigmoid], rtol=1e-14)
    np.testing.assert_allclose(face.softmax([3.0, -7.0, 5.0, 0.0], 1e305), [0.25] * 4, rtol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_bad_logits_never_choose_a_token(face, temperature, bad):
    """Fault: NaN compares false with everything, so a greedy argmax settled on the NaN or on token 0."""
    for place in range(5):
        x = np.array([0.5, 6.0, 2.0, -1.0, 3.0])
        x[place] = bad
        with pytest.raises(ValueError, match=r"nan_count=\d, inf_count=\d"):
            face.softmax(x, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fully_masked_rows_are_refused(face, temperature):
    """Fault: a grammar that allowed nothing gave 0/0, then token 0 or token V."""
    x = np.full(9, -np.inf)
    for call in (
        lambda: face.softmax(x, temperature),
        lambda: face.distribution_from_logits(x, SamplerConfig(temperature, 0.9, 4)),
        lambda: face.sparse_distribution_from_logits(x, SamplerConfig(temperature, 0.9, 4)),
    ):
        with pytest.raises(RuntimeError):  # which NonFiniteLogitsError also is
            call()
    x[6] = -20.0
    assert np.array_equal(face.softmax(x, temperature), one_hot(6, 9))


# ---- draws -----------------------------------------------------------------------------------------


def test_impossible_tokens_are_never_drawn(face):
    """Fault: `>=` at u = 0 drew a leading token of probability 0."""
    assert face.sample_from_distribution([0.0, 0.0, 0.0, 0.25, 0.75], scripted(0.0)) == 3
    rng = np.random.default_rng(22)
    p = np.array([0.0, 0.4, 0.0, 0.0, 0.6, 0.0])
    assert set(Counter(face.sample_from_distribution(p, rng) for _ in range(2000))) == {1, 4}
    masked = face.softmax([-1e6] * 300 + [2.0] + [-1e6] * 300)
    assert {face.sample_from_distribution(masked, rng) for _ in range(100)} == {300}


def test_the_largest_number_draws_the_last_possible_token(face):
    """Fault: sums just below 1 left u above the last step, and the search returned V."""
    for p in ([0.6, 0.3, 0.1], [0.1] * 10, [0.6, 0.3, 0.1, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0]):
        last = max(i for i, value in enumerate(p) if value > 0)
        assert face.sample_from_distribution(p, scripted(LAST)) == last
    d = SparseDistribution([21, 4, 9], [0.6, 0.4, 0.0], 30)
    assert face.sample_from_distribution(d, scripted(LAST)) == 4


@pytest.mark.parametrize("weights", [np.float32, np.float16, np.int32], ids=lambda t: t.__name__)
def test_short_and_unnormalised_weights_can_be_drawn_from(face, weights):
    """Fault: float32 rows were refused because they sum to 1 only within float32."""
    w = (np.array([1, 4, 5]) * (0.1 if weights is not np.int32 else 1)).astype(weights)
    rng = np.random.default_rng(25)
    counts = np.bincount([face.sample_from_distribution(w, rng) for _ in range(4000)], minlength=3)
    assert not law_refuted(counts, [0.1, 0.4, 0.5])  # false alarm: one in a million
    assert law_refuted(counts[::-1], [0.1, 0.4, 0.5])
    flat = np.full(60_000, 1 / 60_000, dtype=np.float32)
    assert 0 <= face.sample_from_distribution(flat, rng) < 60_000


@pytest.mark.parametrize("w", [[0.0] * 5, [math.nan, 0.5], [math.nan] * 5, [0.7, -0.2, 0.5]], ids=str)
def test_weights_that_are_no_law_are_refused(face, w):
    """Fault: a row of zeros or NaN drew token 0, silently."""
    with pytest.raises(ValueError, match=r"mass|finite"):
        face.sample_from_distribution(w, np.random.default_rng(0))


def test_draws_follow_the_seed_and_unseeded_ones_do_not_repeat(face):
    """Fault: a hidden default seed made every "random" completion the same."""
    w = np.random.default_rng(44).random(300)
    for seed in range(30):
        rng, twin = np.random.default_rng(seed), np.random.default_rng(seed)
        steps = np.cumsum(w)
        expected = int(np.searchsorted(steps / steps[-1], twin.random(), side="right"))
        assert face.sample_from_distribution(w, rng) == expected
        assert rng.random() == twin.random()
    assert len({face.sample_from_distribution(np.ones(5000)) for _ in range(12)}) > 1


# ---- acceptance and correction ---------------------------------------------------------------------


def test_residual_of_equal_rows_is_finite(face):
    """Fault: 0/0 for p = q; and a cut-off such as 1e-9 that took small differences for none."""
    p = np.array([0.7, 0.2, 0.1])
    d = SparseDistribution([4, 1], [0.75, 0.25], 6)
    assert_ulps(face.residual_distribution(p, p), p, 2)
    assert np.array_equal(face.residual_distribution(one_hot(1, 4), one_hot(1, 4)), one_hot(1, 4))
    for target in (d, d.to_dense()):
        for draft in (d, d.to_dense()):
            got = face.residual_distribution(target, draft)
            got = got.to_dense() if isinstance(got, SparseDistribution) else got
            assert_ulps(got, d.to_dense(), 2)
    nearly = np.array([0.5 - 1e-13, 0.5 + 1e-13])
    assert face.residual_distribution(nearly, np.array([0.5, 0.5])).tolist() == [0.0, 1.0]


def test_nan_in_the_draft_is_no_acceptance(face):
    """Fault: min(1, p/NaN) came out as 1, so a broken draft model was believed."""
    p, q = np.array([1e-20, 0.9, 0.1]), np.full(3, np.nan)
    with pytest.raises(ValueError, match="nan"):
        face.acceptance_probability(p, q, 0)
    with pytest.raises(ValueError, match="nan"):
        face.verify_one_token(p, q, 0, np.random.default_rng(0))
    assert face.residual_distribution(p, q).argmax() == 1


def test_correction_is_from_the_positive_part(face):
    """Fault: corrections were drawn from p, or from |p - q|; the emitted law was then not the target."""
    assert face.residual_distribution([0.5, 0.375, 0.125], [0.25, 0.5, 0.25]).tolist() == [1.0, 0.0, 0.0]
    assert face.residual_distribution([0.125, 0.5, 0.375], [0.75, 0.25, 0.0]).tolist() == [0.0, 0.4, 0.6]
    assert face.speculative_output_marginal(one_hot(0, 3), one_hot(2, 3)).tolist() == [1.0, 0.0, 0.0]


def test_coin_and_correction_have_their_own_numbers(face):
    """Fault: the coin's number was used again for the correction, which is then biased upwards."""
    p, q = np.array([0.125, 0.4375, 0.4375]), np.array([1.0, 0.0, 0.0])
    for number, expected in ((0.0, 1), (0.25, 1), (0.75, 2), (LAST, 2)):
        decision = face.verify_one_token(p, q, 0, scripted(0.875, number))
        assert (decision.accepted, decision.token_id) == (False, expected)


def test_temperature_reaches_both_sides_of_the_ratio(face):
    """Fault: the draft's probabilities were taken at temperature 1, the target's at T."""
    config = SamplerConfig(0.25, 1.0, 0)
    p = face.distribution_from_logits([1.5, 0.0], config)
    q = face.distribution_from_logits([1.0, 0.0], config)
    expected = (1 + math.exp(4.0)) / (1 + math.exp(6.0))
    assert abs(face.acceptance_probability(p, q, 1) - expected) < 1e-15
    assert abs(expected - (1 + math.exp(1.0)) / (1 + math.exp(6.0))) > 0.1


def test_acceptance_is_no_more_than_the_ratio(face):
    """Fault: acceptance on p(x) > u, or on a ratio with a tolerance, accepted too often."""
    p, q = np.array([0.0625, 0.9375]), np.array([0.625, 0.375])
    assert face.acceptance_probability(p, q, 0) == 0.1
    assert face.acceptance_probability(p, q, 1) == 1.0
    rng = np.random.default_rng(35)
    accepted = sum(face.verify_one_token(p, q, 0, rng).accepted for _ in range(6000))
    assert not law_refuted([accepted, 6000 - accepted], [0.1, 0.9])  # false alarm: one in a million
    assert law_refuted([accepted, 6000 - accepted], [0.13, 0.87])


def test_vocabularies_of_different_size(face):
    """Fault: padded draft vocabularies were broadcast, or read past the shorter row."""
    p, q = np.full(6, 1 / 6), np.full(4, 1 / 4)
    for target, draft in ((p, q), (q, p)):
        with pytest.raises(ValueError, match=r"6.*4|4.*6"):
            face.residual_distribution(target, draft)
        with pytest.raises(ValueError, match=r"6.*4|4.*6"):
            face.verify_one_token(target, draft, 0)
        with pytest.raises(IndexError, match="5"):
            face.acceptance_probability(target, draft, 5)
    target, draft = SparseDistribution([1, 2], [0.5, 0.5], 6), SparseDistribution.one_hot(7, 8)
    assert face.acceptance_probability(target, draft, 7) == 0.0
    assert face.residual_distribution(target, draft).vocab_size == 6
    assert face.verify_one_token(target, draft, 7, scripted(0.0, 0.75)).token_id == 2


def test_residuals_do_not_alias_the_target(face):
    """Fault: a result that shared memory with its input was edited by the caller."""
    p = np.array([0.25, 0.75])
    got = face.residual_distribution(p, p)
    got[:] = 5.0
    assert p.tolist() == [0.25, 0.75]


# ---- penalties and order ---------------------------------------------------------------------------


def test_counts_advance_within_a_block_and_are_not_stored(face):
    """Fault: later positions of a block did not see the block's own drafts, or counted them twice."""
    counts = Counter({1: 1})
    for drafted in range(4):
        seen = counts + Counter({1: drafted})
        got = face.apply_penalties([1.0, 4.0], seen, 0.25, 0.5)
        assert got.tolist() == [1.0, 4.0 - 0.5 * (1 + drafted) - 0.25]
    assert counts == {1: 1}


def test_presence_counts_once_and_frequency_each_time(face):
    """Fault: presence was multiplied by the count; a count of 0 was penalised."""
    got = face.apply_penalties([1.0] * 4, {0: 4, 1: 1, 2: 0}, 0.25, 0.5)
    assert got.tolist() == [-1.25, 0.25, 1.0, 1.0]


def test_penalties_then_temperature_then_truncation(face):
    """Fault: top-p was applied at temperature 1, and penalties after the division by T."""
    x = np.array([4.0, 3.0, 2.0])  # at T = 1 the first has .665
    assert kept(face.distribution_from_logits(x, SamplerConfig(0.5, 0.75, 0))) == [0]
    assert kept(face.distribution_from_logits(x, SamplerConfig(1.0, 0.75, 0))) == [0, 1]
    got = face.distribution_from_logits([3.0, 1.0], SamplerConfig(0.25, 1.0, 0, 2.0), token_counts={0: 1})
    assert got.tolist() == [0.5, 0.5]


# ---- arrays ----------------------------------------------------------------------------------------


def test_read_only_and_foreign_arrays_are_accepted(face):
    """Fault: typed memoryviews refuse read-only buffers, and byte-swapped ones were misread."""
    frozen = np.frombuffer(np.array([0.5, 0.25, 0.25]).tobytes())
    swapped = frozen.astype(">f8")
    for row in (frozen, swapped, frozen.tolist(), frozen.astype(np.float32)):
        assert face.apply_top_p_top_k(row, 1.0, 2).tolist() == [2 / 3, 1 / 3, 0.0]
        assert face.residual_distribution(row, [0.25, 0.25, 0.5]).tolist() == [1.0, 0.0, 0.0]
        assert face.acceptance_probability(row, [1.0, 0.0, 0.0], 0) == 0.5
        assert face.sample_from_distribution(row, scripted(0.5)) == 1
        assert face.apply_penalties(row, {0: 1}, 1.0).tolist() == [-0.5, 0.25, 0.25]


def test_sparse_pairs_build_nothing_of_the_size_of_the_vocabulary(face):
    """Fault: sparse distributions were made dense inside verification."""
    size = 40_000_000
    ids = np.arange(25) * 1_500_007
    p = SparseDistribution(ids, np.arange(25) + 1.0, size)
    q = SparseDistribution(ids[3:], np.arange(22) + 1.0, size)
    rng = np.random.default_rng(49)
    tracemalloc.start()
    residual = face.residual_distribution(p, q)
    face.acceptance_probability(p, q, int(ids[4]))
    face.total_variation(p, q)
    face.distribution_entropy(p)
    for _ in range(10):
        face.verify_one_token(p, q, int(ids[20]), rng)
        face.sample_from_distribution(p, rng)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(residual, SparseDistribution)
    assert peak < size / 100


@pytest.mark.parametrize("settings", [(0.95, 20), (0.9, 0), (1.0, 50), (0.999, V // 2)], ids=str)
def test_shapes_that_make_a_selection_quadratic(face, settings):
    """Fault: quickselect on tied, sorted or organ-pipe rows took minutes; here: the right answer on each."""
    for name, p in rows.probabilities(V).items():
        order = np.lexsort((np.arange(V), -p))
        limit = min(settings[1] or V, V)
        if settings[0] < 1.0:
            limit = min(limit, 1 + int(np.count_nonzero(np.cumsum(p[order])[:-1] < settings[0])))
        got = face.apply_top_p_top_k(p, *settings)
        assert kept(got) == sorted(i for i in order[:limit].tolist() if p[i] > 0), name
        assert abs(math.fsum(got) - 1.0) < 1e-12, name
