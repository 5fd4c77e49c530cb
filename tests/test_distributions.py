"""Data types: one set of classes for both faces (contract 2)."""

import copy
import dataclasses
import pickle
from fractions import Fraction
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rows
from support.ulps import assert_ulps

from mtplx import distributions
from mtplx.distributions import (
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    SpeculativeDecision,
    non_finite_logits_error,
)

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Tagged(SparseDistribution):
    """A user's subclass with an attribute of its own."""


class Slotted(SparseDistribution):
    __slots__ = ()


def bits(distribution):
    return (
        distribution.token_ids.tobytes(),
        distribution.probs.tobytes(),
        distribution.vocab_size,
        type(distribution),
    )


def renormalises_to_other_bits():
    """A distribution whose stored numbers change when they are normalised once more."""
    for seed in range(1000):
        made = SparseDistribution(range(9), np.random.default_rng(seed).random(9), 20)
        if bits(SparseDistribution(made.token_ids, made.probs, 20)) != bits(made):
            return made
    raise AssertionError("no such distribution was found, so pickling could not be tested")


def test_one_set_of_classes_for_both_faces(face):
    assert {"SamplerConfig", "SparseDistribution", "SpeculativeDecision", "NonFiniteLogitsError"} <= set(
        face.__all__
    )
    for name in set(distributions.__all__) & set(face.__all__):
        assert getattr(face, name) is getattr(distributions, name)


# ---- SamplerConfig ---------------------------------------------------------------------------------


def test_config_has_the_defaults_and_the_order_of_the_contract():
    assert dataclasses.astuple(SamplerConfig()) == (0.6, 0.95, 20, 0.0, 0.0)
    names = ["temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty"]
    assert [field.name for field in dataclasses.fields(SamplerConfig)] == names
    config = SamplerConfig(0.7, 0.8, 5, 0.25, -0.5)
    assert dataclasses.asdict(config) == dict(zip(names, (0.7, 0.8, 5, 0.25, -0.5), strict=True))


def test_config_is_a_frozen_value():
    config = SamplerConfig(0.7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.temperature = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        del config.top_p
    assert config == SamplerConfig(0.7)
    assert config != SamplerConfig(0.8)
    assert len({config, SamplerConfig(0.7), SamplerConfig(0.8)}) == 2
    assert dataclasses.replace(config, top_k=3) == SamplerConfig(0.7, top_k=3)
    assert dataclasses.replace(config, top_k=3) != config


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_config_pickles(protocol):
    config = SamplerConfig(0.7, 0.8, None, 1.0, -1.0)
    assert pickle.loads(pickle.dumps(config, protocol)) == config


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SamplerConfig)])
@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan"), np.float16("nan")])
def test_config_refuses_nan_by_name(field, nan):
    with pytest.raises(ValueError, match=field):
        SamplerConfig(**{field: nan})
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(SamplerConfig(), **{field: nan})


@pytest.mark.parametrize(
    "given_fields",
    [
        {"temperature": -3.0},
        {"temperature": float("inf")},
        {"top_p": 7.0},
        {"top_p": -1.0},
        {"top_k": None},
        {"top_k": -5},
        {"top_k": 2**40},
        {"top_k": 2**80},
        {"presence_penalty": 99.0},
        {"frequency_penalty": float("-inf")},
    ],
)
def test_config_takes_everything_else_as_given(given_fields):
    config = SamplerConfig(**given_fields)
    for name, value in given_fields.items():
        assert getattr(config, name) is value


# ---- NonFiniteLogitsError --------------------------------------------------------------------------


def test_error_is_caught_as_either_class_and_keeps_its_counts():
    error = NonFiniteLogitsError("row 3", nan_count=1, inf_count=2, vocab_size=8)
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    assert (error.nan_count, error.inf_count, error.vocab_size) == (1, 2, 8)
    text = str(error)
    assert "row 3" in text
    for number in ("1", "2", "8"):
        assert number in text.replace("row 3", "")
    bare = NonFiniteLogitsError("nothing known")
    assert (bare.nan_count, bare.inf_count, bare.vocab_size) == (None, None, None)
    assert str(bare) == "nothing known"
    with pytest.raises(TypeError):
        NonFiniteLogitsError("counts are keyword-only", 1, 2, 8)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_error_survives_a_process_boundary(protocol):
    error = NonFiniteLogitsError("row 3", nan_count=1, inf_count=0, vocab_size=8)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is NonFiniteLogitsError
    assert str(again) == str(error)
    assert (again.nan_count, again.inf_count, again.vocab_size) == (1, 0, 8)


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_error_counts_what_it_finds(dtype):
    x = np.array([1.0, np.nan, np.inf, -np.inf, np.nan], dtype=dtype)
    error = non_finite_logits_error(x, "the draft's row")
    assert (error.nan_count, error.inf_count, error.vocab_size) == (2, 2, 5)
    assert "the draft's row" in str(error)
    assert non_finite_logits_error([1.0, float("inf")], "a list").inf_count == 1


