"""softmax, by type of logits and of result.

Run ``pytest benches/bench_softmax.py --benchmark-group-by=case``;
``-k "zipf and 151936"`` selects.
"""

from functools import partial

import numpy as np
import others
import pytest

from mtplx import reference, sampling
from mtplx.bench import logits

T = 0.8


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "onnxruntime", "numba"])
def test_softmax_float32(compare, kind, vocab):
    x = logits(kind, vocab)
    compare(
        reference=lambda: partial(reference.softmax, x, T),
        compiled=lambda: partial(sampling.softmax, x, T),
        torch=lambda: others.torch_softmax(x, T),
        onnxruntime=lambda: others.onnxruntime_softmax(x, T),
        numba=lambda: others.numba_call("softmax", x, T),
    )


@pytest.mark.parametrize("implementation", ["reference", "compiled", "torch", "onnxruntime"])
def test_softmax_float32_to_float32(compare, kind, vocab):
    x = logits(kind, vocab)
    out = np.empty(vocab, np.float32)
    compare(
        reference=lambda: partial(reference.softmax, x, T, out=out),
        compiled=lambda: partial(sampling.softmax, x, T, out=out),
        torch=lambda: others.torch_softmax(x, T, "float32"),
        onnxruntime=lambda: others.onnxruntime_softmax(x, T, double=False),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_softmax_other_types(compare, dtype, kind, vocab):
    x = logits(kind, vocab)
    x = x.astype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    compare(
        reference=lambda: partial(reference.softmax, x, T),
        compiled=lambda: partial(sampling.softmax, x, T),
    )
