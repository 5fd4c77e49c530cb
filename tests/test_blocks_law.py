"""The joint law of what whole blocks emit, by frequencies, and faults that it must catch.

V = 4, K = 3, rows that depend on the whole prefix. A block is drafted from the draft's rows, verified, and
continued with the target to `LENGTH` tokens; under a lossless rule the result has the target's law, whatever
the draft. That law is a product of rows, so no derivation of a rule enters it.

The first token, the first two, .. and the whole text are each tested. Seeds are fixed; `FALSE_ALARM` is how
likely a correct rule would have failed one of these tests for some choice of seeds, and the same test must
reject each planted fault.
"""

import itertools

import numpy as np
import pytest
from support.blocks import InOrder, every_face, first_above, plain_block
from support.statistics import FALSE_ALARM, law_refuted

from mtplx import reference
from mtplx.reference import rules

V, K, LENGTH, BLOCKS = 4, 3, 4, 8_000
LOSSLESS = ("exact", "match", "block")


class Model:
    """Rows by prefix, from a seeded table."""

    def __init__(self, seed, near=None, share=0.0):
        rng = np.random.default_rng(seed)
        self.rows = {}
        for length in range(LENGTH):
            for prefix in itertools.product(range(V), repeat=length):
                row = rng.dirichlet([1.0] * V)
                self.rows[prefix] = row if near is None else share * near.rows[prefix] + (1.0 - share) * row

    def drawn(self, prefix, rng):
        return first_above(self.rows[prefix], rng.random())


TARGET = Model(5)
DRAFT = Model(6, TARGET, 0.3)

LAW = np.zeros([V] * LENGTH)
for text in itertools.product(range(V), repeat=LENGTH):
    LAW[text] = np.prod([TARGET.rows[text[:i]][token] for i, token in enumerate(text)])
assert np.isclose(LAW.sum(), 1.0)


def counts_of(verify, seed, draft=True, blocks=BLOCKS):
    """How often each text of `LENGTH` tokens comes out of `verify(target rows, draft rows, drafts, rng)`."""
    rng = np.random.default_rng([50, seed])
    counts = np.zeros([V] * LENGTH)
    for _ in range(blocks):
        drafts = ()
        for _ in range(K):
            drafts += (DRAFT.drawn(drafts, rng),)
        target_rows = [TARGET.rows[drafts[:i]] for i in range(K + 1)]
        draft_rows = [DRAFT.rows[drafts[:i]] for i in range(K)] if draft else None
        text = tuple(verify(target_rows, draft_rows, drafts, rng))
        while len(text) < LENGTH:
            text += (TARGET.drawn(text, rng),)
        counts[text] += 1
    return counts


def refuted(counts):
    """Whether texts like these come from the target less often than `FALSE_ALARM`."""
    return any(
        law_refuted(counts.sum(axis=rest).ravel(), LAW.sum(axis=rest).ravel(), FALSE_ALARM / LENGTH)
        for rest in (tuple(range(first, LENGTH)) for first in range(1, LENGTH + 1))
    )


@every_face
@pytest.mark.parametrize("rule", LOSSLESS)
def test_lossless_rules_emit_the_law_of_the_target(face, rule):
    def verify(target, draft, drafts, rng):
        return face.verify_block(target, draft, drafts, rng, rule=rule).tokens.tolist()

    assert not refuted(counts_of(verify, 1))


