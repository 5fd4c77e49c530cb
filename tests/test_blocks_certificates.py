"""Blocks from logits without truncation: draws and accept tests so close that each certificate falls back.

What a block has to emit is worked out from `sampling.softmax` by sequential sums, so the fast paths (float32
terms, sums of blocks) are compared with the definition on both sides of every step.
"""

import numpy as np
import pytest
from support import rows
from support.counting import counting
from support.generators import LAST, around, scripted

from mtplx import reference, sampling, verification
from mtplx.distributions import SamplerConfig

WHOLE = SamplerConfig(0.8, 1.0, 0)
SIZES = (2048, 2049, 5000)  # rows from 2048 elements on are streamed


def sequential_draw(weights, u):
    """Contract 4, with the sums in the order of the ids."""
    sums = np.cumsum(weights)
    return int(np.flatnonzero(sums / sums[-1] > u)[0])


def correction_weights(p, q):
    left = np.maximum(p - q, 0.0)
    return left if left.any() else p


def correction(p, q, u):
    return sequential_draw(correction_weights(p, q), u)


def row_pair(n, seed, dtype=np.float32):
    rng = np.random.default_rng([n, seed])
    target = (rng.normal(size=n) * 3).astype(dtype)
    draft = (target.astype(np.float64) + rng.normal(size=n)).astype(dtype)
    return target, draft


def rejected_at_once(target, draft, token, u, config, draft_config=None):
    """The correction that a block of one draft emits when it is rejected."""
    draft = None if draft is None else [draft]
    decision = verification.verify_block_from_logits(
        [target], draft, [token], config, draft_config, scripted(LAST, u)
    )
    assert decision.accepted == 0
    return int(decision.tokens[0])


def distances(sums, places):
    """Uniforms on, next to, and at many distances from steps of these sums."""
    for place in places:
        step = sums[place] / sums[-1]
        yield from around(step)
        for apart in (1e-15, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4):
            yield from (u for u in (step - apart, step + apart) if 0.0 <= u < 1.0)


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", SIZES)
def test_corrections_next_to_a_step(isa, n, dtype):
    with counting("rough_draw") as rough, counting("correction_draw") as exact:
        for seed in range(2):
            target, draft = row_pair(n, seed, dtype)
            p, q = (sampling.softmax(row, WHOLE.temperature) for row in (target, draft))
            token = int(np.argmax(q - p))
            sums = np.cumsum(np.maximum(p - q, 0.0))
            places = [0, n - 2, *np.random.default_rng(seed).integers(n, size=3), int(np.argmax(p - q))]
            for u in distances(sums, places):
                found = rejected_at_once(target, draft, token, u, WHOLE)
                assert found == correction(p, q, u), (seed, u)
    assert rough[0] >= exact[0] > 0


@pytest.mark.parametrize("n", SIZES)
def test_bonus_tokens_next_to_a_step(isa, n):
    with counting("rough_draw") as rough, counting("categorical_draw") as exact:
        for seed in range(3):
            target, _ = row_pair(n, seed)
            p = sampling.softmax(target, WHOLE.temperature)
            for u in distances(np.cumsum(p), [0, n - 2, *np.random.default_rng(seed).integers(n, size=3)]):
                drawn = verification.verify_block_from_logits([target], None, [], WHOLE, None, scripted(u))
                assert drawn.tokens.tolist() == [sequential_draw(p, u)], (seed, u)
    assert rough[0] >= exact[0] > 0


@pytest.mark.parametrize("draft_config", [SamplerConfig(1.0, 1.0, 8), SamplerConfig(0.0), None], ids=str)
def test_corrections_of_a_whole_row_against_a_few_tokens(isa, draft_config):
    """A truncated draft, a one-hot one, a point mass: the target's row stays a row of logits."""
    n = 3000
    for seed in range(3):
        target, draft = row_pair(n, seed)
        p = sampling.softmax(target, WHOLE.temperature)
        if draft_config is None:
            token = int(np.argsort(p)[-3])
            q = np.eye(n)[token]
        else:
            q = sampling.distribution_from_logits(draft, draft_config)
            token = int(np.argmax(q - p))
        sums = np.cumsum(np.maximum(p - q, 0.0))
        for u in distances(sums, [0, token, *np.random.default_rng(seed).integers(n, size=3)]):
            given = None if draft_config is None else draft
            found = rejected_at_once(target, given, token, u, WHOLE, draft_config)
            assert found == correction(p, q, u), (seed, u)


