"""Blocks and batches of blocks: K drafted tokens verified in one call.

Design
------
A call becomes a `Block` (rows and ids, all of them lazy), a stream of uniforms and a rule. `decide` is
the one place where the three meet. From logits, the lazy rows are computed from logits when they are
reached; everything else is the same, and so every call from logits decides and draws as the call on the
rows of `distributions_from_logits` by construction.

What can be checked without reaching a row (numbers of rows, the rule, generators, keys, kinds of
arguments), is checked for all sequences of a batch before anything is drawn. What a row holds is
checked when the row is reached, before the draw that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtplx._csampling.dlpack import imported
from mtplx.arguments import as_integer, as_real
from mtplx.decisions import BatchDecision, BlockDecision, CanonicalRule, Rule, as_rule
from mtplx.distributions import Distribution, SamplerConfig, SparseDistribution, errors_at
from mtplx.reference import rules
from mtplx.reference.one_row import (
    as_generator,
    check_penalties,
    check_settings,
    id_within,
    weights_of,
)
from mtplx.reference.rows import (
    Indexed,
    Lazy,
    as_distribution,
    as_rows,
    is_array,
    is_sequence,
    one_or_each,
    require_executor,
    row_from_logits,
    vocabulary,
)
from mtplx.reference.streams import BONUS_LANE, CORRECTION_LANE, GeneratorStream, KeyedStream, Stream


@dataclass(frozen=True)
class Block:
    """K drafts, the K rows they were drawn from, the target's rows, and whether row K gives a bonus."""

    tokens: Lazy[int]
    target: Lazy[Distribution]
    draft: Lazy[Distribution]
    bonus: bool


# ---- the decision --------------------------------------------------------------------------------


def decide(block: Block, rule: CanonicalRule, stream: Stream, check_draft: bool) -> BlockDecision:
    """Verify one block: accept count, then one token, if there is one to draw."""
    tokens, target, draft = block.tokens, block.target, block.draft
    K = len(tokens)
    coins = Lazy(K, stream.coin)
    drawn = Lazy(K, lambda i: stream.token(i, weights_of(target[i], "target_p")))  # under "match" alone
    with stream.held():
        accepted, probabilities = rules.accept_count(
            rule, target, draft, tokens, coins, drawn, check_draft=check_draft
        )
        emitted = [tokens[i] for i in range(accepted)]
        bonus = accepted == K and block.bonus
        if accepted < K or bonus:
            with errors_at(f"row {accepted}"):
                if rule == "greedy":
                    emitted.append(rules.best_token(target[accepted]))
                elif bonus:
                    emitted.append(stream.token(BONUS_LANE, weights_of(target[accepted], "target_p")))
                elif rule == "match":
                    emitted.append(drawn[accepted])
                else:
                    weights = rules.weights_after_rejection(rule, target, draft, accepted, probabilities)
                    emitted.append(stream.token(CORRECTION_LANE, weights))
    return BlockDecision(np.array(emitted, dtype=np.int64), accepted, np.array(probabilities), bonus)


# ---- opening a block -----------------------------------------------------------------------------


class Reader(Protocol):
    """How the rows of a caller become distributions, when they are reached."""

    def check(self, target_rows: int) -> None:
        """Check what can be checked once the number of target rows is known."""

    def target(self, i: int, row: Any) -> Distribution: ...

    def draft(self, i: int, row: Any) -> Distribution: ...


class Given:
    """Rows of probabilities."""

    def check(self, target_rows: int) -> None:
        pass

    def target(self, i: int, row: Any) -> Distribution:
        return as_distribution(row, "target_p")

    def draft(self, i: int, row: Any) -> Distribution:
        return as_distribution(row, "draft_q")


