"""`verify_block`: the same decisions and draws as the plain statement of each rule, rows in every form,
rows that are never looked at, and what is refused before which draw."""

import numpy as np
import pytest
from support.blocks import (
    COINS,
    RULES,
    InOrder,
    Touched,
    Untouchable,
    as_batch,
    as_sparse,
    by_the_loop,
    every_face,
    fields_of,
    in_some_form,
    plain_block,
    random_block,
)
from support.generators import LAST, STEP, Falsy, Stub, plain_state, scripted

from mtplx.decisions import BlockDecision, Cascade, Typical
from mtplx.distributions import SparseDistribution

# ---- the same draws as the plain statement -----------------------------------------------------------


def same_draws(face, rule, target, draft, tokens, seed, **options):
    """Run a block beside its plain statement, from the same generator state; the decision, if both agree."""
    ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
    decision = face.verify_block(target, draft, tokens, ours, rule=rule, **options)
    plain = plain_block(rule, target, draft, tokens, InOrder(theirs))
    assert fields_of(decision) == plain, (rule, seed, target, draft, tokens)
    assert plain_state(ours) == plain_state(theirs), (rule, seed)
    return decision


@every_face
def test_exact_is_the_loop_of_single_verifications(face):
    accepted = set()
    for seed in range(4000):
        rng = np.random.default_rng([1, seed])
        target, draft, tokens = random_block(rng, bonus=seed % 5 != 0)
        if seed % 3 == 0:
            draft = None
        if seed % 4 == 0:
            target = in_some_form(target, rng)
            draft = None if draft is None else in_some_form(draft, rng)
        ours, theirs = np.random.default_rng(seed), np.random.default_rng(seed)
        decision = face.verify_block(target, draft, tokens, ours)
        assert fields_of(decision) == by_the_loop(target, draft, tokens, theirs), seed
        assert plain_state(ours) == plain_state(theirs), seed
        accepted.add((decision.accepted, len(tokens)))
    assert accepted >= {(i, K) for K in range(6) for i in range(K + 1)}


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_is_its_plain_statement(face, rule):
    accepted = set()
    for seed in range(600):
        rng = np.random.default_rng([2, seed])
        target, draft, tokens = random_block(rng, bonus=seed % 5 != 0)
        decision = same_draws(face, rule, target, None if seed % 7 == 0 else draft, tokens, seed)
        accepted.add((decision.accepted, len(tokens)))
    assert {(i, K) for K in range(4) for i in range(K + 1)} <= accepted


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_decide_by_what_they_hold_and_not_by_their_form(face, rule):
    for seed in range(150):
        rng = np.random.default_rng([3, seed])
        target, draft, tokens = random_block(rng, K=int(rng.integers(1, 5)))
        target, draft = ([as_sparse(row) for row in rows] for rows in (target, draft))
        p, q = (np.array([row.to_dense() for row in rows]) for rows in (target, draft))
        expected = fields_of(face.verify_block(p, q, tokens, np.random.default_rng(seed), rule=rule))
        for one, other in (
            (target, draft),
            (as_batch(target), as_batch(draft)),
            ([p[0], *target[1:]], [*draft[:-1], q[-1]]),
            (np.asfortranarray(p), q.tolist()),
            (p.astype(">f8"), list(q)),
            (Touched(p), np.repeat(q, 2, axis=1)[:, ::2]),
        ):
            decision = face.verify_block(one, other, tokens, np.random.default_rng(seed), rule=rule)
            assert fields_of(decision) == expected, (seed, one, other)


