"""Rows: many distributions from many rows of logits, and a token from each.

For now these are the functions of :mod:`mtplx.reference`; the compiled core takes their place.
"""

from mtplx.distributions import BatchedSparseDistributions
from mtplx.reference import distributions_from_logits, sample_rows

__all__ = ["BatchedSparseDistributions", "distributions_from_logits", "sample_rows"]
