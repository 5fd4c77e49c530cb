from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtplx.distributions import SparseDistribution

def apply_top_p_top_k(
    probs: ArrayLike, top_p: float = 1.0, top_k: int | None = 0, *, out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]: ...
def apply_top_k_top_p(
    probs: ArrayLike, top_k: int | None = 0, top_p: float = 1.0, *, out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]: ...
def deterministic_top_k_order(values: ArrayLike, top_k: int) -> NDArray[np.int64]: ...
def distribution_from_logits(
    logits: Any,
    temperature: float,
    top_p: float,
    top_k: int | None,
    presence_penalty: float,
    frequency_penalty: float,
    token_counts: Mapping[int, int] | None,
    penalty_overlay: Mapping[int, float] | None,
    out: NDArray[np.float64] | None,
) -> NDArray[np.float64]: ...
def sparse_distribution_from_logits(
    logits: Any,
    temperature: float,
    top_p: float,
    top_k: int | None,
    presence_penalty: float,
    frequency_penalty: float,
    token_counts: Mapping[int, int] | None,
    penalty_overlay: Mapping[int, float] | None,
) -> SparseDistribution: ...