@every_face
@pytest.mark.parametrize("rule", ["exact", "greedy", "block", Cascade(0.1)], ids=str)
def test_corrections_go_by_id_whatever_the_order_of_storage(face, rule):
    for seed in range(150):
        rng = np.random.default_rng([3, seed])
        target, draft, tokens = random_block(rng, K=int(rng.integers(1, 5)), bonus=False)
        target, draft = ([as_sparse(row, rng) for row in rows] for rows in (target, draft))
        p, q = (np.array([row.to_dense() for row in rows]) for rows in (target, draft))
        decision = face.verify_block(target, draft, tokens, np.random.default_rng(seed), rule=rule)
        assert decision == face.verify_block(p, q, tokens, np.random.default_rng(seed), rule=rule)


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ids_come_in_any_integer_form(face, rule):
    target = np.array([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]])
    draft = np.array([[0.5, 0.5], [0.5, 0.5]])
    expected = face.verify_block(target, draft, [1, 1], np.random.default_rng(0), rule=rule)
    for tokens in (
        (1, 1),
        np.array([1, 1], np.uint8),
        np.array([1, 1])[::-1],
        [np.int32(1), 1],
        np.ones(2, ">i4"),
    ):
        assert face.verify_block(target, draft, tokens, np.random.default_rng(0), rule=rule) == expected
    for tokens in ([1.0, 1], np.array([1.0, 1.0]), ["1", 1], [None, 1]):
        with pytest.raises(TypeError):
            face.verify_block(target, draft, tokens, np.random.default_rng(0), rule=rule)


# ---- coins on the edge -------------------------------------------------------------------------------


@every_face
def test_a_coin_equal_to_the_accept_probability_accepts(face):
    target, draft = [[0.25, 0.75], [0.5, 0.5]], [[0.5, 0.5]]
    assert face.verify_block(target, draft, [0], scripted(0.5, 0.0)).accepted == 1
    assert face.verify_block(target, draft, [0], scripted(0.5 + STEP, 0.0)).accepted == 0


@every_face
@pytest.mark.parametrize("rule", COINS, ids=str)
@pytest.mark.parametrize("draft", [[[0.5, 0.5]], [[0.0, 1.0]], None], ids=["q>0", "q=0", "point mass"])
def test_an_impossible_token_is_rejected_whatever_the_coin(face, rule, draft):
    for u in (0.0, 0.5, LAST):
        decision = face.verify_block([[0.0, 1.0], [0.5, 0.5]], draft, [0], scripted(u, 0.5), rule=rule)
        assert decision == BlockDecision([1], 0, [0.0], False)


@every_face
def test_dyadic_blocks_tie_with_dyadic_coins(face):
    """Coins and probabilities on the same coarse grid: every comparison meets equality sooner or later."""
    met = 0
    for seed in range(1500):
        rng = np.random.default_rng([4, seed])
        K = int(rng.integers(1, 4))
        target = rng.multinomial(8, [0.25] * 4, K + 1) / 8.0
        draft = rng.multinomial(8, [0.25] * 4, K) / 8.0
        tokens = [int(rng.choice(4, p=row)) for row in draft]
        uniforms = (rng.integers(0, 8, K + 1) / 8.0).tolist()
        for rule in COINS:
            ours, theirs = scripted(*uniforms), scripted(*uniforms)
            decision = face.verify_block(target, draft, tokens, ours, rule=rule)
            assert fields_of(decision) == plain_block(rule, target, draft, tokens, InOrder(theirs)), seed
            assert plain_state(ours) == plain_state(theirs)
            met += any(u == a for u, a in zip(uniforms, decision.accept_probabilities, strict=False))
    assert met > 300


# ---- generators --------------------------------------------------------------------------------------


@every_face
def test_draws_of_every_rule(face):
    """How many numbers a block of 3 consumes, by rule, when all drafts are kept and when the first is not."""
    kept = [[1.0, 0.0]] * 4, [[1.0, 0.0]] * 3, [0, 0, 0]
    lost = [[0.0, 1.0]] * 4, [[1.0, 0.0]] * 3, [0, 0, 0]
    counts = {
        "exact": (4, 2),
        "greedy": (0, 0),
        "match": (4, 1),
        "block": (4, 4),
        "typical": (1, 1),
        Cascade(0.0): (1, 2),  # nothing is deferred where p and q are the same single token
    }
    for rule, expected in counts.items():
        for block, number in zip((kept, lost), expected, strict=True):
            rng, counted = np.random.default_rng(0), np.random.default_rng(0)
            face.verify_block(*block, rng, rule=rule)
            counted.random(number)
            assert plain_state(rng) == plain_state(counted), rule


