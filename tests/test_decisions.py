"""Decisions of blocks and batches, and rules as objects: values, not behaviour."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
from support.blocks import every_face

from mtplx.decisions import CHAIN_RULES, BatchDecision, BlockDecision, Cascade, Typical, as_rule

BLOCK = BlockDecision([3, 1, 4], 2, [0.5, 0.25], True)
BATCH = BatchDecision([[3, 1, -1], [0, 2, 4]], [2, 3], [1, 2], [[0.5, np.nan], [1.0, 0.5]])


@pytest.mark.parametrize("decision", [BLOCK, BATCH, Typical(), Cascade(0.5)], ids=lambda d: type(d).__name__)
def test_values(decision):
    for copied in (
        pickle.loads(pickle.dumps(decision)),
        copy.copy(decision),
        copy.deepcopy(decision),
        dataclasses.replace(decision),
    ):
        assert copied == decision
        assert repr(copied) == repr(decision)
        for field in dataclasses.fields(copied):
            value = getattr(copied, field.name)
            assert type(value) is type(getattr(decision, field.name))
            if isinstance(value, np.ndarray):
                assert not value.flags.writeable
                assert value.flags.c_contiguous
                with pytest.raises(ValueError, match="WRITEABLE"):
                    value.flags.writeable = True
    assert decision != "a decision"
    assert not decision == 1  # noqa: SIM201  (__ne__ is tested above, this is __eq__)
    for field in dataclasses.fields(decision):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(decision, field.name, None)


def test_decisions_differ_in_any_field():
    assert dataclasses.replace(BLOCK, tokens=[3, 1, 5]) != BLOCK
    assert dataclasses.replace(BLOCK, tokens=[3, 1]) != BLOCK
    assert dataclasses.replace(BLOCK, accepted=1) != BLOCK
    assert dataclasses.replace(BLOCK, accept_probabilities=[0.5, 0.5]) != BLOCK
    assert dataclasses.replace(BLOCK, bonus=False) != BLOCK
    assert dataclasses.replace(BATCH, num_tokens=[2, 2]) != BATCH
    assert dataclasses.replace(BATCH, accept_probabilities=[[0.5, 0.5], [1.0, 0.5]]) != BATCH
    assert BLOCK != BATCH
    for decision in (BLOCK, BATCH):
        with pytest.raises(TypeError, match="unhashable"):
            hash(decision)


def test_decisions_hold_copies_of_what_they_are():
    tokens, probabilities = np.array([3, 1], np.int32), np.array([0.5], np.float32)
    decision = BlockDecision(tokens, np.int64(1), probabilities, np.True_)
    tokens[:], probabilities[:] = 0, 0.0
    assert decision == BlockDecision([3, 1], 1, [0.5], True)
    assert type(decision.accepted) is int
    assert type(decision.bonus) is bool
    assert (decision.tokens.dtype, decision.accept_probabilities.dtype) == (np.int64, np.float64)
    for arguments in (([[1]], 0, [], False), ([1], 0, [[0.5]], False)):
        with pytest.raises(ValueError, match="dimension"):
            BlockDecision(*arguments)
    for make, message in (
        (lambda: BlockDecision([1], 0.0, [], False), "accepted must be an integer, not 0.0"),
        (lambda: BlockDecision([1.7], 0, [], False), "tokens must hold integers, not float64"),
        (lambda: BlockDecision([1], 0, ["0.5"], False), "accept_probabilities must hold real numbers"),
        (lambda: BatchDecision([["1"]], [1], [0], [[]]), "tokens must hold integers, not <U1"),
        (lambda: BatchDecision([[1]], [1], [0.0], [[]]), "accepted must hold integers, not float64"),
    ):
        with pytest.raises(TypeError, match=message):
            make()


def test_rule_objects():
    assert Typical() == Typical(0.3, 0.09) == Typical(eps=0.3, delta=0.09)
    assert Cascade(0.1) == Cascade(alpha=0.1, rule="tokenv3")
    assert len({Typical(), Typical(0.3), Cascade(0.1), Cascade(0.1, "tokenv1")}) == 3
    for make, message in (
        (lambda: Typical(-0.1), "eps .*-0.1"),
        (lambda: Typical(0.1, float("nan")), "delta .*nan"),
        (lambda: Cascade(float("nan")), "alpha is nan"),
        (lambda: Cascade(0.1, "tokenv4"), "'tokenv4'; known are 'tokenv1', 'tokenv2', 'tokenv3'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for make, message in (
        (Cascade, "alpha"),
        (lambda: Cascade("0.5"), "alpha must be a real number, not '0.5'"),
        (lambda: Typical("a"), "eps must be a real number, not 'a'"),
        (lambda: Typical(0.1, None), "delta must be a real number, not None"),
        (lambda: Typical(np.array([0.1, 0.2])), "eps must be a real number, not array"),
    ):
        with pytest.raises(TypeError, match=message):
            make()


def test_rules_by_name():
    assert [as_rule(rule) for rule in CHAIN_RULES] == ["exact", "greedy", "match", "block", Typical()]
    for rule in (Typical(0.1), Cascade(0.2)):
        assert as_rule(rule) is rule
    with pytest.raises(ValueError, match="'recursive'; known are 'exact'"):
        as_rule("recursive")
    for bad in (None, 3, Typical, ["exact"]):
        with pytest.raises(TypeError, match="rule"):
            as_rule(bad)


@every_face
def test_verification_gives_plain_values(face):
    decision = face.verify_block(np.eye(2)[[0, 1]], np.eye(2)[[0]], [0])
    assert decision == BlockDecision([0, 1], 1, [1.0], True)
    assert type(decision) is BlockDecision
    assert type(decision.accepted) is int
    assert type(decision.bonus) is bool
    assert not decision.tokens.flags.writeable
    batch = face.verify_batch(np.eye(2)[None, [0, 1]], None, [[0]])
    assert batch == BatchDecision([[0, 1]], [2], [1], [[1.0]])
    assert type(batch) is BatchDecision
