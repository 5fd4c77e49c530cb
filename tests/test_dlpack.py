"""Arrays of other libraries through DLPack: values, layouts, lifetimes, refusals."""

import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from support import dlpack, rows
from support.blocks import every_face, fields_of
from support.dlpack import AlsoArray, Producer, bfloat16
from support.ulps import assert_ulps

from mtplx import reference, sampling
from mtplx.distributions import NonFiniteLogitsError, SamplerConfig

CONFIG = SamplerConfig(0.8, 0.9, 3)
WHOLE = SamplerConfig(0.8, 1.0, 0)
X = np.array([0.5, -1.0, 2.25, 0.0, 3.0, -4.0])

both = pytest.mark.parametrize("versioned", [False, True], ids=["unversioned", "versioned"])


def plain(values):
    """The same numbers as float64."""
    return np.asarray(values, dtype=np.float64)


@both
@pytest.mark.parametrize("dtype", [*rows.FLOAT_TYPES.values(), np.int32, np.uint8, np.bool_], ids=str)
def test_every_type(face, dtype, versioned):
    row = (np.abs(X) > 1 if dtype == np.bool_ else np.abs(X)).astype(dtype)
    producer = Producer(row, versioned)
    assert face.softmax(producer).tobytes() == face.softmax(plain(row)).tobytes()
    assert producer.used()
    assert producer.exported == 1
    assert producer.settled()


@both
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_layouts(face, dtype, versioned):
    matrix = np.arange(24.0).reshape(4, 6).astype(dtype)
    views = {
        "strided": matrix.ravel()[::3],
        "column": matrix[:, 2],
        "reversed": matrix[1, ::-1],
        "offset": matrix[3],
    }
    for name, view in views.items():
        expected = face.softmax(plain(view)).tobytes()
        assert face.softmax(Producer(view, versioned)).tobytes() == expected, name
        assert face.softmax(Producer(view, versioned, byte_offset=64)).tobytes() == expected, name
    whole = Producer(matrix[2], versioned, strides=False)
    assert face.softmax(whole).tobytes() == face.softmax(plain(matrix[2])).tobytes()
    frozen = Producer(matrix[2], True, flags=dlpack.READ_ONLY)
    assert face.softmax(frozen).tobytes() == face.softmax(plain(matrix[2])).tobytes()


@both
def test_bfloat16_in_every_function_of_a_row(face, versioned):
    x, p = bfloat16(X), bfloat16(np.abs(X) / 8)

    def of(row):
        return Producer(row, versioned)

    assert face.deterministic_top_k_order(of(x), 3).tolist() == [4, 2, 0]
    for got, want in (
        (face.apply_top_p_top_k(of(p), 0.5, 3), face.apply_top_p_top_k(plain(p), 0.5, 3)),
        (
            face.apply_penalties(of(x), {1: 2}, 0.5, 0.25),
            face.apply_penalties(plain(x), {1: 2}, 0.5, 0.25),
        ),
        (face.distribution_from_logits(of(x), CONFIG), face.distribution_from_logits(plain(x), CONFIG)),
        (
            face.residual_distribution(of(p), of(p[::-1])),
            face.residual_distribution(plain(p), plain(p)[::-1]),
        ),
    ):
        assert got.tobytes() == want.tobytes()
    sparse = face.sparse_distribution_from_logits(of(x), CONFIG)
    assert sparse == face.sparse_distribution_from_logits(plain(x), CONFIG)
    assert face.acceptance_probability(of(p), of(p[::-1]), 1) == 1 / 3
    for seed in range(10):
        one, other = (np.random.default_rng(seed) for _ in range(2))
        assert face.sample_from_distribution(of(p), one) == face.sample_from_distribution(plain(p), other)
        assert face.verify_one_token(of(p), of(p[::-1]), 1, one) == face.verify_one_token(
            plain(p), plain(p)[::-1], 1, other
        )


@every_face
@both
def test_bfloat16_blocks(face, versioned):
    """Matrices are read where they lie; so are rows in a list, and [B, K + 1, V] as a whole."""
    rng = np.random.default_rng(3)
    target = bfloat16(rng.normal(size=(2, 4, 3000)) * 3)
    draft = bfloat16(rng.normal(size=(2, 3, 3000)) * 3)
    tokens = plain(draft).argmax(axis=2)
    for config in (CONFIG, WHOLE, SamplerConfig(0.8, 0.9, 0), SamplerConfig(0.0)):
        made = Producer(target, versioned), Producer(draft, versioned)
        batch = face.verify_batch_from_logits(*made, tokens, config, seeds=[1, 2], positions=[0, 5])
        assert batch == face.verify_batch_from_logits(
            plain(target), plain(draft), tokens, config, seeds=[1, 2], positions=[0, 5]
        )
        assert all(producer.used() and producer.settled() for producer in made)
        for pair in (
            (Producer(target[0], versioned), Producer(draft[0], versioned)),
            ([Producer(row, versioned) for row in target[0]], [Producer(row) for row in draft[0]]),
        ):
            found = face.verify_block_from_logits(*pair, tokens[0], config, rng=np.random.default_rng(1))
            wanted = face.verify_block_from_logits(
                plain(target[0]), plain(draft[0]), tokens[0], config, rng=np.random.default_rng(1)
            )
            assert fields_of(found) == fields_of(wanted)
        made_rows = face.distributions_from_logits(Producer(target[0], versioned), config)
        wanted_rows = face.distributions_from_logits(plain(target[0]), config)
        assert np.array_equal(
            getattr(made_rows, "probs", made_rows), getattr(wanted_rows, "probs", wanted_rows)
        )