@every_face
@pytest.mark.parametrize("rule", ["exact", "block", "match"])
def test_without_a_bonus_row_nothing_is_drawn_for_one(face, rule):
    rows = [[1.0, 0.0]] * 3
    rng, counted = np.random.default_rng(0), np.random.default_rng(0)
    decision = face.verify_block(rows, rows, [0, 0, 0], rng, rule=rule)
    counted.random(3)
    assert decision == BlockDecision([0, 0, 0], 3, [1.0] * 3, False)
    assert plain_state(rng) == plain_state(counted)


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_drafts(face, rule):
    decision = face.verify_block([[0.0, 1.0]], np.empty((0, 2)), [], rule=rule)
    assert decision == BlockDecision([1], 0, [], True)
    assert face.verify_block([[0.0, 1.0]], None, np.array([], int), rule=rule) == decision
    nothing = face.verify_block([], [], [], rule=rule)
    assert nothing == BlockDecision([], 0, [], False)
    assert nothing.tokens.dtype == np.int64
    assert nothing.accept_probabilities.dtype == np.float64


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_other_objects_draw_through_their_own_methods(face, rule):
    """`random()` for a coin, `choice(ids, p=weights/sum)` for a token; a falsy object is used as given."""
    for seed in range(30):
        rng = np.random.default_rng([5, seed])
        target, draft, tokens = random_block(rng, K=3)
        uniforms = rng.random(8).tolist()
        stub, falsy = Stub(*uniforms), Falsy(*uniforms)
        decision = face.verify_block(target, draft, tokens, stub, rule=rule)
        assert face.verify_block(target, draft, tokens, falsy, rule=rule) == decision
        called = [call if isinstance(call, str) else call[0] for call in stub.calls]
        drawn = decision.accepted < 3 or decision.bonus
        if rule == "greedy":
            assert called == []
        elif rule == "match":
            assert called == ["choice"] * len(decision.tokens)
        elif rule == "block":
            assert called == ["random"] * 3 + ["choice"] * drawn
        elif rule == "exact":
            assert called == ["random"] * len(decision.accept_probabilities) + ["choice"] * drawn
        for call in stub.calls:
            if not isinstance(call, str):
                np.testing.assert_allclose(call[2].sum(), 1.0, rtol=1e-12)


@every_face
def test_legacy_generators(face):
    target, draft = [[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]]
    decision = face.verify_block(target, draft, [1], np.random.RandomState(0))
    assert decision.accepted == 1
    with pytest.raises(TypeError, match="rng"):
        face.verify_block(target, draft, [1], object(), rule="greedy")


# ---- what is never looked at -------------------------------------------------------------------------

ONE, TWO = [1.0, 0.0], [0.0, 1.0]


@every_face
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "block"], ids=str)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_nothing_behind_the_first_rejection_is_touched(face, rule, kept):
    K = 5
    rejected = [0.0, 1.0] if rule != Cascade(0.2, "tokenv1") else [0.02, 0.98]
    target = Touched([ONE] * kept + [rejected] + [Untouchable()] * (K - kept))
    draft = Touched([ONE] * kept + [[0.6, 0.4]] + [Untouchable()] * (K - kept - 1))
    tokens = [0] * (kept + 1) + [Untouchable()] * (K - kept - 1)
    decision = face.verify_block(target, draft, tokens, scripted(LAST, LAST, LAST, 0.9), rule=rule)
    assert decision.accepted == kept
    assert decision.tokens.tolist() == [0] * kept + [1]
    assert target.touched <= set(range(kept + 1))
    assert draft.touched <= set(range(kept + 1))


@every_face
@pytest.mark.parametrize(
    "poison", [[np.nan, np.nan], [-1.0, 2.0], ["a", "b"], [[0.5], [0.5]], [0.0, 0.0], []]
)
def test_bad_rows_behind_the_first_rejection_do_not_matter(face, poison):
    for rule in ("exact", "greedy", "match", "typical", Cascade(0.1)):
        decision = face.verify_block([TWO, poison, poison], [ONE, poison], [0, 7], rule=rule)
        assert decision.tokens.tolist() == [1], rule


@every_face
def test_a_poisoned_array_behind_the_rejection_does_not_matter(face):
    target, draft = np.full((3, 2), np.nan), np.full((2, 2), np.nan)
    target[0], draft[0] = TWO, ONE
    assert face.verify_block(target, draft, [0, 1]).tokens.tolist() == [1]


