"""`verify_block_from_logits` is `verify_block` on the rows of `distributions_from_logits`."""

import collections
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.blocks import COINS, RULES, Touched, Untouchable, every_face, fields_of
from support.generators import LAST, plain_state, scripted

from mtplx import sampling, verification
from mtplx.decisions import BlockDecision, Cascade, Typical
from mtplx.distributions import NonFiniteLogitsError, SamplerConfig

CONFIGS = (
    SamplerConfig(0.0, 0.95, 20),
    SamplerConfig(0.7, 1.0, None),
    SamplerConfig(1.0, 0.9, 0),
    SamplerConfig(1.3, 0.9, 3),
    SamplerConfig(1.0, 1.0, 4),
)


def random_logits(rng, V=None):
    V = int(rng.integers(2, 30)) if V is None else V
    K = int(rng.integers(0, 6))
    target = rng.normal(size=(K + 1, V)) * 2.0
    draft = target[:K] + rng.normal(size=(K, V)) * rng.choice([0.0, 0.3, 3.0])
    if rng.random() < 0.3:  # ties
        target, draft = np.round(target), np.round(draft)
    return target, draft


def drafted(face, draft, config, rng):
    """Drafts drawn from their rows."""
    if not len(draft):
        return []
    return face.sample_rows(face.distributions_from_logits(draft, config), rng).tolist()


def rows_of(distributions):
    return (
        [distributions.to_distribution(i) for i in range(len(distributions))]
        if hasattr(distributions, "to_distribution")
        else list(distributions)
    )


def same_as_on_rows(decision, expected):
    ours, theirs = fields_of(decision), fields_of(expected)
    assert ours[:2] + ours[3:] == theirs[:2] + theirs[3:]
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5)


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"T{c.temperature}-p{c.top_p}-k{c.top_k}")
def test_equal_to_the_call_on_rows(face, rule, config):
    for seed in range(25):
        rng = np.random.default_rng([20, seed])
        target, draft = random_logits(rng)
        draft_config = CONFIGS[seed % len(CONFIGS)] if seed % 2 else None
        tokens = drafted(face, draft, draft_config or config, rng)
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        decision = face.verify_block_from_logits(target, draft, tokens, config, draft_config, ours, rule=rule)
        q = face.distributions_from_logits(draft, draft_config or config)
        p = face.distributions_from_logits(target, config)
        same_as_on_rows(decision, face.verify_block(p, q, tokens, theirs, rule=rule))
        assert plain_state(ours) == plain_state(theirs)
        # Point masses, and no bonus row.
        decision = face.verify_block_from_logits(target[:-1], None, tokens, config, None, ours, rule=rule)
        same_as_on_rows(decision, face.verify_block(rows_of(p)[:-1], None, tokens, theirs, rule=rule))
        assert plain_state(ours) == plain_state(theirs)


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_penalties_see_the_drafts_before_a_row(face, rule):
    """Row i counts the completion and drafts 0..i-1; draft rows know no penalties."""
    for seed in range(40):
        rng = np.random.default_rng([21, seed])
        target, draft = random_logits(rng, V=5)
        K = len(draft)
        config = SamplerConfig(1.0, 0.9, [0, 3][seed % 2], float(rng.normal()), float(rng.normal()))
        tokens = drafted(face, draft, config, rng)
        counts = [None, {}, {0: 2, 3: 1}][seed % 3]
        per_row = [dict(counts or {}) for _ in range(K + 1)]
        for i in range(K + 1):
            for token in tokens[:i]:
                per_row[i][token] = per_row[i].get(token, 0) + 1
        overlays = [{int(rng.integers(5)): float(rng.normal())} if i % 2 else None for i in range(K + 1)]
        for overlay in (None, {1: 0.5, 4: -1.0}, overlays):
            ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
            decision = face.verify_block_from_logits(
                target,
                draft,
                tokens,
                config,
                rng=ours,
                rule=rule,
                token_counts=counts,
                penalty_overlay=overlay,
            )
            p = face.distributions_from_logits(target, config, token_counts=per_row, penalty_overlay=overlay)
            q = face.distributions_from_logits(draft, config)
            same_as_on_rows(decision, face.verify_block(p, q, tokens, theirs, rule=rule))
            assert plain_state(ours) == plain_state(theirs)