def test_what_array_cannot_give_comes_through_dlpack(face):
    producer = AlsoArray(bfloat16(X))
    assert face.softmax(producer).tobytes() == face.softmax(plain(bfloat16(X))).tobytes()
    assert producer.settled()


def test_producers_that_know_no_versions(face):
    producer = Producer(bfloat16(X), versioned=False, knows_versions=False)
    assert face.softmax(producer).tobytes() == face.softmax(plain(bfloat16(X))).tobytes()
    assert producer.settled()


# ---- lifetimes -------------------------------------------------------------------------------------


@both
def test_memory_lives_as_long_as_an_array_of_it(versioned):
    from mtplx._csampling.dlpack import BFLOAT16, from_dlpack

    producer = Producer(bfloat16(X), versioned)
    array = from_dlpack(producer)
    assert array.dtype == BFLOAT16
    assert not array.flags.writeable
    assert array.__array_interface__["data"][0] == producer.array.ctypes.data  # no copy
    row = array[2:4]
    del array
    gc.collect()
    assert producer.deleted == 0
    assert row["bfloat16"].tobytes() == producer.array[2:4].tobytes()
    gone = weakref.ref(producer)
    holder = producer.array
    del producer
    gc.collect()
    assert gone() is not None  # what was handed out keeps its library alive
    del row
    gc.collect()
    assert gone() is None
    assert not Producer.alive
    assert holder.size == X.size


@both
def test_nothing_is_held_or_lost_by_many_calls(versioned):
    producer = Producer(bfloat16(X), versioned)
    sampling.softmax(producer)
    before = sys.getrefcount(producer)
    for _ in range(200):
        sampling.softmax(producer)
        with pytest.raises(ValueError, match="negative"):
            sampling.apply_top_p_top_k(producer)
    producer.capsules.clear()
    assert producer.settled()
    assert producer.exported == 401
    assert sys.getrefcount(producer) == before


@both
def test_a_capsule_that_nobody_takes_is_not_touched(versioned):
    producer = Producer(X, versioned, claimed=dlpack.CUDA)
    with pytest.raises(TypeError, match="device 2"):
        sampling.softmax(producer)
    assert producer.exported == 0


# ---- refusals --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "options",
    [
        {"device": dlpack.CUDA, "claimed": dlpack.CPU},
        {"dtype": (dlpack.FLOAT, 32, 4)},
        {"dtype": (10, 8, 1)},
        {"dtype": (dlpack.INT, 4, 1)},
        {"dtype": (dlpack.COMPLEX, 64, 1)},
    ],
    ids=["a device that its object denies", "lanes", "a code of another kind", "half bytes", "complex"],
)
def test_tensors_that_are_no_rows(face, options, versioned):
    producer = Producer(X.copy(), versioned, **options)
    with pytest.raises(TypeError, match="logits"):
        face.softmax(producer)
    assert producer.used()
    assert producer.settled()


def test_a_version_to_come(face):
    producer = Producer(X.copy(), True, major=2)
    with pytest.raises(TypeError, match=r"DLPack 2\.0"):
        face.softmax(producer)
    assert producer.settled()


def test_a_capsule_that_was_used(face):
    class Again(Producer):
        def __dlpack__(self, **options):
            if not self.capsules:
                super().__dlpack__(**options)
            return self.capsules[0]

    producer = Again(X.copy())
    face.softmax(producer)
    with pytest.raises(TypeError, match="has not been used"):
        face.softmax(producer)
    assert producer.settled()


def test_empty_and_more_dimensional(face):
    for array in (np.empty(0), np.ones((2, 3)), np.array(1.0)):
        producer = Producer(array)
        with pytest.raises(ValueError, match="one-dimensional and not empty"):
            face.softmax(producer)
        assert producer.settled()


def test_errors_name_the_numbers_and_not_their_bits(face):
    bad = bfloat16(X.copy())
    bad[[1, 3]] = np.nan
    with pytest.raises(NonFiniteLogitsError, match="nan_count=2, inf_count=0, vocab_size=6"):
        face.distribution_from_logits(Producer(bad), CONFIG, penalty_overlay={0: 1.0})
    with pytest.raises(NonFiniteLogitsError, match="nan_count=2"):
        face.softmax(Producer(bad))
    with pytest.raises(ValueError, match=r"entry 1 is -1\.0"):
        face.apply_top_p_top_k(Producer(bfloat16(X)))


def test_the_package_needs_no_package_for_bfloat16():
    """A row of two bytes a number, read where ml_dtypes cannot be imported."""
    script = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
from mtplx import reference, sampling
from mtplx._csampling.dlpack import BFLOAT16
row = (np.array([1.0, 2.0, 3.5], dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
for face in (reference, sampling):
    assert face.softmax(row).tobytes() == face.softmax([1.0, 2.0, 3.5]).tobytes()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_faces_agree():
    for array in (bfloat16(X), X.astype(np.float16)):
        ours, theirs = (face.softmax(Producer(array)) for face in (sampling, reference))
        assert_ulps(ours, theirs, 8)