@every_face
def test_the_bonus_row_is_looked_at_only_when_it_is_due(face):
    assert face.verify_block([TWO, Untouchable()], [ONE], [0], rule="block").tokens.tolist() == [1]
    with pytest.raises(AssertionError, match="converted"):
        face.verify_block([ONE, Untouchable()], [ONE], [0], rule="block")


@every_face
def test_rules_that_ignore_the_draft_do_not_look_at_it(face):
    for rule in ("greedy", "match", "typical", Typical(0.1, 0.1)):
        draft = [Untouchable(), Untouchable()]
        assert face.verify_block([ONE, ONE, TWO], draft, [0, 0], rule=rule).tokens.tolist() == [0, 0, 1]


@every_face
def test_the_block_rule_reads_two_numbers_of_a_row_whose_coin_is_lost(face):
    """P = (1/2, 1/4): with u_1 > 1/2, row 1 is not summed; its other entries may be anything."""
    nan = float("nan")
    target = [[0.5, 0.5], [nan, 0.5], [nan, nan]]
    draft = [[1.0, 0.0], [nan, 1.0]]
    decision = face.verify_block(target, draft, [0, 1], scripted(0.5 + STEP, 0.25 + STEP, 0.0), rule="block")
    assert decision == BlockDecision([1], 0, [0.5, 0.25], False)


@every_face
def test_the_block_rule_reads_nothing_behind_an_impossible_prefix(face):
    target, draft = Touched([ONE, TWO, Untouchable(), Untouchable()]), Touched([ONE, ONE, Untouchable()])
    decision = face.verify_block(
        target, draft, [0, 0, Untouchable()], scripted(0.0, 0.0, 0.0, 0.0), rule="block"
    )
    assert decision == BlockDecision([0, 1], 1, [1.0, 0.0, 0.0], False)
    assert target.touched == draft.touched == {0, 1}


# ---- errors ------------------------------------------------------------------------------------------

ROWS = np.full((3, 4), 0.25)
NAN_AT_1 = np.array([[0.25, 0.25, 0.25, 0.25], [0.5, np.nan, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]])

BAD_CALLS = {
    "too few target rows": (ValueError, "target has 1 rows", ROWS[:1], ROWS[:2], [0, 1], {}),
    "too many target rows": (ValueError, "target has 3 rows", ROWS, ROWS[:1], [0], {}),
    "too few draft rows": (ValueError, "draft has 1 rows", ROWS, ROWS[:1], [0, 1], {}),
    "too many draft rows": (ValueError, "draft has 3 rows", ROWS, ROWS, [0, 1], {}),
    "one row for rows": (ValueError, "target must be rows", ROWS[0], None, [0], {}),
    "blocks for rows": (ValueError, "target must be rows", ROWS[None], None, [0, 1], {}),
    "one distribution for rows": (TypeError, "target", SparseDistribution.one_hot(0, 4), None, [0], {}),
    "a text for rows": (TypeError, "target", "ab", None, [0], {}),
    "a mapping for rows": (TypeError, "target", {0: ROWS[0]}, None, [], {}),
    "ids in two dimensions": (ValueError, "draft_tokens", ROWS, ROWS[:2], np.zeros((2, 1), int), {}),
    "no ids": (TypeError, "draft_tokens", ROWS, ROWS[:2], None, {}),
    "an unknown rule": (ValueError, "unknown rule 'best'", ROWS, ROWS[:2], [0, 1], {"rule": "best"}),
    "a cascade without its alpha": (ValueError, "Cascade", ROWS, ROWS[:2], [0, 1], {"rule": "cascade"}),
    "a rule of another kind": (TypeError, "rule", ROWS, ROWS[:2], [0, 1], {"rule": 1}),
    "a rule class": (TypeError, "rule", ROWS, ROWS[:2], [0, 1], {"rule": Typical}),
    "an id outside, row 0": (IndexError, "row 0: token id 4 ", ROWS, ROWS[:2], [4, 0], {}),
    "a negative id": (IndexError, "row 0: token id -1 ", ROWS, ROWS[:2], [-1, 0], {}),
    "lengths that differ": (ValueError, "row 0: .*4 .*3", ROWS, ROWS[:2, :3], [0, 1], {}),
    "a complex target": (TypeError, "complex", ROWS.astype(complex), ROWS[:2], [0, 1], {}),
    "NaN at the draft": (ValueError, "row 0: draft_q .*nan", ROWS, NAN_AT_1[1:], [1, 1], {}),
}