@every_face
def test_penalties_by_hand(face):
    """Logits (0, 0, 0), presence 2, T -> 0: every draft seen before is out of the race."""
    config = SamplerConfig(0.0, 1.0, None, presence_penalty=2.0)
    zeros = np.zeros((4, 3), np.float32)
    decision = face.verify_block_from_logits(zeros, None, [0, 1, 2], config)
    assert decision == BlockDecision([0, 1, 2, 0], 3, [1.0] * 3, True)  # all seen once: the lowest id again
    decision = face.verify_block_from_logits(zeros, None, [0, 0, 2], config)
    assert decision == BlockDecision([0, 1], 1, [1.0, 0.0], False)
    decision = face.verify_block_from_logits(zeros, None, [0, 1, 2], config, token_counts={0: 1})
    assert decision == BlockDecision([1], 0, [0.0], False)
    banned = [{}, {1: np.inf}, None, None]
    decision = face.verify_block_from_logits(zeros, None, [0, 1, 2], config, penalty_overlay=banned)
    assert decision == BlockDecision([0, 2], 1, [1.0, 0.0], False)


@every_face
def test_the_caller_s_counts_stay_as_they_are(face):
    counts = {0: 1}
    config = SamplerConfig(1.0, presence_penalty=0.5)
    face.verify_block_from_logits(np.zeros((3, 4)), None, [1, 2], config, token_counts=counts)
    assert counts == {0: 1}


@every_face
@pytest.mark.parametrize("draft_logits", [np.zeros((2, 4)), None], ids=["draft", "point masses"])
def test_greedy_draws_all_the_same(face, draft_logits):
    """T <= 0: one-hot rows; coins and draw are consumed as always."""
    logits = np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0]])
    for config in (SamplerConfig(0.0), SamplerConfig(-1.0, top_k=None)):
        rng, counted = np.random.default_rng(0), np.random.default_rng(0)
        decision = face.verify_block_from_logits(logits, draft_logits, [0, 1], config, rng=rng)
        assert decision.tokens.tolist() == [0, 1, 2]  # what the draft cannot draw counts as accepted
        counted.random(3)
        assert plain_state(rng) == plain_state(counted)


@every_face
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "block"], ids=str)
def test_nothing_behind_the_first_rejection_is_touched(face, rule):
    one, two, either = [60.0, 0.0, -60.0], [0.0, 60.0, -60.0], [0.4, 0.0, -60.0]
    target = Touched([one, two, Untouchable(), Untouchable()])
    draft = Touched([one, either, Untouchable()])
    for config in (SamplerConfig(1.0, 0.9, None), SamplerConfig(1.0, 0.9, 2), SamplerConfig(1.0, 1.0, 0)):
        decision = face.verify_block_from_logits(
            target, draft, [0, 0, Untouchable()], config, rng=scripted(LAST, LAST, LAST), rule=rule
        )
        assert decision.tokens.tolist() == [0, 1]
    assert target.touched | draft.touched <= {0, 1}
    nan = [np.nan, 0.0, 0.0]
    decision = face.verify_block_from_logits(
        np.array([one, two, nan, nan]),
        np.array([one, either, nan]),
        [0, 0, 9],
        SamplerConfig(1.0),
        rng=scripted(LAST, LAST, LAST),
        rule=rule,
    )
    assert decision.tokens.tolist() == [0, 1]


LOGITS = np.zeros((3, 4))
PLAIN = SamplerConfig(1.0, 1.0, None)

