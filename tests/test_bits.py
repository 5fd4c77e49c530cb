"""The same bits whatever the alignment, the place in memory, the neighbours and the instruction set."""

import numpy as np
import pytest
from mtplx._csampling import dispatch
from support import rows
from support.bits import digest, logits, weights

from mtplx import sampling
from mtplx.distributions import SamplerConfig

OFFSETS = (0, 2, 4, 8, 16, 24, 32, 40, 56, 62)  # bytes behind a cache line
LENGTHS = (1, 7, 16, 33, 257, 513, 1100, 6000)


def same_bits(results):
    return len({b"".join(np.asarray(part).tobytes() for part in result) for result in results}) == 1


def sparse_parts(distribution):
    return distribution.token_ids, distribution.probs


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", LENGTHS)
def test_alignment_of_logits(isa, n, dtype):
    for kind in ("plain", "masked", "deep"):
        x = logits(n, kind).astype(dtype)
        places = [rows.shifted(x, offset) for offset in (*OFFSETS, 1, 3)]
        assert same_bits((sampling.softmax(row, 0.7),) for row in places)
        assert same_bits((sampling.softmax(row, 0.7, out=np.empty(n, dtype=np.float32)),) for row in places)
        for top_p, top_k in ((1.0, 0), (0.9, 0), (0.9, 20), (1.0, 3)):
            config = SamplerConfig(0.7, top_p, top_k)
            assert same_bits((sampling.distribution_from_logits(row, config),) for row in places)
            assert same_bits(
                sparse_parts(sampling.sparse_distribution_from_logits(row, config)) for row in places
            )


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", LENGTHS)
def test_alignment_of_probabilities(isa, n, dtype):
    p, q = weights(n).astype(dtype), weights(n, 77).astype(dtype)
    places = [(rows.shifted(p, a), rows.shifted(q, b)) for a, b in zip(OFFSETS, OFFSETS[::-1], strict=True)]
    for top_p, top_k in ((1.0, 0), (0.9, 0), (0.9, 20), (1.0, 3), (0.9, n // 2)):
        assert same_bits((sampling.apply_top_p_top_k(row, top_p, top_k),) for row, _ in places)
    assert same_bits((sampling.residual_distribution(a, b),) for a, b in places)
    assert same_bits((sampling.speculative_output_marginal(a, b),) for a, b in places)
    assert same_bits((sampling.total_variation(a, b),) for a, b in places)
    assert same_bits((sampling.distribution_entropy(a),) for a, _ in places)
    assert same_bits((sampling.deterministic_top_k_order(a, 20),) for a, _ in places)
    decisions = set()
    for a, b in places:
        rng = np.random.default_rng(3)
        emitted = [sampling.verify_one_token(a, b, n // 2, rng).token_id for _ in range(20)]
        decisions.add((*emitted, *[sampling.sample_from_distribution(a, rng) for _ in range(20)]))
    assert len(decisions) == 1


@pytest.mark.parametrize("n", LENGTHS)
def test_place_of_the_result(isa, n):
    x, p, q = logits(n, "plain"), weights(n), weights(n, 77)
    places = [rows.shifted(np.zeros(n), offset) for offset in (0, 8, 16, 24, 40, 56)]
    assert same_bits((sampling.softmax(x, 0.7, out=out).copy(),) for out in places)
    for top_p, top_k in ((1.0, 0), (0.9, 0), (0.9, 20)):
        config = SamplerConfig(0.7, top_p, top_k)
        assert same_bits((sampling.distribution_from_logits(x, config, out=out).copy(),) for out in places)
        assert same_bits((sampling.apply_top_p_top_k(p, top_p, top_k, out=out).copy(),) for out in places)
    assert same_bits((sampling.residual_distribution(p, q, out=out).copy(),) for out in places)
    narrow = [rows.shifted(np.zeros(n, dtype=np.float32), offset) for offset in (0, 4, 8, 20, 36, 60)]
    assert same_bits((sampling.softmax(x, 0.7, out=out).copy(),) for out in narrow)


@pytest.mark.parametrize("n", LENGTHS)
def test_neighbours_of_a_row(isa, n):
    """A row of a matrix: what lies before and behind it must not show, nor be written."""
    for around in (0.0, 1e300, -np.inf, np.nan):
        matrix = np.full((3, n), around)
        matrix[1] = logits(n, "plain")
        alone = matrix[1].copy()
        assert same_bits((sampling.softmax(row, 0.7),) for row in (matrix[1], alone))
        assert same_bits(
            (sampling.distribution_from_logits(row, SamplerConfig(0.7, 0.9, 0)),)
            for row in (matrix[1], alone)
        )
        matrix[1] = weights(n)
        alone = matrix[1].copy()
        assert same_bits((sampling.apply_top_p_top_k(row, 0.9),) for row in (matrix[1], alone))
        results = np.full((3, n), 5.0)
        sampling.softmax(alone, 0.7, out=results[1])
        sampling.apply_top_p_top_k(alone, 0.9, 3, out=results[1])
        sampling.residual_distribution(alone, alone[::-1].copy(), out=results[1])
        assert (results[[0, 2]] == 5.0).all()


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_short_floats_give_the_bits_of_their_float64_values(isa, dtype):
    for n in LENGTHS:
        x, p = logits(n, "masked").astype(dtype), weights(n).astype(dtype)
        assert same_bits((sampling.softmax(row, 0.7),) for row in (x, x.astype(np.float64)))
        for top_p, top_k in ((0.9, 0), (0.9, 20)):
            assert same_bits(
                (sampling.apply_top_p_top_k(r, top_p, top_k),) for r in (p, p.astype(np.float64))
            )
        assert same_bits((sampling.residual_distribution(r, weights(n)),) for r in (p, p.astype(np.float64)))


def test_a_digest_is_the_same_every_time(isa):
    assert digest(with_exp=False) == digest(with_exp=False)
    assert digest(with_exp=True) == digest(with_exp=True)
    assert digest(with_exp=True) != digest(with_exp=False)


def test_a_digest_sees_a_single_bit(isa, monkeypatch):
    before = digest(with_exp=False)
    real = sampling.residual_distribution

    def one_bit_off(p, q):
        result = real(p, q)
        if isinstance(result, np.ndarray) and result.size == 1000:
            result = result.copy()
            result[999] = np.nextafter(result[999], 1.0)
        return result

    monkeypatch.setattr(sampling, "residual_distribution", one_bit_off)
    assert digest(with_exp=False) != before


def test_tables_agree_to_the_bit():
    """Without exp and log all tables do; with them all that have fused multiply-add."""
    before = dispatch.active_isa()
    found = {}
    for name in dispatch.available_isas():
        dispatch.use_isa(name)
        found[name] = digest(with_exp=False), digest(with_exp=True)
    dispatch.use_isa(before)
    assert len({without for without, _ in found.values()}) == 1, found
    assert len({with_exp for name, (_, with_exp) in found.items() if name != "baseline"}) <= 1, found


if __name__ == "__main__":  # `python tests/test_bits.py`: the digests of this machine
    for name in dispatch.available_isas():
        dispatch.use_isa(name)
        print(name, digest(with_exp=False), digest(with_exp=True))
