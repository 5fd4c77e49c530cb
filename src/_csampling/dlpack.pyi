from typing import Any

import numpy as np
from numpy.typing import NDArray

BFLOAT16: np.dtype[np.void]

def from_dlpack(values: Any) -> NDArray[Any]: ...
def imported(values: Any, name: str) -> NDArray[Any]: ...
def widen_bfloat16(array: NDArray[Any]) -> NDArray[Any]: ...
