"""One case through both faces; every broken promise of contract 1 as a line of text."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtplx import reference, sampling
from mtplx.distributions import SamplerConfig, SparseDistribution
from support.cases import Case
from support.generators import LAST, script, scripted
from support.ulps import ulps_apart

FROM_LOGITS, GIVEN, LAW = 8.0, 4.0, 1e-12  # contract 1, promise 3
NARROW = 4.0  # softmax to float32, in float32 units (design 3)


class Expected:
    """What the reference gives for a case; worked out once for all that is compared with it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = SamplerConfig(case.temperature, case.top_p, case.top_k, case.presence, case.frequency)
        p = case.target
        self.rng = np.random.Generator(np.random.PCG64(case.draw_seed))
        self.start = self.rng.bit_generator.state
        self.scripted = scripted()
        self.penalised = reference.apply_penalties(
            case.logits, case.counts, case.presence, case.frequency, case.overlay
        )
        self.softmax = reference.softmax(self.penalised, case.temperature)
        self.order = reference.deterministic_top_k_order(p, case.top_k)
        self.truncated = [reference.apply_top_p_top_k(p, *settings) for settings in self.truncations()]
        self.pairs = list(self.kinds())
        self.residuals = [reference.residual_distribution(a, b) for a, b in self.pairs]
        self.draws = [self.draw(reference, d) for d in (self.pairs[0][0], self.pairs[1][0])]
        self.verifications = [self.verify(reference, a, b) for a, b in self.pairs]
        self.accept = [reference.acceptance_probability(a, b, case.token) for a, b in self.pairs]
        self.laws = [self.law(reference, a, b) for a, b in self.pairs[:2]]

    def truncations(self) -> list[tuple[float, int]]:
        case = self.case
        return [(case.top_p, case.top_k), (case.edge, 0), (case.edge, case.top_k)]

    def kinds(self) -> Iterator[tuple[Any, Any]]:
        """Dense, sparse (ids ascending, as a sampler makes them), mixed, and sparse in any order."""
        p, q = self.case.target, self.case.draft
        dense = p.astype(np.float64), q.astype(np.float64)
        sparse = []
        for row in dense:
            ids = np.flatnonzero(row)
            sparse.append(SparseDistribution(ids, row[ids], row.size))
        shuffled = np.random.Generator(np.random.PCG64(self.case.draw_seed)).permutation(
            sparse[1].token_ids.size
        )
        stored = SparseDistribution(sparse[1].token_ids[shuffled], sparse[1].probs[shuffled], p.size)
        yield p, q
        yield sparse[0], sparse[1]
        yield sparse[0], q
        yield p, stored
        yield stored, sparse[0]

    def draw(self, face: Any, distribution: Any) -> list[Any]:
        rng = self.rng
        rng.bit_generator.state = self.start
        tokens = [face.sample_from_distribution(distribution, rng) for _ in range(2)]
        for u in self.case.uniforms:
            tokens.append(face.sample_from_distribution(distribution, script(self.scripted, u)))
        return [tokens, rng.bit_generator.state]

    def verify(self, face: Any, p: Any, q: Any) -> list[Any]:
        token, (first, second) = self.case.token, self.case.uniforms
        rng = self.rng
        rng.bit_generator.state = self.start
        found: list[Any] = [face.verify_one_token(p, q, token, rng), rng.bit_generator.state]
        for coin in (first, LAST):
            found.append(face.verify_one_token(p, q, token, script(self.scripted, coin, second)))
        return found

    def law(self, face: Any, p: Any, q: Any) -> tuple[Any, list[float]]:
        """Distances are stated absolutely, so of rows that sum to about 1."""
        if not isinstance(p, SparseDistribution):
            p, q = (reference.apply_top_p_top_k(row) for row in (p, q))
        return face.speculative_output_marginal(p, q), [
            face.total_variation(p, q),
            face.distribution_entropy(p),
            face.distribution_entropy(q),
        ]


def as_dense(distribution: Any) -> Any:
    return distribution.to_dense() if isinstance(distribution, SparseDistribution) else distribution


def compare_rows(name: str, got: Any, want: Any, most: float, strict: bool = False) -> Iterator[str]:
    """Same support, and no entry more than `most` units away."""
    if isinstance(want, SparseDistribution):
        if not isinstance(got, SparseDistribution) or got.vocab_size != want.vocab_size:
            yield f"{name}: {type(got).__name__} in place of {type(want).__name__}"
            return
        if not np.array_equal(got.token_ids, want.token_ids):
            yield f"{name}: other ids"
            return
        got, want = got.probs, want.probs
    # A quotient that rounds to the smallest subnormal or to 0 is a matter of ulps, not of what is kept;
    # `strict` where the divisor is at most 1, which leaves nothing to round away.
    smallest = 0.0 if strict else 2 * 5e-324
    places = np.flatnonzero(((got > 0) != (want > 0)) & (np.maximum(got, want) > smallest))
    if places.size:
        yield f"{name}: {places.size} entries kept by one face only, the first {places[:5].tolist()}"
        return
    apart = ulps_apart(got, want)
    if apart > most:
        yield f"{name}: {apart:.3g} units apart"