@every_face
def test_point_masses_emit_the_law_of_the_target(face):
    """Drafts may come from anywhere, a draft model included, if they are verified as point masses."""
    for rule in ("exact", "block"):

        def verify(target, draft, drafts, rng, rule=rule):
            return face.verify_block(target, draft, drafts, rng, rule=rule).tokens.tolist()

        assert not refuted(counts_of(verify, 2, draft=False, blocks=BLOCKS // 2))


@every_face
def test_keyed_streams_emit_the_law_of_the_target(face):
    """One seed, one position after another: lanes and positions are independent numbers."""
    position = itertools.count()

    def verify(target, draft, drafts, rng):
        batch = face.verify_batch(
            [target], [draft], [drafts], seeds=[7], positions=[next(position)], rule="block"
        )
        return batch.tokens[0, : batch.num_tokens[0]].tolist()

    assert not refuted(counts_of(verify, 3, blocks=BLOCKS // 2))


# ---- planted faults ----------------------------------------------------------------------------------


def drawn(weights, otherwise, u):
    positive = np.maximum(weights, 0.0)
    return first_above(positive if positive.any() else otherwise, u)


def exact_with(fault):
    """The exact rule on dense rows, with one fault."""

    def verify(target, draft, drafts, rng):
        for i, x in enumerate(drafts):
            coin = rng.random()
            if coin <= min(1.0, target[i][x] / draft[i][x]):
                continue
            row = i + 1 if fault == "residual of the wrong row" and i + 1 < K else i
            weights = target[row] - draft[row]
            u = coin if fault == "coin reused for the correction" else rng.random()
            emitted = [*drafts[:i], drawn(weights, target[row], u)]
            if fault == "bonus drawn after a rejection":
                emitted.append(first_above(target[K], rng.random()))
            return emitted[:LENGTH]
        return [*drafts, first_above(target[K], rng.random())]

    return verify


def block_with(fault):
    """The block rule on dense rows, with one fault."""

    def verify(target, draft, drafts, rng):
        prefixes = [1.0]
        for p, q, x in zip(target, draft, drafts, strict=False):
            ratio = prefixes[-1] * p[x] / q[x]
            prefixes.append(ratio if fault == "prefix not capped" else min(1.0, ratio))
        coins = [rng.random() for _ in drafts]
        accepted = 0
        for i in range(1, K + 1):
            if i == K:
                keep = prefixes[K]
            else:
                mass = np.maximum(prefixes[i] * target[i] - draft[i], 0.0).sum()
                slack = 1.0 - (1.0 if fault == "slack forgotten" else prefixes[i])
                keep = mass / (mass + slack) if mass + slack else 1.0
            if coins[i - 1] <= keep:
                accepted = i
        if accepted == K:
            return [*drafts, first_above(target[K], rng.random())]
        row = max(accepted - 1, 0) if fault == "correction at the wrong row" else accepted
        weights = prefixes[row] * target[row] - draft[row]
        return [*drafts[:accepted], drawn(weights, target[row], rng.random())]

    return verify


FAULTS = {
    "coin reused for the correction": exact_with,
    "residual of the wrong row": exact_with,
    "bonus drawn after a rejection": exact_with,
    "prefix not capped": block_with,
    "slack forgotten": block_with,
    "correction at the wrong row": block_with,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_frequency_test_catches(fault):
    assert refuted(counts_of(FAULTS[fault](fault), 4))


@pytest.mark.parametrize("make", [exact_with, block_with])
def test_the_same_code_without_a_fault_passes(make):
    assert not refuted(counts_of(make(None), 4))


# ---- how much is accepted ----------------------------------------------------------------------------


@every_face
def test_block_keeps_more_than_exact(face):
    """Mean accepted drafts over the same blocks; a difference of means, so many standard errors above 0."""
    rng = np.random.default_rng(60)
    gains = []
    for _ in range(2000):
        drafts = ()
        for _ in range(K):
            drafts += (DRAFT.drawn(drafts, rng),)
        target_rows = [TARGET.rows[drafts[:i]] for i in range(K + 1)]
        draft_rows = [DRAFT.rows[drafts[:i]] for i in range(K)]
        seed = rng.integers(2**62)
        kept = [
            face.verify_block(
                target_rows, draft_rows, drafts, np.random.default_rng(seed), rule=rule
            ).accepted
            for rule in ("block", "exact")
        ]
        gains.append(kept[0] - kept[1])
    assert np.mean(gains) > 5.0 * np.std(gains) / np.sqrt(len(gains))


def test_the_plain_statement_passes_too():
    """So that a fault of the statement that other tests compare with would show here."""
    for rule in LOSSLESS:

        def verify(target, draft, drafts, rng, rule=rule):
            return plain_block(rule, target, draft, drafts, InOrder(rng))[0]

        assert not refuted(counts_of(verify, 5))


# ---- coins taken out ---------------------------------------------------------------------------------


def outcomes(rule, target, draft, drafts):
    """(probability, accepted, weights of the next token) of one block, as `mtplx.reference.rules` says."""
    alive = 1.0
    if rule == "block":
        prefixes = rules.prefix_acceptances(target, draft, drafts)
        for i in range(K, -1, -1):
            if i == K:
                keep, weights = prefixes[K - 1], target[K]
            else:
                prefix = prefixes[i - 1] if i else 1.0
                keep = rules.block_keep_probability(target[i], draft[i], prefix) if i else 1.0
                weights = rules.block_weights(target[i], draft[i], prefix)[1]
            yield alive * keep, i, weights
            alive *= 1.0 - keep
        return
    for i, x in enumerate(drafts):
        if rule == "match":
            keep, weights = target[i][x], np.where(np.arange(V) == x, 0.0, target[i])
        else:
            keep = reference.acceptance_probability(target[i], draft[i], x)
            weights = rules.exact_weights(target[i], draft[i])[1]
        yield alive * (1.0 - keep), i, weights
        alive *= keep
    yield alive, K, target[K]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("model", [DRAFT, TARGET, Model(9)], ids=["near", "the target itself", "far"])
def test_the_recipe_for_taking_coins_out(rule, model):
    """Every draft, every outcome: the law of the target, to 1e-12."""
    law = np.zeros([V] * LENGTH)
    for drafts in itertools.product(range(V), repeat=K):
        target = [TARGET.rows[drafts[:i]] for i in range(K + 1)]
        draft = [model.rows[drafts[:i]] for i in range(K)]
        drafted = np.prod([row[x] for row, x in zip(draft, drafts, strict=True)])
        for probability, accepted, weights in outcomes(rule, target, draft, drafts):
            for token in range(V):
                text = (*drafts[:accepted], token)
                share = drafted * probability * weights[token] / max(weights.sum(), 1e-300)
                # The rest of the text is the target's.
                law[text] += share * LAW[text] / LAW[text].sum()
    assert np.abs(law - LAW).sum() <= 1e-12
