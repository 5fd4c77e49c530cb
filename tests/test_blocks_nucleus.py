"""Blocks from logits with top-p alone: the gathered nucleus is the one of the written row, to the last bit.

Rows from 8192 elements on whose nucleus seems narrow are gathered, others written; what comes out may not
tell which. p(x) is read off a block of one point-mass draft, whose acceptance probability it is.
"""

import numpy as np
import pytest
from support import rows
from support.counting import counting
from support.generators import LAST, around, scripted

from mtplx import reference, sampling, verification
from mtplx.distributions import SamplerConfig

N = 9000


def shapes(n):
    rng = np.random.default_rng(n)
    zipf = np.empty(n)
    zipf[rng.permutation(n)] = 12.0 - 1.3 * np.log(np.arange(1, n + 1))
    masked = np.where(rng.random(n) < 0.7, -np.inf, rng.normal(size=n) * 4)
    steps = np.round(rng.normal(size=n) * 3) * 1.5
    lone = np.full(n, -30.0)
    lone[n - 1] = 5.0
    heavy = rng.normal(size=n) * 3
    heavy[[17, 99, 100]] = 30.0, 29.5, 22.0
    dyadic = rng.integers(-14, 1, n) * np.log(2.0)
    dyadic[rng.integers(0, n, 40)] = 4.0 * np.log(2.0)
    return {
        "normal": rng.normal(size=n) * 3,
        "zipf": zipf + rng.normal(size=n) * 0.3,
        "masked": masked,
        "ties": steps,
        "alone": lone,
        "few heavy": heavy,
        "all equal": np.zeros(n),
        "two values": rng.integers(0, 2, n) * 12.0,
        "dyadic": dyadic,
        "far from zero": rng.normal(size=n) * 3 + 5000.0,
        "wide apart": rng.normal(size=n) * 300.0,
    }


def probability(x, token, config):
    decision = verification.verify_block_from_logits([x], None, [token], config)
    return float(decision.accept_probabilities[0])


def at_the_cut(p, row):
    """Ids on both sides of the cut, the heaviest and the lightest."""
    ranks = np.lexsort((np.arange(p.size), -p))
    kept = np.count_nonzero(row)
    near = [ranks[i] for i in range(kept - 4, kept + 4) if 0 <= i < p.size]
    return [int(i) for i in (*near, ranks[0], ranks[-1])]


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("name", shapes(N))
def test_the_nucleus_of_the_written_row(isa, name, dtype):
    with np.errstate(over="ignore"):
        x = shapes(N)[name].astype(dtype)
    for temperature in (0.3, 0.8, 1.0, 2.0):
        p = sampling.softmax(x, temperature)
        for top_p in (0.1, 0.5, 0.9, 0.95, 0.99):
            config = SamplerConfig(temperature, top_p, 0)
            row = sampling.distribution_from_logits(x, config)
            for token in at_the_cut(p, row):
                assert probability(x, token, config) == row[token], (temperature, top_p, token)


@pytest.mark.parametrize("n", [8192, 8193, 20_000])
def test_cuts_on_a_partial_sum(isa, n):
    """top_p on, and next to, the sums of the reference: the sums are taken again in rank order."""
    with counting("nucleus_boundary") as counted:
        for name in ("zipf", "normal", "dyadic"):
            x = np.float32(shapes(n)[name])
            p = sampling.softmax(x, 0.7)
            sums = np.cumsum(np.sort(p)[::-1])
            for place in (0, 3, 40, 300):
                for top_p in (np.nextafter(sums[place], 0), sums[place], np.nextafter(sums[place], 1)):
                    config = SamplerConfig(0.7, float(top_p), 0)
                    row = sampling.distribution_from_logits(x, config)
                    assert np.array_equal(row > 0, reference.apply_top_p_top_k(p, top_p, 0) > 0)
                    for token in at_the_cut(p, row):
                        assert probability(x, token, config) == row[token], (name, place)
    assert counted[0] > 0