def mismatches(expected: Expected) -> Iterator[str]:
    """`sampling`, on the instruction set in use, against the reference and against its own softmax."""
    case, config = expected.case, expected.config
    settings = {"token_counts": case.counts, "penalty_overlay": case.overlay}

    # ---- of given probabilities: the same decisions, always
    if not np.array_equal(sampling.deterministic_top_k_order(case.target, case.top_k), expected.order):
        yield "deterministic_top_k_order: other ids"
    for (top_p, top_k), want in zip(expected.truncations(), expected.truncated, strict=True):
        got = sampling.apply_top_p_top_k(case.target, top_p, top_k)
        yield from compare_rows(f"apply_top_p_top_k({top_p!r}, {top_k})", got, want, GIVEN)
    for i, (p, q) in enumerate(expected.pairs):
        got = sampling.residual_distribution(p, q)
        want = expected.residuals[i]
        yield from compare_rows(f"residual_distribution, pair {i}", got, want, GIVEN)
        if (want is p) != (got is p):
            yield f"residual_distribution, pair {i}: the target object is due"
        if expected.verify(sampling, p, q) != expected.verifications[i]:
            yield f"verify_one_token, pair {i}: {expected.verify(sampling, p, q)[::2]}"
        # A coin may lie between two neighbouring floats, so the quotient must be the same one.
        if sampling.acceptance_probability(p, q, case.token) != expected.accept[i]:
            yield f"acceptance_probability, pair {i}"
    for i, want in enumerate(expected.draws):
        if (got := expected.draw(sampling, expected.pairs[i][0])) != want:
            yield f"sample_from_distribution, pair {i}: {got[0]} for {want[0]}"
    for i, (marginal, numbers) in enumerate(expected.laws):
        got_marginal, got_numbers = expected.law(sampling, *expected.pairs[i])
        apart = max(np.abs(got_marginal - marginal).max(), np.abs(np.subtract(got_numbers, numbers)).max())
        if not apart <= LAW:
            yield f"laws, pair {i}: {apart:.3g} apart"

    # ---- from logits: softmax within its tolerance, the rest by composition with it
    penalised = sampling.apply_penalties(
        case.logits, case.counts, case.presence, case.frequency, case.overlay
    )
    if penalised is case.logits:
        if expected.penalised is not case.logits:
            yield "apply_penalties: a copy is due"
    elif penalised.tobytes() != expected.penalised.tobytes():
        yield "apply_penalties: other bits"
    p = sampling.softmax(penalised, case.temperature)
    if (apart := ulps_apart(p, expected.softmax)) > FROM_LOGITS:
        yield f"softmax: {apart:.3g} units apart"
    narrow = sampling.softmax(penalised, case.temperature, out=np.empty(p.size, dtype=np.float32))
    if (apart := ulps_apart(narrow, expected.softmax, np.float32)) > NARROW:
        yield f"softmax to float32: {apart:.3g} units apart"
    greedy = case.temperature <= 0.0
    want = p if greedy else reference.apply_top_p_top_k(p, case.top_p, case.top_k)
    dense = sampling.distribution_from_logits(case.logits, config, **settings)
    yield from compare_rows(
        "distribution_from_logits", dense, want, 0.0 if greedy else FROM_LOGITS, strict=True
    )
    sparse = sampling.sparse_distribution_from_logits(case.logits, config, **settings)
    if not np.array_equal(sparse.token_ids, np.flatnonzero(want)):
        yield "sparse_distribution_from_logits: other ids"
    elif (apart := ulps_apart(sparse.probs, want[sparse.token_ids])) > FROM_LOGITS:
        yield f"sparse_distribution_from_logits: {apart:.3g} units apart"
    if not greedy:
        # The reference's own softmax may tie or cut otherwise; where it keeps the same, the row is close.
        row = reference.apply_top_p_top_k(expected.softmax, case.top_p, case.top_k)
        if np.array_equal(row > 0, dense > 0) and (apart := ulps_apart(dense, row)) > FROM_LOGITS:
            yield f"distribution_from_logits against the reference's: {apart:.3g} units apart"
