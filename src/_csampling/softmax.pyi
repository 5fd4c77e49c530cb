from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

def softmax(
    logits: ArrayLike,
    temperature: float = 1.0,
    *,
    out: NDArray[np.float64] | NDArray[np.float32] | None = None,
) -> NDArray[Any]: ...
