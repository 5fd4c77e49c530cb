from collections.abc import Mapping
from typing import Any

PENALTY_MIN: float
PENALTY_MAX: float

def apply_penalties(
    logits: Any,
    token_counts: Mapping[int, int] | None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_overlay: Mapping[int, float] | None = None,
) -> Any: ...
