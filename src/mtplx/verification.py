"""Blocks, batches of blocks and trees: drafted tokens verified in one call, and the acceptance rules.

The functions of :mod:`mtplx.reference`, same names, errors and draws. Blocks and trees run on the compiled
core: one crossing a block, one release of the GIL a range of sequences, and from logits nothing that is not
needed. Generators that draw through methods of their own are served by the reference's decisions, from
logits on rows of the compiled core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mtplx._csampling import trees as core_trees
from mtplx._csampling import verification as core
from mtplx.decisions import (
    BatchDecision,
    BlockDecision,
    CanonicalRule,
    Cascade,
    Rule,
    TokenTree,
    TreeDecision,
    TreeRule,
    Typical,
    as_rule,
    as_tree_rule,
)
from mtplx.distributions import BatchedSparseDistributions, Distribution, SamplerConfig, errors_at
from mtplx.reference import blocks, rows, trees
from mtplx.reference.one_row import as_array, as_top_k
from mtplx.reference.streams import DRAFTER_LANE, GeneratorStream, KeyedStream
from mtplx.sampling import (
    cascade_defer_decision,
    cascade_token_deferral,
    cascade_token_target_distribution,
    distribution_from_logits,
    sparse_distribution_from_logits,
    typical_accept_decision,
    typical_acceptance_threshold,
)
from mtplx.work import WORTHWHILE_LOGITS, WORTHWHILE_PROBABILITIES, run_ranges

__all__ = [
    "DRAFTER_LANE",
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


class _FromLogits(blocks.FromLogits):
    """Rows of logits, made into distributions by the compiled core."""

    def row(
        self, logits: Any, config: SamplerConfig, token_counts: Any, penalty_overlay: Any
    ) -> Distribution:
        row = as_array(logits, "logits")
        make: Callable[..., Distribution] = (
            sparse_distribution_from_logits if as_top_k(config.top_k, row.size) else distribution_from_logits
        )
        return make(row, config, token_counts=token_counts, penalty_overlay=penalty_overlay)


def _compiled(rng: Any) -> bool:
    return rng is None or type(rng) is np.random.Generator


_NAMED = {name: (name,) for name in ("exact", "greedy", "match", "block")}


def _for_core(given: Rule) -> tuple[Any, ...]:
    """The name of a rule and its parameters."""
    named = _NAMED.get(given) if type(given) is str else None
    if named is not None:
        return named
    rule = as_rule(given)
    if isinstance(rule, str):
        return (rule,)
    if isinstance(rule, Typical):
        return "typical", float(rule.eps), float(rule.delta)
    return "cascade", float(rule.alpha), rule.rule


def _raise(error: BaseException, where: str, sequence: int | None = None) -> NoReturn:
    """Raise an error of the core, saying where it happened."""
    places = [f"sequence {sequence}"] * (sequence is not None) + [where] * bool(where)
    if not places:
        raise error
    with errors_at(": ".join(places)):
        raise error


def verify_block(
    target: Any,
    draft: Any,
    draft_tokens: Any,
    rng: Any = None,
    *,
    rule: Rule = "exact",
    check_draft: bool = False,
) -> BlockDecision:
    """Keep a prefix of K drafted tokens and draw the token that follows it.

    Parameters
    ----------
    target : array_like of float, shape (K + 1, V) or (K, V), BatchedSparseDistributions, or sequence
        The target's rows: row i is the distribution after i drafts. Entries of a sequence may be dense
        or sparse, mixed freely. With K rows there is no bonus token.
    draft : like `target`, K rows, or None
        The rows that the drafts were drawn from. None: every draft is a point mass (copied or greedy
        drafts); then p(x) is its acceptance probability and p without x its residual.
    draft_tokens : sequence of K int
        K = 0: one draw from row 0.
    rng : numpy.random.Generator, or any object with ``random()`` and ``choice(ids, p=...)``, optional
        As in `verify_one_token`.
        Rows of a caller's own sequence may not draw from it: it is locked while they are read.
    rule : {"exact", "greedy", "match", "block", "typical"}, Typical or Cascade
        See `mtplx.reference.rules`. All but ``"block"`` read, convert and check rows and ids only as they
        are reached: rows behind the first rejection are untouched.
    check_draft : bool
        Whether a draft with ``q(x) = 0 < p(x)`` is an error, under rules that look at q. It is accepted
        otherwise, though it cannot have been drawn from q.

    Returns
    -------
    BlockDecision

    Raises
    ------
    ValueError
        Another number of rows than that; an unknown rule; `check_draft`.
    ValueError, IndexError, TypeError
        As in `verify_one_token` and `sample_from_distribution`, for rows that are reached, before the draw
        that needs them. The message names the row.

    Notes
    -----
    Draws: ``"exact"`` one number a tested draft, one more for the correction or the bonus token, as the
    loop of `verify_one_token`. ``"greedy"`` none. ``"match"`` one a tested draft, one for the bonus
    token. ``"block"`` K, then one. `Typical` one for the correction or the bonus token. `Cascade` one a
    tested and deferred draft, then one.

    Examples
    --------
    >>> target = [[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]
    >>> draft = [[0.5, 0.5], [1.0, 0.0]]
    >>> verify_block(target, draft, [1, 0])
    BlockDecision(tokens=array([1, 1]), accepted=1, accept_probabilities=array([1., 0.]), bonus=False)
    >>> verify_block(target, None, [0, 1], rule="greedy").tokens
    array([0, 1, 0])
    """
    if rng is None:
        rng = np.random.default_rng()
    if type(rng) is not np.random.Generator:
        chosen = as_rule(rule)
        block = blocks.open_block(target, draft, blocks.as_tokens(draft_tokens), blocks.Given())
        return blocks.decide(block, chosen, GeneratorStream(rng), check_draft)
    answer = core.verify_block(
        target, draft, draft_tokens, rng, _for_core(rule), check_draft, None, BlockDecision
    )
    if not isinstance(answer, BlockDecision):
        _raise(*answer)
    return answer


def verify_block_from_logits(
    target_logits: Any,
    draft_logits: Any,
    draft_tokens: Any,
    config: SamplerConfig,
    draft_config: SamplerConfig | None = None,
    rng: Any = None,
    *,
    rule: Rule = "exact",
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    check_draft: bool = False,
) -> BlockDecision:
    """`verify_block` on the rows that `distributions_from_logits` gives.

    Parameters
    ----------
    target_logits : array_like of float, shape (K + 1, V) or (K, V), or sequence of rows
    draft_logits : array_like of float, shape (K, V), or sequence of rows, or None
        None: point masses.
    draft_tokens : sequence of K int
    config : SamplerConfig
        Of the target's rows. At temperature <= 0 they are one-hot; coins are drawn all the same.
    draft_config : SamplerConfig, optional
        Of the draft's rows, default `config`. Draft rows know no penalties.
    rng : optional
        As in `verify_block`.
    rule, check_draft
        As in `verify_block`.
    token_counts : mapping of int to int, optional
        Occurrences before the block. Target row i sees them and the drafts before i.
    penalty_overlay : mapping of int to float, or sequence of one a target row, optional

    Returns
    -------
    BlockDecision

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `verify_block` and `distribution_from_logits`.

    Examples
    --------
    >>> greedy = SamplerConfig(temperature=0.0)
    >>> verify_block_from_logits([[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0]], [1], greedy).tokens
    array([1, 0])
    """
    draft_config = config if draft_config is None else draft_config
    if rng is None:
        rng = np.random.default_rng()
    if type(rng) is not np.random.Generator:
        chosen = as_rule(rule)
        tokens = blocks.as_tokens(draft_tokens)
        reader = _FromLogits(tokens, config, draft_config, token_counts, penalty_overlay)
        block = blocks.open_block(target_logits, draft_logits, tokens, reader)
        return blocks.decide(block, chosen, GeneratorStream(rng), check_draft)
    settings = config, draft_config, token_counts, penalty_overlay
    answer = core.verify_block(
        target_logits, draft_logits, draft_tokens, rng, _for_core(rule), check_draft, settings, BlockDecision
    )
    if not isinstance(answer, BlockDecision):
        _raise(*answer)
    return answer


def verify_batch(
    targets: Any,
    drafts: Any,
    draft_tokens: Any,
    rngs: Any = None,
    *,
    rule: Rule = "exact",
    seeds: Any = None,
    positions: Any = None,
    check_draft: bool = False,
    executor: Any = None,
) -> BatchDecision:
    """`verify_block` for B sequences.

    Parameters
    ----------
    targets : array_like of float, shape (B, K + 1, V) or (B, K, V), or sequence of B
        A sequence holds what `verify_block` takes as `target`, so its entries may differ in length.
    drafts : array_like of float, shape (B, K, V), or sequence of B, or None
        As `draft` of `verify_block`; None: point masses everywhere.
    draft_tokens : array_like of int, shape (B, K), or sequence of B sequences
        -1 at the end of a row is padding. The bonus row of a sequence with k drafts is row k; rows of an
        array behind it are padding, and not looked at.
    rngs : sequence of B generators, optional
        All different. None, alone or as an entry: a fresh generator.
    seeds, positions : array_like of int, shape (B,), optional
        Instead of `rngs`: keyed streams. `positions` are the absolute indices of the blocks' first
        tokens. The uniform of lane L is the first ``random()`` of
        ``numpy.random.Philox(key=[seed, position], counter=[0, L, 0, 0])``; lane i is the coin of position
        i (its draw under ``"match"``), 2**32 the correction, 2**32 + 1 the bonus token, and lanes from
        `DRAFTER_LANE` (2**32 + 2) to 2**33 - 1 are the drafter's. What a sequence emits depends on its own
        key and rows alone.
    rule, check_draft
        As in `verify_block`.
    executor : concurrent.futures.Executor, optional
        Runs contiguous ranges of sequences on its workers; results never depend on it.

    Returns
    -------
    BatchDecision

    Raises
    ------
    ValueError
        Numbers of sequences or rows that do not fit; one generator given twice; `rngs` and `seeds` both
        given, one of `seeds` and `positions` missing, a key out of range.
    ValueError, IndexError, TypeError
        As in `verify_block`, for the first sequence that fails. The message names sequence and row.
        The other sequences have drawn from their generators as if none had failed.

    Examples
    --------
    >>> targets = [[[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0]]]
    >>> decision = verify_batch(targets, None, [[1], []], seeds=[1, 2], positions=[0, 0])
    >>> decision.tokens, decision.num_tokens
    (array([[ 1,  0],
           [ 1, -1]]), array([2, 1]))
    """
    chosen = as_rule(rule)
    return _verify_batch(
        targets, drafts, draft_tokens, rngs, seeds, positions, chosen, check_draft, executor, None
    )


def verify_batch_from_logits(
    target_logits: Any,
    draft_logits: Any,
    draft_tokens: Any,
    config: SamplerConfig | Sequence[SamplerConfig],
    draft_config: SamplerConfig | Sequence[SamplerConfig] | None = None,
    rngs: Any = None,
    *,
    rule: Rule = "exact",
    seeds: Any = None,
    positions: Any = None,
    token_counts: Mapping[int, int] | Sequence[Mapping[int, int] | None] | None = None,
    penalty_overlay: Mapping[int, float] | Sequence[Any] | None = None,
    check_draft: bool = False,
    executor: Any = None,
) -> BatchDecision:
    """`verify_block_from_logits` for B sequences.

    Parameters
    ----------
    target_logits, draft_logits, draft_tokens
        As `targets`, `drafts` and `draft_tokens` of `verify_batch`, with logits for probabilities.
    config, draft_config : SamplerConfig, or sequence of B
    token_counts : mapping, or sequence of B mappings (None: nothing), optional
    penalty_overlay : mapping, or sequence of B, optional
        Each entry is what `verify_block_from_logits` takes: a sequence of k drafts that is padded to K has
        k + 1 overlays of its own, if not one for all of its rows.
    rngs, rule, seeds, positions, check_draft, executor
        As in `verify_batch`.

    Returns
    -------
    BatchDecision

    Raises
    ------
    NonFiniteLogitsError, ValueError, IndexError, TypeError
        As in `verify_batch` and `verify_block_from_logits`.

    Examples
    --------
    >>> greedy = SamplerConfig(temperature=0.0)
    >>> verify_batch_from_logits([[[0.0, 1.0], [1.0, 0.0]]], None, [[1]], greedy).tokens
    array([[1, 0]])
    """
    chosen = as_rule(rule)
    return _verify_batch(
        target_logits,
        draft_logits,
        draft_tokens,
        rngs,
        seeds,
        positions,
        chosen,
        check_draft,
        executor,
        (config, config if draft_config is None else draft_config, token_counts, penalty_overlay),
    )


def _verify_batch(
    targets: Any,
    drafts: Any,
    draft_tokens: Any,
    rngs: Any,
    seeds: Any,
    positions: Any,
    rule: CanonicalRule,
    check_draft: bool,
    executor: Any,
    from_logits: tuple[Any, Any, Any, Any] | None,
) -> BatchDecision:
    rows.require_executor(executor)
    # Whatever is not of the usual types is looked at one by one, and what is wrong with it found there.
    given = _plain_rows(targets, drafts, draft_tokens) or blocks.as_batch_tokens(draft_tokens)
    B = len(given.tokens)
    names = ("config", "draft_config", "token_counts", "penalty_overlay")
    settings: list[Any] = [
        [None] * B if from_logits is None else rows.one_or_each(value, B, name)
        for name, value in zip(names, from_logits or (None,) * 4, strict=True)
    ]
    proposed, each = None, None
    if isinstance(given, blocks.Drafts):
        proposed, each = given, blocks.as_sequences(targets, drafts, given)
        given = _rows_one_by_one(each, proposed)
    K = given.K
    plain = _plain_streams(B, rngs, seeds, positions)
    if plain is None:
        streams = blocks.open_streams(B, rngs, seeds, positions)
        plain = [_plain_stream(stream) for stream in streams]
    if None not in plain:
        opened = core.open_blocks(
            given.targets,
            given.target_counts,
            given.drafts,
            given.draft_counts,
            given.tokens,
            given.token_counts,
            plain,
            _for_core(rule),
            check_draft,
            from_logits is not None,
            *settings,
        )
        if isinstance(opened, tuple):
            _raise(*opened)
        # Of probabilities one row is walked at most, from logits every row that is reached.
        work, enough = core.vocabulary(opened), WORTHWHILE_PROBABILITIES
        if from_logits is not None:
            work, enough = work * (K + 1), WORTHWHILE_LOGITS
        least = 1 + enough // max(work, 1)
        core.holding_generators(
            opened,
            lambda: run_ranges(
                executor, lambda first, last: core.run_blocks(opened, first, last), B, least=least
            ),
        )
        answer = core.collect_blocks(opened, K)
        if len(answer) == 3:
            _raise(*answer)
        return BatchDecision.adopt(*answer)
    if proposed is None or each is None:
        proposed = blocks.as_batch_tokens(draft_tokens)
        each = blocks.as_sequences(targets, drafts, proposed)
    opened_blocks = []
    for b, tokens in enumerate(proposed.tokens):
        reader = (
            blocks.Given()
            if from_logits is None
            else _FromLogits(tokens, *(values[b] for values in settings))
        )
        opened_blocks.append(blocks.open_one(each, b, tokens, reader))
    return blocks.decide_all(opened_blocks, K, rule, streams, check_draft)


class _Rows(NamedTuple):
    """Rows and ids of a batch as the core takes them, how many of each count, and K."""

    targets: Any
    target_counts: list[int]
    drafts: Any
    draft_counts: list[int]
    tokens: Any
    token_counts: list[int]
    K: int


def _plain_rows(targets: Any, drafts: Any, draft_tokens: Any) -> _Rows | None:
    """Rows and ids of the usual types, in order; None for all others."""
    found = core.plain_tokens(draft_tokens)
    if found is None:
        return None
    tokens, kept, padded, K = found
    of_target = core.plain_counts(targets, kept, padded, K, True, BatchedSparseDistributions)
    of_draft = (
        kept
        if drafts is None
        else core.plain_counts(drafts, kept, padded, K, False, BatchedSparseDistributions)
    )
    if of_target is None or of_draft is None:
        return None
    return _Rows(targets, of_target, drafts, of_draft, tokens, kept, K)


def _rows_one_by_one(each: blocks.Sequences, proposed: blocks.Drafts) -> _Rows:
    counts = [len(tokens) for tokens in proposed.tokens]
    return _Rows(
        each.targets,
        each.target_counts,
        each.drafts,
        each.draft_counts,
        proposed.tokens,
        counts,
        proposed.K,
    )


def _plain_streams(count: int, rngs: Any, seeds: Any, positions: Any) -> list[Any] | None:
    """Streams of the usual types, in order; None for all others."""
    if seeds is None and positions is None:
        if type(rngs) is not list or len(rngs) != count:
            return None
        if any(type(rng) is not np.random.Generator for rng in rngs):
            return None
        return list(rngs) if len({id(rng.bit_generator) for rng in rngs}) == count else None
    keys = []
    for values, bound in ((seeds, 1 << 64), (positions, 1 << 63)):
        if type(values) is np.ndarray and values.ndim == 1 and values.dtype.kind in "iu":
            values = values.tolist()
        if type(values) is not list or len(values) != count:
            return None
        if any(type(key) is not int or not 0 <= key < bound for key in values):
            return None
        keys.append(values)
    return list(zip(*keys, strict=True)) if rngs is None else None


def _plain_stream(stream: Any) -> Any:
    """What the core draws from: a generator, or (seed, position); None where it cannot."""
    if isinstance(stream, KeyedStream):
        return stream.seed, stream.position
    return stream.rng if type(stream.rng) is np.random.Generator else None


def verify_tree(
    target: Any,
    draft: Any,
    tree: TokenTree,
    rng: Any = None,
    *,
    rule: TreeRule = "recursive",
    replacement: bool = True,
    check_draft: bool = False,
    seed: int | None = None,
    position: int | None = None,
) -> TreeDecision:
    """Keep a path of drafted tokens from the context downwards and draw the token that follows it.

    Parameters
    ----------
    target : array_like of float, shape (n + 1, V), BatchedSparseDistributions, or sequence of n + 1
        The target's rows: row 0 after the context, row i + 1 after node i. Entries of a sequence may be
        dense or sparse, mixed freely.
    draft : like `target`
        The rows that the children were drawn from: those of the context from row 0, those of node i
        from row i + 1. Rows of nodes without children are not looked at.
    tree : TokenTree
        n drafted tokens; none: one draw from row 0.
    rng : numpy.random.Generator, or any object with ``random()`` and ``choice(ids, p=...)``, optional
        As in `verify_one_token`.
        Rows of a caller's own sequence may not draw from it: it is locked while they are read.
    rule : {"recursive", "kseq", "traversal"}
        See `mtplx.reference.trees`.
    replacement : bool
        How siblings were drawn: independently from one row, or without replacement, each from what the
        ones before it left of the row. The wrong answer gives a wrong law.
    check_draft : bool
        Whether a tested draft with ``q(x) = 0 < p(x)`` is an error. It is accepted otherwise, though it
        cannot have been drawn from q.
    seed, position : int, optional
        Instead of `rng`: a keyed stream, as in `verify_batch`. The coin of node i is lane 2**33 + i, the
        correction lane 2**32, the bonus token lane 2**32 + 1.

    Returns
    -------
    TreeDecision

    Raises
    ------
    ValueError
        Another number of rows; an unknown rule; ``"kseq"`` without replacement; `seed` without
        `position`, or beside `rng`; `check_draft`.
    IndexError
        A token outside [0, V).
    TypeError
        `tree` is no `TokenTree`; `rng` has not the two methods.
    ValueError, TypeError
        As in `verify_one_token` and `sample_from_distribution`, for rows that are reached, before the
        draw that needs them. The message names the row. All other errors come before the first draw.

    Notes
    -----
    Draws: one number a tested node, in the order of the tests, then one for the last token. ``"recursive"``
    and ``"kseq"`` test the children of the context in index order up to the first that is accepted, then
    its children, and so on. ``"traversal"`` tests the node at the end of the path of first children, then
    follows the next sibling of a node that failed down its own first children, and tests a parent after
    its last child; the context is not tested.

    A draft row that children without replacement have used up (more siblings than tokens with positive
    probability) counts as 0 everywhere: such a child cannot have been drawn, and is accepted by
    definition if its p(x) is positive.

    References
    ----------
    ``"recursive"``: X. Miao et al., "SpecInfer" (arXiv:2305.09781). ``"kseq"``: Z. Sun et al., "SpecTr"
    (arXiv:2310.15141). ``"traversal"``: Y. Weng et al., "Traversal verification" (arXiv:2505.12398).

    Examples
    --------
    Of the two candidates for the next token, the target holds the second for impossible and the first
    for certain; after it, there is one draft, which cannot be:

    >>> tree = TokenTree([1, 0, 0], [-1, -1, 0])
    >>> target = [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    >>> draft = [[0.5, 0.5]] * 4
    >>> verify_tree(target, draft, tree)
    TreeDecision(tokens=array([1, 1]), path=array([0]), accepted=1, bonus=False)
    """
    chosen = as_tree_rule(rule, replacement)
    if not _compiled(rng):
        return trees.verify_tree(
            target,
            draft,
            tree,
            rng,
            rule=chosen,
            replacement=replacement,
            check_draft=check_draft,
            seed=seed,
            position=position,
        )
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a TokenTree, not {type(tree).__name__}")
    opened = core_trees.open_tree(
        target, draft, tree.tokens, tree.parents, chosen, bool(replacement), check_draft
    )
    if isinstance(opened, tuple):
        _raise(*opened)
    if seed is None and position is None:
        rng = rng or np.random.default_rng()
    else:
        seed, position = trees.as_key(rng, seed, position)
    answer = core_trees.verify_tree(opened, rng, seed, position)
    if len(answer) == 2:
        _raise(*answer)
    return TreeDecision.adopt(*answer)
