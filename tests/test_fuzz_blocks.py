"""Blocks and batches against the reference on 2,000 random blocks.

`fuzz_blocks.py` runs as many more of the same cases as one likes; its case numbers are those below.
"""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from support import block_cases
from support.block_cases import Producer, check, make_case
from support.blocks import RULES

from mtplx import verification

CASES, CHUNK = 800, 100


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_blocks(first):
    wrong = [line for number in range(first, first + CHUNK) for line in check(0, number)]
    assert not wrong, "\n".join([f"{len(wrong)} mismatches", *wrong[:20]])


def test_the_cases_are_those_that_were_asked_for():
    sample = [make_case(number) for number in range(1500)]
    blocks = [block for case in sample for block in case.blocks]
    assert 2.3 < len(blocks) / len(sample) < 2.7
    assert {len(block.tokens) for block in blocks} == set(range(9))
    assert {str(case.rule) for case in sample} == {str(rule) for rule in RULES}
    assert min(case.V for case in sample) == 2
    assert any(case.V >= 2048 and case.blocks[0].config is not None for case in sample)
    assert any(make_case(number).V == 151_936 for number in range(3000))
    assert {case.keys is None for case in sample} == {case.whole for case in sample} == {True, False}
    logits = [block for block in blocks if block.config is not None]
    assert {block.draft is None for block in logits} == {True, False}
    assert any(block.counts and block.config.presence_penalty for block in logits)
    assert any(isinstance(block.overlay, list) for block in logits)
    assert any(isinstance(block.target, Producer) for block in logits)
    types = {str(block.target.dtype) for block in logits if isinstance(block.target, np.ndarray)}
    assert types == {"float16", "bfloat16", "float32", "float64", ">f4", ">f8", "int16"}


# ---- planted faults ----------------------------------------------------------------------------------


def shifted_draws(real):
    """One uniform too many before each block."""

    def verify(target, draft, tokens, generator, *options):
        generator.random()
        return real(target, draft, tokens, generator, *options)

    return verify


def looks_behind(real):
    """Reads every row of an array before it begins."""

    def verify(target, *options):
        if isinstance(target, np.ndarray) and np.isnan(np.asarray(target, dtype=np.float64)).any():
            raise ValueError("not a number")
        return real(target, *options)

    return verify


def neighbours(real):
    """The streams of a batch of generators in another order."""

    def open_blocks(targets, target_counts, drafts, draft_counts, tokens, streams, *options):
        return real(targets, target_counts, drafts, draft_counts, tokens, streams[::-1], *options)

    return open_blocks


def without_its_last(real):
    """The last sequence of every range is forgotten."""

    def run_blocks(blocks, first, last):
        return real(blocks, first, max(last - 1, first))

    return run_blocks


FAULTS = {
    "verify_block": [shifted_draws, looks_behind],
    "open_blocks": [neighbours],
    "run_blocks": [without_its_last],
}


@pytest.mark.parametrize(
    ("name", "plant"), [(name, plant) for name, plants in FAULTS.items() for plant in plants]
)
def test_the_comparison_catches(monkeypatch, name, plant):
    # A fault that reads such rows is a crash, which ends the test run as well.
    monkeypatch.setattr(block_cases, "unreadable", lambda rows, first, kept: None)
    monkeypatch.setattr(verification.core, name, plant(getattr(verification.core, name)))
    assert any(check(0, number) for number in range(60))


@pytest.mark.skipif(os.name != "posix", reason="pages without permission are made by mprotect")
def test_rows_that_cannot_be_read_are_rows_that_cannot_be_read():
    """Whoever reads one is killed; so the comparison above would not get to its end."""
    script = """
import numpy as np
from support.block_cases import unreadable
kept = []
rows = unreadable(np.ones((3, 5)), 1, kept)
print(rows[0].sum(), flush=True)
print(rows[1].sum(), flush=True)
"""
    tests = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", script], cwd=tests, capture_output=True, check=False)
    assert done.stdout.split() == [b"5.0"]
    assert done.returncode == -signal.SIGSEGV