@pytest.mark.parametrize("config", [SamplerConfig(1.0, 1.0, 8), SamplerConfig(0.0)], ids=str)
def test_corrections_of_a_few_tokens_against_a_whole_row(isa, config):
    n = 3000
    for seed in range(3):
        target, draft = row_pair(n, seed)
        p = sampling.distribution_from_logits(target, config)
        q = sampling.softmax(draft, WHOLE.temperature)
        token = int(np.argmax(q - p))
        for u in distances(np.cumsum(np.maximum(p - q, 0.0)), [*np.flatnonzero(p), 0, n - 1]):
            found = rejected_at_once(target, draft, token, u, config, WHOLE)
            assert found == correction(p, q, u), (seed, u)


@pytest.mark.parametrize("draft_config", [SamplerConfig(1.0, 0.9, 0), SamplerConfig(1e200, 1.0, 0)], ids=str)
def test_corrections_against_a_row_that_is_written(isa, draft_config):
    n = 3000
    target, draft = row_pair(n, 1)
    p = sampling.softmax(target, WHOLE.temperature)
    q = sampling.distribution_from_logits(draft, draft_config)
    token = int(np.argmax(q - p))
    for u in distances(np.cumsum(np.maximum(p - q, 0.0)), [0, 7, n // 2, n - 2]):
        assert rejected_at_once(target, draft, token, u, WHOLE, draft_config) == correction(p, q, u)


def test_rows_that_leave_no_difference(isa):
    """One logit larger by less than the sums can show: q(x) > p(x), and nowhere p > q. From the target."""
    n = 4096
    target = np.zeros(n)
    draft = target.copy()
    target[9], draft[9] = -2e-13, 0.0
    p, q = sampling.softmax(target), sampling.softmax(draft)
    assert q[9] > p[9]
    assert not (p > q).any()
    config = SamplerConfig(1.0, 1.0, 0)
    for u in (0.0, 0.25, 0.7, LAST):
        assert rejected_at_once(target, draft, 9, u, config) == sequential_draw(p, u)


def test_masked_rows_and_ends_of_the_interval(isa):
    for n in SIZES:
        target, draft = row_pair(n, 3)
        mask = np.random.default_rng(n).random(n) < 0.6
        mask[[0, n - 1]] = True
        target[mask] = -np.inf
        draft[np.roll(mask, 1)] = -np.inf
        p, q = (sampling.softmax(row, WHOLE.temperature) for row in (target, draft))
        token = int(np.argmax(q - p))
        for u in (0.0, 2.0**-53, 0.5, LAST):
            found = rejected_at_once(target, draft, token, u, WHOLE)
            assert found == correction(p, q, u)
            assert p[found] > 0.0


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("allowed", [1, 2, 30, 600, 700, 2500])  # of 5000: the first four are few
def test_draws_in_doubt_where_a_mask_leaves_few_tokens(isa, allowed, dtype):
    n = 5000
    target, draft = row_pair(n, allowed, dtype)
    mask = np.ones(n, bool)
    mask[np.random.default_rng(allowed).permutation(n)[:allowed]] = False
    target[mask] = draft[mask] = -np.inf
    p, q = (sampling.softmax(row, WHOLE.temperature) for row in (target, draft))
    banned, places = int(np.argmax(mask)), np.flatnonzero(~mask)[:: max(1, allowed // 3)]
    with counting("rough_draw") as counted:
        for other, row in ((q, draft), (p, target)):  # against itself a row leaves nothing: from the target
            for u in distances(np.cumsum(correction_weights(p, other)), places):
                assert rejected_at_once(target, row, banned, u, WHOLE) == correction(p, other, u)
    assert counted[0] > 0
    for u in distances(np.cumsum(p), places):
        drawn = verification.verify_block_from_logits([target], [], [], WHOLE, None, scripted(u))
        assert int(drawn.tokens[0]) == sequential_draw(p, u)


def test_masked_rows_keep_the_smallest_weights(isa):
    """Logits whose exponentials are the last above 0, the first that are 0, and a mask in between."""
    n = 4096
    target = np.full(n, -np.inf)
    low = -np.linspace(744.0, 748.0, 200)
    target[::21][:195] = np.float64(3.0) + low[:195]
    target[n - 1] = 3.0
    draft = target.copy()
    draft[n - 1] = draft[::21][0] = 3.0
    config = SamplerConfig(1.0, 1.0, 0)
    p, q = sampling.softmax(target), sampling.softmax(draft)
    assert 0 < np.count_nonzero(p) < 195
    for u in (0.0, 2.0**-53, 0.5, LAST):
        assert rejected_at_once(target, draft, 0, u, config) == correction(p, q, u)
        assert rejected_at_once(target, target, 1, u, config) == correction(p, p, u)


@pytest.mark.parametrize("temperature", [2.0**-61, 1e-30, 1e-3, 1e3, 1e18, 1e30, 1e300])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_temperatures_far_from_one(isa, temperature, scale):
    """Where float32 terms say nothing, nothing is concluded from them."""
    n = 2500
    config = SamplerConfig(temperature, 1.0, 0)
    rng = np.random.default_rng(3)
    target, draft = (np.round(rng.normal(size=(2, n)) * 4) * scale).astype(np.float32)
    p, q = (sampling.softmax(row, temperature) for row in (target, draft))
    token = int(np.argmax(q - p))
    for u in (0.0, 0.3, 0.5, 0.9, LAST):
        if reference.acceptance_probability(p, q, token) < LAST:
            assert rejected_at_once(target, draft, token, u, config) == correction(p, q, u)
        drawn = verification.verify_block_from_logits([target], None, [], config, None, scripted(u))
        assert drawn.tokens.tolist() == [sequential_draw(p, u)]


@pytest.mark.parametrize("level", [0.0, 40.0, 3000.0])
def test_a_largest_logit_that_is_no_float(isa, level):
    """A penalty leaves the top between two floats, as far from either as can be."""
    n = 4000
    target, draft = row_pair(n, 5)
    target, draft = np.float32(target + level), np.float32(draft + level)
    top = int(np.argmax(target))
    lifted = 12.0 + level
    between = lifted + np.spacing(np.float32(lifted)).astype(np.float64) * 0.49
    overlay = {top: float(target[top]) - between}
    p = sampling.softmax(sampling.apply_penalties(target, None, 0.0, 0.0, overlay), WHOLE.temperature)
    q = sampling.softmax(draft, WHOLE.temperature)
    token = int(np.argmax(q - p))
    for u in distances(np.cumsum(np.maximum(p - q, 0.0)), [0, 9, top, n - 2]):
        decision = verification.verify_block_from_logits(
            [target], [draft], [token], WHOLE, None, scripted(LAST, u), penalty_overlay=overlay
        )
        assert decision.tokens.tolist() == [correction(p, q, u)]
    a = reference.acceptance_probability(p, q, token)
    assert 0.0 < a < 1.0
    for apart in (0.0, 1e-9, 1e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4):
        for coin in (a * (1 - apart), a * (1 + apart)):
            decision = verification.verify_block_from_logits(
                [target], [draft], [token], WHOLE, None, scripted(coin, 0.5), penalty_overlay=overlay
            )
            assert decision.accepted == (np.floor(coin * 2.0**53) * 2.0**-53 <= a), (apart, coin)


@pytest.mark.parametrize("level", [0.0, 40.0, 3000.0])
def test_top_p_beside_a_largest_logit_that_is_no_float(isa, level):
    n = 6000
    x = np.float32(np.random.default_rng(4).normal(size=n) * 3 + level)
    top = int(np.argmax(x))
    between = level + 9.0 + np.spacing(np.float32(level + 9.0)).astype(np.float64) * 0.49
    overlay = {top: float(x[top]) - between}
    p = sampling.softmax(sampling.apply_penalties(x, None, 0.0, 0.0, overlay), 0.8)
    sums = np.cumsum(np.sort(p)[::-1][:20])
    for place in (1, 4, 12):
        for apart in (0.0, 1e-9, 1e-6, 3e-6, 1e-5, 3e-5):
            for top_p in (sums[place] * (1 - apart), sums[place] * (1 + apart)):
                config = SamplerConfig(0.8, float(top_p), 20)
                found = sampling.sparse_distribution_from_logits(x, config, penalty_overlay=overlay)
                kept = np.flatnonzero(reference.apply_top_p_top_k(p, float(top_p), 20))
                assert found.token_ids.tolist() == kept.tolist(), (place, apart)


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 2.0**-61, 2.0**61, 1e39, 1e300])
def test_top_p_at_temperatures_without_a_rough_sum(isa, temperature):
    """Two equal logits at the top: half the mass each, whatever the temperature makes of float32."""
    x = np.zeros(6000, np.float32)
    x[[7, 99]] = min(5.0 * temperature, 1e38) if temperature > 1.0 else 5.0
    config = SamplerConfig(temperature, 0.95, 20)
    p = sampling.softmax(x, temperature)
    kept = np.flatnonzero(reference.apply_top_p_top_k(p, 0.95, 20))
    assert sampling.sparse_distribution_from_logits(x, config).token_ids.tolist() == kept.tolist()


def test_ordinary_draws_are_certain(isa):
    """In the middle of a heavy token's step nothing is in doubt."""
    n = 20_000
    target, draft = row_pair(n, 7)
    p, q = (sampling.softmax(row, WHOLE.temperature) for row in (target, draft))
    token = int(np.argmax(q - p))
    left = np.maximum(p - q, 0.0)
    sums = np.cumsum(left)
    with counting("rough_draw") as counted:
        for heavy in np.argsort(left)[-5:]:
            u = float((sums[heavy] - left[heavy] / 2) / sums[-1])
            assert rejected_at_once(target, draft, token, u, WHOLE) == heavy
    assert counted[0] == 0


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_rows_too_flat_for_float32_terms(isa, dtype):
    """No weight is larger than the error of rough sums: one pass of exponentials decides most draws."""
    n = 40_000
    config = SamplerConfig(1.0, 1.0, 0)
    noise = np.random.default_rng(1).normal(size=n).astype(dtype)
    target, draft = np.zeros(n, dtype), (noise / 2).astype(dtype)
    p, q = sampling.softmax(target), sampling.softmax(draft)
    token = int(np.argmax(q - p))
    left = np.maximum(p - q, 0.0)
    sums = np.cumsum(left)
    with counting("rough_draw") as rough, counting("one_pass_draw") as passes:
        for place in np.argsort(left)[-4:]:
            u = float((sums[place] - left[place] / 2) / sums[-1])
            assert rejected_at_once(target, draft, token, u, config) == place
        for place in (0, 17, n // 2, n - 1):
            drawn = verification.verify_block_from_logits(
                [target], None, [], config, None, scripted((place + 0.5) / n)
            )
            assert drawn.tokens.tolist() == [place]
    assert rough[0] == 8
    assert passes[0] == 0
    with counting("one_pass_draw") as passes, counting("correction_draw") as exact:
        for place in (0, 17, n // 2, n - 2):
            for u in distances(sums, [place]):
                assert rejected_at_once(target, draft, token, u, config) == correction(p, q, u), (place, u)
    assert passes[0] > exact[0] > 0
    with counting("one_pass_draw") as passes, counting("categorical_draw") as exact:
        for u in distances(np.cumsum(p), [0, 17, n // 2, n - 2]):
            drawn = verification.verify_block_from_logits([target], None, [], config, None, scripted(u))
            assert drawn.tokens.tolist() == [sequential_draw(p, u)], u
    assert passes[0] >= exact[0] > 0


def test_weights_near_the_error_of_the_rough_sums(isa):
    """Some draws are certain after one pass of exponentials, and some are not."""
    n = 60_000
    config = SamplerConfig(1.0, 1.0, 0)
    rng = np.random.default_rng(2)
    target, draft = (rng.random((2, n)) * 1e-3).astype(np.float32)
    token = 4711
    target[token] = -np.inf
    p, q = sampling.softmax(target), sampling.softmax(draft)
    with counting("one_pass_draw") as passes:
        for u in rng.random(60):
            assert rejected_at_once(target, draft, token, u, config) == correction(p, q, u)
    assert 0 < passes[0] < 60


def test_a_banned_token_is_rejected_without_exact_sums(isa):
    """exp(-inf) is 0 over any sum, and so is what underflows."""
    n = 4096
    target, draft = row_pair(n, 8)
    token = int(np.argmax(draft))
    p, q = (sampling.softmax(row, WHOLE.temperature) for row in (target, draft))
    for banned in (-np.inf, -1e30, -2000.0):
        target[token] = banned
        p = sampling.softmax(target, WHOLE.temperature)
        assert p[token] == 0.0
        for u in (0.0, 0.5, LAST):
            decision = verification.verify_block_from_logits(
                [target], [draft], [token], WHOLE, None, scripted(0.0, u)
            )
            assert decision.tokens.tolist() == [correction(p, q, u)]
            assert decision.accept_probabilities.tolist() == [0.0]