@every_face
@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_draw_nothing(face, call):
    error, message, target, draft, tokens, options = call
    for rule in [options["rule"]] if "rule" in options else ["exact", "block", Cascade(0.2, "tokenv1")]:
        rng = np.random.default_rng(0)
        before = plain_state(rng)
        with pytest.raises(error, match=message):
            face.verify_block(target, draft, tokens, rng, rule=rule)
        assert plain_state(rng) == before


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_error_names_its_row(face, rule):
    target = ROWS.copy()
    target[1] = [0.5, np.nan, 0.25, 0.25]
    sharp = np.eye(4)[[0, 0, 0]]
    kept = np.vstack([sharp[:1], target[1:2], sharp[:1]])
    with pytest.raises(ValueError, match=r"row 1: .*nan"):
        face.verify_block(kept, sharp[:2], [0, 1], np.random.default_rng(0), rule=rule)
    with pytest.raises(ValueError, match=r"row 2: .*nan"):  # the bonus row
        face.verify_block(np.vstack([sharp[:2], target[1:2]]), sharp[:2], [0, 0], rule=rule)


@every_face
@pytest.mark.parametrize("rule", COINS, ids=str)
def test_point_masses_on_no_token(face, rule):
    for target in (ROWS, [as_sparse(row) for row in ROWS]):
        for token in (-1, 4, 2**70):
            with pytest.raises(IndexError, match=f"row 0: token id {token} "):
                face.verify_block(target, None, [token, 0], rule=rule)


@every_face
def test_a_correction_without_mass_fails_before_its_coin(face):
    for rule in ("exact", "block"):
        rng = np.random.default_rng(0)
        before = plain_state(rng)
        with pytest.raises(ValueError, match="row 0: neither"):
            face.verify_block([[0.0, 0.0], [0.5, 0.5]], [[0.5, 0.5]], [0], rng, rule=rule)
        assert plain_state(rng) == before


@every_face
@pytest.mark.parametrize("rule", COINS, ids=str)
def test_drafts_that_cannot_have_been_drawn(face, rule):
    target, draft = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]]
    rng = scripted(0.0, 0.0, 0.5)
    assert face.verify_block(target, draft, [0, 0], rng, rule=rule).accepted == 2
    with pytest.raises(ValueError, match="row 1: token 0 cannot have been drafted"):
        face.verify_block(target, draft, [0, 0], scripted(0.0, 0.0), rule=rule, check_draft=True)
    # Where the target has nothing either it is an ordinary rejection, and elsewhere nothing changes.
    impossible = [[0.0, 1.0], [0.5, 0.5]]
    assert face.verify_block(impossible, [[0.0, 1.0]], [0], rule=rule, check_draft=True).tokens.tolist() == [
        1
    ]
    for seed in range(50):
        target, draft, tokens = random_block(np.random.default_rng([6, seed]), K=3)
        if all(draft[i, x] > 0 for i, x in enumerate(tokens)):
            same_draws(face, rule, target, draft, tokens, seed, check_draft=True)


@every_face
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_inputs_stay_as_they_are(face, rule):
    target, draft, tokens = random_block(np.random.default_rng(7), K=4)
    ids = np.array(tokens)
    copies = target.copy(), draft.copy(), ids.copy()
    for array in (target, draft, ids):
        array.flags.writeable = False
    face.verify_block(target, draft, ids, np.random.default_rng(0), rule=rule)
    for array, copy in zip((target, draft, ids), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


@every_face
def test_rows_are_counted_before_ids_are_read(face):
    read = []

    class Ids:
        def __len__(self):
            return 10**9

        def __getitem__(self, i):
            read.append(i)
            return 0

    for target in (np.eye(2), list(np.eye(2)), tuple(np.eye(2))):
        with pytest.raises(ValueError, match="target has 2 rows for 1000000000 drafts"):
            face.verify_block(target, target, Ids())
    assert read == []
