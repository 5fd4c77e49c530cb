from collections.abc import Callable
from typing import Any, TypeVar

_Decision = TypeVar("_Decision")

def verify_block(
    target: Any,
    draft: Any,
    draft_tokens: Any,
    generator: Any,
    rule: tuple[Any, ...],
    check_draft: bool,
    settings: tuple[Any, Any, Any, Any] | None,
    kind: type[_Decision],
) -> _Decision | tuple[BaseException, str]: ...
def plain_tokens(given: Any) -> tuple[Any, list[int], list[int], int] | None: ...
def plain_counts(
    rows: Any, kept: list[int], padded: list[int], K: int, of_target: bool, batch_type: type
) -> list[int] | None: ...
def open_blocks(
    targets: Any,
    target_counts: list[int],
    drafts: Any,
    draft_counts: list[int],
    tokens: Any,
    token_counts: list[int],
    streams: list[Any],
    rule: tuple[Any, ...],
    check_draft: bool,
    from_logits: bool,
    configs: Any,
    draft_configs: Any,
    counts: Any,
    overlays: Any,
) -> Any: ...
def vocabulary(blocks: list[Any]) -> int: ...
def holding_generators(blocks: list[Any], call: Callable[[], None]) -> None: ...
def run_blocks(blocks: list[Any], first: int, last: int) -> None: ...
def collect_blocks(blocks: list[Any], drafts: int) -> tuple[Any, ...]: ...
