"""The n-gram model: pieces, the Kneser-Ney formula, and the exactness of start, forward and rollback."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.models.ngram import NGramModel, NGramPair, PieceTokenizer, default_corpus, train_pair


@pytest.fixture(scope="module")
def pair() -> NGramPair:
    return train_pair(default_corpus())


@pytest.fixture(scope="module")
def tokenizer(pair: NGramPair) -> PieceTokenizer:
    return pair.tokenizer


# --- pieces


@given(text=st.text())
@settings(max_examples=300, deadline=None)
def test_decoding_gives_any_text_back(tokenizer: PieceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "   trailing blanks   ",
        "\n\n\n   indented\n",
        "\r\n\t\v\f\x00\x1b",
        "=" * 1000,
        "naïve café, 東京, \N{SNOWMAN}\ufe0f, \U0001f9d1\u200d\U0001f680",
        "\u2028\u3000\xa0",
        "__dunder__ 3.14159265358979",
        "\ufffd",
    ],
)
def test_decoding_gives_awkward_text_back(tokenizer: PieceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_default_corpus_round_trips_in_whole_pieces(tokenizer: PieceTokenizer) -> None:
    text = default_corpus()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert 3000 < tokenizer.vocab_size <= 4096
    assert len(tokens) < len(text) / 2


def test_unknown_pieces_are_spelled_in_bytes() -> None:
    tokenizer = PieceTokenizer("abc abc")
    # One ASCII character is its byte already, so "abc" is the only further token.
    assert tokenizer.vocab_size == 257
    assert tokenizer.encode("abc é") == [256, 0x20, 0xC3, 0xA9]
    assert tokenizer.token_bytes(256) == b"abc"


def test_the_most_frequent_pieces_become_tokens() -> None:
    tokenizer = PieceTokenizer("bb aa bb cc", vocab_size=258)
    assert [tokenizer.token_bytes(token) for token in (256, 257)] == [b"bb", b"aa"]
    assert tokenizer.encode("cc") == [ord("c")] * 2


def test_bytes_that_are_not_utf8_decode_to_replacement_characters(tokenizer: PieceTokenizer) -> None:
    assert tokenizer.decode([0xC3, ord("x")]) == "\ufffdx"


def test_lone_surrogates_cannot_be_encoded(tokenizer: PieceTokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\udcffb")


@pytest.mark.parametrize("token", [-1, 10**6])
def test_decoding_refuses_ids_outside_the_vocabulary(tokenizer: PieceTokenizer, token: int) -> None:
    with pytest.raises(IndexError, match=str(token)):
        tokenizer.decode([token])


def test_the_vocabulary_holds_all_bytes() -> None:
    with pytest.raises(ValueError, match="255"):
        PieceTokenizer("text", vocab_size=255)


# --- the distribution


def kneser_ney(corpus: list[int], V: int, order: int, history: list[int]) -> np.ndarray:
    """The formula of the module's docstring, term by term; -1 stands for the beginning of the text."""
    padded = [-1] * (order - 1) + corpus
    occurrences = {
        length: Counter(tuple(padded[end - length : end]) for end in range(order, len(padded) + 1))
        for length in range(1, order + 1)
    }
    counts = {order: occurrences[order]}
    for length in range(1, order):
        counts[length] = Counter(gram[1:] for gram in occurrences[length + 1])
    row = np.full(V, 1.0 / V)
    for length in range(1, order + 1):
        context = tuple(history[len(history) - (length - 1) :])
        followers = {gram[-1]: c for gram, c in counts[length].items() if gram[:-1] == context}
        if len(context) < length - 1 or not followers:
            break
        n1, n2 = (sum(c == n for c in counts[length].values()) for n in (1, 2))
        discount = n1 / (n1 + 2 * n2) if n1 else 0.5
        total = sum(followers.values())
        row = row * discount * len(followers) / total
        for token, count in followers.items():
            row[token] += (count - discount) / total
    return row


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_rows_follow_the_formula(order: int) -> None:
    V = 6
    corpus = np.random.default_rng(order).choice(5, p=[0.4, 0.3, 0.15, 0.1, 0.05], size=60).tolist()
    model = NGramModel(corpus, V, order)
    # Every history of three tokens, seen ones and unseen ones, and token 5 that the corpus never has.
    for history in itertools.product(range(V), repeat=3):
        state = model.start([*history[:2], 0])
        row = np.exp(model.forward(state, history[2:])[0].astype(np.float64))
        np.testing.assert_allclose(row, kneser_ney(corpus, V, order, list(history)), rtol=2e-6)