BAD_CALLS = {
    "rows": (ValueError, "target has 2 rows", (LOGITS[:2], None, [0, 1, 2], PLAIN), {}),
    "draft rows": (ValueError, "draft has 3 rows", (LOGITS, LOGITS, [0, 1], PLAIN), {}),
    "counts of a row": (TypeError, "token_counts", (LOGITS, None, [0, 1], PLAIN), {"token_counts": [{0: 1}]}),
    "an overlay too few": (
        ValueError,
        "penalty_overlay",
        (LOGITS, None, [0, 1], PLAIN),
        {"penalty_overlay": [None]},
    ),
    "an overlay of another kind": (
        TypeError,
        "penalty_overlay",
        (LOGITS, None, [0, 1], PLAIN),
        {"penalty_overlay": 1.0},
    ),
    "a NaN overlay": (
        ValueError,
        "nan",
        (LOGITS, None, [0, 1], PLAIN),
        {"penalty_overlay": {0: np.nan}},
    ),
    "a count outside": (
        IndexError,
        "token id 9 ",
        (LOGITS, None, [0, 1], SamplerConfig(1.0, presence_penalty=1.0)),
        {"token_counts": {9: 1}},
    ),
    "a draft outside": (IndexError, r"row 0: token id 4 ", (LOGITS, LOGITS[:2], [4, 1], PLAIN), {}),
    "a NaN row": (NonFiniteLogitsError, "row 0: .*nan_count=1", ([[np.nan, 0.0]], None, [], PLAIN), {}),
}


@every_face
@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_draw_nothing(face, call):
    error, message, arguments, options = call
    for rule in ("exact", "block"):
        rng = np.random.default_rng(0)
        before = plain_state(rng)
        with pytest.raises(error, match=message):
            face.verify_block_from_logits(*arguments, rng=rng, rule=rule, **options)
        assert plain_state(rng) == before


@every_face
def test_a_bad_row_that_is_reached_is_named(face):
    logits = np.array([[60.0, 0.0], [np.inf, 0.0], [0.0, 0.0]])
    with pytest.raises(NonFiniteLogitsError, match=r"row 1: .*inf_count=1") as caught:
        face.verify_block_from_logits(logits, None, [0, 0], PLAIN, rng=scripted(0.0, 0.0))
    assert caught.value.inf_count == 1
    with pytest.raises(NonFiniteLogitsError, match="row 1: "):
        face.verify_block_from_logits(np.zeros((3, 2)), logits[:2], [0, 0], PLAIN, rng=scripted(0.0, 0.0))


@every_face
def test_one_overlay_a_target_row_without_a_bonus_row(face):
    overlay = [{0: np.inf}, {1: np.inf}]
    decision = face.verify_block_from_logits(
        LOGITS[:2], None, [1, 0], PLAIN, rule="greedy", penalty_overlay=overlay
    )
    assert decision == BlockDecision([1, 0], 2, [1.0, 1.0], False)


@every_face
def test_drafts_that_cannot_have_been_drawn(face):
    draft = np.array([[0.0, -np.inf, 0.0, 0.0]])
    assert face.verify_block_from_logits(LOGITS[:2], draft, [1], PLAIN).accepted == 1
    with pytest.raises(ValueError, match="row 0: token 1 cannot have been drafted"):
        face.verify_block_from_logits(LOGITS[:2], draft, [1], PLAIN, check_draft=True)


@every_face
@pytest.mark.parametrize("V", [6, 3000])  # a top-k of few ranks, and one that is most of the row
def test_with_top_k_rows_are_sparse_whatever_their_length(face, V):
    """An id that is none has probability 0, and vocabularies may differ."""
    config = SamplerConfig(0.8, 1.0, 3)
    rng = np.random.default_rng(V)
    target, draft = rng.normal(size=(2, V)), rng.normal(size=(1, V + 2))
    for token in (V + 1, V + 100, -5):
        decision = face.verify_block_from_logits(target, draft, [token], config, rng=rng)
        assert (decision.accepted, decision.accept_probabilities.tolist()) == (0, [0.0])
        assert decision.tokens[0] in np.argsort(target[0])[-3:]
    token = int(draft[0, :V].argmax())
    ours, theirs = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(20):
        decision = face.verify_block_from_logits(target, draft, [token], config, rng=ours)
        p, q = (face.distributions_from_logits(rows, config) for rows in (target, draft))
        same_as_on_rows(decision, face.verify_block(p, q, [token], theirs))
    with pytest.raises(ValueError, match=rf"target_p has {V} entries, draft_q {V + 2}"):
        face.verify_block_from_logits(target, draft, [0], PLAIN)


