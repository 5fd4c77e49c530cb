"""Drafters: what they propose, that they keep the text as it was committed, and what the loop refuses."""

from __future__ import annotations

import doctest
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mtplx import decoding
from mtplx.decoding import CallableDrafter, PromptLookupDrafter, generate, speculative_generate
from mtplx.distributions import BatchedSparseDistributions, SamplerConfig, SparseDistribution

CONFIG = SamplerConfig(1.0, 1.0, 0)
GREEDY = SamplerConfig(temperature=0.0)


class Table:
    """A target of V tokens whose row depends on the last token; row `i` favours ``successors[i]``."""

    def __init__(self, successors: Sequence[int], scale: float = 3.0) -> None:
        self.vocab_size = len(successors)
        self.rows = scale * np.eye(self.vocab_size)[list(successors)]

    def start(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt[:-1])

    def forward(self, state: list[int], tokens: Sequence[int]) -> np.ndarray:
        state += tokens
        return self.rows[list(tokens)]

    def rollback(self, state: list[int], n: int) -> None:
        del state[len(state) - n :]


def propose(drafter: Any, depth: int) -> Any:
    return drafter.propose(depth, CONFIG, np.random.default_rng(0))


def test_docstring_examples_run() -> None:
    assert doctest.testmod(decoding).failed == 0


# --- look-up


@pytest.mark.parametrize(
    ("text", "depth", "drafts"),
    [
        ([7], 3, []),
        ([1, 2, 3], 3, []),
        ([1, 2, 3, 1], 3, [2, 3, 1]),
        # The longest ending counts: 2 3 was followed by 9, and 3 alone by 8 later on.
        ([2, 3, 9, 5, 3, 8, 2, 3], 2, [9, 5]),
        # Of equally long ones the last.
        ([3, 9, 3, 8, 6, 3], 2, [8, 6]),
        # A copy that reaches the end of the text goes on with itself.
        ([4, 4], 5, [4, 4, 4, 4, 4]),
        ([0, 1, 2, 1, 2], 7, [1, 2, 1, 2, 1, 2, 1]),
        ([1, 2, 3, 1], 0, []),
    ],
)
def test_lookup_on_small_texts(text: list[int], depth: int, drafts: list[int]) -> None:
    drafter = PromptLookupDrafter()
    drafter.start(text)
    assert propose(drafter, depth) == (drafts, None)
    # Proposing changes nothing; a text that came in pieces is the same text.
    assert propose(drafter, depth) == (drafts, None)
    drafter.start(text[:1])
    drafter.commit(text[1:2])
    drafter.commit(text[2:])
    assert propose(drafter, depth) == (drafts, None)


