"""Random batches of blocks, and everything that two ways of verifying them do not agree on.

A case is a batch of up to four blocks: (seed, number) -> case, the same on every run. Each block is verified
alone, in a batch, in a batch split over an executor, and once more with everything behind its first rejection
made unreadable. What has to come out is what `mtplx.reference` makes of the rows (the loop over
`verify_one_token` for the exact rule), draw for draw; from logits, of what `distributions_from_logits` gives.
"""

import ctypes
import itertools
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from mtplx._csampling import dispatch

from mtplx import batch, reference, verification
from mtplx.decisions import BlockDecision
from mtplx.distributions import SamplerConfig
from support.blocks import RULES, by_the_loop, fields_of, in_some_form, random_block
from support.cases import SHAPES, logits_of
from support.dlpack import Producer
from support.generators import STEP, plain_state, scripted

MOST_BLOCKS, MOST_DRAFTS = 4, 8
SMALL, MIDDLE, WHOLE = 2_000, 12_000, 151_936
ONE_WHOLE_IN, ONE_MIDDLE_IN = 1_000, 30  # a middling row is long enough to be streamed
DTYPES = ("float64", "float64", "float32", "float32", "float16", "bfloat16", ">f8", ">f4", "int16")
TEMPERATURES = (-1.0, 0.0, 0.1, 0.6, 1.0, 2.0)
TOP_PS = (0.0, 0.1, 0.9, 0.95, 1.0)
TOP_KS = (0, None, 1, 5, 20)


@dataclass(frozen=True)
class Block:
    target: Any  # rows, or rows of logits, in some form; K + 1 of them or K
    draft: Any  # None: point masses
    tokens: list[int]
    config: SamplerConfig | None = None  # None: rows of probabilities
    draft_config: SamplerConfig | None = None
    counts: dict[int, int] | None = None
    overlay: Any = None


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    V: int
    rule: Any
    isa: str
    blocks: list[Block]
    coins: list[tuple[float, ...]]  # what the first numbers of each block's generator are
    keys: list[tuple[int, int]] | None  # seeds and positions instead
    whole: bool  # as arrays [B, K + 1, V]
    check_draft: bool

    def __str__(self) -> str:
        given = "probabilities" if self.blocks[0].config is None else "logits"
        return (
            f"case {self.number} (seed {self.seed}): V={self.V} {self.rule} from {given}, "
            f"K={[len(block.tokens) for block in self.blocks]} {self.isa}"
        )


# ---- making them -------------------------------------------------------------------------------------


def make_case(number: int, seed: int = 0) -> Case:
    rng = np.random.Generator(np.random.PCG64([seed, number, 4]))
    V = int(np.exp(rng.uniform(np.log(2.0), np.log(SMALL + 1.0))))
    count = int(rng.integers(1, MOST_BLOCKS + 1))
    most = MOST_DRAFTS
    if rng.integers(ONE_WHOLE_IN) == 0:
        V, count, most = WHOLE, 1, 2
    elif rng.integers(ONE_MIDDLE_IN) == 0:
        V, most = int(rng.integers(SMALL, MIDDLE)), 4
    rule = RULES[number % len(RULES)] if rng.random() < 0.5 else "exact"
    whole = rng.random() < 0.2
    bonus = rng.random() < 0.8
    # The rows of one array are as many for every sequence, however many drafts it has.
    drafts = [int(rng.integers(0, most + 1)) for _ in range(count)]
    of_logits = rng.random() < 0.6
    # Of an array, the row behind the last draft is there for every sequence.
    bonus = bonus or whole
    points = rng.random() < 0.2
    dtype, config, draft_config = str(rng.choice(DTYPES)), some_config(rng), some_config(rng)
    blocks, coins = [], []
    for K in drafts:
        if of_logits:
            block = block_of_logits(rng, V, K, bonus, dtype, config, draft_config, whole, points)
        else:
            block = block_of_rows(rng, V, K, bonus, whole, points)
        blocks.append(block)
        coins.append(tuple(float(rng.integers(2**53)) * STEP for _ in range(4)))
    isas = dispatch.available_isas()
    case = Case(
        seed,
        number,
        V,
        rule,
        isas[number % len(isas)],
        blocks,
        coins,
        [(int(rng.integers(2**63)), int(rng.integers(2**40))) for _ in drafts]
        if rng.random() < 0.3
        else None,
        whole,
        bool(rng.random() < 0.1),
    )
    if rng.random() < 0.05:
        spoil(case, rng)
    if case.keys is None and rng.random() < 0.5:
        case.coins[:] = [forced(case, block, rng) for block in case.blocks]
    return case


