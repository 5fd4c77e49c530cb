import numpy as np
from numpy.typing import NDArray

def solved(p: NDArray[np.float64], q: NDArray[np.float64], siblings: int) -> tuple[float, float, float]: ...