@pytest.mark.parametrize("corpus", [[0], [0, 1], [2] * 9, [0, 1, 2] * 7], ids=str)
@pytest.mark.parametrize("order", [1, 2, 5])
def test_tiny_corpora_give_distributions(corpus: list[int], order: int) -> None:
    model = NGramModel(corpus, 4, order)
    row = np.exp(model.forward(model.start([0]), [corpus[0]])[0].astype(np.float64))
    assert row.sum() == pytest.approx(1.0, abs=1e-6)
    assert row.min() > 0


def test_rows_are_log_probabilities_over_the_whole_vocabulary(pair: NGramPair) -> None:
    tokens = pair.tokenizer.encode(default_corpus()[:3000] + "unseen \N{SNOWMAN} words: qxzv")
    for model in (pair.target, pair.draft):
        logits = model.forward(model.start(tokens[:1]), tokens)
        assert logits.dtype == np.float32
        assert logits.shape == (len(tokens), pair.tokenizer.vocab_size)
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(np.exp(logits.astype(np.float64)).sum(axis=1), 1.0, atol=1e-6)


def test_the_longer_context_predicts_the_corpus_better(pair: NGramPair) -> None:
    tokens = pair.tokenizer.encode(default_corpus())[:2000]
    loss = {}
    for model in (pair.target, pair.draft):
        logits = model.forward(model.start(tokens[:1]), tokens[:-1])
        loss[model.order] = -logits[np.arange(len(logits)), tokens[1:]].mean()
    assert loss[5] < loss[2] - 0.5
    assert loss[2] < np.log(pair.draft.vocab_size) - 2


# --- start, forward, rollback


def test_rows_do_not_depend_on_chunks_or_rolled_back_tokens(pair: NGramPair) -> None:
    model = pair.target
    tokens = pair.tokenizer.encode("The class statement is executed in order")
    whole = model.forward(model.start(tokens[:1]), tokens)

    state = model.start(tokens[:1])
    single = np.concatenate([model.forward(state, [token]) for token in tokens])
    assert single.tobytes() == whole.tobytes()

    state = model.start(tokens[:1])
    for position, token in enumerate(tokens):
        model.forward(state, [7, 8, 9, 10, 11, 12])
        model.rollback(state, 6)
        assert model.forward(state, [token]).tobytes() == whole[position : position + 1].tobytes()


def test_start_decodes_all_but_the_last_prompt_token(pair: NGramPair) -> None:
    model = pair.target
    tokens = pair.tokenizer.encode("The class statement")
    after_start = model.forward(model.start(tokens), tokens[-1:])
    after_forward = model.forward(model.start(tokens[:1]), tokens)
    assert after_start.tobytes() == after_forward[-1:].tobytes()


def test_an_empty_prompt_is_refused(pair: NGramPair) -> None:
    with pytest.raises(ValueError, match="empty"):
        pair.target.start([])


def test_forward_of_nothing_gives_no_rows(pair: NGramPair) -> None:
    state = pair.draft.start([65])
    assert pair.draft.forward(state, []).shape == (0, pair.draft.vocab_size)


@pytest.mark.parametrize("n", [-1, 5, 10**9])
def test_rollback_beyond_what_was_decoded_changes_nothing(pair: NGramPair, n: int) -> None:
    model = pair.draft
    state = model.start([65, 66])
    model.forward(state, [67, 68, 69])
    with pytest.raises(ValueError, match=str(n)):
        model.rollback(state, n)
    assert state.tokens == [65, 67, 68, 69]
    model.rollback(state, 4)
    assert state.tokens == []


@pytest.mark.parametrize("token", [-1, 4096])
def test_ids_outside_the_vocabulary_change_nothing(pair: NGramPair, token: int) -> None:
    model = pair.draft
    state = model.start([65, 66])
    with pytest.raises(IndexError, match=str(token)):
        model.forward(state, [67, token])
    assert state.tokens == [65]
    with pytest.raises(IndexError, match=str(token)):
        model.start([token])


# --- training


@pytest.mark.parametrize(
    ("tokens", "order", "message"),
    [
        ([], 2, "non-empty"),
        ([0, 7], 2, "the token 7, outside"),
        ([0, -1], 2, "the token -1, outside"),
        ([0, 1], 0, "order"),
    ],
)
def test_bad_training_input_is_refused(tokens: list[int], order: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramModel(tokens, 3, order)


def test_an_empty_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        train_pair("")


def test_the_pair_trains_at_start_up() -> None:
    text = default_corpus()
    began = time.process_time()
    train_pair(text)
    # A third of a second where this was written; the bound is for slow and busy machines.
    assert time.process_time() - began < 5
