from typing import Any

def verify_block(
    target: Any,
    draft: Any,
    draft_tokens: Any,
    generator: Any,
    rule: tuple[Any, ...],
    check_draft: bool,
    from_logits: bool,
    config: Any,
    draft_config: Any,
    token_counts: Any,
    penalty_overlay: Any,
) -> tuple[Any, ...]: ...
def open_blocks(
    targets: list[Any],
    target_counts: list[int],
    drafts: list[Any],
    draft_counts: list[int],
    tokens: list[Any],
    streams: list[Any],
    rule: tuple[Any, ...],
    check_draft: bool,
    from_logits: bool,
    configs: list[Any],
    draft_configs: list[Any],
    counts: list[Any],
    overlays: list[Any],
) -> Any: ...
def vocabulary(blocks: list[Any]) -> int: ...
def run_blocks(blocks: list[Any], first: int, last: int) -> None: ...
def collect_blocks(blocks: list[Any], drafts: int) -> tuple[Any, ...]: ...