def some_config(rng: Any) -> SamplerConfig:
    return SamplerConfig(
        float(rng.choice(TEMPERATURES)), float(rng.choice(TOP_PS)), TOP_KS[rng.integers(len(TOP_KS))]
    )


def block_of_rows(rng: Any, V: int, K: int, bonus: bool, whole: bool, points: bool) -> Block:
    target, draft, tokens = random_block(rng, V, K, bonus)
    if not whole:
        target, draft = in_some_form(target, rng), in_some_form(draft, rng)
    return Block(target, None if points else draft, tokens)


def block_of_logits(
    rng: Any,
    V: int,
    K: int,
    bonus: bool,
    dtype: str,
    config: Any,
    draft_config: Any,
    whole: bool,
    points: bool,
) -> Block:
    shape = str(rng.choice(SHAPES))
    target = np.array([logits_of(shape, V, rng) for _ in range(K + bonus)]).reshape(K + bonus, V)
    with np.errstate(all="ignore"):
        noise = rng.normal(size=(K, V)) * rng.choice([0.0, 0.1, 1.0])
        target, draft = as_type(target, dtype), as_type(target[:K] + noise, dtype)
    tokens = [drafted(row, rng) for row in draft]
    presence, frequency, counts, overlay = 0.0, 0.0, None, None
    if rng.random() < 0.3:
        presence, frequency = float(rng.choice([0.0, 0.7, -3.0])), float(rng.choice([0.0, 0.25]))
        counts = {int(rng.integers(V)): int(rng.integers(4)) for _ in range(int(rng.integers(4)))}
        overlays = [
            {int(rng.integers(V)): float(rng.normal()) * 3} if rng.random() < 0.7 else None
            for _ in range(K + 1)
        ]
        overlay = overlays if rng.random() < 0.5 else overlays[0]
    config = SamplerConfig(config.temperature, config.top_p, config.top_k, presence, frequency)
    if not whole:
        target, draft = in_memory(target, rng), in_memory(draft, rng)
    return Block(target, None if points else draft, tokens, config, draft_config, counts, overlay)


def as_type(rows: Any, dtype: str) -> Any:
    if dtype == "int16":
        return np.clip(np.nan_to_num(np.round(rows), neginf=-9.0), -3e4, 3e4).astype(dtype)
    found = rows.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    infinite = ~np.isfinite(found.astype(np.float64).max(axis=1))
    found[infinite] = 0  # a short float has no room for the largest
    return found


def in_memory(rows: Any, rng: Any) -> Any:
    """The same numbers of the same type in some layout, or through DLPack."""
    form = rng.integers(6)
    if form == 0:
        return np.asfortranarray(rows)
    if form == 1:
        return np.repeat(rows, 2, axis=1)[:, ::2]
    if form == 2:
        return list(rows)
    if form == 3:
        return rows[::-1].copy()[::-1]
    if form == 4 and rows.dtype.isnative:
        return Producer(rows)
    return rows


def drafted(row: Any, rng: Any) -> int:
    """Mostly what such a row would draft, now and then anything."""
    if rng.random() < 0.2:
        return int(rng.integers(row.size))
    x = row.astype(np.float64)
    return int(np.argmax(np.where(np.isfinite(x), x, -1e300) / 2.0 + rng.gumbel(size=x.size)))


def spoil(case: Case, rng: Any) -> None:
    """One block with something that may not be there; it may never be reached."""
    at = int(rng.integers(len(case.blocks)))
    block = case.blocks[at]
    K = len(block.tokens)
    if K and rng.random() < 0.3:
        block.tokens[int(rng.integers(K))] = [case.V, -2, 2**61, 2**70][rng.integers(4)]
        return
    rows = block.target if block.draft is None or rng.random() < 0.5 else block.draft
    if isinstance(rows, np.ndarray) and len(rows) and rows.dtype.kind != "i" and rows.flags.writeable:
        bad = np.nan if block.config is not None or rng.random() < 0.5 else -0.5
        rows[int(rng.integers(len(rows))), int(rng.integers(case.V))] = bad


