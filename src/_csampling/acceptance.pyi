from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx.distributions import Distribution, SpeculativeDecision

def acceptance_probability(target_p: Any, draft_q: Any, token_id: int) -> float: ...
def residual_distribution(
    target_p: Any, draft_q: Any, *, out: NDArray[np.float64] | None = None
) -> Distribution: ...
def verify_one_token(
    target_p: Any, draft_q: Any, draft_token: int, rng: Any = None
) -> SpeculativeDecision: ...
