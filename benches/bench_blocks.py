"""Blocks of drafts, from probabilities and from logits.

Run ``pytest benches/bench_blocks.py --benchmark-group-by=case``; ``-k "logits and at_0"`` selects.
Batches too are in ``mtplx bench --blocks``.
"""

import pytest

from mtplx import bench_blocks
from mtplx.bench_blocks import Shape

V = 151_936
SHAPES = [
    Shape(form, drafts, 1, outcome)
    for form in bench_blocks.FORMS
    for outcome in bench_blocks.OUTCOMES
    for drafts in (3, 8)
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace(" ", "_"))
@pytest.mark.parametrize("implementation", ["reference", "compiled"])
def test_blocks(compare, shape):
    compare(
        reference=lambda: bench_blocks.reference_call(shape, V),
        compiled=lambda: bench_blocks.compiled_call(shape, V),
    )