def forced(case: Case, block: Block, rng: Any) -> tuple[float, ...]:
    """Coins on, or next to, their acceptance probabilities, and a draw on a step of a cumulative sum."""
    try:
        with on_isa(case.isa):
            p_rows, q_rows = rows_of(block)
        coins = []
        for i, token in enumerate(block.tokens[:3]):
            p, q = as_dense(p_rows[i], case.V), as_dense(q_rows[i] if q_rows else None, case.V, token)
            if rng.random() < 0.4:
                left = np.maximum(p - q, 0.0)
                sums = np.cumsum(left if left.any() else p)
                return (*coins, 1.0 - STEP, next_to(sums[rng.integers(case.V)] / sums[-1], rng))
            coins.append(next_to(min(p[token] / q[token], 1.0) if q[token] else 1.0, rng))
        return tuple(coins)
    except Exception:  # a spoilt block: its coins are as good as any
        return (0.5,)


def next_to(value: float, rng: Any) -> float:
    if not 0.0 <= value <= 1.0:
        return 0.5
    step = int(np.floor(value / STEP)) + int(rng.integers(-1, 2))
    return min(max(step, 0), 2**53 - 1) * STEP


def as_dense(row: Any, V: int, token: int = 0) -> Any:
    if row is None:
        return np.eye(1, V, token)[0]
    return row.to_dense() if hasattr(row, "to_dense") else np.asarray(row, dtype=np.float64)


# ---- what has to come out ------------------------------------------------------------------------------


class on_isa:
    """Everything inside runs on one instruction set."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def __enter__(self) -> None:
        self.before = dispatch.active_isa()
        dispatch.use_isa(self.isa)

    def __exit__(self, *_: object) -> None:
        dispatch.use_isa(self.before)


def rows_of(block: Block) -> tuple[Any, Any]:
    """The distributions of a block, as the call on rows takes them."""
    if block.config is None:
        return block.target, block.draft
    K = len(block.tokens)
    counts = [dict(block.counts or {}) for _ in range(K + 1)]
    for i, j in itertools.combinations(range(K + 1), 2):
        token = block.tokens[i]
        counts[j][token] = counts[j].get(token, 0) + 1
    if block.config.presence_penalty == block.config.frequency_penalty == 0.0:
        counts = [None] * (K + 1)
    given = length(block.target)
    overlay = block.overlay if isinstance(block.overlay, list) else [block.overlay] * (K + 1)
    target = distributions(block.target, block.config, counts[:given], overlay[:given])
    draft = None
    if block.draft is not None:
        draft = distributions(block.draft, block.draft_config, [None] * K, [None] * K)
    return target, draft


class NoDistribution:
    """A row of logits that gives none: an error for whoever reaches it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error


def distributions(logits: Any, config: Any, counts: list[Any], overlays: list[Any]) -> list[Any]:
    if not counts:
        return []
    try:
        rows: Any = batch.distributions_from_logits(
            logits, config, token_counts=counts, penalty_overlay=overlays
        )
    except (ValueError, IndexError) as error:
        if len(counts) == 1:
            return [NoDistribution(error)]
        each = logits.array if isinstance(logits, Producer) else logits
        return [
            distributions([row], config, [count], [overlay])[0]
            for row, count, overlay in zip(each, counts, overlays, strict=True)
        ]
    return (
        [rows.to_distribution(i) for i in range(len(rows))]
        if hasattr(rows, "to_distribution")
        else list(rows)
    )


def length(rows: Any) -> int:
    return len(rows.array) if isinstance(rows, Producer) else len(rows)


