"""apply_penalties (contract 3)."""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import rows


def by_definition(logits, counts, presence, frequency, overlay=None):
    """One token after the other in plain floats, the two penalties summed before they are subtracted."""
    x = [float(value) for value in logits]
    presence, frequency = (min(max(float(p), -2.0), 2.0) for p in (presence, frequency))
    for token, count in counts.items():
        lowered = frequency * count + presence * (count > 0)
        x[token] = x[token] - lowered
    for token, amount in (overlay or {}).items():
        x[token] = x[token] - amount
    return x


@pytest.mark.parametrize(
    ("logits", "counts", "presence", "frequency", "overlay", "expected"),
    [
        ([2.0, 2.0, 2.0], {0: 3, 1: 1}, 0.5, 0.25, None, [0.75, 1.25, 2.0]),
        ([2.0, 2.0, 2.0], {0: 3, 1: 0}, 0.5, 0.25, None, [0.75, 2.0, 2.0]),  # a count of 0 is "not seen"
        ([0.0, 0.0], {1: 2}, -0.5, -0.25, None, [0.0, 1.0]),  # negative penalties raise
        ([4, 4], {0: 1}, 0.5, 0.0, None, [3.5, 4.0]),  # integer logits
        ([1.0, 1.0], {0: 1}, 5.0, 0.0, None, [-1.0, 1.0]),  # clamped to 2
        ([1.0, 1.0], {0: 3}, 0.0, 5.0, None, [-5.0, 1.0]),  # the penalty is clamped, not the product
        ([1.0, 1.0], {0: 3}, -9.0, -9.0, None, [9.0, 1.0]),
        ([1.0, 1.0], {0: 1}, math.inf, -math.inf, None, [1.0, 1.0]),  # +2 and -2
        ([1.0, 1.0], {}, 1.0, 1.0, {1: 7.5}, [1.0, -6.5]),  # the overlay is not clamped
        ([1.0, 1.0], None, 0.0, 0.0, {1: -7.5}, [1.0, 8.5]),  # a logit bias
        ([1.0, 1.0], None, 0.0, 0.0, {1: math.inf}, [1.0, -math.inf]),  # a ban
        ([1.0, 1.0], {0: 1}, 1.0, 0.0, {0: 1.0}, [-1.0, 1.0]),  # both, one after the other
        ([1.0, 1.0], {0: 9}, 0.0, 0.0, {1: 1.0}, [1.0, 0.0]),
        ([-math.inf, 1.0], {0: 2}, 1.0, 1.0, {0: 3.0}, [-math.inf, 1.0]),
        ([1.0], {0: 10**6}, 0.0, 0.5, None, [1.0 - 5e5]),
        ([1.0, 2.0], {True: 1}, 1.0, 0.0, None, [1.0, 1.0]),
    ],
    ids=str,
)
def test_by_hand(face, logits, counts, presence, frequency, overlay, expected):
    got = face.apply_penalties(logits, counts, presence, frequency, overlay)
    assert got.tolist() == expected
    assert got.dtype == np.float64
    assert got.flags.c_contiguous
    assert got.flags.writeable


def test_bounds_of_the_penalties(face):
    assert (face.PENALTY_MIN, face.PENALTY_MAX) == (-2.0, 2.0)