class FromLogits:
    """Rows of logits. Target row i sees the counts before the block and the drafts before i."""

    def __init__(
        self,
        tokens: Lazy[int],
        config: SamplerConfig,
        draft_config: SamplerConfig,
        token_counts: Any,
        penalty_overlay: Any,
    ) -> None:
        self._tokens = tokens
        self._config = config
        self._draft_config = draft_config
        self._counts = token_counts
        self._each = is_sequence(penalty_overlay)
        self._overlays = list(penalty_overlay) if self._each else [penalty_overlay]

    def check(self, target_rows: int) -> None:
        """All that can be wrong with settings and penalties but for ids that a row has not."""
        if self._each and len(self._overlays) not in (target_rows, len(self._tokens) + 1):
            raise ValueError(
                f"penalty_overlay has {len(self._overlays)} entries for {target_rows} target rows"
            )
        _require_mapping(self._counts, "token_counts")
        for overlay in self._overlays:
            _require_mapping(overlay, "penalty_overlay")
        with errors_at("row 0"):
            check_penalties(self._config)
            check_settings(self._config)
            check_settings(self._draft_config)
        if target_rows == 0:
            return
        with errors_at("row 0"):
            penalties = self._config.presence_penalty, self._config.frequency_penalty
            self._counts = _by_id(self._counts, "token_counts") if any(penalties) else {}
        for i, overlay in enumerate(self._overlays):
            with errors_at(f"row {i}"):
                self._overlays[i] = _by_id(overlay, "penalty_overlay")
        with errors_at("row 0"):
            for token, count in self._counts.items():
                if not count >= 0.0:
                    raise ValueError(f"token {token} has the count {count}")
                _require_id(token)
        for i, overlay in enumerate(self._overlays):
            with errors_at(f"row {i}"):
                for token, amount in overlay.items():
                    if np.isnan(amount):
                        raise ValueError(f"penalty_overlay of token {token} is {amount}")
                    _require_id(token)

    def target(self, i: int, row: Any) -> Distribution:
        counts = dict(self._counts)
        for before in range(i):
            token = self._tokens[before]
            counts[token] = counts.get(token, 0) + 1
        return self.row(row, self._config, counts, self._overlays[i if self._each else 0])

    def draft(self, i: int, row: Any) -> Distribution:
        return self.row(row, self._draft_config, None, None)

    def row(
        self, logits: Any, config: SamplerConfig, token_counts: Any, penalty_overlay: Any
    ) -> Distribution:
        """The distribution of one row of logits."""
        return row_from_logits(logits, config, token_counts, penalty_overlay)


