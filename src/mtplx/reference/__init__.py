"""The definition: every sampling function in plain NumPy, written to be read.

:mod:`mtplx.sampling`, :mod:`mtplx.batch` and :mod:`mtplx.verification` are the same functions on the
compiled core. Where the two could differ, this package decides: which tokens a truncation keeps, in
which order a sum is taken, how many numbers a draw consumes. Nothing here is fast by a trick, and
nothing loops over the vocabulary in Python.

============ ==========================================================================
`one_row`      one distribution: from logits, truncated, drawn from, verified
`rows`         many of them, each looked at only when it is reached
`streams`      where uniforms come from: a generator in order, or keys without an order
`rules`        the acceptance rules of a drafted block, as functions of rows and coins
`blocks`       blocks and batches of blocks: rules, streams and rows put together
`trees`        trees of drafts: their rules, node by node, and the walk over them
============ ==========================================================================
"""

from mtplx.decisions import BatchDecision, BlockDecision, Cascade, TokenTree, TreeDecision, Typical
from mtplx.distributions import (
    BatchedSparseDistributions,
    Distribution,
    NonFiniteLogitsError,
    SamplerConfig,
    SparseDistribution,
    SpeculativeDecision,
    non_finite_logits_error,
)
from mtplx.reference.blocks import (
    verify_batch,
    verify_batch_from_logits,
    verify_block,
    verify_block_from_logits,
)
from mtplx.reference.one_row import (
    PENALTY_MAX,
    PENALTY_MIN,
    acceptance_probability,
    apply_penalties,
    apply_top_k_top_p,
    apply_top_p_top_k,
    deterministic_top_k_order,
    distribution_entropy,
    distribution_from_logits,
    residual_distribution,
    sample_from_distribution,
    softmax,
    sparse_distribution_from_logits,
    speculative_output_marginal,
    total_variation,
    verify_one_token,
)
from mtplx.reference.rows import distributions_from_logits, sample_rows
from mtplx.reference.rules import (
    cascade_defer_decision,
    cascade_token_deferral,
    cascade_token_target_distribution,
    typical_accept_decision,
    typical_acceptance_threshold,
)
from mtplx.reference.trees import verify_tree

__all__ = [
    "PENALTY_MAX",
    "PENALTY_MIN",
    "BatchDecision",
    "BatchedSparseDistributions",
    "BlockDecision",
    "Cascade",
    "Distribution",
    "NonFiniteLogitsError",
    "SamplerConfig",
    "SparseDistribution",
    "SpeculativeDecision",
    "TokenTree",
    "TreeDecision",
    "Typical",
    "acceptance_probability",
    "apply_penalties",
    "apply_top_k_top_p",
    "apply_top_p_top_k",
    "cascade_defer_decision",
    "cascade_token_deferral",
    "cascade_token_target_distribution",
    "deterministic_top_k_order",
    "distribution_entropy",
    "distribution_from_logits",
    "distributions_from_logits",
    "non_finite_logits_error",
    "residual_distribution",
    "sample_from_distribution",
    "sample_rows",
    "softmax",
    "sparse_distribution_from_logits",
    "speculative_output_marginal",
    "total_variation",
    "typical_accept_decision",
    "typical_acceptance_threshold",
    "verify_batch",
    "verify_batch_from_logits",
    "verify_block",
    "verify_block_from_logits",
    "verify_one_token",
    "verify_tree",
]
