"""Batches are their blocks, one by one; keyed streams are `numpy.random.Philox`, lane by lane."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.blocks import RULES, ByLane, Touched, Untouchable, every_face, plain_block, random_block
from support.generators import plain_state

from mtplx.distributions import NonFiniteLogitsError, SamplerConfig


def blocks_of(seed, B, V=5, **options):
    rng = np.random.default_rng([30, seed])
    return [random_block(rng, V=V, **options) for _ in range(B)]


def rngs_of(B, seed=0):
    return [np.random.default_rng([seed, b]) for b in range(B)]


def assert_is(batch, decisions):
    """A `BatchDecision` against the `BlockDecision` of every sequence."""
    for b, one in enumerate(decisions):
        n, tested = len(one.tokens), len(one.accept_probabilities)
        assert batch.num_tokens[b] == n
        assert batch.accepted[b] == one.accepted
        assert batch.tokens[b].tolist() == one.tokens.tolist() + [-1] * (batch.tokens.shape[1] - n)
        np.testing.assert_array_equal(batch.accept_probabilities[b, :tested], one.accept_probabilities)
        assert np.isnan(batch.accept_probabilities[b, tested:]).all()
    assert len(batch.num_tokens) == len(decisions)


def padded(sequences, K, fill):
    """Sequences of rows or ids as one array of K entries each."""
    shape = np.shape(sequences[0])[1:]
    out = np.full((len(sequences), K, *shape), fill)
    for b, one in enumerate(sequences):
        out[b, : len(one)] = one
    return out


# ---- shapes ------------------------------------------------------------------------------------------


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ragged_batches_are_their_blocks(face, rule):
    for seed in range(12):
        blocks = blocks_of(seed, B=5, bonus=seed % 4 != 0)
        targets, drafts, tokens = map(list, zip(*blocks, strict=True))
        if seed % 3 == 0:
            drafts[1] = None
        batch = face.verify_batch(targets, drafts, tokens, rngs_of(5), rule=rule)
        singles = [
            face.verify_block(p, q, x, rng, rule=rule)
            for p, q, x, rng in zip(targets, drafts, tokens, rngs_of(5), strict=True)
        ]
        assert_is(batch, singles)
        K = max(map(len, tokens))
        assert batch.tokens.shape == (5, K + 1)
        assert batch.accept_probabilities.shape == (5, K)
        assert batch.tokens.dtype == batch.num_tokens.dtype == batch.accepted.dtype == np.int64


@every_face
@pytest.mark.parametrize("fill", [np.nan, 0.2])
def test_padding_is_not_looked_at(face, fill):
    """The bonus row of a sequence with k drafts is row k, whatever stands behind it."""
    for seed in range(12):
        blocks = blocks_of(seed, B=4)
        targets, drafts, tokens = map(list, zip(*blocks, strict=True))
        K = max(map(len, tokens)) + seed % 2  # a padded array may be wider than any of its sequences
        ids = padded(tokens, K, -1)
        expected = face.verify_batch(targets, drafts, tokens, rngs_of(4))
        p, q = padded(targets, K + 1, fill), padded(drafts, K, fill)
        for one, other in ((p, q), (p.tolist(), list(q)), (targets, q), (p, drafts)):
            decision = face.verify_batch(one, other, ids, rngs_of(4))
            np.testing.assert_array_equal(decision.num_tokens, expected.num_tokens)
            width = expected.tokens.shape[1]
            np.testing.assert_array_equal(decision.tokens[:, :width], expected.tokens)
            assert (decision.tokens[:, width:] == -1).all()
            assert decision.tokens.shape == (4, K + 1)
            assert decision.accept_probabilities.shape == (4, K)
        assert face.verify_batch(targets, drafts, ids.tolist(), rngs_of(4)) == decision


@every_face
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f8", object])
def test_arrays_are_read_as_they_lie(face, dtype):
    """Rows and ids of one array against the same rows and ids, sequence by sequence, in lists."""
    rng = np.random.default_rng(77)
    B, K, V = 4, 3, 6
    p, q = (rng.random((B, rows, V)).astype(dtype) for rows in (K + 1, K))
    ids = rng.integers(0, V, (B, K))
    ids[2, 1:] = -1
    tokens = [[int(token) for token in row if token >= 0] for row in ids]
    counts = [len(row) for row in tokens]
    expected = face.verify_batch(
        [p[b, : k + 1].copy() for b, k in enumerate(counts)],
        [q[b, :k].copy() for b, k in enumerate(counts)],
        tokens,
        rngs_of(B),
    )

    def reversed_axes(array, axes):
        return np.ascontiguousarray(np.flip(array, axes)).__getitem__(
            tuple(slice(None, None, -1) if axis in axes else slice(None) for axis in range(array.ndim))
        )

    layouts = (
        lambda array: array,
        lambda array: reversed_axes(array, (0,)),
        lambda array: reversed_axes(array, (0, 1)),
        lambda array: np.asfortranarray(array),
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: np.repeat(array, 2, axis=1)[:, ::2],
    )
    for layout in layouts:
        for given in (
            ids,
            ids.astype(np.int32),
            ids.astype(">i8"),
            ids.tolist(),
            list(map(tuple, ids.tolist())),
        ):
            laid = layout(given) if isinstance(given, np.ndarray) else given
            assert face.verify_batch(layout(p), layout(q), laid, rngs_of(B)) == expected


@every_face
def test_an_array_of_k_rows_has_no_bonus_for_any_sequence(face):
    targets = np.full((2, 2, 3), 1.0 / 3.0)
    decision = face.verify_batch(targets, None, [[0, 1], [2, -1]], rngs_of(2), rule="match", seeds=None)
    assert decision.num_tokens.tolist() == [
        len(face.verify_block(targets[0], None, [0, 1], rngs_of(2)[0], rule="match").tokens),
        len(face.verify_block(targets[1, :1], None, [2], rngs_of(2)[1], rule="match").tokens),
    ]
    one_hot = np.zeros((2, 2, 3))
    one_hot[..., 0] = 1.0
    decision = face.verify_batch(one_hot, None, np.array([[0, 0], [0, -1]]), rngs_of(2))
    assert decision.tokens.tolist() == [[0, 0, -1], [0, -1, -1]]
    assert decision.num_tokens.tolist() == [2, 1]


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_nothing_to_do(face, rule):
    empty = face.verify_batch([], None, [], [], rule=rule)
    assert empty.tokens.shape == (0, 1)
    assert empty.accept_probabilities.shape == (0, 0)
    empty = face.verify_batch(np.empty((0, 4, 5)), np.empty((0, 3, 5)), np.empty((0, 3), int), rule=rule)
    assert empty.tokens.shape == (0, 4)
    no_drafts = face.verify_batch([[[0.0, 1.0]], [[1.0, 0.0]]], None, [[], []], rule=rule)
    assert no_drafts.tokens.tolist() == [[1], [0]]
    assert no_drafts.accept_probabilities.shape == (2, 0)


# ---- keyed streams -----------------------------------------------------------------------------------


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_keyed_streams_are_philox_lane_by_lane(face, rule):
    """Against the plain statement of the rule, its coins and tokens taken from `numpy.random.Philox`."""
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    positions = np.array([0, 7, 2**31, 2**63 - 1, 5])
    for seed in range(12):
        blocks = blocks_of(seed, B=5)
        targets, drafts, tokens = map(list, zip(*blocks, strict=True))
        batch = face.verify_batch(targets, drafts, tokens, seeds=seeds, positions=positions, rule=rule)
        for b, (p, q, x) in enumerate(blocks):
            source = ByLane(seeds[b], positions[b])
            emitted, accepted, probabilities, _ = plain_block(rule, p, q, x, source)
            assert batch.tokens[b, : batch.num_tokens[b]].tolist() == emitted
            assert batch.accepted[b] == accepted
            assert batch.accept_probabilities[b, : len(probabilities)].tolist() == probabilities


@every_face
@pytest.mark.parametrize("rule", ["exact", "match", "block"])
def test_keyed_streams_do_not_depend_on_order_or_neighbours(face, rule):
    blocks = blocks_of(1, B=8)
    targets, drafts, tokens = map(list, zip(*blocks, strict=True))
    seeds, positions = list(range(100, 108)), list(range(0, 80, 10))

    def run(order):
        def pick(values):
            return [values[b] for b in order]

        return face.verify_batch(
            pick(targets), pick(drafts), pick(tokens), seeds=pick(seeds), positions=pick(positions), rule=rule
        )

    whole = run(range(8))
    for order in ([5], [3, 1], [7, 6, 5, 4, 3, 2, 1, 0], [2, 2, 2]):
        part = run(order)
        for row, b in enumerate(order):
            n = whole.num_tokens[b]
            assert part.num_tokens[row] == n
            assert part.tokens[row, :n].tolist() == whole.tokens[b, :n].tolist()


@every_face
def test_seed_and_position_both_count(face):
    rows = np.full((1, 1, 1000), 1e-3)
    drawn = {
        (seed, position): int(
            face.verify_batch(rows, None, [[]], seeds=[seed], positions=[position]).tokens[0, 0]
        )
        for seed in range(4)
        for position in range(4)
    }
    assert len(set(drawn.values())) > 12
    again = face.verify_batch(
        rows, None, [[]], seeds=np.array([3], np.int32), positions=np.array([2], np.uint8)
    )
    assert again.tokens[0, 0] == drawn[3, 2]


# ---- logits ------------------------------------------------------------------------------------------


@every_face
@pytest.mark.parametrize("rule", ["exact", "block", "greedy"])
def test_batches_from_logits_are_their_blocks(face, rule):
    B = 4
    for seed in range(8):
        rng = np.random.default_rng([31, seed])
        counts = [int(k) for k in rng.integers(0, 5, B)]
        targets = [rng.normal(size=(k + 1, 6)).astype(np.float32) for k in counts]
        drafts = [
            p[:-1] + np.float32(0.3) * rng.normal(size=p[:-1].shape).astype(np.float32) for p in targets
        ]
        tokens = [row.argmax(axis=1).tolist() for row in drafts]
        configs = [SamplerConfig(0.8, 0.9, k, 0.5, 0.25) for k in (0, 2, 3, None)]
        seen = [None, {}, {1: 2}, {0: 1, 5: 3}]
        overlays = [None, {2: 1.0}, [{0: 0.5}] * (counts[2] + 1), {}]
        for config, count, overlay in (
            (configs, seen, overlays),
            (configs[1], seen[2], overlays[1]),
            (configs[0], None, None),
        ):
            batch = face.verify_batch_from_logits(
                targets,
                drafts,
                tokens,
                config,
                configs[seed % B],
                rngs_of(B),
                rule=rule,
                token_counts=count,
                penalty_overlay=overlay,
            )
            each = [value if isinstance(value, list) else [value] * B for value in (config, count, overlay)]
            singles = [
                face.verify_block_from_logits(
                    targets[b],
                    drafts[b],
                    tokens[b],
                    each[0][b],
                    configs[seed % B],
                    rng,
                    rule=rule,
                    token_counts=each[1][b],
                    penalty_overlay=each[2][b],
                )
                for b, rng in enumerate(rngs_of(B))
            ]
            assert_is(batch, singles)


@every_face
def test_padded_logits(face):
    logits = np.zeros((2, 3, 4), np.float16)
    logits[0, :, 1] = 50.0
    logits[1, :2, 2] = 50.0
    logits[1, 2] = np.nan
    ids = np.array([[1, 1], [2, -1]])
    for config in (SamplerConfig(1.0, 0.9, 2), SamplerConfig(1.0, 1.0, None), SamplerConfig(0.0)):
        decision = face.verify_batch_from_logits(logits, None, ids, config, seeds=[1, 2], positions=[0, 0])
        assert decision.tokens.tolist() == [[1, 1, 1], [2, 2, -1]]


# ---- generators, executors ---------------------------------------------------------------------------


@every_face
def test_generators_of_a_batch(face):
    blocks = blocks_of(2, B=3)
    targets, drafts, tokens = map(list, zip(*blocks, strict=True))
    assert len(face.verify_batch(targets, drafts, tokens).tokens) == 3  # fresh ones
    assert len(face.verify_batch(targets, drafts, tokens, [None, np.random.default_rng(), None]).tokens) == 3
    rng = np.random.default_rng(0)
    twin = np.random.Generator(rng.bit_generator)
    for rngs, error, message in (
        ([rng, np.random.default_rng(), rng], ValueError, "sequence 2: .*sequence 0"),
        ([rng, twin, None], ValueError, "sequence 1: .*sequence 0"),
        ([rng], ValueError, "rngs has 1 entries"),
        (rng, TypeError, "rngs"),
        ([rng, 3, None], TypeError, "sequence 1: rng"),
    ):
        before = plain_state(rng)
        for rule in ("exact", "greedy"):
            with pytest.raises(error, match=message):
                face.verify_batch(targets, drafts, tokens, rngs, rule=rule)
        assert plain_state(rng) == before


@every_face
def test_keys_of_a_batch(face):
    rows = np.full((2, 1, 4), 0.25)
    for options, error, message in (
        ({"seeds": [1, 2]}, ValueError, "positions"),
        ({"positions": [1, 2]}, ValueError, "seeds"),
        ({"seeds": [1, 2], "positions": [0, 0], "rngs": rngs_of(2)}, ValueError, "rngs"),
        ({"seeds": [1], "positions": [0, 0]}, ValueError, "seeds has 1"),
        ({"seeds": [1, 2], "positions": [0]}, ValueError, "positions has 1"),
        ({"seeds": [1, -1], "positions": [0, 0]}, ValueError, "sequence 1: seeds: -1"),
        ({"seeds": [1, 2**64], "positions": [0, 0]}, ValueError, "sequence 1: seeds"),
        ({"seeds": [1, 2], "positions": [0, -3]}, ValueError, "sequence 1: positions: -3"),
        ({"seeds": [1, 2], "positions": [0, 2**63]}, ValueError, "sequence 1: positions"),
        ({"seeds": [1.0, 2.0], "positions": [0, 0]}, TypeError, "sequence 0: seeds"),
        ({"seeds": 1, "positions": [0, 0]}, TypeError, "seeds"),
    ):
        with pytest.raises(error, match=message):
            face.verify_batch(rows, None, [[], []], **options)


@every_face
def test_an_executor_changes_nothing(face, monkeypatch):
    # Batches as small as these would never be split.
    monkeypatch.setattr("mtplx.batch.WORTHWHILE_LOGITS", 0)
    monkeypatch.setattr("mtplx.verification.WORTHWHILE_PROBABILITIES", 0)
    blocks = blocks_of(3, B=9)
    targets, drafts, tokens = map(list, zip(*blocks, strict=True))
    logits = np.random.default_rng(0).normal(size=(9, 50))
    config = SamplerConfig(1.0, 0.9, 5)
    alone = face.verify_batch(targets, drafts, tokens, rngs_of(9))
    rows = face.distributions_from_logits(logits, config)
    with ThreadPoolExecutor(3) as executor:
        assert face.verify_batch(targets, drafts, tokens, rngs_of(9), executor=executor) == alone
        assert face.distributions_from_logits(logits, config, executor=executor) == rows
    with pytest.raises(TypeError, match="executor"):
        face.verify_batch(targets, drafts, tokens, rngs_of(9), executor=3)


@every_face
def test_a_caller_may_hold_the_lock_of_a_generator(face, monkeypatch):
    """As NumPy advises whoever draws from several threads; a worker would wait for it for ever."""
    monkeypatch.setattr("mtplx.verification.WORTHWHILE_PROBABILITIES", 0)
    targets, drafts, tokens = map(list, zip(*blocks_of(3, B=9), strict=True))
    alone, found = face.verify_batch(targets, drafts, tokens, rngs_of(9)), []

    def call():
        rngs = rngs_of(9)
        with ThreadPoolExecutor(2) as executor, rngs[8].bit_generator.lock:
            found.append(face.verify_batch(targets, drafts, tokens, rngs, executor=executor))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60.0)
    assert found == [alone]


# ---- errors ------------------------------------------------------------------------------------------

ROWS = np.full((2, 3, 4), 0.25)

BAD_CALLS = {
    "targets too few": (ValueError, "targets has 1 entries for 2", (ROWS[:1], None, [[0, 1], [0, 1]])),
    "targets too flat": (ValueError, "targets", (ROWS[0], None, [[0, 1], [0, 1], [0, 1]])),
    "targets of another kind": (TypeError, "targets", (3, None, [[0, 1], [0, 1]])),
    "drafts too many": (ValueError, "drafts has 3 entries for 2", (ROWS, [None] * 3, [[0, 1], [0, 1]])),
    "rows of an array": (ValueError, "targets have 3 rows for K = 4", (ROWS, None, np.zeros((2, 4), int))),
    "draft rows of an array": (ValueError, "drafts have 3 rows for K = 2", (ROWS, ROWS, [[0, 1], [0, 1]])),
    "rows of a sequence": (ValueError, "sequence 1: target has 3 rows", (list(ROWS), None, [[0, 1], [0]])),
    "draft rows of a sequence": (
        ValueError,
        "sequence 1: draft has 2 rows",
        ([ROWS[0], ROWS[1, :2]], list(ROWS[:, :2]), [[0, 1], [0]]),
    ),
    "padding in between": (ValueError, "sequence 1: padding", (ROWS, None, [[0, 1], [-1, 1]])),
    "ids in one dimension": (ValueError, "draft_tokens", (ROWS, None, np.zeros(2, int))),
    "ids that are no integers": (TypeError, "draft_tokens", (ROWS, None, np.zeros((2, 2)))),
    "an id outside": (IndexError, "sequence 1: row 0: token id 4", (ROWS, None, [[0, 1], [4, 1]])),
}


@every_face
@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(face, call):
    error, message, arguments = call
    with pytest.raises(error, match=message):
        face.verify_batch(*arguments, seeds=[0] * len(arguments[2]), positions=[0] * len(arguments[2]))


@every_face
def test_an_error_names_sequence_and_row_and_the_first_counts(face):
    targets = np.zeros((5, 3, 2))
    targets[..., 0] = 1.0
    targets[2, 1] = np.nan
    targets[4, 0] = -1.0
    ids = np.zeros((5, 2), int)
    rngs, counted = rngs_of(5), rngs_of(5)
    with pytest.raises(ValueError, match=r"sequence 2: row 1: .*nan"):
        face.verify_batch(targets, None, ids, rngs)
    # What the others draw does not depend on who fails, so that it does not depend on an executor either.
    for b, number in enumerate((3, 3, 1, 3, 0)):
        counted[b].random(number)
        assert plain_state(rngs[b]) == plain_state(counted[b])
    logits = np.zeros((2, 2, 3))
    logits[1, 0, 0] = np.nan
    with pytest.raises(NonFiniteLogitsError, match=r"sequence 1: row 0: .*nan_count=1"):
        face.verify_batch_from_logits(logits, None, [[0], [0]], SamplerConfig())


@every_face
def test_what_can_be_checked_is_checked_before_any_sequence_draws(face):
    rngs = rngs_of(2)
    before = [plain_state(rng) for rng in rngs]
    with pytest.raises(ValueError, match="sequence 1: target has 1 rows"):
        face.verify_batch([ROWS[0], ROWS[1, :1]], None, [[0, 1], [0, 1]], rngs)
    assert [plain_state(rng) for rng in rngs] == before


@every_face
def test_sequences_stop_at_their_own_rejection(face):
    one, two = [1.0, 0.0], [0.0, 1.0]
    targets = [Touched([two, Untouchable(), Untouchable()]), Touched([one, two, Untouchable()])]
    drafts = [Touched([one, Untouchable()]), Touched([one, one])]
    decision = face.verify_batch(targets, drafts, [[0, Untouchable()], [0, 0]], rngs_of(2))
    assert decision.tokens.tolist() == [[1, -1, -1], [0, 1, -1]]
    assert [rows.touched for rows in targets] == [{0}, {0, 1}]


class Raising(list):
    """A caller's sequence of rows, one of which cannot be read."""

    def __getitem__(self, i):
        raise KeyError("row")


@every_face
@pytest.mark.parametrize(
    ("rows", "tokens", "error"),
    [
        (lambda rows: [rows[0], "no row", rows[0]], [0, 0], TypeError),
        (lambda rows: [rows[0], [rows[0]], rows[0]], [0, 0], ValueError),
        (Raising, [0, 0], KeyError),
        (list, [0, 2.5], TypeError),
    ],
    ids=["text", "too deep", "raises", "token"],
)
def test_nothing_of_a_failed_batch_is_kept_alive(face, rows, tokens, error):
    # An exception leads to the frames that it passed, and so to the caller's rows: the core must not hold it.
    class Canary(np.ndarray):
        pass

    canary = np.array([1.0, 0.0, 0.0]).view(Canary)  # token 0 is accepted, so that all rows are reached
    gone = weakref.ref(canary)
    for keys in ({"rngs": rngs_of(2)}, {"seeds": [1, 2], "positions": [0, 0]}):
        with pytest.raises(error):
            face.verify_batch([rows([canary, canary, canary])] * 2, None, [tokens] * 2, **keys)
    del canary
    gc.collect()
    assert gone() is None