def outcome(call: Any) -> Any:
    """What a call returns, or the class of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__


def same(found: Any, expected: Any, loosely: bool) -> bool:
    if isinstance(found, str) or isinstance(expected, str):
        return found == expected
    one, other = fields_of(found), fields_of(expected)
    if one[:2] + one[3:] != other[:2] + other[3:] or len(one[2]) != len(other[2]):
        return False
    return np.allclose(one[2], other[2], rtol=1e-5, atol=0.0) if loosely else one[2] == other[2]


def alone(case: Case, block: Block, rng: Any) -> Any:
    options = {"rule": case.rule, "check_draft": case.check_draft}
    if block.config is None:
        return verification.verify_block(block.target, block.draft, block.tokens, rng, **options)
    return verification.verify_block_from_logits(
        block.target,
        block.draft,
        block.tokens,
        block.config,
        block.draft_config,
        rng,
        token_counts=block.counts,
        penalty_overlay=block.overlay,
        **options,
    )


def together(case: Case, rngs: Any, executor: Any) -> Any:
    blocks = case.blocks
    options = {"rule": case.rule, "check_draft": case.check_draft, "executor": executor}
    if case.keys is not None:
        options |= {"seeds": [key[0] for key in case.keys], "positions": [key[1] for key in case.keys]}
    targets, drafts = [block.target for block in blocks], [block.draft for block in blocks]
    tokens: Any = [block.tokens for block in blocks]
    if case.whole:
        targets, drafts, tokens = stacked(targets, 1), stacked(drafts, 0), padded(tokens)
    elif drafts[0] is None:
        drafts = None
    if blocks[0].config is None:
        return verification.verify_batch(targets, drafts, tokens, rngs, **options)
    return verification.verify_batch_from_logits(
        targets,
        drafts,
        tokens,
        [block.config for block in blocks],
        [block.draft_config for block in blocks],
        rngs,
        token_counts=[block.counts for block in blocks],
        penalty_overlay=[block.overlay for block in blocks],
        **options,
    )


def stacked(sides: list[Any], least: int) -> Any:
    """Rows of all blocks as one array; what no block has is never looked at."""
    if sides[0] is None:
        return None
    most = max([least, *(len(rows) for rows in sides)])
    found = np.zeros((len(sides), most, sides[0].shape[1]), dtype=sides[0].dtype)
    for rows, to in zip(sides, found, strict=True):
        to[: len(rows)] = rows
    return found


def padded(tokens: list[list[int]]) -> Any:
    """One array of all ids, or lists where an int64 does not hold them."""
    most = max(map(len, tokens))
    found = [row + [-1] * (most - len(row)) for row in tokens]
    return (
        found if any(token >= 2**63 for row in tokens for token in row) else np.array(found, dtype=np.int64)
    )


def of_sequence(found: Any, b: int, block: Block) -> Any:
    """One sequence of a batch as the fields of a block."""
    emitted, accepted = int(found.num_tokens[b]), int(found.accepted[b])
    probabilities = found.accept_probabilities[b]
    tokens = found.tokens[b].tolist()
    if any(token != -1 for token in tokens[emitted:]):
        return "not padded"
    tested = probabilities[~np.isnan(probabilities)].tolist()
    bonus = accepted == len(block.tokens) and emitted > accepted
    return tokens[:emitted], accepted, tested, bonus


@cache
def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


# ---- the comparison ------------------------------------------------------------------------------------


def check(seed: int, number: int) -> list[str]:
    """Everything that is wrong with one case."""
    case = make_case(number, seed)
    with (
        # Or batches as small as these would never be split.
        patch.multiple(verification, WORTHWHILE_LOGITS=0, WORTHWHILE_PROBABILITIES=0),
        on_isa(case.isa),
    ):
        return [f"{case}: {line}" for line in mismatches(case)]


def describe(seed: int, number: int) -> str:
    return str(make_case(number, seed))


def mismatches(case: Case) -> Any:
    loosely = case.blocks[0].config is not None
    expected, states = [], []
    for b, block in enumerate(case.blocks):
        rows = rows_of(block)
        rng = scripted(*case.coins[b])
        wanted = outcome(
            lambda block=block, rng=rng, rows=rows: reference.verify_block(
                *rows, block.tokens, rng, rule=case.rule, check_draft=case.check_draft
            )
        )
        expected.append(wanted)
        states.append(plain_state(rng))
        if case.rule == "exact" and not case.check_draft and not isinstance(wanted, str):
            rng = scripted(*case.coins[b])
            emitted, accepted, probabilities, bonus = by_the_loop(*rows, block.tokens, rng)
            if (emitted, accepted, bonus) != (wanted.tokens.tolist(), wanted.accepted, wanted.bonus) or (
                plain_state(rng) != states[-1] or probabilities != wanted.accept_probabilities.tolist()
            ):
                yield f"block {b}: the loop emits {emitted}, the reference {wanted}"
        rng = scripted(*case.coins[b])
        found = outcome(lambda block=block, rng=rng: alone(case, block, rng))
        if not same(found, wanted, loosely):
            yield f"block {b}: {found} for {wanted}"
        elif plain_state(rng) != states[-1]:
            yield f"block {b}: other draws"
        elif not isinstance(wanted, str):
            yield from behind_the_rejection(case, b, block, wanted)
    if case.keys is not None:
        expected = [outcome(lambda b=b: of_keys(case, b)) for b in range(len(case.blocks))]
    for pool in (None, executor()):
        rngs = None if case.keys is not None else [scripted(*coins) for coins in case.coins]
        found = outcome(lambda rngs=rngs, pool=pool: together(case, rngs, pool))
        errors = [wanted for wanted in expected if isinstance(wanted, str)]
        if isinstance(found, str) or errors:
            if found not in errors:
                yield f"batch: {found} for {errors}"
            continue
        for b, wanted in enumerate(expected):
            emitted = of_sequence(found, b, case.blocks[b])
            fields = fields_of(wanted)
            if emitted[:2] + emitted[3:] != fields[:2] + fields[3:]:
                yield f"batch, block {b}: {emitted} for {fields}"
            elif not np.allclose(emitted[2], fields[2], rtol=1e-5 if loosely else 0.0, atol=0.0):
                yield f"batch, block {b}: other probabilities"
            elif rngs is not None and plain_state(rngs[b]) != states[b]:
                yield f"batch, block {b}: other draws"


def of_keys(case: Case, b: int) -> Any:
    """The reference's block with a keyed stream."""
    seed, position = case.keys[b]
    block = case.blocks[b]
    options = {"seeds": [seed], "positions": [position], "rule": case.rule, "check_draft": case.check_draft}
    target, draft = rows_of(block)
    found = reference.verify_batch([target], None if draft is None else [draft], [block.tokens], **options)
    return BlockDecision(*of_sequence(found, 0, block))