@pytest.mark.parametrize(
    ("counts", "presence", "frequency", "overlay"),
    [
        (None, 1.0, 1.0, None),
        ({}, 1.0, 1.0, None),
        ({}, 1.0, 1.0, {}),
        ({0: 5}, 0.0, 0.0, None),
        ({0: 5}, 0.0, -0.0, {}),
        (Counter(), 1.0, 1.0, None),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "logits",
    [[1.0, 2.0], np.array([1.0, 2.0]), np.array([1, 2]), rows.ArrayOnly(np.ones(2)), object()],
    ids=lambda value: type(value).__name__,
)
def test_nothing_to_do_returns_the_very_object(face, logits, counts, presence, frequency, overlay):
    assert face.apply_penalties(logits, counts, presence, frequency, overlay) is logits
    named = {"presence_penalty": presence, "frequency_penalty": frequency}
    assert face.apply_penalties(logits, counts, **named) is logits


def test_defaults_do_nothing(face):
    x = np.array([1.0, 2.0])
    assert face.apply_penalties(x, {0: 3}) is x


def test_something_to_do_returns_a_fresh_array(face):
    x = np.array([1.0, 2.0])
    for counts, overlay in (({0: 1}, None), ({0: 0}, None), (None, {1: 0.0})):
        got = face.apply_penalties(x, counts, 0.5, 0.5, overlay)
        assert not np.shares_memory(got, x)
        got[:] = 9.0
        assert x.tolist() == [1.0, 2.0]


class Lookup(Mapping):
    """The least that a Mapping has to have."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@pytest.mark.parametrize(
    "kind",
    [dict, Counter, OrderedDict, Lookup, lambda items: MappingProxyType(dict(items))],
    ids=["dict", "Counter", "OrderedDict", "Mapping", "MappingProxyType"],
)
@pytest.mark.parametrize("integer", [int, np.int64, np.int32, np.uint16, np.uint64], ids=lambda t: t.__name__)
def test_mappings_and_integers_of_every_kind(face, kind, integer):
    counts = kind({integer(1): integer(4), integer(0): integer(1)})
    got = face.apply_penalties([3.0, 1.0, 0.5], counts, 0.5, 0.25)
    assert got.tolist() == [2.25, -0.5, 0.5]
    got = face.apply_penalties([3.0, 1.0, 0.5], None, 0.0, 0.0, kind({integer(2): 0.25}))
    assert got.tolist() == [3.0, 1.0, 0.25]


def test_numbers_of_every_kind(face):
    counts = {0: 2.0, 1: np.float32(1)}
    got = face.apply_penalties([3.0, 1.0], counts, np.float16(0.5), Fraction(1, 4), {0: 1})
    assert got.tolist() == [1.0, 0.25]


def test_the_two_penalties_are_summed_before_they_are_subtracted(face):
    logit, count, presence, frequency = 1.0, 1, 0.3, 0.3
    assert (logit - frequency * count) - presence != logit - (frequency * count + presence)
    got = face.apply_penalties([logit], {0: count}, presence, frequency)
    assert got.tolist() == [logit - (frequency * count + presence)]


@pytest.mark.parametrize("outside", [3, -1, -3, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**70)])
@pytest.mark.parametrize("into", ["token_counts", "penalty_overlay"])
def test_ids_outside_the_vocabulary_are_refused(face, outside, into):
    x = np.array([1.0, 2.0, 3.0])
    mapping = {0: 1, outside: 1}
    arguments = {"token_counts": None, "presence_penalty": 1.0, "frequency_penalty": 1.0, into: mapping}
    with pytest.raises(IndexError, match=str(outside)):
        face.apply_penalties(x, **arguments)
    assert x.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"presence_penalty": np.float32("nan")}, "presence_penalty"),
        ({"token_counts": {1: -1}}, "-1"),
        ({"token_counts": {0: 1, 2: np.int64(-7)}}, "-7"),
        ({"token_counts": {1: math.nan}}, "nan"),
        ({"penalty_overlay": {1: math.nan}}, "nan"),
        ({"logits": [[1.0, 2.0]]}, ""),
        ({"logits": []}, ""),
        ({"logits": 3.0}, ""),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(face, changed, named):
    arguments = {"logits": [1.0, 2.0, 3.0], "token_counts": {0: 1}, "presence_penalty": 1.0}
    with pytest.raises(ValueError, match=named or None):
        face.apply_penalties(**{**arguments, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"token_counts": [0, 1]},
        {"token_counts": 3},
        {"penalty_overlay": [(0, 1.0)]},
        {"token_counts": {1.5: 1}},
        {"token_counts": {"1": 1}},
        {"penalty_overlay": {None: 1.0}},
        {"token_counts": {1: "many"}},
        {"token_counts": {1: None}},
        {"presence_penalty": "high"},
        {"frequency_penalty": None},
        {"logits": ["a", "b"]},
        {"logits": [1j, 2.0]},
    ],
    ids=str,
)
def test_types_that_make_no_sense_are_refused(face, changed):
    arguments = {"logits": [1.0, 2.0, 3.0], "token_counts": {0: 1}, "presence_penalty": 1.0}
    # Text goes through float(), which says ValueError where it is no number.
    with pytest.raises((TypeError, ValueError)):
        face.apply_penalties(**{**arguments, **changed})


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [1, 2, 17, 513, 5000])
def test_many_counts_give_the_definition_bit_for_bit(face, n, dtype):
    rng = np.random.default_rng(n)
    x = (rng.normal(size=n) * 3).astype(dtype)
    seen = rng.choice(n, max(n // 3, 1), replace=False)
    counts = dict(zip(seen.tolist(), rng.integers(0, 9, seen.size).tolist(), strict=True))
    overlay = {int(i): float(v) for i, v in zip(seen[::2], rng.normal(size=seen.size) * 5, strict=False)}
    before = x.tobytes(), dict(counts), dict(overlay)
    got = face.apply_penalties(x, counts, 0.3, 0.7, overlay)
    assert got.tolist() == by_definition(x, counts, 0.3, 0.7, overlay)
    assert (x.tobytes(), counts, overlay) == before


@given(
    st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=20),
    st.dictionaries(st.integers(0, 19), st.integers(0, 1000)),
    st.floats(-3, 3),
    st.floats(-3, 3),
    st.dictionaries(st.integers(0, 19), st.floats(-100, 100)),
)
def test_any_numbers(face, logits, counts, presence, frequency, overlay):
    counts = {token: count for token, count in counts.items() if token < len(logits)}
    overlay = {token: amount for token, amount in overlay.items() if token < len(logits)}
    got = face.apply_penalties(logits, counts, presence, frequency, overlay)
    if got is logits:
        assert not overlay
        assert not counts or presence == frequency == 0.0
    else:
        assert got.tolist() == by_definition(logits, counts, presence, frequency, overlay)
