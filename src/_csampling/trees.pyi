from typing import Any

import numpy as np
from numpy.typing import NDArray

class OpenTree: ...

def open_tree(
    target: Any,
    draft: Any,
    tokens: NDArray[np.int64],
    parents: NDArray[np.int64],
    rule: str,
    replacement: bool,
    check_draft: bool,
) -> Any: ...
def verify_tree(opened: OpenTree, generator: Any, seed: Any, position: Any) -> tuple[Any, ...]: ...