# ---- what must not be read -----------------------------------------------------------------------------


def behind_the_rejection(case: Case, b: int, block: Block, wanted: Any) -> Any:
    """The same block with NaN in the rows behind its rejection, and with rows that no one can read."""
    K, first = len(block.tokens), wanted.accepted + 1
    if case.rule == "block" or first > K:
        return
    for make in (poisoned, unreadable):
        if make is unreadable and (case.number + b) % 8:
            continue
        kept: list[Any] = []
        target = make(block.target, first, kept)
        draft = block.draft if block.draft is None else make(block.draft, first, kept)
        if target is None or (draft is None) != (block.draft is None):
            continue
        spoilt = Block(
            target, draft, block.tokens, block.config, block.draft_config, block.counts, block.overlay
        )
        rng = scripted(*case.coins[b])
        found = outcome(lambda spoilt=spoilt, rng=rng: alone(case, spoilt, rng))
        for protect in kept:
            protect(mmap.PROT_READ | mmap.PROT_WRITE)
        if not same(found, wanted, block.config is not None):
            yield f"block {b}, {make.__name__} from row {first} on: {found} for {wanted}"


def poisoned(rows: Any, first: int, kept: list[Any]) -> Any:
    if not isinstance(rows, np.ndarray) or rows.dtype.kind == "i":
        return None
    spoilt = rows.copy(order="A")
    spoilt[first:] = np.nan
    return spoilt


def unreadable(rows: Any, first: int, kept: list[Any]) -> Any:
    """The rows in pages of their own, those from `first` on not to be read: a crash if they are."""
    if not isinstance(rows, np.ndarray) or len(rows) <= first or rows.dtype.kind == "i":
        return None
    pages = -(-rows.shape[1] * rows.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages * len(rows))
    plain = np.frombuffer(memory, dtype=np.uint8)
    width = rows.shape[1] * rows.itemsize
    spoilt = plain.reshape(len(rows), pages)[:, :width].view(rows.dtype)
    spoilt[:first] = rows[:first]
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start, size = plain.ctypes.data + first * pages, (len(rows) - first) * pages

    def permit(what: int) -> None:
        if protect(start, size, what):
            raise OSError(ctypes.get_errno(), "mprotect")

    permit(0)  # PROT_NONE
    kept.append(permit)
    return spoilt