@pytest.mark.parametrize("name", shapes(N))
def test_draws_and_corrections(isa, name):
    """Tokens at uniforms on the steps of the written rows, for each rule that gathers."""
    rng = np.random.default_rng(7)
    x = np.float32(shapes(N)[name])
    draft = np.float32(np.where(np.isfinite(x), x, -40.0) + rng.normal(size=N) * 0.5)
    for top_p in (0.5, 0.95):
        config = SamplerConfig(0.8, top_p, 0)
        p, q = (sampling.distribution_from_logits(row, config) for row in (x, draft))
        left = np.maximum(p - q, 0.0)
        sums = np.cumsum(left if left.any() else p)
        steps = [
            u
            for place in rng.choice(np.flatnonzero(left if left.any() else p), 4)
            for u in around(sums[place] / sums[-1])
        ]
        for rule in ("exact", "match", "greedy"):
            for token in (int(np.argmax(q - p)), int(np.argmax(q)), int(np.argmax(p))):
                for u in (0.0, LAST, *steps):
                    for given, given_q in (([draft], [q]), (None, None)):
                        found = verification.verify_block_from_logits(
                            [x, x], given, [token], config, rng=scripted(LAST, u, u), rule=rule
                        )
                        wanted = reference.verify_block(
                            [p, p], given_q, [token], scripted(LAST, u, u), rule=rule
                        )
                        assert found == wanted, (rule, token, u)


def test_other_rules_divide_by_sums_over_whole_rows(isa):
    x, draft = (np.float32(shapes(N)[name]) for name in ("zipf", "normal"))
    config = SamplerConfig(0.8, 0.95, 0)
    p, q = (sampling.distribution_from_logits(row, config) for row in (x, draft))
    for rule in ("block", "typical"):
        for seed in range(20):
            found = verification.verify_block_from_logits(
                [x, x], [draft], [int(q.argmax())], config, rng=np.random.default_rng(seed), rule=rule
            )
            wanted = reference.verify_block(
                [p, p], [q], [int(q.argmax())], np.random.default_rng(seed), rule=rule
            )
            assert found == wanted


def test_penalties_and_mixed_configurations(isa):
    """A penalised row is gathered too; the other side may be truncated otherwise, or written."""
    rng = np.random.default_rng(3)
    x, draft = np.float32(shapes(N)["zipf"]), np.float32(rng.normal(size=N))
    overlay = {int(i): float(v) for i, v in zip(rng.integers(0, N, 6), rng.normal(size=6) * 5, strict=True)}
    overlay[int(np.argmax(x))] = -0.3
    config = SamplerConfig(0.8, 0.9, 0)
    p = sampling.distribution_from_logits(x, config, penalty_overlay=overlay)
    for other in (
        SamplerConfig(0.8, 1.0, 0),
        SamplerConfig(1.0, 0.9, 5),
        SamplerConfig(3.0, 0.99, 0),
        config,
    ):
        q = sampling.distribution_from_logits(draft, other)
        token = int(np.argmax(q - p))
        for u in (0.0, 0.2, 0.5, 0.77, LAST):
            found = verification.verify_block_from_logits(
                [x], [draft], [token], config, other, scripted(LAST, u), penalty_overlay=overlay
            )
            assert (
                found.tokens.tolist()
                == reference.verify_block([p], [q], [token], scripted(LAST, u)).tokens.tolist()
            )
            np.testing.assert_allclose(
                found.accept_probabilities, [reference.acceptance_probability(p, q, token)], rtol=1e-5
            )


def test_errors_are_those_of_a_whole_row(isa):
    config = SamplerConfig(0.8, 0.9, 0)
    x = np.zeros(N, np.float32)
    x[5] = 20.0
    with pytest.raises(IndexError, match=f"token id {N} "):
        verification.verify_block_from_logits([x], None, [N], config)
    with pytest.raises(ValueError, match=f"target_p has {N} entries, draft_q {N + 1}"):
        verification.verify_block_from_logits([x], [np.append(x, 0.0)], [5], config)
    for bad in (np.nan, np.inf):
        spoilt = x.copy()
        spoilt[77] = bad
        with pytest.raises(ValueError, match=r"row 0: .*vocab_size=9000"):
            verification.verify_block_from_logits([spoilt], None, [5], config)