@every_face
@pytest.mark.parametrize("rule", [*COINS, "typical", Typical(0.5, 0.4), Cascade(0.2, "tokenv1")], ids=str)
@pytest.mark.parametrize("config", CONFIGS[1:3], ids=["no truncation", "top-p"])
def test_long_rows_with_penalties_that_grow_inside_the_block(face, rule, config):
    """Rows that are streamed, where each sees the drafts before it and no others."""
    config = replace(config, presence_penalty=0.7, frequency_penalty=0.4)
    counts = {1: 2, 7: 1}
    accepted = set()
    for seed in range(6 if face.name == "reference" else 12):
        rng = np.random.default_rng([27, seed])
        V, K = 2500, 4
        target = (rng.normal(size=(K + 1, V)) * 3.0).astype(np.float32)
        target[:, :3] += 9.0
        draft = target[:K] + 0.3 * rng.normal(size=(K, V)).astype(np.float32)
        tokens = rng.integers(0, 3, K).tolist()
        seen = [dict(Counter(counts) + Counter(tokens[:i])) for i in range(K + 1)]
        plain = replace(config, presence_penalty=0.0, frequency_penalty=0.0)
        p = face.distributions_from_logits(target, config, token_counts=seen)
        q = face.distributions_from_logits(draft, plain)
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        decision = face.verify_block_from_logits(
            target, draft, tokens, config, plain, ours, rule=rule, token_counts=counts
        )
        same_as_on_rows(decision, face.verify_block(p, q, tokens, theirs, rule=rule))
        assert plain_state(ours) == plain_state(theirs)
        accepted.add(decision.accepted)
    assert len(accepted) > 1


@pytest.mark.parametrize("V", [1000, 2524, 5000])
def test_greedy_takes_the_lowest_id_among_equal_probabilities(V):
    logits = 1.0 - ((np.arange(V) * 7919 + 3) % 8) * 2.0**-53
    config = SamplerConfig(1.0, 1.0, 0)
    got = verification.verify_block_from_logits(logits[None], None, [], config, rule="greedy").tokens
    assert got.tolist() == [int(np.argmax(sampling.softmax(logits)))]


COUNTED = SamplerConfig(1.0, 1.0, 0, 0.5)

BAD_PENALTIES = {
    "a negative id": (IndexError, "token id -3 ", {"penalty_overlay": [None, None, {-3: 1.0}]}),
    "an id of more than 64 bits": (
        IndexError,
        "token id 73786976294838206464 ",
        {"penalty_overlay": [None, None, {2**66: 1.0}]},
    ),
    "a NaN": (ValueError, "token 1 is nan", {"penalty_overlay": [None, None, {1: np.nan}]}),
    "a text": (TypeError, "token 1 must be a real number", {"penalty_overlay": [None, None, {1: "9"}]}),
    "an id that is none": (
        TypeError,
        "a token id must be an integer, not 1.0",
        {"penalty_overlay": [None, None, {1.0: 1.0}]},
    ),
    "no mapping": (TypeError, "penalty_overlay must be a mapping", {"penalty_overlay": [None, None, 3]}),
    "a negative count": (ValueError, "token 1 has the count -2", {"token_counts": {1: -2}}),
    "a count of a negative id": (IndexError, "token id -1 ", {"token_counts": {-1: 2}}),
}