# ---- SparseDistribution: what it holds -------------------------------------------------------------


def test_sparse_keeps_order_and_normalises():
    d = SparseDistribution([7, 3, 5], [3.0, 1.0, 4.0], 10)
    assert d.token_ids.tolist() == [7, 3, 5]
    assert d.probs.tolist() == [0.375, 0.125, 0.5]
    assert d.vocab_size == 10
    assert type(d.vocab_size) is int
    assert d.token_ids.dtype == np.int64
    assert d.probs.dtype == np.float64
    assert d.to_dense().tolist() == [0, 0, 0, 0.125, 0, 0.5, 0, 0.375, 0, 0]


@pytest.mark.parametrize(
    "ids",
    [
        np.array([7, 3], dtype=np.int32),
        np.array([7, 3], dtype=np.uint64),
        np.array([7, 3], dtype=np.int8),
        np.array([7, 3], dtype=">i4"),
        np.array([3, 7])[::-1],
        np.array([7, 0, 3])[::2],
        [7, 3],
        (np.int64(7), 3),
        np.array([7, 3], dtype=object),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "probs",
    [
        [3, 1],
        np.array([0.75, 0.25], dtype=np.float32),
        np.array([0.75, 0.25], dtype=np.float16),
        np.array([0.75, 0.25], dtype=ml_dtypes.bfloat16),
        np.array([0.75, 0.25], dtype=">f8"),
        np.array([3.0, 9.0, 1.0])[::2],
        np.array([1.0, 3.0])[::-1],
        [Fraction(3, 4), Fraction(1, 4)],
    ],
    ids=str,
)
def test_sparse_takes_any_array_like(ids, probs):
    d = SparseDistribution(ids, probs, 10)
    assert d.token_ids.tolist() == [7, 3]
    assert d.probs.tolist() == [0.75, 0.25]
    assert d.token_ids.dtype == np.int64
    assert d.token_ids.dtype.isnative


def test_sparse_copies_and_freezes_its_arrays():
    ids, probs = np.array([7, 3]), np.array([0.75, 0.25])
    d = SparseDistribution(ids, probs, 10)
    assert not np.shares_memory(ids, d.token_ids)
    assert not np.shares_memory(probs, d.probs)
    ids[0], probs[0] = 1, 9.0
    assert (d.token_ids[0], d.probs[0]) == (7, 0.75)
    for array in (d.token_ids, d.probs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    dense = d.to_dense()
    dense[7] = 9.0
    assert d.probability(7) == 0.75
    assert d.to_dense()[7] == 0.75


@pytest.mark.parametrize("nothing", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
def test_sparse_entries_without_a_finite_mass_become_zero_and_stay(nothing):
    d = SparseDistribution([4, 2, 9], [1.0, nothing, 3.0], 10)
    assert d.token_ids.tolist() == [4, 2, 9]
    assert d.probs.tolist() == [0.25, 0.0, 0.75]
    assert not np.signbit(d.probs[1])
    assert d.probability(2) == 0.0


@pytest.mark.parametrize(
    "probs", [[0.0, 0.0], [np.nan, np.nan], [np.inf, 0.0], [-np.inf, np.nan], [-0.0, 0.0]], ids=str
)
def test_sparse_without_mass_is_refused(probs):
    with pytest.raises(NonFiniteLogitsError):
        SparseDistribution([1, 2], probs, 5)


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        ([1.7e308, 1.7e308], [0.5, 0.5]),  # the sum is beyond float64
        ([1.6e308, 0.8e308, 0.8e308], [0.5, 0.25, 0.25]),
        ([1.7e308] * 1000, [0.001] * 1000),
        ([1.7e308, 1.0], [1.0, 1.0 / 1.7e308]),
        ([5e-324, 5e-324], [0.5, 0.5]),
        ([5e-324, 15e-324], [0.25, 0.75]),
        ([2.0**-1022, 2.0**-1022, 2.0**-1021], [0.25, 0.25, 0.5]),
        ([1e300, 1e-300], [1.0, 0.0]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_sparse_sums_beyond_the_range_of_float64(probs, expected):
    d = SparseDistribution(range(len(probs)), probs, 2000)
    # Scaling by a power of two is exact; the division and the sum may round once each.
    assert_ulps(d.probs, expected, 2)


@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=50).filter(any))
def test_sparse_sums_to_one_and_keeps_ratios(probs):
    d = SparseDistribution(range(len(probs)), probs, len(probs))
    exact = [Fraction(p) for p in probs]
    total = sum(exact)
    assert abs(sum(map(Fraction, d.probs.tolist())) - 1) <= len(probs) * Fraction(2) ** -53
    # One rounding of the (compensated) sum and one of the division; float() rounds the exact ratio once.
    assert_ulps(d.probs, [float(value / total) for value in exact], 2)


# ---- SparseDistribution: what it refuses -----------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "probs", "vocab_size", "named"),
    [
        ([[1, 2]], [[0.5, 0.5]], 5, "one-dimensional"),
        (3, 1.0, 5, "one-dimensional"),
        ([1, 2], [[0.5, 0.5]], 5, "one-dimensional"),
        ([1, 2], [1.0], 5, "2"),
        ([1], [0.5, 0.5], 5, "2"),
        ([], [], 5, "one token"),
        (np.array([], dtype=np.int64), np.array([]), 5, "one token"),
        ([1, 2], [0.5, -0.25], 5, "-0.25"),
        ([1, 2], [-5e-324, 1.0], 5, "-5e-324"),
        ([1, 5], [0.5, 0.5], 5, "5"),
        ([-1, 2], [0.5, 0.5], 5, "-1"),
        ([2**40, 2], [0.5, 0.5], 5, str(2**40)),
        (np.array([2**63], dtype=np.uint64), [1.0], 2**62, str(2**63)),
        (np.array([2**64 - 1], dtype=np.uint64), [1.0], 5, str(2**64 - 1)),
        ([2**70], [1.0], 5, str(2**70)),
        ([-(2**70)], [1.0], 5, str(2**70)),
        ([3, 1, 3], [0.2, 0.3, 0.5], 5, "3"),
        ([3, 3], [0.5, 0.0], 5, "3"),  # a zero entry is an entry
        ([0], [1.0], 0, "0"),
        ([0], [1.0], -4, "-4"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_sparse_refuses(ids, probs, vocab_size, named):
    with pytest.raises(ValueError, match=named) as caught:
        SparseDistribution(ids, probs, vocab_size)
    assert not isinstance(caught.value, NonFiniteLogitsError)


@pytest.mark.parametrize("n", [2, 3, 31, 32, 33, 500])
def test_sparse_finds_a_duplicate_anywhere(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        ids = rng.permutation(2 * n)[:n]
        first, second = rng.choice(n, 2, replace=False)
        SparseDistribution(ids, np.ones(n), 2 * n)
        ids[first] = ids[second]
        with pytest.raises(ValueError, match=str(ids[second])):
            SparseDistribution(ids, np.ones(n), 2 * n)


@pytest.mark.parametrize("ids", [[1.5, 2.5], ["1", "2"], [1 + 0j, 2], [None, 1]], ids=str)
def test_sparse_never_truncates_an_id(ids):
    with pytest.raises((TypeError, ValueError)):
        SparseDistribution(ids, [0.5, 0.5], 5)


@pytest.mark.parametrize("probs", [["a", "b"], [1j, 1.0], np.array([b"x", b"y"])], ids=str)
def test_sparse_refuses_what_is_no_real_number(probs):
    with pytest.raises(TypeError):
        SparseDistribution([1, 2], probs, 5)


# ---- SparseDistribution: what it answers -----------------------------------------------------------


def test_one_hot():
    d = SparseDistribution.one_hot(3, 5)
    assert d == SparseDistribution([3], [1.0], 5)
    assert d.to_dense().tolist() == [0, 0, 0, 1, 0]
    assert type(Tagged.one_hot(np.int32(3), 5)) is Tagged
    for outside in (5, -1, 2**70):
        with pytest.raises(ValueError, match=str(outside)):
            SparseDistribution.one_hot(outside, 5)


@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("n", [1, 2, 20, 31, 32, 33, 34, 100, 1000])
def test_probability_finds_every_id_and_no_other(n, ascending):
    rng = np.random.default_rng(n)
    ids = rng.choice(3 * n, n, replace=False)
    ids = np.sort(ids) if ascending else ids
    d = SparseDistribution(ids, rng.random(n) + 0.1, 3 * n)
    held = dict(zip(d.token_ids.tolist(), d.probs.tolist(), strict=True))
    for token in range(-2, 3 * n + 2):
        assert d.probability(token) == held.get(token, 0.0)


@pytest.mark.parametrize("outside", [5, -1, 2**31, 2**32 + 2, 2**40, 2**63, 2**64 + 2, -(2**63), 2**100])
def test_probability_is_zero_for_any_other_integer(outside):
    d = SparseDistribution([2, 4], [0.5, 0.5], 5)
    assert d.probability(outside) == 0.0
    assert type(d.probability(outside)) is float


def test_probability_takes_integers_only_and_gives_plain_floats():
    d = SparseDistribution([2, 4], [0.75, 0.25], 5)
    for token in (2, np.int64(2), np.uint8(2), np.int32(2)):
        assert d.probability(token) == 0.75
        assert type(d.probability(token)) is float
    for token in (2.0, "2", None):
        with pytest.raises(TypeError):
            d.probability(token)


def test_sparse_over_a_huge_vocabulary():
    d = SparseDistribution([2**40, 5], [0.5, 0.5], 2**41)
    assert d.probability(2**40) == 0.5
    assert d.probability(2**40 % 2**32) == 0.0


# ---- SparseDistribution: a value -------------------------------------------------------------------


def test_sparse_equality_is_of_size_ids_and_probabilities_in_order():
    d = SparseDistribution([7, 3], [0.75, 0.25], 10)
    assert d == SparseDistribution(np.array([7, 3]), [3, 1], 10)
    assert (d != SparseDistribution([7, 3], [3, 1], 10)) is False
    assert d != SparseDistribution([7, 3], [0.75, 0.25], 11)
    assert d != SparseDistribution([3, 7], [0.25, 0.75], 10)
    assert d != SparseDistribution([7, 4], [0.75, 0.25], 10)
    assert d != SparseDistribution([7, 3], [0.25, 0.75], 10)
    assert d != SparseDistribution([7, 3, 1], [0.75, 0.25, 0.0], 10)
    assert d != "a distribution"
    assert d != d.to_dense().tolist()
    with pytest.raises(TypeError, match="unhashable"):
        hash(d)


def test_sparse_is_immutable():
    d = SparseDistribution([7, 3], [0.75, 0.25], 10)
    before = bits(d)
    for name in ("token_ids", "probs", "vocab_size"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(d, name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(d, name)
    with pytest.raises(AttributeError):
        d.something_else = 1
    with pytest.raises(AttributeError):
        d.__init__([1], [1.0], 5)
    assert bits(d) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tagged([1], [1.0], 5).probs = None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sparse_pickles_to_the_stored_bits(protocol):
    d = renormalises_to_other_bits()
    assert bits(pickle.loads(pickle.dumps(d, protocol))) == bits(d)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_sparse_copies_to_the_stored_bits(duplicate):
    d = renormalises_to_other_bits()
    assert bits(duplicate(d)) == bits(d)
    assert duplicate(d) == d
    with pytest.raises(dataclasses.FrozenInstanceError):
        duplicate(d).probs = None
    with pytest.raises(ValueError, match="read-only"):
        duplicate(d).probs[0] = 1.0


@pytest.mark.parametrize("cls", [Tagged, Slotted])
def test_sparse_subclasses_survive_pickling_and_copying(cls):
    plain = renormalises_to_other_bits()
    d = cls(plain.token_ids, plain.probs, plain.vocab_size)
    for again in (copy.copy(d), copy.deepcopy(d), *(pickle.loads(pickle.dumps(d, p)) for p in PROTOCOLS)):
        assert bits(again) == bits(d)
        assert again.probability(int(d.token_ids[0])) == d.probs[0]


def test_sparse_subclass_keeps_its_own_attributes_when_copied():
    d = Tagged([1, 2], [0.5, 0.5], 5)
    object.__setattr__(d, "origin", "draft")
    assert copy.copy(d).origin == "draft"
    assert pickle.loads(pickle.dumps(d)).origin == "draft"


def test_sparse_is_a_dataclass():
    d = SparseDistribution([7, 3], [0.75, 0.25], 10)
    assert dataclasses.is_dataclass(d)
    assert [field.name for field in dataclasses.fields(d)] == ["token_ids", "probs", "vocab_size"]
    as_dict = dataclasses.asdict(d)
    assert list(as_dict) == ["token_ids", "probs", "vocab_size"]
    assert as_dict["probs"].tolist() == [0.75, 0.25]
    wider = dataclasses.replace(d, vocab_size=20)
    assert wider == SparseDistribution([7, 3], [0.75, 0.25], 20)
    assert dataclasses.replace(d, probs=[2, 6]).probs.tolist() == [0.25, 0.75]
    assert type(dataclasses.replace(Tagged([1], [1.0], 5), vocab_size=6)) is Tagged
    with pytest.raises(ValueError, match="7"):
        dataclasses.replace(d, vocab_size=7)


def test_sparse_replace_normalises_and_copy_does_not():
    d = renormalises_to_other_bits()
    assert bits(dataclasses.replace(d)) != bits(d)
    assert bits(dataclasses.replace(d)) == bits(SparseDistribution(d.token_ids, d.probs, d.vocab_size))


def test_sparse_methods_can_be_patched_on_the_class():
    d = SparseDistribution([7, 3], [0.75, 0.25], 10)
    with mock.patch.object(SparseDistribution, "probability", return_value=0.125) as patched:
        assert d.probability(7) == 0.125
        patched.assert_called_once_with(7)
    assert d.probability(7) == 0.75
    with mock.patch.object(SparseDistribution, "to_dense", return_value="dense"):
        assert d.to_dense() == "dense"
    assert d.to_dense()[7] == 0.75


def test_sparse_repr_names_its_fields():
    text = repr(SparseDistribution([7, 3], [0.75, 0.25], 10))
    for part in ("SparseDistribution", "token_ids", "probs", "vocab_size=10"):
        assert part in text


# ---- SpeculativeDecision ---------------------------------------------------------------------------


def test_decision_is_a_plain_immutable_value():
    decision = SpeculativeDecision(np.True_, np.int64(5), np.float32(0.25))
    assert type(decision.accepted) is bool
    assert type(decision.token_id) is int
    assert type(decision.accept_probability) is float
    assert repr(decision) == "SpeculativeDecision(accepted=True, token_id=5, accept_probability=0.25)"
    assert decision == SpeculativeDecision(True, 5, 0.25)
    assert decision != SpeculativeDecision(False, 5, 0.25)
    assert decision != SpeculativeDecision(True, 6, 0.25)
    assert decision != SpeculativeDecision(True, 5, 0.5)
    assert decision != (True, 5, 0.25)
    assert len({decision, SpeculativeDecision(True, 5, 0.25), SpeculativeDecision(True, 6, 0.25)}) == 2
    for name in ("accepted", "token_id", "accept_probability"):
        with pytest.raises(AttributeError):
            setattr(decision, name, 0)
    with pytest.raises(AttributeError):
        decision.something_else = 0
    assert decision == SpeculativeDecision(accepted=True, token_id=5, accept_probability=0.25)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_decision_pickles(protocol):
    decision = SpeculativeDecision(False, 2**40, 0.1)
    again = pickle.loads(pickle.dumps(decision, protocol))
    assert again == decision
    assert type(again) is SpeculativeDecision


def test_decision_is_a_dataclass():
    decision = SpeculativeDecision(False, 7, 0.1)
    expected = {"accepted": False, "token_id": 7, "accept_probability": 0.1}
    assert dataclasses.asdict(decision) == expected
    assert [field.name for field in dataclasses.fields(decision)] == list(expected)
    replaced = dataclasses.replace(decision, token_id=8)
    assert replaced == SpeculativeDecision(False, 8, 0.1)
    assert copy.copy(decision) == decision == copy.deepcopy(decision)
