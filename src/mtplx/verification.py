"""Blocks, batches of blocks and trees: drafted tokens verified in one call, and the acceptance rules.

For now these are the functions of :mod:`mtplx.reference`; the compiled core takes their place.
"""

from mtplx.decisions import BatchDecision, BlockDecision, Cascade, TokenTree, TreeDecision, Typical
from mtplx.reference import (
    cascade_defer_decision,
    cascade_token_deferral,
    cascade_token_target_distribution,
    typical_accept_decision,
    typical_acceptance_threshold,
    verify_batch,
    verify_batch_from_logits,
    verify_block,
    verify_block_from_logits,
    verify_tree,
)

__all__ = [
    "BatchDecision",
    "BlockDecision",
    "Cascade",
    "TokenTree",
    "TreeDecision",
    "Typical",
    "cascade_defer_decision",
    "cascade_token_deferral",
    "cascade_token_target_distribution",
    "typical_accept_decision",
    "typical_acceptance_threshold",
    "verify_batch",
    "verify_batch_from_logits",
    "verify_block",
    "verify_block_from_logits",
    "verify_tree",
]