@every_face
@pytest.mark.parametrize("bad", BAD_PENALTIES.values(), ids=BAD_PENALTIES)
def test_penalties_of_rows_that_are_never_reached_are_checked(face, bad):
    """Before a number is drawn, by one block and by a batch; the row is named where it is one's own."""
    error, message, options = bad
    for rule in ("exact", "block", "greedy"):
        rng = np.random.default_rng(0)
        before = plain_state(rng)
        with pytest.raises(error, match=message) as caught:
            face.verify_block_from_logits(
                [[0.0, 60.0]] * 3, [[60.0, 0.0]] * 2, [0, 0], COUNTED, rng=rng, rule=rule, **options
            )
        each = {name: [None, value] for name, value in options.items()}
        with pytest.raises(error, match=f"sequence 1: .*{message}"):
            face.verify_batch_from_logits(
                [[[0.0, 60.0]] * 3] * 2,
                [[[60.0, 0.0]] * 2] * 2,
                [[0, 0]] * 2,
                COUNTED,
                rngs=[rng, np.random.default_rng(1)],
                rule=rule,
                **each,
            )
        assert plain_state(rng) == before
    where = "row 0: " if "token_counts" in options else "" if "mapping" in message else "row 2: "
    assert str(caught.value).startswith(where)


@every_face
def test_counts_are_not_looked_at_without_penalties(face):
    face.verify_block_from_logits([[0.0, 1.0]], None, [], PLAIN, token_counts={-1: "many"})


@every_face
def test_ids_that_are_given_twice_count_once(face):
    class Three:
        def __index__(self):
            return 3

    overlay = {3: -50.0, Three(): np.inf}
    decision = face.verify_block_from_logits(np.zeros((1, 5)), None, [], PLAIN, penalty_overlay=overlay)
    assert decision.tokens[0] != 3


@every_face
def test_overlays_in_any_sequence(face):
    for kind in (list, tuple, collections.deque, lambda given: np.array(given, dtype=object)):
        overlays = kind([{0: np.inf}, {1: np.inf}])
        decision = face.verify_block_from_logits(
            LOGITS[:2], None, [1, 0], PLAIN, rule="greedy", penalty_overlay=overlays
        )
        assert decision.tokens.tolist() == [1, 0]


@every_face
def test_a_padded_sequence_has_overlays_of_its_own_rows(face):
    """One for each of its k + 1 rows, as its block alone takes them."""
    targets = np.zeros((2, 3, 4))
    tokens = np.array([[1, 2], [1, -1]])
    keys = {"rule": "greedy", "seeds": [1, 2], "positions": [0, 0]}
    own = [{0: 60.0}, {0: 60.0, 1: 60.0}]
    decision = face.verify_batch_from_logits(
        targets, None, tokens, PLAIN, penalty_overlay=[None, own], **keys
    )
    assert decision.tokens[1].tolist() == [1, 2, -1]
    with pytest.raises(ValueError, match="sequence 1: penalty_overlay has 3 entries for 2 target rows"):
        face.verify_batch_from_logits(
            targets, None, tokens, PLAIN, penalty_overlay=[None, [*own, None]], **keys
        )


@pytest.mark.parametrize("batch", [False, True], ids=["block", "batch"])
def test_numbers_that_give_the_rows_back_when_they_are_read(batch):
    """Penalties and settings are read while no address is held: rows that change then are read as changed."""
    rows = np.zeros((2, 3000))
    rows[:, 7] = 60.0

    class Late:
        def __float__(self):
            rows.resize((2, 2048), refcheck=False)
            rows[:] = 0.0
            rows[:, 9] = 60.0
            return 0.0

    options = {"rule": "greedy", "penalty_overlay": {3: Late()}}
    if batch:
        found = verification.verify_batch_from_logits(
            [rows], None, [[9]], PLAIN, seeds=[1], positions=[0], **options
        )
        assert found.tokens.tolist() == [[9, 9]]
    else:
        found = verification.verify_block_from_logits(rows, None, [9], PLAIN, **options)
        assert found.tokens.tolist() == [9, 9]