def searched(text: list[int], depth: int, max_ngram: int, min_ngram: int) -> list[int]:
    """What look-up means, by searching the whole text."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for at in range(len(text) - n - 1, -1, -1):
            if text[at : at + n] == text[len(text) - n :]:
                longer = list(text)
                for i in range(depth):
                    longer.append(longer[at + n + i])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (4, 2), (3, 3)])
def test_lookup_finds_what_a_search_finds(max_ngram: int, min_ngram: int) -> None:
    choice = random.Random(1)
    found = 0
    for _ in range(100):
        drafter = PromptLookupDrafter(max_ngram, min_ngram)
        text = [choice.randrange(4) for _ in range(choice.randint(1, 6))]
        drafter.start(text)
        for _ in range(5):
            depth = choice.randint(0, 6)
            expected = searched(text, depth, max_ngram, min_ngram)
            assert propose(drafter, depth) == (expected, None)
            found += bool(expected)
            more = [choice.randrange(4) for _ in range(choice.randint(0, 5))]
            drafter.commit(more)
            text += more
    assert 25 < found < 475


@pytest.mark.parametrize("sizes", [(0, 0), (3, 4), (2, -1)])
def test_lookup_refuses_lengths_that_make_no_sense(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"min_ngram {sizes[1]} and max_ngram {sizes[0]}"):
        PromptLookupDrafter(*sizes)


def test_lookup_text_is_plain_text_and_needs_fewer_calls() -> None:
    # 0 1 2 3 4 0 1 ..: the first round is plain, then everything is copied.
    target = Table([1, 2, 3, 4, 0])
    plain = generate(target, [0], config=GREEDY, max_tokens=40)
    stream = speculative_generate(target, PromptLookupDrafter(), [0], config=GREEDY, depth=4, max_tokens=40)
    assert list(stream) == list(plain)
    assert stream.stats.acceptance_by_depth == [1.0] * 4
    assert stream.stats.target_calls == 5 + 7


# --- a function


def test_a_function_sees_the_whole_text_and_draws_from_the_generator_it_gets() -> None:
    seen = []

    def uniform(text: list[int], depth: int, config: SamplerConfig, rng: np.random.Generator) -> Any:
        seen.append(list(text))
        text.clear()  # its own copy
        return rng.integers(0, 5, depth), np.full((depth, 5), 0.2)

    def decode(seed: int) -> Any:
        return speculative_generate(
            Table([1, 2, 3, 4, 0]),
            CallableDrafter(uniform),
            [2, 0],
            config=CONFIG,
            depth=3,
            max_tokens=30,
            seed=seed,
        )

    stream = decode(4)
    tokens = list(stream)
    assert seen[0] == [2, 0]
    assert all(text == [2, 0, *tokens][: len(text)] for text in seen)
    assert min(stream.kinds.count(kind) for kind in ("accepted", "correction")) > 3
    assert list(decode(4)) == tokens
    assert list(decode(5)) != tokens


def test_a_function_may_give_rows_in_any_form() -> None:
    dense = np.full(5, 0.2)
    sparse = SparseDistribution([1, 2], [0.5, 0.5], 5)
    forms = {
        "array": np.array([dense, dense]),
        "lists": [dense.tolist(), dense.tolist()],
        "mixed": [dense, SparseDistribution(np.arange(5), dense, 5)],
        "float32": np.array([dense, dense], np.float32),
        "sparse": [sparse, sparse],
        "batch": BatchedSparseDistributions([[1, 2], [1, 2]], [[0.5, 0.5]] * 2, vocab_size=5),
    }
    texts = {}
    for name, rows in forms.items():
        drafter = CallableDrafter(lambda text, depth, config, rng, rows=rows: ([1, 2][:depth], rows[:depth]))
        if name == "batch":
            drafter = CallableDrafter(lambda text, depth, config, rng, rows=rows: ([1, 2], rows))
        stream = speculative_generate(
            Table([1, 2, 3, 4, 0]), drafter, [0], config=CONFIG, depth=2, max_tokens=3, seed=8
        )
        texts[name] = list(stream)
    assert texts["array"] == texts["lists"] == texts["mixed"] == texts["float32"]
    assert texts["sparse"] == texts["batch"]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="got 3"):
        CallableDrafter(3)  # type: ignore[arg-type]  # the error is the point


UNIFORM = np.full((2, 5), 0.2)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ([1, 2], TypeError, r"must give a tuple \(tokens, rows\); got \[1, 2\]"),
        (([1, 2], None, None), TypeError, r"got \(\[1, 2\], None, None\)"),
        (None, TypeError, "got None"),
        (([1, 2, 3], None), ValueError, "proposed 3 tokens; asked for at most 2"),
        (([1, 5], UNIFORM), ValueError, r"token 5, outside the target's \[0, 5\)"),
        (([1, -1], None), ValueError, "token -1"),
        (([1, 2.5], None), TypeError, "a drafted token must be an integer, not 2.5"),
        (([1, 2], UNIFORM[:1]), ValueError, "1 rows for 2 tokens"),
        (([1, 2], UNIFORM[0]), ValueError, "5 rows for 2 tokens"),
        (([1, 2], UNIFORM[:, :4]), ValueError, r"row 0 of the drafter has shape \(4,\); expected \(5,\)"),
        (([1, 2], [UNIFORM[0], np.full(6, 0.2)]), ValueError, r"row 1 of the drafter has shape \(6,\)"),
        (([1, 2], [UNIFORM, UNIFORM]), ValueError, r"shape \(2, 5\)"),
        (([1, 2], 0.2), TypeError, "rows must be a sequence or None; got 0.2"),
        (([1, 2], np.array([[0.0, np.nan, 0, 0, 0]] * 2)), ValueError, "nan"),
        (([1, 2], np.array([[0.0, -0.5, 0, 0, 0]] * 2)), ValueError, "-0.5"),
        # It cannot have been drawn from that row: the text would not have the target's law.
        (([1, 2], np.eye(5)[[0, 0]]), ValueError, "token 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_wrong_answers_of_a_function_are_named(
    answer: Any, error: type[Exception], message: str, backend: Any
) -> None:
    stream = speculative_generate(
        Table([1, 2, 3, 4, 0]),
        CallableDrafter(lambda text, depth, config, rng: answer),
        [0],
        config=CONFIG,
        depth=2,
        max_tokens=9,
        backend=backend,
    )
    with pytest.raises(error, match=message) as caught:
        next(stream)
    assert [note.split(",")[0] for note in caught.value.__notes__] in (
        ["in the drafter's propose"],
        ["in the verification"],
    )
    assert stream.tokens == []
    assert stream.stats.target_calls == 0
    assert next(stream, None) is None