def _require_mapping(value: Any, name: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of token ids, not {type(value).__name__}")


def _by_id(mapping: Mapping[Any, Any] | None, name: str) -> dict[int, float]:
    """The numbers of a mapping, by id."""
    return {
        as_integer(token, "a token id"): as_real(value, f"{name} of token {token}")
        for token, value in (mapping or {}).items()
    }


def _require_id(token: int) -> None:
    """No row has such an id; whether the rows that are reached have it, they tell themselves."""
    if not 0 <= token < 1 << 63:
        raise IndexError(f"token id {token} is outside of any vocabulary")


def as_tokens(draft_tokens: Any) -> Lazy[int]:
    """The ids of the drafts, each read when it is reached."""
    if is_array(draft_tokens):
        draft_tokens = imported(draft_tokens, "draft_tokens")
        if draft_tokens.ndim != 1:
            raise ValueError(f"draft_tokens must be one-dimensional, not of shape {draft_tokens.shape}")
    if not is_sequence(draft_tokens):
        raise TypeError(f"draft_tokens must be a sequence of ids, not {type(draft_tokens).__name__}")
    return Lazy(len(draft_tokens), lambda i: as_integer(draft_tokens[i], "a token id"))


def _point_mass(token: int, target_p: Distribution) -> SparseDistribution:
    size = vocabulary(target_p)
    return SparseDistribution.one_hot(id_within(token, size), size)


def open_block(target: Any, draft: Any, tokens: Lazy[int], reader: Reader) -> Block:
    """Check the numbers of rows, and make rows lazy."""
    K = len(tokens)
    target_rows = as_rows(target, "target")
    if len(target_rows) not in (K, K + 1):
        raise ValueError(
            f"target has {len(target_rows)} rows for {K} drafts; expected {K + 1}, or {K} without a bonus row"
        )
    reader.check(len(target_rows))
    targets = Lazy(len(target_rows), lambda i: reader.target(i, target_rows[i]))
    if draft is None:
        drafts: Lazy[Distribution] = Lazy(K, lambda i: _point_mass(tokens[i], targets[i]))
    else:
        draft_rows = as_rows(draft, "draft")
        if len(draft_rows) != K:
            raise ValueError(f"draft has {len(draft_rows)} rows for {K} drafts")
        drafts = Lazy(K, lambda i: reader.draft(i, draft_rows[i]))
    return Block(tokens, targets, drafts, len(target_rows) > K)


# ---- one block -----------------------------------------------------------------------------------


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
        Rows of a caller's own sequence may not draw from it: the compiled face has it locked while they
        are read.
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
    chosen = as_rule(rule)
    tokens = as_tokens(draft_tokens)
    block = open_block(target, draft, tokens, Given())
    return decide(block, chosen, GeneratorStream(rng), check_draft)


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
    chosen = as_rule(rule)
    tokens = as_tokens(draft_tokens)
    reader = FromLogits(
        tokens, config, config if draft_config is None else draft_config, token_counts, penalty_overlay
    )
    block = open_block(target_logits, draft_logits, tokens, reader)
    return decide(block, chosen, GeneratorStream(rng), check_draft)


# ---- batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """The drafts of every sequence without padding, their lengths with it, and K, the largest of these."""

    tokens: list[Lazy[int]]
    padded: list[int]
    K: int


def as_batch_tokens(draft_tokens: Any) -> Drafts:
    K = 0
    if is_array(draft_tokens):
        draft_tokens = imported(draft_tokens, "draft_tokens")
        if draft_tokens.ndim == 2:
            K = draft_tokens.shape[1]
        elif draft_tokens.dtype.kind != "O":
            raise ValueError(f"draft_tokens must have the shape (B, K), not {draft_tokens.shape}")
        if draft_tokens.dtype.kind not in "iuO" and draft_tokens.size:
            raise TypeError(f"draft_tokens must hold ids, not {draft_tokens.dtype}")
    if not is_sequence(draft_tokens):
        raise TypeError(f"draft_tokens must be B sequences of ids, not {type(draft_tokens).__name__}")
    tokens, padded = [], []
    for b in range(len(draft_tokens)):
        with errors_at(f"sequence {b}"):
            given = draft_tokens[b]
            given = imported(given, "draft_tokens") if is_array(given) else given
            tokens.append(_without_padding(given, as_tokens(given)))
            padded.append(len(given))
    return Drafts(tokens, padded, max([K, *padded]))


def _without_padding(given: Any, tokens: Lazy[int]) -> Lazy[int]:
    def is_padding(i: int) -> bool:
        # Ids themselves are read only when they are reached: whatever is no integer is left to then.
        return isinstance(given[i], int | np.integer) and given[i] == -1

    kept = len(tokens)
    while kept and is_padding(kept - 1):
        kept -= 1
    for i in range(kept):
        if is_padding(i):
            raise ValueError(f"padding (-1) at position {i} is followed by drafts")
    return tokens.first(kept)


def _each_block(value: Any, count: int, name: str) -> Any:
    """The rows of every sequence: a 3-D array, or a sequence of `count`."""
    if is_array(value):
        value = imported(value, name)
        if value.ndim != 3 and not (value.ndim == 1 and value.dtype.kind == "O"):
            raise ValueError(f"{name} must have the shape (B, rows, V), not {value.shape}")
    if not is_sequence(value):
        raise TypeError(f"{name} must hold the rows of B sequences, not be {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} sequences")
    return value


def open_streams(count: int, rngs: Any, seeds: Any, positions: Any) -> list[Stream]:
    if (seeds is None) != (positions is None):
        raise ValueError("seeds and positions are given together or not at all")
    if seeds is not None:
        if rngs is not None:
            raise ValueError("either rngs or seeds and positions are given, not both")
        keys = _as_keys(seeds, count, "seeds", 1 << 64)
        starts = _as_keys(positions, count, "positions", 1 << 63)
        return [KeyedStream(seed, position) for seed, position in zip(keys, starts, strict=True)]
    if rngs is None:
        return [GeneratorStream(None) for _ in range(count)]
    if not is_sequence(rngs):
        raise TypeError(f"rngs must be a sequence of generators, not {type(rngs).__name__}")
    if len(rngs) != count:
        raise ValueError(f"rngs has {len(rngs)} entries for {count} sequences")
    first: dict[int, int] = {}
    streams: list[Stream] = []
    for b in range(count):
        rng = rngs[b]
        with errors_at(f"sequence {b}"):
            generator = as_generator(rng)
            # Two generators on one bit generator are one stream, too: who draws first would matter.
            source = generator.bit_generator if type(generator) is np.random.Generator else generator
            if rng is not None and first.setdefault(id(source), b) != b:
                raise ValueError(f"its generator is that of sequence {first[id(source)]}")
        streams.append(GeneratorStream(generator))
    return streams


def _as_keys(values: Any, count: int, name: str, bound: int) -> list[int]:
    if not is_sequence(values):
        raise TypeError(f"{name} must be a sequence of integers, not {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} sequences")
    keys = []
    for b in range(count):
        with errors_at(f"sequence {b}: {name}"):
            key = as_integer(values[b], "a key")
            if not 0 <= key < bound:
                raise ValueError(f"{key} is outside [0, {bound})")
        keys.append(key)
    return keys


def decide_all(
    blocks: list[Block], K: int, rule: CanonicalRule, streams: list[Stream], check_draft: bool
) -> BatchDecision:
    """Every sequence by itself. One that fails does not keep the others from drawing what they draw."""
    B = len(blocks)
    tokens = np.full((B, K + 1), -1, dtype=np.int64)
    num_tokens, accepted = np.zeros(B, dtype=np.int64), np.zeros(B, dtype=np.int64)
    probabilities = np.full((B, K), np.nan)
    failed: Exception | None = None
    for b, (block, stream) in enumerate(zip(blocks, streams, strict=True)):
        try:
            with errors_at(f"sequence {b}"):
                decision = decide(block, rule, stream, check_draft)
        except Exception as error:
            failed = failed or error
            continue
        num_tokens[b] = decision.tokens.size
        tokens[b, : decision.tokens.size] = decision.tokens
        accepted[b] = decision.accepted
        probabilities[b, : decision.accept_probabilities.size] = decision.accept_probabilities
    if failed is not None:
        raise failed
    return BatchDecision(tokens, num_tokens, accepted, probabilities)


@dataclass(frozen=True)
class Sequences:
    """Target and draft rows of every sequence, and how many of each count: the rest stands beside padding."""

    targets: list[Any]
    target_counts: list[int]
    drafts: list[Any]
    draft_counts: list[int]


def as_sequences(targets: Any, drafts: Any, proposed: Drafts) -> Sequences:
    """The rows of every sequence, none of them looked at."""
    count, K = len(proposed.tokens), proposed.K
    targets = _each_block(targets, count, "targets")
    drafts = _each_block([None] * count if drafts is None else drafts, count, "drafts")
    # An array has the rows of K drafts for every sequence, whatever it has drafted.
    target_array, draft_array = (isinstance(v, np.ndarray) and v.ndim == 3 for v in (targets, drafts))
    if target_array and targets.shape[1] not in (K, K + 1):
        raise ValueError(f"targets have {targets.shape[1]} rows for K = {K}; expected {K + 1} or {K}")
    if draft_array and drafts.shape[1] != K:
        raise ValueError(f"drafts have {drafts.shape[1]} rows for K = {K}")
    each = Sequences([], [], [], [])
    for b, (tokens, padded) in enumerate(zip(proposed.tokens, proposed.padded, strict=True)):
        with errors_at(f"sequence {b}"):
            target, draft = targets[b], drafts[b]
            rows = len(as_rows(target, "target"))
            if target_array:
                rows = len(tokens) + (rows > K)
            elif rows == padded + 1:
                rows = len(tokens) + 1
            each.targets.append(target)
            each.target_counts.append(rows)
            rows = 0 if draft is None else len(as_rows(draft, "draft"))
            each.drafts.append(draft)
            each.draft_counts.append(len(tokens) if draft_array or rows == padded else rows)
    return each


def _open_all(targets: Any, drafts: Any, proposed: Drafts, readers: Indexed[Reader]) -> list[Block]:
    each = as_sequences(targets, drafts, proposed)
    return [open_one(each, b, tokens, readers[b]) for b, tokens in enumerate(proposed.tokens)]


def open_one(each: Sequences, b: int, tokens: Lazy[int], reader: Reader) -> Block:
    """The block of sequence b."""
    with errors_at(f"sequence {b}"):
        draft = each.drafts[b]
        return open_block(
            as_rows(each.targets[b], "target").first(each.target_counts[b]),
            None if draft is None else as_rows(draft, "draft").first(each.draft_counts[b]),
            tokens,
            reader,
        )


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
        2**32 + 2 to 2**33 - 1 are the drafter's. What a sequence emits depends on its own key and rows
        alone.
    rule, check_draft
        As in `verify_block`.
    executor : concurrent.futures.Executor, optional
        For the compiled face; results never depend on it, and this one computes in the calling thread.

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
    require_executor(executor)
    proposed = as_batch_tokens(draft_tokens)
    blocks = _open_all(targets, drafts, proposed, [Given()] * len(proposed.tokens))
    return decide_all(
        blocks, proposed.K, chosen, open_streams(len(blocks), rngs, seeds, positions), check_draft
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
    require_executor(executor)
    proposed = as_batch_tokens(draft_tokens)
    count = len(proposed.tokens)
    configs = one_or_each(config, count, "config")
    draft_configs = configs if draft_config is None else one_or_each(draft_config, count, "draft_config")
    counts = one_or_each(token_counts, count, "token_counts")
    overlays = one_or_each(penalty_overlay, count, "penalty_overlay")
    readers = [
        FromLogits(tokens, configs[b], draft_configs[b], counts[b], overlays[b])
        for b, tokens in enumerate(proposed.tokens)
    ]
    blocks = _open_all(target_logits, draft_logits, proposed, readers)
    return decide_all(
        blocks, proposed.K, chosen, open_streams(len(blocks), rngs, seeds, positions), check_draft
    )
