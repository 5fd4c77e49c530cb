"""Rows: `distributions_from_logits`, `sample_rows`, `BatchedSparseDistributions`."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from support.blocks import Face, Touched, Untouchable, every_face
from support.generators import Stub, plain_state
from support.rows import DLPackOnly

from mtplx import reference, sampling
from mtplx.decisions import Cascade, Typical
from mtplx.distributions import (
    BatchedSparseDistributions,
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
)

# ---- distributions_from_logits -----------------------------------------------------------------------


def one_face(face):
    """The functions of one row that belong to the same face, on the same instruction set."""
    return Face(face.name, [reference if face.name == "reference" else sampling], face.isa)


CONFIGS = [
    SamplerConfig(temperature, top_p, top_k)
    for temperature in (0.0, 0.7)
    for top_p in (0.6, 1.0)
    for top_k in (None, 3, 50)
]


@every_face
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"T{c.temperature}-p{c.top_p}-k{c.top_k}")
@pytest.mark.parametrize("dtype", ["<f8", "<f4", "<f2", ">f4", "i8"])
def test_rows_are_those_of_one_row(face, config, dtype):
    logits = (np.random.default_rng(0).normal(size=(6, 11)) * 3).astype(dtype)
    one = one_face(face)
    for given in (logits, np.asfortranarray(logits), logits[::-1][::-1], list(logits), logits.tolist()):
        rows = face.distributions_from_logits(given, config)
        if config.top_k == 3:
            assert isinstance(rows, BatchedSparseDistributions)
            assert rows.token_ids.shape == (6, 3)
            assert rows.vocab_size == 11
            for i, row in enumerate(logits):
                assert rows.to_distribution(i) == one.sparse_distribution_from_logits(row, config)
        else:
            assert rows.shape == (6, 11)
            assert rows.dtype == np.float64
            assert rows.flags.c_contiguous
            for i, row in enumerate(logits):
                np.testing.assert_array_equal(rows[i], one.distribution_from_logits(row, config))


@every_face
def test_one_setting_for_all_or_one_for_each(face):
    logits = np.random.default_rng(1).normal(size=(3, 7))
    one = one_face(face)
    configs = [SamplerConfig(0.5, 0.9, 2, 1.0), SamplerConfig(1.0, 1.0, 4), SamplerConfig(0.0, 1.0, 1)]
    counts = [{0: 1}, None, {6: 2}]
    overlays = [None, {1: 3.0}, {}]
    rows = face.distributions_from_logits(logits, configs, token_counts=counts, penalty_overlay=overlays)
    assert rows.token_ids.shape == (3, 4)  # as wide as the largest top-k
    for i in range(3):
        expected = one.sparse_distribution_from_logits(
            logits[i], configs[i], token_counts=counts[i], penalty_overlay=overlays[i]
        )
        assert rows.to_distribution(i) == expected
    # Dense as soon as one row is.
    configs[1] = SamplerConfig(1.0, 0.8, None)
    rows = face.distributions_from_logits(logits, tuple(configs), token_counts=counts[0])
    for i in range(3):
        expected = one.distribution_from_logits(logits[i], configs[i], token_counts=counts[0])
        np.testing.assert_array_equal(rows[i], expected)


@every_face
def test_no_rows(face):
    sparse = face.distributions_from_logits(np.empty((0, 9)), SamplerConfig(top_k=4))
    assert (len(sparse), sparse.token_ids.shape, sparse.vocab_size) == (0, (0, 4), 9)
    assert face.distributions_from_logits(np.empty((0, 9)), SamplerConfig(top_k=9)).shape == (0, 9)


PLAIN = SamplerConfig(1.0, 1.0, None)
BAD_LOGITS = {
    "one row": (ValueError, "logits must be rows", (np.zeros(3), PLAIN), {}),
    "three dimensions": (ValueError, "logits", (np.zeros((1, 1, 3)), PLAIN), {}),
    "no vocabulary": (ValueError, "", (np.zeros((2, 0)), PLAIN), {}),
    "no rows in a list": (ValueError, "vocabulary size", ([], PLAIN), {}),
    "lengths that differ": (ValueError, "row 1: .*2 entries", ([[0.0] * 3, [0.0] * 2], PLAIN), {}),
    "NaN": (NonFiniteLogitsError, "row 1: .*nan_count=1", (np.array([[0.0, 0], [0, np.nan]]), PLAIN), {}),
    "configs": (ValueError, "config has 1 entries for 2", (np.zeros((2, 3)), [PLAIN]), {}),
    "counts": (ValueError, "token_counts has 3", (np.zeros((2, 3)), PLAIN), {"token_counts": [None] * 3}),
    "overlays": (ValueError, "penalty_overlay has 0", (np.zeros((2, 3)), PLAIN), {"penalty_overlay": []}),
    "an overlay": (
        IndexError,
        "row 1: .*7",
        (np.zeros((2, 3)), PLAIN),
        {"penalty_overlay": [None, {7: 1.0}]},
    ),
    "complex": (TypeError, "complex", (np.zeros((2, 3), complex), PLAIN), {}),
    "text": (TypeError, "logits", ("ab", PLAIN), {}),
    "executor": (TypeError, "executor", (np.zeros((2, 3)), PLAIN), {"executor": object()}),
}


@every_face
@pytest.mark.parametrize("call", BAD_LOGITS.values(), ids=BAD_LOGITS)
def test_bad_logits(face, call):
    error, message, arguments, options = call
    with pytest.raises(error, match=message or None):
        face.distributions_from_logits(*arguments, **options)


# ---- sample_rows -------------------------------------------------------------------------------------


@every_face
def test_samples_are_those_of_one_row(face):
    rng = np.random.default_rng(2)
    dense = rng.dirichlet([0.5] * 6, 5)
    sparse = face.distributions_from_logits(np.log(dense), SamplerConfig(1.0, 1.0, 4))
    mixed = [dense[0], sparse.to_distribution(1), dense[2].tolist(), sparse.to_distribution(3), dense[4] * 7]
    for rows, each in (
        (dense, list(dense)),
        (sparse, [sparse.to_distribution(i) for i in range(5)]),
        (mixed, mixed),
    ):
        own = face.sample_rows(rows, [np.random.default_rng(i) for i in range(5)])
        assert own.dtype == np.int64
        assert own.tolist() == [
            reference.sample_from_distribution(row, np.random.default_rng(i)) for i, row in enumerate(each)
        ]
        ours, theirs = np.random.default_rng(3), np.random.default_rng(3)
        shared = face.sample_rows(rows, ours)
        assert shared.tolist() == [reference.sample_from_distribution(row, theirs) for row in each]
        assert plain_state(ours) == plain_state(theirs)
    assert face.sample_rows([[0.0, 1.0], [1.0, 0.0]], None).tolist() == [1, 0]
    assert face.sample_rows([[0.0, 1.0], [1.0, 0.0]], [None, Stub(0.0)]).tolist() == [1, 0]
    assert face.sample_rows(np.empty((0, 3)), []).shape == (0,)


@every_face
def test_bad_rows_are_found_before_the_first_draw(face):
    rng = np.random.default_rng(0)
    before = plain_state(rng)
    for rows, rngs, error, message in (
        ([[0.5, 0.5], [0.5, np.nan]], rng, ValueError, "row 1: .*nan"),
        ([[0.5, 0.5], [0.0, 0.0]], rng, ValueError, "row 1: "),
        ([[0.5, 0.5], [-1.0, 2.0]], [rng, np.random.default_rng()], ValueError, "row 1: .*-1"),
        ([[0.5, 0.5], [0.5, 0.5]], [rng], ValueError, "rngs has 1"),
        ([[0.5, 0.5], [0.5, 0.5]], [rng, 3], TypeError, "row 1: rng"),
        ([0.5, 0.5], rng, (TypeError, ValueError), "row 0"),
        (np.array([0.5, 0.5]), rng, ValueError, "rows"),
    ):
        with pytest.raises(error, match=message):
            face.sample_rows(rows, rngs)
        assert plain_state(rng) == before


# ---- BatchedSparseDistributions ----------------------------------------------------------------------


def batch_of_three():
    return BatchedSparseDistributions(
        [[7, 3, 5], [5, -1, -1], [-1, 0, 9]],
        [[3.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, np.inf, 0.5]],
        vocab_size=10,
    )


def test_rows_are_normalised_and_padding_is_kept():
    batch = batch_of_three()
    np.testing.assert_array_equal(batch.token_ids, [[7, 3, 5], [5, -1, -1], [-1, 0, 9]])
    np.testing.assert_array_equal(batch.probs, [[0.75, 0.25, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert (batch.token_ids.dtype, batch.probs.dtype, batch.vocab_size) == (np.int64, np.float64, 10)
    assert len(batch) == 3
    assert batch.to_distribution(0) == SparseDistribution([7, 3, 5], [3.0, 1.0, 0.0], 10)
    assert batch.to_distribution(2) == SparseDistribution([0, 9], [0.0, 1.0], 10)
    assert [batch.probability(0, token) for token in (7, 3, 5, 4, -1, 10, 2**70, -5)] == [0.75, 0.25] + [
        0.0
    ] * 6
    assert type(batch.probability(0, 7)) is float
    for row in (-1, 3):
        for call in (batch.to_distribution, batch.sample, lambda row: batch.probability(row, 0)):
            with pytest.raises(IndexError, match=str(row)):
                call(row)


def test_rows_hold_the_bits_of_single_distributions():
    for seed in range(50):
        rng = np.random.default_rng([40, seed])
        weights = rng.random((4, 7)) * 10.0 ** rng.uniform(-300, 300)
        ids = np.array([rng.permutation(20)[:7] for _ in range(4)])
        batch = BatchedSparseDistributions(ids, weights, vocab_size=20)
        singles = [SparseDistribution(ids[i], weights[i], 20) for i in range(4)]
        for i, single in enumerate(singles):
            assert batch.to_distribution(i) == single
            assert batch.sample(i, np.random.default_rng(seed)) == reference.sample_from_distribution(
                single, np.random.default_rng(seed)
            )
        assert BatchedSparseDistributions.from_distributions(singles, vocab_size=20) == batch


def test_immutable_and_compared_by_value():
    batch = batch_of_three()
    for name in ("token_ids", "probs", "vocab_size"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(batch, name, None)
    for array in (batch.token_ids, batch.probs):
        assert not array.flags.writeable
    assert batch == batch_of_three()
    assert batch != dataclasses.replace(batch, vocab_size=11)
    assert batch != BatchedSparseDistributions([[7]], [[1.0]], vocab_size=10)
    assert batch != "batch"
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)
    ids = np.array([[1, 2]])
    weights = np.array([[1.0, 3.0]])
    batch = BatchedSparseDistributions(ids, weights, vocab_size=4)
    ids[:], weights[:] = 0, 0.0
    assert batch.probability(0, 2) == 0.75


def test_copies_restore_the_bits():
    batch = BatchedSparseDistributions(
        [[0, 1, 2]], [[0.1, 0.2, 0.7000000000000001]], vocab_size=3
    )  # a sum that is not 1: another division would change bits
    for copied in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert copied == batch
        assert not copied.probs.flags.writeable
    assert [field.name for field in dataclasses.fields(batch)] == ["token_ids", "probs", "vocab_size"]
    assert set(dataclasses.asdict(batch)) == {"token_ids", "probs", "vocab_size"}
    assert repr(batch).startswith("BatchedSparseDistributions(token_ids=array([[0, 1, 2]]), probs=")
    assert repr(batch).endswith("vocab_size=3)")


BAD_BATCHES = {
    "one dimension": (ValueError, "shape", ([1, 2], [0.5, 0.5]), 4),
    "shapes that differ": (ValueError, "shape", ([[1, 2]], [[0.5]]), 4),
    "no tokens": (ValueError, "row 0", (np.empty((1, 0), int), np.empty((1, 0))), 4),
    "only padding": (ValueError, "row 1", ([[1], [-1]], [[1.0], [0.0]]), 4),
    "padding with mass": (ValueError, "row 1: padding", ([[1, 2], [1, -1]], [[0.5, 0.5], [0.5, 0.5]]), 4),
    "negative": (ValueError, "row 1: .*-0.5", ([[1], [2]], [[1.0], [-0.5]]), 4),
    "an id outside": (ValueError, "row 0: .*4", ([[4], [2]], [[1.0], [1.0]]), 4),
    "a negative id": (ValueError, "row 0: .*-2", ([[-2], [2]], [[1.0], [1.0]]), 4),
    "twice": (ValueError, "row 1: .*3", ([[1, 2], [3, 3]], [[1.0, 1.0], [1.0, 1.0]]), 4),
    "no mass": (NonFiniteLogitsError, "row 1", ([[1], [2]], [[1.0], [np.nan]]), 4),
    "ids that are no integers": (TypeError, "row 0", ([[1.0]], [[1.0]]), 4),
    "no vocabulary": (ValueError, "vocab_size", ([[0]], [[1.0]]), 0),
    "a vocabulary that is no integer": (TypeError, "vocab_size.* 2.0", ([[0]], [[1.0]]), 2.0),
}


@pytest.mark.parametrize("call", BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_bad_batches(call):
    error, message, arguments, vocab_size = call
    with pytest.raises(error, match=message or None):
        BatchedSparseDistributions(*arguments, vocab_size=vocab_size)


def test_stacking_refuses_what_does_not_fit():
    one = SparseDistribution([1, 2], [0.5, 0.5], 4)
    stack = BatchedSparseDistributions.from_distributions
    assert len(stack([], vocab_size=4)) == 0
    assert stack([one], vocab_size=4, width=3).token_ids.tolist() == [[1, 2, -1]]
    for options in ({"vocab_size": 5}, {"vocab_size": 4, "width": 1}):
        with pytest.raises(ValueError, match="row 0 has 2 tokens of 4"):
            stack([one], **options)


def test_stacking_refuses_what_was_never_checked():
    """Else ids outside the vocabulary would reach the core, which trusts those that are stored."""
    stack = BatchedSparseDistributions.from_distributions
    one = SparseDistribution([1, 2], [0.5, 0.5], 4)
    unchecked = SimpleNamespace(token_ids=np.array([10**12, 1]), probs=np.array([0.5, 0.5]), vocab_size=4)
    with pytest.raises(TypeError, match="row 1 must be a SparseDistribution, not SimpleNamespace"):
        stack([one, unchecked], vocab_size=4)
    for size, error in ((-5, ValueError), (0, ValueError), (4.0, TypeError), ("x", TypeError)):
        with pytest.raises(error, match=f"vocab_size.*{size}"):
            stack([], vocab_size=size)
    for width, error in ((-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match=f"width.*{width}"):
            stack([one], vocab_size=4, width=width)


# ---- rows that come in lazily ------------------------------------------------------------------------


@every_face
def test_rows_of_other_libraries(face):
    class Numbers:
        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    target, draft = np.eye(3)[[0, 1, 2]], np.eye(3)[[0, 1]]
    for wrap in (DLPackOnly, Numbers):
        decision = face.verify_block(wrap(target), wrap(draft), wrap(np.array([0, 1])))
        assert decision.tokens.tolist() == [0, 1, 2]
        decision = face.verify_block([wrap(row) for row in target], None, [0, 1])
        assert decision.tokens.tolist() == [0, 1, 2]
        batch = face.verify_batch(wrap(target[None]), wrap(draft[None]), wrap(np.array([[0, 1]])))
        assert batch.tokens.tolist() == [[0, 1, 2]]


@every_face
def test_own_containers(face):
    rows = Touched([[0.0, 1.0], [1.0, 0.0], Untouchable()])
    assert face.verify_block(rows, None, [0, 0]).tokens.tolist() == [1]
    assert rows.touched == {0}


@every_face
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SamplerConfig("warm", 1.0, 0), "sequence 1: row 0: temperature must be a real number, not 'warm'"),
        (SamplerConfig(1.0, None, 0), "sequence 1: row 0: top_p must be a real number, not None"),
        (SamplerConfig(1.0, 1.0, 2.5), "sequence 1: row 0: top_k must be an integer, not 2.5"),
        (SamplerConfig(1.0, 1.0, 0, [1]), r"row 0: presence_penalty must be a real number, not \[1\]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["config", "draft_config"])
def test_settings_of_all_sequences_are_read_before_a_number_is_drawn(face, bad, message, where):
    good = SamplerConfig(1.0, 1.0, 0)
    if where == "draft_config" and bad.presence_penalty:
        return  # of the target's rows alone
    settings = {"config": good, where: [good, bad]}
    rngs = [np.random.default_rng(seed) for seed in (0, 1)]
    before = [plain_state(rng) for rng in rngs]
    with pytest.raises(TypeError, match=message):
        face.verify_batch_from_logits(
            np.zeros((2, 3, 4)), np.zeros((2, 2, 4)), [[0, 1], [0, 1]], rngs=rngs, **settings
        )
    assert [plain_state(rng) for rng in rngs] == before


@every_face
def test_an_overlay_that_is_no_mapping_has_no_place(face):
    with pytest.raises(TypeError, match=r"^penalty_overlay must be a mapping of token ids, not int"):
        face.verify_block_from_logits(
            np.zeros((3, 4)), None, [0, 1], SamplerConfig(1.0, 1.0, 0), penalty_overlay=[None, None, 5]
        )


@every_face
@pytest.mark.parametrize("rule", ["exact", "greedy", "match"])
def test_a_mapping_is_no_sequence_of_ids(face, rule):
    with pytest.raises(TypeError, match="draft_tokens must be a sequence of ids, not dict"):
        face.verify_block(np.full((2, 3), 1 / 3), None, {0: 0}, rule=rule)


@every_face
def test_a_token_that_is_no_integer_is_named(face):
    with pytest.raises(TypeError, match=r"row 0: a token id must be an integer, not 1\.5"):
        face.verify_block(np.full((2, 3), 1 / 3), None, [1.5])


@every_face
@pytest.mark.parametrize("rule", ["exact", "block", Typical(0.3, 0.09), Cascade(0.1, "tokenv3")], ids=str)
def test_a_row_of_a_sequence_is_asked_for_once(face, rule):
    rng = np.random.default_rng(5)
    rows = rng.dirichlet(np.ones(6), 9).astype(">f4")  # every opening would copy
    asked = []

    class Rows(list):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    for seed in range(8):
        asked.clear()
        tokens = rng.integers(0, 6, 4)
        lazy = face.verify_block(Rows(rows[:5]), rows[5:], tokens, np.random.default_rng(seed), rule=rule)
        assert len(asked) == len(set(asked))
        whole = face.verify_block(rows[:5], rows[5:], tokens, np.random.default_rng(seed), rule=rule)
        assert lazy.tokens.tolist() == whole.tokens.tolist()
