"""What comes in, what comes out, what is refused: the same on both faces (contract 1)."""

import dataclasses
import decimal
import inspect
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from support import rows
from support.generators import Stub, plain_state

from mtplx import reference, sampling
from mtplx.distributions import NonFiniteLogitsError, SamplerConfig, SparseDistribution

NAN, INF = math.nan, math.inf
S = SparseDistribution
ROW = np.array([0.5, 0.25, 0.125, 0.125, 0.0])
OTHER = np.array([0.125, 0.5, 0.25, 0.0, 0.125])
CONFIG = SamplerConfig(0.7, 0.9, 3)


class Real:
    """A real number of somebody's own, which does not compare with others."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value


GREEDY = SamplerConfig(0.0)


def seeded():
    return np.random.default_rng(5)


# Every function that reads a row, with the row as its argument; results compare with ==.
ONE_ROW = {
    "softmax": lambda face, x: face.softmax(x, 0.7).tolist(),
    "softmax, greedy": lambda face, x: face.softmax(x, 0.0).tolist(),
    "softmax, T = inf": lambda face, x: face.softmax(x, INF).tolist(),
    "deterministic_top_k_order": lambda face, x: face.deterministic_top_k_order(x, 3).tolist(),
    "apply_top_p_top_k": lambda face, x: face.apply_top_p_top_k(x, 0.8, 4).tolist(),
    "apply_top_p_top_k, top-p alone": lambda face, x: face.apply_top_p_top_k(x, 0.8).tolist(),
    "apply_top_p_top_k, off": lambda face, x: face.apply_top_p_top_k(x).tolist(),
    "apply_top_k_top_p": lambda face, x: face.apply_top_k_top_p(x, 2).tolist(),
    "apply_penalties": lambda face, x: face.apply_penalties(x, {1: 2}, 0.5, 0.25, {0: 0.5}).tolist(),
    "distribution_from_logits": lambda face, x: face.distribution_from_logits(x, CONFIG).tolist(),
    "distribution_from_logits, greedy": lambda face, x: face.distribution_from_logits(x, GREEDY).tolist(),
    "distribution_from_logits, counts": lambda face, x: face.distribution_from_logits(
        x, SamplerConfig(0.7, 0.9, 3, 1.0), token_counts={0: 1}
    ).tolist(),
    "sparse_distribution_from_logits": lambda face, x: (
        face.sparse_distribution_from_logits(x, CONFIG).to_dense().tolist()
    ),
    "sparse_distribution_from_logits, greedy": lambda face, x: (
        face.sparse_distribution_from_logits(x, GREEDY).to_dense().tolist()
    ),
    "acceptance_probability, p": lambda face, x: face.acceptance_probability(x, OTHER, 1),
    "acceptance_probability, q": lambda face, x: face.acceptance_probability(OTHER, x, 0),
    "acceptance_probability, sparse q": lambda face, x: face.acceptance_probability(x, S([1], [1.0], 5), 1),
    "residual_distribution, p": lambda face, x: face.residual_distribution(x, OTHER).tolist(),
    "residual_distribution, q": lambda face, x: face.residual_distribution(OTHER, x).tolist(),
    "residual_distribution, sparse p": lambda face, x: face.residual_distribution(
        S([1], [1.0], 5), x
    ).tolist(),
    "residual_distribution, sparse q": lambda face, x: face.residual_distribution(
        x, S([1], [1.0], 5)
    ).tolist(),
    "sample_from_distribution": lambda face, x: [
        face.sample_from_distribution(x, rng) for rng in [seeded()] * 9
    ],
    "verify_one_token, p": lambda face, x: [
        face.verify_one_token(x, OTHER, 1, rng) for rng in [seeded()] * 9
    ],
    "verify_one_token, q": lambda face, x: [
        face.verify_one_token(OTHER, x, 0, rng) for rng in [seeded()] * 9
    ],
    "verify_one_token, sparse q": lambda face, x: [
        face.verify_one_token(x, S([1], [1.0], 5), 1, rng) for rng in [seeded()] * 9
    ],
    "speculative_output_marginal, p": lambda face, x: face.speculative_output_marginal(x, OTHER).tolist(),
    "speculative_output_marginal, q": lambda face, x: face.speculative_output_marginal(OTHER, x).tolist(),
    "total_variation, p": lambda face, x: face.total_variation(x, OTHER),
    "total_variation, q": lambda face, x: face.total_variation(OTHER, x),
    "distribution_entropy": lambda face, x: face.distribution_entropy(x),
}


# ---- one contract, two faces -----------------------------------------------------------------------


def test_names_and_signatures_are_the_same(face):
    assert set(sampling.__all__) <= set(face.__all__)  # the reference holds the twins of blocks as well
    for name in sampling.__all__:
        ours, theirs = getattr(face, name), getattr(reference, name)
        if not inspect.isroutine(theirs):
            assert ours == theirs, name
            continue
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
            for function in (ours, theirs)
        ]
        assert parameters[0] == parameters[1], name


def test_public_functions_say_what_they_do(face):
    for name in face.__all__:
        if inspect.isroutine(getattr(face, name)):
            assert getattr(face, name).__doc__, name


def modules_loaded_by(module):
    script = f"import sys, {module}; print(*[m for m in sys.modules if m.startswith('mtplx')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split() if not name.startswith("mtplx._csampling")}


def test_sampling_can_be_used_alone():
    """It is also copied into other packages of that name, with the data types and the core."""
    assert modules_loaded_by("mtplx.sampling") == {"mtplx", "mtplx.distributions", "mtplx.sampling"}


def test_the_reference_does_not_know_the_compiled_face():
    loaded = modules_loaded_by("mtplx.reference")
    assert not loaded & {"mtplx.sampling", "mtplx.batch", "mtplx.verification", "mtplx.decoding"}


# ---- layouts and dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_ROW)
def test_every_layout_gives_the_same_bits(face, name):
    expected = ONE_ROW[name](face, ROW)
    for layout, row in rows.layouts(ROW).items():
        assert ONE_ROW[name](face, row) == expected, layout


@pytest.mark.parametrize("dtype", list(rows.FLOAT_TYPES.values())[:3], ids=list(rows.FLOAT_TYPES)[:3])
@pytest.mark.parametrize("name", ONE_ROW)
def test_every_layout_of_short_floats_gives_the_same_bits(face, name, dtype):
    short = ROW.astype(dtype)  # exact: sums of powers of two
    expected = ONE_ROW[name](face, short)
    for layout, row in rows.layouts(short).items():
        assert ONE_ROW[name](face, row) == expected, layout
    if name.startswith("softmax") or "from_logits" in name:
        np.testing.assert_allclose(expected, ONE_ROW[name](face, ROW), rtol=1e-15, atol=0)
    else:
        assert expected == ONE_ROW[name](face, ROW)


INTEGERS = np.array([4, 2, 1, 1, 0])


@pytest.mark.parametrize(
    "dtype",
    ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", "?", "O", np.longdouble, ml_dtypes.float8_e4m3],
    ids=str,
)
@pytest.mark.parametrize("name", ONE_ROW)
def test_other_real_numbers_are_converted(face, name, dtype):
    row = (INTEGERS > 1 if dtype == "?" else INTEGERS).astype(dtype)
    expected = ONE_ROW[name](face, row.astype(np.float64))
    assert ONE_ROW[name](face, row) == expected
    assert ONE_ROW[name](face, row[::-1].copy()[::-1]) == expected


@pytest.mark.parametrize("name", ONE_ROW)
def test_lists_of_python_numbers(face, name):
    expected = ONE_ROW[name](face, np.array([4.0, 2.0, 1.0, 0.0, 0.5]))
    assert ONE_ROW[name](face, [4, 2.0, True, False, decimal.Decimal("0.5")]) == expected
    assert ONE_ROW[name](face, (4, np.float32(2), np.int8(1), np.float16(0), 0.5)) == expected
    assert ONE_ROW[name](face, memoryview(np.array([4.0, 2.0, 1.0, 0.0, 0.5]))) == expected


@pytest.mark.parametrize("name", ONE_ROW)
def test_subclasses_of_arrays(face, name):
    class Named(np.ndarray):
        pass

    assert ONE_ROW[name](face, ROW.view(Named)) == ONE_ROW[name](face, ROW)


LONG = 1200


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
def test_long_rows_in_every_layout(face, dtype):
    """Longer than a chunk, so that a strided row is gathered in several pieces."""
    x = (np.random.default_rng(2).normal(size=LONG) * 3).astype(dtype)
    p = np.abs(x)
    calls = {
        "softmax": lambda x, p: face.softmax(x, 0.7),
        "float32": lambda x, p: face.softmax(x, 0.7, out=np.empty(LONG, dtype=np.float32)),
        "dense": lambda x, p: face.distribution_from_logits(x, SamplerConfig(0.7, 0.9, 0)),
        "sparse": lambda x, p: face.sparse_distribution_from_logits(x, SamplerConfig()).to_dense(),
        "order": lambda x, p: face.deterministic_top_k_order(x, 40),
        "nucleus": lambda x, p: face.apply_top_p_top_k(p, 400.0 / LONG, 0),
        "top-k": lambda x, p: face.apply_top_p_top_k(p, 1.0, 50),
        "residual": lambda x, p: face.residual_distribution(p, p[::-1]),
        "draw": lambda x, p: np.array([face.sample_from_distribution(p, seeded())]),
        "marginal": lambda x, p: face.speculative_output_marginal(p, p[::-1]),
        "entropy": lambda x, p: np.array([face.distribution_entropy(p)]),
    }
    for name, call in calls.items():
        expected = call(x, p)
        for (layout, a), b in zip(rows.layouts(x).items(), rows.layouts(p).values(), strict=True):
            if name in ("residual", "marginal") and not isinstance(b, np.ndarray):
                continue  # no [::-1] of its own
            assert call(a, b).tobytes() == expected.tobytes(), (name, layout)


# ---- what comes out --------------------------------------------------------------------------------


def results(face, x, q):
    yield "softmax", face.softmax(x)
    yield "softmax, greedy", face.softmax(x, 0.0)
    yield "softmax, inf", face.softmax(x, INF)
    for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 2), (0.9, 2)):
        yield "apply_top_p_top_k", face.apply_top_p_top_k(x, top_p, top_k)
        yield "apply_top_k_top_p", face.apply_top_k_top_p(x, top_k, top_p)
        yield "distribution_from_logits", face.distribution_from_logits(x, SamplerConfig(0.7, top_p, top_k))
    yield "distribution_from_logits, greedy", face.distribution_from_logits(x, GREEDY)
    yield "apply_penalties", face.apply_penalties(x, {0: 1}, 1.0)
    yield "residual", face.residual_distribution(x, q)
    yield "residual, equal", face.residual_distribution(x, x)
    yield "residual, mixed", face.residual_distribution(S([0], [1.0], x.size), q)
    yield "marginal", face.speculative_output_marginal(x, q)


@pytest.mark.parametrize("dtype", rows.FLOAT_TYPES.values(), ids=list(rows.FLOAT_TYPES))
@pytest.mark.parametrize("n", [1, 5, 600])
def test_results_are_fresh_plain_float64(face, n, dtype):
    x = (np.random.default_rng(n).random(n) + 0.1).astype(dtype)
    q = x[::-1].copy()
    before = x.tobytes(), q.tobytes()
    for name, result in results(face, x, q):
        assert type(result) is np.ndarray, name
        assert result.dtype == np.float64, name
        assert result.dtype.isnative, name
        assert result.flags.c_contiguous, name
        assert result.flags.writeable, name
        assert result.shape == (n,), name
        assert not np.shares_memory(result, x), name
        result[:] = -1.0
    assert (x.tobytes(), q.tobytes()) == before


@pytest.mark.parametrize("name", ONE_ROW)
def test_inputs_are_never_modified(face, name):
    for layout, row in rows.layouts(ROW).items():
        before = np.asarray(row.__array__() if hasattr(row, "__array__") else ROW).tobytes()
        ONE_ROW[name](face, row)
        after = np.asarray(row.__array__() if hasattr(row, "__array__") else ROW).tobytes()
        assert after == before, layout
    memory = np.array([0.25, 9.0, 0.5, 9.0, 0.125, 9.0, 0.125, 9.0, 0.0, 9.0])
    before = memory.tobytes()
    ONE_ROW[name](face, memory[::2])
    assert memory.tobytes() == before  # nor what lies between its entries


def test_sparse_inputs_are_never_modified(face):
    p, q = S([3, 1], [0.75, 0.25], 5), S([1, 0], [0.5, 0.5], 5)
    before = [array.tobytes() for d in (p, q) for array in (d.token_ids, d.probs)]
    face.residual_distribution(p, q)
    face.residual_distribution(p, OTHER)
    face.verify_one_token(p, q, 1, seeded())
    face.sample_from_distribution(p, seeded())
    face.speculative_output_marginal(p, q)
    face.total_variation(p, q)
    face.distribution_entropy(p)
    assert [array.tobytes() for d in (p, q) for array in (d.token_ids, d.probs)] == before


# ---- out= ------------------------------------------------------------------------------------------

X = np.array([0.5, 0.25, 0.75])
INTO = {
    "softmax": lambda face, x, out: face.softmax(x, 0.7, out=out),
    "softmax, greedy": lambda face, x, out: face.softmax(x, 0.0, out=out),
    "softmax, inf": lambda face, x, out: face.softmax(x, INF, out=out),
    "apply_top_p_top_k": lambda face, x, out: face.apply_top_p_top_k(x, 0.9, 2, out=out),
    "apply_top_p_top_k, top-p": lambda face, x, out: face.apply_top_p_top_k(x, 0.9, out=out),
    "apply_top_p_top_k, off": lambda face, x, out: face.apply_top_p_top_k(x, out=out),
    "distribution_from_logits": lambda face, x, out: face.distribution_from_logits(x, CONFIG, out=out),
    "distribution_from_logits, top-p": lambda face, x, out: face.distribution_from_logits(
        x, SamplerConfig(0.7, 0.9, 0), out=out
    ),
    "distribution_from_logits, off": lambda face, x, out: face.distribution_from_logits(
        x, SamplerConfig(0.7, 1.0, 0), out=out
    ),
    "distribution_from_logits, greedy": lambda face, x, out: face.distribution_from_logits(
        x, GREEDY, out=out
    ),
    "residual_distribution": lambda face, x, out: face.residual_distribution(x, X[::-1], out=out),
    "residual_distribution, equal": lambda face, x, out: face.residual_distribution(x, x, out=out),
    "residual_distribution, sparse p": lambda face, x, out: face.residual_distribution(
        S([0], [1.0], 3), x, out=out
    ),
}


def read_only(array):
    array.flags.writeable = False
    return array


BAD_OUT = {
    "float32": lambda: np.empty(3, dtype=np.float32),
    "float16": lambda: np.empty(3, dtype=np.float16),
    "int64": lambda: np.empty(3, dtype=np.int64),
    "longdouble": lambda: np.empty(3, dtype=np.longdouble),
    "complex": lambda: np.empty(3, dtype=np.complex128),
    "big-endian": lambda: np.empty(3, dtype=">f8"),
    "too short": lambda: np.empty(2),
    "too long": lambda: np.empty(4),
    "2-D": lambda: np.empty((1, 3)),
    "0-d": lambda: np.empty(()),
    "strided": lambda: np.empty(6)[::2],
    "reversed": lambda: np.empty(3)[::-1],
    "read-only": lambda: read_only(np.empty(3)),
    "unaligned": lambda: rows.shifted(np.zeros(3), 1),
    "list": lambda: [0.0, 0.0, 0.0],
    "memoryview": lambda: memoryview(np.empty(3)),
    "False": lambda: False,
}


@pytest.mark.parametrize("name", INTO)
def test_out_is_filled_and_returned(face, name):
    out = np.full(3, 9.0)
    assert INTO[name](face, X, out) is out
    assert out.tolist() == INTO[name](face, X, None).tolist()
    inside = np.full(5, 9.0)
    view = inside[1:4]
    assert INTO[name](face, X, view) is view
    assert inside.tolist() == [9.0, *out.tolist(), 9.0]


@pytest.mark.parametrize("name", INTO)
@pytest.mark.parametrize("kind", BAD_OUT)
def test_out_that_does_not_fit_is_refused(face, name, kind):
    if name.startswith("softmax") and kind == "float32":
        out = BAD_OUT[kind]()
        assert INTO[name](face, X, out) is out  # softmax alone narrows
        return
    with pytest.raises(ValueError, match="out"):
        INTO[name](face, X, BAD_OUT[kind]())


@pytest.mark.parametrize("name", INTO)
def test_out_that_overlaps_an_input_is_refused(face, name):
    memory = np.array([0.5, 0.25, 0.75, 0.5, 0.25])
    before = memory.tobytes()
    for start in (0, 1, 2):
        with pytest.raises(ValueError, match="overlap"):
            INTO[name](face, memory[start : start + 3], memory[1:4])
    with pytest.raises(ValueError, match="overlap"):
        INTO[name](face, memory[::2], memory[1:4])
    for wrap in (memoryview, rows.ArrayOnly):
        with pytest.raises(ValueError, match="overlap"):
            INTO[name](face, wrap(memory[0:3]), memory[1:4])
    assert memory.tobytes() == before
    assert INTO[name](face, memory[0:2].repeat(2)[:3], memory[2:5]) is not None  # neighbours are no overlap


def test_out_that_overlaps_the_draft_is_refused(face):
    memory = np.array([0.5, 0.25, 0.75])
    with pytest.raises(ValueError, match="overlap"):
        face.residual_distribution(X, memory, out=memory)
    with pytest.raises(ValueError, match="overlap"):
        face.residual_distribution(S([0], [1.0], 3), memory, out=memory)


def test_out_is_for_dense_results(face):
    with pytest.raises(ValueError, match="out"):
        face.residual_distribution(S([0], [1.0], 3), S([1], [1.0], 3), out=np.empty(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda face, out: face.softmax([NAN, 1.0, 2.0], out=out),
        lambda face, out: face.softmax([INF, 1.0, 2.0], 0.0, out=out),
        lambda face, out: face.softmax([-INF, -INF, -INF], out=out),
        lambda face, out: face.softmax([1.0, 2.0, 3.0], NAN, out=out),
        lambda face, out: face.apply_top_p_top_k([0.5, NAN, 0.5], 0.9, 2, out=out),
        lambda face, out: face.apply_top_p_top_k([0.5, -0.5, 0.5], 0.9, out=out),
        lambda face, out: face.apply_top_p_top_k([0.0, 0.0, 0.0], out=out),
        lambda face, out: face.apply_top_p_top_k([0.5, 0.25, 0.25], NAN, out=out),
        lambda face, out: face.distribution_from_logits([1.0, NAN, 2.0], CONFIG, out=out),
        lambda face, out: face.distribution_from_logits([1.0, NAN, 2.0], SamplerConfig(0.7, 0.9, 0), out=out),
        lambda face, out: face.distribution_from_logits([1.0, INF, 2.0], GREEDY, out=out),
        lambda face, out: face.distribution_from_logits(X, CONFIG, penalty_overlay={3: 1.0}, out=out),
        lambda face, out: face.residual_distribution([0.0, NAN, -1.0], X, out=out),
        lambda face, out: face.residual_distribution(X, [0.5, 0.5], out=out),
    ],
)
def test_out_is_untouched_after_an_error(face, call):
    out = np.full(3, 9.0)
    with pytest.raises((ValueError, IndexError)):
        call(face, out)
    assert out.tolist() == [9.0, 9.0, 9.0]


# ---- what is refused -------------------------------------------------------------------------------

NOT_ONE_ROW = {
    "0-d": 0.5,
    "0-d array": np.array(0.5),
    "empty list": [],
    "empty array": np.empty(0),
    "empty float16": np.empty(0, dtype=np.float16),
    "2-D": np.full((2, 5), 0.1),
    "one row of 2-D": np.full((1, 5), 0.2),
    "one column": np.full((5, 1), 0.2),
    "2-D without entries": np.empty((0, 5)),
    "2-D list": [[0.5, 0.5]],
    "2-D bfloat16": np.full((1, 5), 0.25, dtype=ml_dtypes.bfloat16),
    "3-D": np.full((1, 1, 5), 0.2),
}
NOT_NUMBERS = {
    "complex": np.array([1j, 0.5, 0.5, 0.5, 0.5]),
    "complex without imaginary part": np.array([0.5 + 0j] * 5),
    "complex64": np.array([0.5] * 5, dtype=np.complex64),
    "list of complex": [1j, 0.5, 0.5, 0.5, 0.5],
    "text": np.array(["0.5"] * 5),
    "list of text": ["0.5", "0.25", "0.25", "0", "0"],
    "a string": "0.5",
    "bytes": np.array([b"0.5"] * 5),
    "objects": np.array([object(), None, [], {}, "x"], dtype=object),
    "objects of text": np.array(["0.5"] * 5, dtype=object),
    "objects of None": [0.5, 0.5, None, 0.0, 0.0],
    "objects of complex": np.array([0.5, 0.5, 1j, 0.0, 0.0], dtype=object),
    "objects of NumPy complex": np.array([np.complex128(1j), 0.5, 0.5, 0.0, 0.0], dtype=object),
    "dates": np.array(["2026-01-01"] * 5, dtype="datetime64[D]"),
    "durations": np.array([1] * 5, dtype="timedelta64[s]"),
    "records": np.zeros(5, dtype=[("a", "f8"), ("b", "f8")]),
    "raw bytes": np.zeros(5, dtype="V8"),
    "None": None,
    "a dict": {0: 0.5, 1: 0.5},
    "a set": {0.5, 0.25},
    "a generator": (value for value in [0.5, 0.5]),
    "an object": object(),
    "another device": rows.OtherDevice(ROW),
}


def answer_to(call):
    """The class of the error that a call raises, or its result."""
    try:
        return repr(call())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", ONE_ROW)
def test_anything_but_one_row_is_refused(face, name):
    answers = {kind: answer_to(lambda row=row: ONE_ROW[name](face, row)) for kind, row in NOT_ONE_ROW.items()}
    assert answers == dict.fromkeys(NOT_ONE_ROW, ValueError)


@pytest.mark.parametrize("name", ONE_ROW)
def test_anything_but_numbers_is_refused(face, name):
    answers = {kind: answer_to(lambda row=row: ONE_ROW[name](face, row)) for kind, row in NOT_NUMBERS.items()}
    assert answers == dict.fromkeys(NOT_NUMBERS, TypeError)


# (call, class, part of the message): the class is compared exactly, so the two faces agree in type.
BAD_CALLS = {
    "softmax without temperature": (lambda f: f.softmax([1.0], None), TypeError, ""),
    "softmax at a text": (lambda f: f.softmax([1.0], "0.5"), TypeError, ""),
    "softmax at a list": (lambda f: f.softmax([1.0], [1.0]), TypeError, ""),
    "softmax at NaN": (lambda f: f.softmax([1.0], NAN), ValueError, "nan"),
    "softmax at a complex": (lambda f: f.softmax([1.0], 1j), TypeError, ""),
    "softmax out by position": (lambda f: f.softmax([1.0], 1.0, np.empty(1)), TypeError, ""),
    "softmax of nothing": (lambda f: f.softmax(), TypeError, ""),
    "softmax, unknown keyword": (lambda f: f.softmax([1.0], temp=1.0), TypeError, "temp"),
    "order without k": (lambda f: f.deterministic_top_k_order([1.0], None), TypeError, ""),
    "order at 1.5": (lambda f: f.deterministic_top_k_order([1.0], 1.5), TypeError, ""),
    "order at text": (lambda f: f.deterministic_top_k_order([1.0], "1"), TypeError, ""),
    "top_k of 2.0": (lambda f: f.apply_top_p_top_k([1.0], 1.0, 2.0), TypeError, ""),
    "top_k of text": (lambda f: f.apply_top_p_top_k([1.0], 1.0, "2"), TypeError, ""),
    "top_p of NaN": (lambda f: f.apply_top_p_top_k([1.0], NAN, 0), ValueError, "nan"),
    "top_p of NaN, alias": (lambda f: f.apply_top_k_top_p([1.0], 0, NAN), ValueError, "nan"),
    "top_p of float32 NaN": (lambda f: f.apply_top_p_top_k([1.0], np.float32("nan")), ValueError, "nan"),
    "top_p of None": (lambda f: f.apply_top_p_top_k([1.0], None), TypeError, ""),
    "top_p of text": (lambda f: f.apply_top_p_top_k([1.0], "0.5"), TypeError, ""),
    "probs with NaN": (lambda f: f.apply_top_p_top_k([0.5, NAN], 0.9), ValueError, "nan"),
    "probs with inf": (lambda f: f.apply_top_p_top_k([0.5, INF], 0.9), ValueError, "inf"),
    "probs with -inf": (lambda f: f.apply_top_p_top_k([0.5, -INF], 1.0, 1), ValueError, "-inf"),
    "probs negative": (lambda f: f.apply_top_p_top_k([0.5, -0.25]), ValueError, "-0.25"),
    "probs without mass": (lambda f: f.apply_top_p_top_k([0.0, 0.0], 0.9), ValueError, "mass"),
    "probs without mass, top-k": (lambda f: f.apply_top_p_top_k([0.0, -0.0], 1.0, 1), ValueError, "mass"),
    "penalties, id -1": (lambda f: f.apply_penalties([1.0], {-1: 1}, 1.0), IndexError, "-1"),
    "penalties, id V": (lambda f: f.apply_penalties([1.0], {1: 1}, 1.0), IndexError, "1"),
    "penalties, id 2**80": (lambda f: f.apply_penalties([1.0], {2**80: 1}, 1.0), IndexError, str(2**80)),
    "penalties, id 0.5": (lambda f: f.apply_penalties([1.0], {0.5: 1}, 1.0), TypeError, ""),
    "penalties, count -1": (lambda f: f.apply_penalties([1.0], {0: -1}, 1.0), ValueError, "-1"),
    "penalties, count NaN": (lambda f: f.apply_penalties([1.0], {0: NAN}, 1.0), ValueError, "nan"),
    "penalties, NaN": (lambda f: f.apply_penalties([1.0], {0: 1}, NAN), ValueError, "presence"),
    "penalties, NaN frequency": (
        lambda f: f.apply_penalties([1.0], {0: 1}, 0.0, NAN),
        ValueError,
        "frequency",
    ),
    "penalties, NaN overlay": (
        lambda f: f.apply_penalties([1.0], None, 0.0, 0.0, {0: NAN}),
        ValueError,
        "nan",
    ),
    "penalties, list of counts": (lambda f: f.apply_penalties([1.0], [1], 1.0), TypeError, ""),
    "penalties, list of overlays": (lambda f: f.apply_penalties([1.0], None, 0, 0, [1]), TypeError, ""),
    "from logits, NaN": (lambda f: f.distribution_from_logits([NAN], CONFIG), NonFiniteLogitsError, ""),
    "from logits, +inf": (lambda f: f.distribution_from_logits([INF, 1.0], CONFIG), NonFiniteLogitsError, ""),
    "from logits, -inf": (lambda f: f.distribution_from_logits([-INF], GREEDY), NonFiniteLogitsError, ""),
    "from logits, no config": (lambda f: f.distribution_from_logits([1.0], None), AttributeError, ""),
    "from logits, counts by position": (
        lambda f: f.distribution_from_logits([1.0], CONFIG, {0: 1}),
        TypeError,
        "",
    ),
    "from logits, overlay id": (
        lambda f: f.distribution_from_logits([1.0], CONFIG, penalty_overlay={5: 1.0}),
        IndexError,
        "5",
    ),
    "sparse from logits, NaN": (
        lambda f: f.sparse_distribution_from_logits([NAN], CONFIG),
        NonFiniteLogitsError,
        "",
    ),
    "sparse from logits, -inf": (
        lambda f: f.sparse_distribution_from_logits([-INF, -INF], CONFIG),
        NonFiniteLogitsError,
        "",
    ),
    "sparse from logits, greedy NaN": (
        lambda f: f.sparse_distribution_from_logits([1.0, NAN], GREEDY),
        NonFiniteLogitsError,
        "",
    ),
    "sparse from logits, out": (
        lambda f: f.sparse_distribution_from_logits([1.0], CONFIG, out=np.empty(1)),
        TypeError,
        "out",
    ),
    "sparse from logits, overlay id": (
        lambda f: f.sparse_distribution_from_logits([1.0], CONFIG, penalty_overlay={-2: 1.0}),
        IndexError,
        "-2",
    ),
    "acceptance, id V": (lambda f: f.acceptance_probability(ROW, OTHER, 5), IndexError, "5"),
    "acceptance, id -1": (lambda f: f.acceptance_probability(ROW, OTHER, -1), IndexError, "-1"),
    "acceptance, id 2**64": (lambda f: f.acceptance_probability(ROW, OTHER, 2**64), IndexError, str(2**64)),
    "acceptance, id 1.0": (lambda f: f.acceptance_probability(ROW, OTHER, 1.0), TypeError, ""),
    "acceptance, id None": (lambda f: f.acceptance_probability(ROW, OTHER, None), TypeError, ""),
    "acceptance, NaN": (lambda f: f.acceptance_probability([NAN], [1.0], 0), ValueError, "nan"),
    "acceptance, -1": (lambda f: f.acceptance_probability([1.0], [-1.0], 0), ValueError, "-1"),
    "acceptance, shorter q": (lambda f: f.acceptance_probability(ROW, [1.0], 4), IndexError, "4"),
    "residual, lengths": (lambda f: f.residual_distribution([1.0, 1.0], [1.0]), ValueError, "2"),
    "residual, mixed lengths": (lambda f: f.residual_distribution(ROW, S([0], [1.0], 6)), ValueError, "6"),
    "residual, no mass": (lambda f: f.residual_distribution([0.0, -1.0], [1.0, 1.0]), ValueError, "mass"),
    "draw, no mass": (lambda f: f.sample_from_distribution([0.0]), ValueError, "mass"),
    "draw, NaN": (lambda f: f.sample_from_distribution([NAN, 1.0]), ValueError, "nan"),
    "draw, negative": (lambda f: f.sample_from_distribution([-0.5, 1.0]), ValueError, "-0.5"),
    "draw, inf": (lambda f: f.sample_from_distribution([INF, 1.0]), ValueError, "inf"),
    "draw, no generator": (lambda f: f.sample_from_distribution([1.0], 5), TypeError, ""),
    "draw, bit generator": (lambda f: f.sample_from_distribution([1.0], np.random.PCG64(1)), TypeError, ""),
    "verify, no generator": (lambda f: f.verify_one_token(ROW, OTHER, 0, "rng"), TypeError, ""),
    "verify, id V": (lambda f: f.verify_one_token(ROW, OTHER, 5), IndexError, "5"),
    "verify, id 2**64": (lambda f: f.verify_one_token(ROW, OTHER, 2**64), IndexError, str(2**64)),
    "verify, id 1.5": (lambda f: f.verify_one_token(ROW, OTHER, 1.5), TypeError, ""),
    "verify, lengths": (lambda f: f.verify_one_token(ROW, [0.5, 0.5], 0), ValueError, "2"),
    "verify, NaN": (lambda f: f.verify_one_token([NAN, 1.0], [0.5, 0.5], 0), ValueError, "nan"),
    "marginal, lengths": (lambda f: f.speculative_output_marginal([1.0, 1.0], [1.0]), ValueError, "2"),
    "marginal, NaN": (lambda f: f.speculative_output_marginal([NAN], [1.0]), ValueError, "nan"),
    "marginal, no mass": (lambda f: f.speculative_output_marginal([1.0], [0.0]), ValueError, "mass"),
    "distance, lengths": (lambda f: f.total_variation([1.0, 1.0], [1.0]), ValueError, "2"),
    "distance, inf": (lambda f: f.total_variation([INF], [1.0]), ValueError, "inf"),
    "entropy, negative": (lambda f: f.distribution_entropy([-1.0, 1.0]), ValueError, "-1"),
    "entropy, no mass": (lambda f: f.distribution_entropy([0.0]), ValueError, "mass"),
    "error, no numbers": (lambda f: f.non_finite_logits_error(["x"], "here"), ValueError, ""),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_the_same_class_and_name_the_value(face, name):
    call, error, named = BAD_CALLS[name]
    with pytest.raises(error) as caught:
        call(face)
    assert type(caught.value) is error
    assert named in str(caught.value)


@pytest.mark.parametrize("outside", [5, -1, 2**31, 2**40, 2**63, 2**64])
def test_nothing_is_drawn_when_a_call_is_refused(face, outside):
    rng, stub = seeded(), Stub(0.5, 0.5)
    before = plain_state(rng)
    for each in (rng, stub):
        with pytest.raises(IndexError):
            face.verify_one_token(ROW, OTHER, outside, each)
    assert plain_state(rng) == before
    assert stub.calls == []


def test_numbers_beyond_float64_are_infinite_and_raise_no_warning(face):
    """Extended precision has a wider range; the conversion must not warn, and inf is what it gives."""
    if np.finfo(np.longdouble).maxexp == np.finfo(np.float64).maxexp:
        pytest.skip("longdouble is float64 on this machine")
    beyond = np.array([np.longdouble("1e400"), np.longdouble(1)])
    with pytest.raises(NonFiniteLogitsError):
        face.softmax(beyond)
    with pytest.raises(ValueError, match="inf"):
        face.apply_top_p_top_k(beyond, 0.9)
    with pytest.raises(ValueError, match="inf"):
        face.sample_from_distribution(beyond, seeded())


@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_the_callers_error_state_changes_nothing(face, mode):
    """Overflow, underflow and 0/0 inside are handled, whatever `np.errstate` the caller runs under."""
    wide = np.array([0.0, -740.0, -1e308, -INF, 700.0])
    tiny, huge = np.array([5e-324, 1e-320, 0.0]), np.array([1.7e308, 1.7e308, 0.0])
    calls = [
        lambda: face.softmax(wide, 0.5),
        lambda: face.softmax(wide, 1e-310),
        lambda: face.softmax(wide, 1.0, out=np.empty(5, dtype=np.float32)),
        lambda: face.distribution_from_logits(wide, SamplerConfig(0.7, 0.9, 0)),
        lambda: face.sparse_distribution_from_logits(wide, SamplerConfig(0.7, 0.9, 3)).probs,
        lambda: face.apply_top_p_top_k(tiny, 0.5, 2),
        lambda: face.apply_top_p_top_k(huge, 0.5, 2),
        lambda: face.residual_distribution(tiny, huge),
        lambda: face.residual_distribution(huge, tiny),
        lambda: face.acceptance_probability(tiny, huge, 0),
        lambda: face.acceptance_probability(huge, tiny, 0),
        lambda: face.sample_from_distribution(huge, seeded()),
        lambda: face.verify_one_token(tiny, huge, 0, seeded()).token_id,
        lambda: face.speculative_output_marginal(tiny, huge),
        lambda: face.distribution_entropy([1.0, 5e-324]),
        lambda: face.apply_penalties(wide, {0: 1}, 0.5, 0.5, {1: 1e-320}),
    ]
    for call in calls:
        expected = np.asarray(call()).tobytes()
        with np.errstate(all=mode):
            assert np.asarray(call()).tobytes() == expected


@pytest.mark.parametrize("face", [reference, sampling])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
def test_settings_that_only_convert_to_a_number(face, name):
    values = {"temperature": 0.5, "top_p": 0.75, "presence_penalty": 1.0, "frequency_penalty": 0.5}
    config = SamplerConfig(**values, top_k=None)
    given = dataclasses.replace(config, **{name: Real(values[name])})
    x, counts = [0.0, 1.0, 2.0, 1.5], {2: 1}
    for call in (face.distribution_from_logits, face.sparse_distribution_from_logits):
        assert repr(call(x, given, token_counts=counts)) == repr(call(x, config, token_counts=counts))
        for bad in ("0.5", b"1", None, 1j):
            with pytest.raises(TypeError):
                call(x, dataclasses.replace(config, **{name: bad}), token_counts=counts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.softmax([1.0, 2.0], None), "temperature must be a real number, not None"),
        (lambda f: f.softmax([1.0, 2.0], [1.0]), r"temperature must be a real number, not \[1.0\]"),
        (lambda f: f.softmax([1.0, 2.0], "1"), "temperature must be a real number, not '1'"),
        (lambda f: f.apply_top_p_top_k([0.5, 0.5], "a", 0), "top_p must be a real number, not 'a'"),
        (lambda f: f.apply_top_p_top_k([0.5, 0.5], 0.5, 1.0), "top_k must be an integer, not 1.0"),
        (lambda f: f.apply_top_k_top_p([0.5, 0.5], "1", 0.5), "top_k must be an integer, not '1'"),
        (lambda f: f.deterministic_top_k_order([0.5, 0.5], None), "top_k must be an integer, not None"),
        (
            lambda f: f.apply_penalties([1.0], {0: 1}, None),
            "presence_penalty must be a real number, not None",
        ),
        (
            lambda f: f.apply_penalties([1.0], {0: 1}, 0.0, 0.0, {0: "x"}),
            "penalty_overlay of token 0 must be a real number, not 'x'",
        ),
        (
            lambda f: f.distribution_from_logits([1.0], SamplerConfig("hot")),
            "temperature must be a real number, not 'hot'",
        ),
        (
            lambda f: f.sparse_distribution_from_logits([1.0], SamplerConfig(1.0, 1.0, 2.0)),
            "top_k must be an integer, not 2.0",
        ),
        (lambda f: f.acceptance_probability([1.0], [1.0], 0.0), "a token id must be an integer, not 0.0"),
        (lambda f: f.verify_one_token([1.0], [1.0], "0"), "a token id must be an integer, not '0'"),
        (lambda f: f.SparseDistribution.one_hot(1.0, 4), "a token id must be an integer, not 1.0"),
        (lambda f: f.SparseDistribution([0], [1.0], 4.0), "vocab_size must be an integer, not 4.0"),
        (
            lambda f: f.apply_top_p_top_k([0.5, 0.5], np.array([0.5, 0.6]), 0),
            r"top_p must be a real number, not array\(\[0.5, 0.6\]\)",
        ),
        (
            lambda f: f.acceptance_probability([1.0], [1.0], np.array([0, 0])),
            r"a token id must be an integer, not array\(\[0, 0\]\)",
        ),
        (
            lambda f: f.typical_acceptance_threshold(0.5, "0.3", 0.09),
            "eps must be a real number, not '0.3'",
        ),
        (
            lambda f: f.typical_accept_decision([1.0], 0, eps=0.3, delta=0.09, entropy_value="0.1"),
            "entropy_value must be a real number, not '0.1'",
        ),
        (
            lambda f: f.cascade_defer_decision([1.0], [1.0], alpha=0.1, tv_value="0.5"),
            "tv_value must be a real number, not '0.5'",
        ),
        (
            lambda f: f.cascade_defer_decision([1.0], [1.0], alpha="0.1"),
            "alpha must be a real number, not '0.1'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_wrong_types_are_named_with_their_values(face, call, message):
    with pytest.raises(TypeError, match=message):
        call(face)
