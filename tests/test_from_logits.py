"""distribution_from_logits and sparse_distribution_from_logits (contract 3): defined by composition."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rows
from support.ulps import assert_ulps

from mtplx import reference, sampling
from mtplx.distributions import NonFiniteLogitsError, SamplerConfig, SparseDistribution

LN2, LN3 = math.log(2.0), math.log(3.0)
OFF = SamplerConfig(1.0, 1.0, 0)


def composed(face, logits, config, counts=None, overlay=None):
    """What the contract says the call from logits is: the face's own softmax, the reference's cut."""
    x = reference.apply_penalties(logits, counts, config.presence_penalty, config.frequency_penalty, overlay)
    p = face.softmax(x, config.temperature)
    return p if config.temperature <= 0 else reference.apply_top_p_top_k(p, config.top_p, config.top_k)


def assert_composed(face, logits, config, counts=None, overlay=None, what=""):
    expected = composed(face, logits, config, counts, overlay)
    mappings = {"token_counts": counts, "penalty_overlay": overlay}
    dense = face.distribution_from_logits(logits, config, **mappings)
    assert np.array_equal(dense > 0, expected > 0), what
    assert_ulps(dense, expected, 8, what)
    sparse = face.sparse_distribution_from_logits(logits, config, **mappings)
    ids = np.flatnonzero(expected)
    assert np.array_equal(sparse.token_ids, ids), what
    assert_ulps(sparse.probs, expected[ids], 8, what)
    assert sparse.vocab_size == expected.size
    assert type(sparse) is SparseDistribution


@pytest.mark.parametrize(
    ("logits", "config", "mappings", "expected"),
    [
        ([0.0, LN2, LN3], OFF, {}, [1 / 6, 2 / 6, 3 / 6]),
        ([0.0, LN2, LN3], SamplerConfig(1.0, 1.0, 2), {}, [0, 2 / 5, 3 / 5]),
        ([0.0, LN2, LN3], SamplerConfig(1.0, 0.6, 0), {}, [0, 2 / 5, 3 / 5]),
        ([0.0, LN2, LN3], SamplerConfig(1.0, 0.4, 0), {}, [0, 0, 1]),
        ([0.0, LN2, LN3], SamplerConfig(1.0, 0.9, 2), {}, [0, 2 / 5, 3 / 5]),
        # temperature before the cut: at T = 1/2 the weights are 1, 4, 9
        ([0.0, LN2, LN3], SamplerConfig(0.5, 0.6, 0), {}, [0, 0, 1]),
        ([0.0, LN2, LN3], SamplerConfig(0.5, 0.7, 0), {}, [0, 4 / 13, 9 / 13]),
        # penalties before the temperature: LN3 - LN3 = 0, then squared
        ([0.0, LN2, LN3], SamplerConfig(0.5, 1.0, 0, LN3), {"token_counts": {2: 1}}, [1 / 6, 4 / 6, 1 / 6]),
        (
            [0.0, LN2, LN3],
            SamplerConfig(1.0, 1.0, 0, 0.0, LN3),
            {"token_counts": {2: 1}},
            [1 / 4, 1 / 2, 1 / 4],
        ),
        ([0.0, LN2, LN3], OFF, {"penalty_overlay": {2: math.inf}}, [1 / 3, 2 / 3, 0]),
        ([0.0, LN2, LN3], OFF, {"penalty_overlay": {0: -LN3}}, [3 / 8, 2 / 8, 3 / 8]),
        ([0.0, LN2, LN3], SamplerConfig(1.0, 1.0, 1), {"penalty_overlay": {2: 9.0}}, [0, 1, 0]),
        # greedy, whatever the truncation
        ([1.0, 3.0, 3.0], SamplerConfig(0.0, 0.95, 20), {}, [0, 1, 0]),
        ([1.0, 3.0, 3.0], SamplerConfig(-1.0, 0.0, 0), {}, [0, 1, 0]),
        ([1.0, 3.0, 3.0], SamplerConfig(0.0, presence_penalty=1.0), {"token_counts": {1: 1}}, [0, 0, 1]),
        ([-math.inf, 3.0, -math.inf], SamplerConfig(), {}, [0, 1, 0]),
    ],
    ids=str,
)
def test_by_hand(face, logits, config, mappings, expected):
    dense = face.distribution_from_logits(logits, config, **mappings)
    np.testing.assert_allclose(dense, expected, rtol=1e-14, atol=0)
    sparse = face.sparse_distribution_from_logits(logits, config, **mappings)
    assert sparse.token_ids.tolist() == np.flatnonzero(expected).tolist()
    np.testing.assert_allclose(sparse.to_dense(), expected, rtol=1e-14, atol=0)
    if config.temperature <= 0:
        assert dense.tolist() == expected


SETTINGS = (SamplerConfig(), SamplerConfig(0.0), OFF, SamplerConfig(1.0, 0.9, 0))
TRUNCATIONS = list(itertools.product((0.5, 0.95, 1.0), (0, 1, 20)))


@pytest.mark.parametrize("n", rows.LENGTHS)
def test_worst_case_rows(face, n):
    for name, x in rows.logits(n).items():
        for temperature in (0.0, 0.6, 1.0):
            for top_p, top_k in [*TRUNCATIONS, (0.95, n // 2), (0.95, n)]:
                config = SamplerConfig(temperature, top_p, top_k)
                assert_composed(face, x, config, what=(name, config))


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [1, 17, 513, 5000])
def test_every_float_type(face, n, dtype):
    x = (np.random.default_rng(n).normal(size=n) * 3).astype(dtype)
    masked = x.copy()
    masked[np.arange(n) % 3 > 0] = -np.inf
    for row in (x, masked):
        for temperature in (0.0, 0.1, 0.6, 1.0, 2.0, math.inf):
            for top_p, top_k in TRUNCATIONS:
                assert_composed(face, row, SamplerConfig(temperature, top_p, top_k))


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_a_whole_vocabulary(face, dtype):
    rng = np.random.default_rng(7)
    V = rows.VOCABULARY
    x = (rng.normal(size=V) - 1.1 * np.log(rng.permutation(V) + 1.0)).astype(dtype)
    for temperature, top_p, top_k in ((0.6, 0.95, 20), (1.0, 0.9, 0), (1.0, 1.0, 50), (0.1, 0.95, 1000)):
        assert_composed(face, x, SamplerConfig(temperature, top_p, top_k))


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_penalties_and_overlays(face, dtype):
    rng = np.random.default_rng(3)
    for n in (5, 40, 3000):
        x = (rng.normal(size=n) * 2).astype(dtype)
        tokens = rng.choice(n, 5, replace=False).tolist()
        counts = dict(zip(tokens, (1, 2, 0, 7, 1), strict=True))
        overlay = {tokens[0]: -3.0, tokens[3]: math.inf, (tokens[0] + 1) % n: 0.5}
        for top_p, top_k in TRUNCATIONS:
            for temperature in (0.0, 0.7):
                config = SamplerConfig(temperature, top_p, top_k, 0.5, 0.25)
                assert_composed(face, x, config, counts)
                assert_composed(face, x, config, None, overlay)
                assert_composed(face, x, config, counts, overlay)


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [513, 1100, 20_000])
def test_penalised_tokens_everywhere_in_a_long_row(face, n, dtype):
    """At the ends of blocks and chunks, many at a time, the largest logits among them, bans and boosts."""
    rng = np.random.default_rng(n)
    x = (rng.normal(size=n) * 3).astype(dtype)
    best = np.argsort(-x.astype(np.float64))[:6].tolist()
    edges = [i for i in (0, 1, 255, 256, 511, 512, 513, 1023, 1024, n - 2, n - 1) if i < n]
    many = rng.choice(n, n // 3, replace=False).tolist()
    half = x.copy()
    half[rng.random(n) < 0.5] = -np.inf
    named = {
        "edges": ({token: 1 + token % 3 for token in edges}, None),
        "the best": (dict.fromkeys(best, 9), None),
        "many": (
            {token: token % 4 for token in many},
            {token: float(token % 7) - 3.0 for token in many[::2]},
        ),
        "the best banned": (None, dict.fromkeys(best, math.inf)),
        "all but a few banned": (None, dict.fromkeys(sorted(set(range(n)) - set(edges)), math.inf)),
        "edges raised to the top": (None, {token: -50.0 - token % 2 for token in edges}),
        "a boost that overflows": (None, {edges[1]: -1.7e308, edges[2]: 1.7e308}),
    }
    for name, (counts, overlay) in named.items():
        for row in (x, half):
            if row is half and "banned" in name:
                continue
            for temperature, top_p, top_k in (
                (0.8, 0.9, 0),
                (0.8, 0.95, 20),
                (0.8, 1.0, 5),
                (0.8, 1.0, 0),
                (0.0, 0.95, 20),
            ):
                config = SamplerConfig(temperature, top_p, top_k, 0.5, 0.25)
                assert_composed(face, row, config, counts, overlay, (name, config))


def test_settings_that_mean_off(face):
    x = [0.0, LN2, LN3]
    for top_p, top_k in itertools.product((0.0, 1.0, -1.0, 7.0), (None, 0, -1, 3, 2**40, 2**64)):
        got = face.distribution_from_logits(x, SamplerConfig(1.0, top_p, top_k))
        np.testing.assert_allclose(got, [1 / 6, 2 / 6, 3 / 6], rtol=1e-15)
        sparse = face.sparse_distribution_from_logits(x, SamplerConfig(1.0, top_p, top_k))
        assert sparse.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("config", SETTINGS, ids=str)
@pytest.mark.parametrize("place", [0, 3, 39])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_without_a_distribution_are_refused(face, config, place, bad):
    for dtype in rows.FLOAT_TYPES.values():
        x = np.linspace(-3, 3, 40).astype(dtype)
        x[place] = bad
        for call in (face.distribution_from_logits, face.sparse_distribution_from_logits):
            with pytest.raises(NonFiniteLogitsError) as caught:
                call(x, config)
            assert caught.value.nan_count == (1 if math.isnan(bad) else 0)
            with pytest.raises(NonFiniteLogitsError):
                call(np.full(7, -np.inf, dtype=dtype), config)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_bans_and_penalties_that_leave_nothing_are_refused(face, config):
    for call in (face.distribution_from_logits, face.sparse_distribution_from_logits):
        with pytest.raises(NonFiniteLogitsError):
            call([1.0, 2.0], config, penalty_overlay={0: math.inf, 1: math.inf})
        with pytest.raises(NonFiniteLogitsError):
            call([1.0, 2.0], config, penalty_overlay={0: -math.inf})
        with pytest.raises(IndexError, match="2"):
            call([1.0, 2.0], SamplerConfig(config.temperature, 0.9, 5, 1.0), token_counts={2: 1})
        with pytest.raises(IndexError, match="-1"):
            call([1.0, 2.0], config, penalty_overlay={-1: 1.0})
        with pytest.raises(ValueError, match="-3"):
            call([1.0, 2.0], SamplerConfig(config.temperature, 0.9, 5, 1.0), token_counts={1: -3})


def test_sparse_ids_ascend_and_no_zero_is_left(face):
    x = np.array([0.0, -800.0, -math.inf, 1.0, -5.0])
    got = face.sparse_distribution_from_logits(x, OFF)
    assert got.token_ids.tolist() == [0, 3, 4]  # exp(-800) is 0 in float64
    assert (got.probs > 0).all()
    got = face.sparse_distribution_from_logits(x, SamplerConfig(1.0, 1.0, 4))
    assert got.token_ids.tolist() == [0, 3, 4]


@given(
    st.lists(st.floats(-30, 30) | st.sampled_from([0.0, 1.0, -math.inf]), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.1, 0.6, 1.0, 2.0, math.inf]),
    st.floats(0, 1),
    st.integers(0, 61),
    st.sampled_from(list(rows.FLOAT_TYPES.values())),
)
def test_any_row(face, logits, temperature, top_p, top_k, dtype):
    if max(logits) == -math.inf:
        logits = [*logits, 0.0]
    assert_composed(face, np.array(logits, dtype=dtype), SamplerConfig(temperature, top_p, top_k))


def traced_peak(call, *arguments):
    call(*arguments)  # imports and caches first
    tracemalloc.start()
    call(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_sparse_with_top_k_never_writes_a_row_of_probabilities(isa, dtype):
    V = 1 << 20
    x = ((np.arange(V) * 7919) % 100_003 / 5000.0).astype(dtype)
    for config in (SamplerConfig(0.7, 0.95, 20), SamplerConfig(0.7, 1.0, 20), SamplerConfig(0.0)):
        # One maximum per 64 logits, as float64, is V/8 bytes; a row of probabilities would be 8 V.
        assert traced_peak(sampling.sparse_distribution_from_logits, x, config) < V


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_a_row_of_logits_is_read_without_a_float64_copy(isa, dtype):
    V = 1 << 20
    x = ((np.arange(V) * 7919) % 100_003 / 5000.0).astype(dtype)
    out = np.empty(V)
    for row in (x, np.repeat(x, 2)[::2], x[::-1]):
        # In place; strided rows may be gathered first, but as they are.
        allowed = 0 if row.flags.c_contiguous else x.nbytes
        assert traced_peak(lambda row=row: sampling.softmax(row, 0.7, out=out)) < allowed + V / 4


# ---- ranks and bounds where numbers round ----------------------------------------------------------


@pytest.mark.parametrize("V", [1000, 2000, 5000, 20_000])
@pytest.mark.parametrize("levels", [2, 3, 8])
@pytest.mark.parametrize(("temperature", "step", "middle"), [(1.0, 2.0**-53, 1.0), (50.0, 2.0**-50, 5.0)])
def test_neighbouring_logits_tie_where_their_probabilities_do(face, V, levels, temperature, step, middle):
    # Multiplied by a prime, so that the levels do not follow the ids.
    x = middle - (np.arange(V) * 7919 % levels) * step
    for top_k in (1, 2, 20):
        assert_composed(face, x, SamplerConfig(temperature, 1.0, top_k))
        assert_composed(face, x, SamplerConfig(temperature, 0.95, top_k))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [1e15, 4e18, 1e19, 1e20, 3e25, 1e37])
@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.3])
def test_logits_of_any_size_are_a_distribution(face, size, temperature, dtype):
    x = (np.linspace(-1.0, 1.0, 2000) * size).astype(dtype)
    for top_p, top_k in ((0.95, 5), (1.0, 5), (0.95, 0)):
        assert_composed(face, x, SamplerConfig(temperature, top_p, top_k))
        assert_composed(face, x - np.asarray(size, dtype), SamplerConfig(temperature, top_p, top_k))
