"""An interpolated Kneser-Ney n-gram language model that trains in a second.

Design
------
A decode loop can only be shown, and tested, on a model that produces real text. This one needs NumPy
and a text file. It is a proper language model (every row it gives is a distribution over the whole
vocabulary) and a weak one: it knows the last few pieces of the text and nothing else.

**Pieces.** A regular expression cuts any text into parts of words, runs of one punctuation character,
and white space. The most frequent pieces of the corpus are tokens; every other
piece is spelled in its UTF-8 bytes, which are the first 256 tokens. So every text can be encoded, and
decoding gives it back.

**Kneser-Ney.** With ``c`` the count of an n-gram, ``h`` the words before ``w``, ``h'`` those without the
first, and ``N(h) = |{w : c(h w) > 0}|``, order ``k`` is::

    P_k(w | h) = (c(h w) - D_k)+ / c(h) + D_k N(h) / c(h) * P_{k-1}(w | h')

The highest order counts occurrences; every lower one counts in how many different left contexts the
n-gram was seen. The lowest order falls back on the uniform distribution, so no token has probability 0.
``D_k = n1 / (n1 + 2 n2)``, ``n1`` and ``n2`` the n-grams counted once and twice.

**Layout.** A context is a node of a tree that grows to the left: the children of a node prepend one
token. The longest known context of a history is then found with one dictionary look-up per order, and
the longer ones need not be tried once one is unknown. The successors of all contexts of one order lie in
one array, sorted by context. One row costs one pass over V and a few sparse additions.

References
----------
R. Kneser and H. Ney, "Improved backing-off for m-gram language modeling", ICASSP 1995.
S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling",
Computer Speech and Language 13 (1999).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from mtplx.arguments import as_count, as_integer, as_tokens

__all__ = ["NGramModel", "NGramPair", "NGramState", "PieceTokenizer", "default_corpus", "train_pair"]

BYTE_TOKENS = 256

# Alternatives are tried in order and together match every character. Words are cut into parts of four
# letters: then nearly every part of a corpus of half a megabyte is frequent enough for a token of its own,
# rare words are put together from parts instead of bytes, and a model of low order predicts the ends of
# words well, which is what makes it a useful drafter. Runs of punctuation end at 16 characters, because an
# underline of any length must not need a piece of its own.
_PIECE = re.compile(r"\w{1,4}|([^\w\s])\1{0,15}|\n+ *| +|\s")


def _split(text: str) -> Iterable[str]:
    return (match.group() for match in _PIECE.finditer(text))


class PieceTokenizer:
    """Frequent pieces of a corpus as tokens, UTF-8 bytes for everything else.

    Ids 0..255 are the bytes; the pieces follow, the most frequent first, equally frequent ones in the
    order of their first appearance.

    Parameters
    ----------
    text : str
        The corpus that decides which pieces are tokens.
    vocab_size : int, default 4096
        The largest number of tokens, the 256 bytes included. A small corpus gives fewer.

    Raises
    ------
    ValueError
        If `vocab_size` is below 256, or `text` holds a lone surrogate (UnicodeEncodeError).

    Examples
    --------
    >>> tokenizer = PieceTokenizer("to be or not to be")
    >>> tokenizer.decode(tokenizer.encode("not to be: \N{SNOWMAN}"))
    'not to be: \N{SNOWMAN}'
    """

    def __init__(self, text: str, vocab_size: int = 4096) -> None:
        if as_integer(vocab_size, "vocab_size") < BYTE_TOKENS:
            raise ValueError(f"vocab_size must be at least {BYTE_TOKENS}, the bytes; got {vocab_size}")
        counts = Counter(_split(text))
        # A piece of one ASCII character is its byte token already.
        frequent = (piece for piece, _ in counts.most_common() if len(piece) > 1 or not piece.isascii())
        pieces = [piece.encode() for piece in islice(frequent, vocab_size - BYTE_TOKENS)]
        self._bytes = [bytes([value]) for value in range(BYTE_TOKENS)] + pieces
        self._ids = {piece.decode(): BYTE_TOKENS + index for index, piece in enumerate(pieces)}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, V."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Give the tokens of `text`.

        Raises
        ------
        UnicodeEncodeError
            If `text` holds a lone surrogate, which UTF-8 cannot spell. A subclass of ValueError.
        """
        ids = self._ids
        tokens: list[int] = []
        for piece in _split(text):
            token = ids.get(piece)
            if token is None:
                tokens.extend(piece.encode())
            else:
                tokens.append(token)
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Give the UTF-8 bytes of one token, which need not be whole characters.

        Raises
        ------
        IndexError
            If `token` is outside [0, V).
        """
        if not 0 <= token < len(self._bytes):
            raise IndexError(f"token {token} is outside [0, {len(self._bytes)})")
        return self._bytes[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Give the text of `tokens`; ``decode(encode(text)) == text``.

        A model may emit bytes that are not UTF-8; they become U+FFFD.
        """
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")


class NGramState:
    """The tokens that an `NGramModel` has decoded.

    Attributes
    ----------
    tokens : list of int
        All of them, oldest first. The model reads no more than its last ``order - 1``; the rest is kept
        so that any number of them can be rolled back.
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class _Order:
    """The successors of all contexts of one length, sorted by context.

    Context ``j`` owns the entries ``starts[j]:starts[j + 1]``. `discounted` is ``(c - D) / c(h)``,
    `backoff` the mass left to the order below.
    """

    contexts: dict[int, int]
    starts: list[int]
    tokens: NDArray[np.int64]
    discounted: NDArray[np.float64]
    backoff: list[float]


class NGramModel:
    """Interpolated Kneser-Ney model with the target protocol of `mtplx.decoding`.

    Parameters
    ----------
    tokens : sequence of int, length N
        The encoded corpus.
    vocab_size : int
        V. Every token lies in [0, V).
    order : int
        Length of the longest n-gram: a row depends on the last ``order - 1`` tokens.

    Raises
    ------
    ValueError
        If the corpus is empty, a token is outside [0, V), or `order` is below 1.

    Notes
    -----
    A row depends on the history alone, not on how it was cut into calls of `forward`; so logits are the
    same bits after any rollback and for every chunking.

    Examples
    --------
    >>> model = NGramModel([0, 1, 2, 0, 1, 2, 0, 1], vocab_size=3, order=3)
    >>> state = model.start([2, 0])
    >>> logits = model.forward(state, [0, 1])
    >>> logits.shape
    (2, 3)
    >>> logits.argmax(axis=1).tolist()
    [1, 2]
    """

    def __init__(self, tokens: Sequence[int] | NDArray[np.integer], vocab_size: int, order: int) -> None:
        order, vocab_size = as_count(order, "order", 1), as_count(vocab_size, "vocab_size", 1)
        given = np.asarray(tokens)
        if given.ndim != 1 or given.size == 0:
            raise ValueError(f"the corpus must be a non-empty sequence of tokens; got shape {given.shape}")
        if given.dtype.kind not in "iu":
            raise TypeError(f"the corpus must hold integers, not {given.dtype}")
        outside = np.flatnonzero((given < 0) | (given >= vocab_size))
        if outside.size:
            raise ValueError(f"the corpus has the token {given[outside[0]]}, outside [0, {vocab_size})")
        corpus = given.astype(np.int64)
        self.order = order
        self.vocab_size = vocab_size
        self._orders: list[_Order] = []
        self._train(corpus)

    def _train(self, corpus: NDArray[np.int64]) -> None:
        V = self.vocab_size
        # V marks the beginning of the text, as often as the longest context is long. Without it the first
        # n-grams would have no left neighbour, and a continuation count of 0.
        padding = self.order - 1
        padded = np.concatenate([np.full(padding, V), corpus])
        context = np.zeros(len(corpus), dtype=np.int64)
        levels = []
        for length in range(self.order):
            contexts: dict[int, int] = {}
            if length:
                before = padded[padding - length : len(padded) - length]
                # Node numbers stay below N, so the keys cannot overflow, whatever the order.
                keys, context = np.unique(context * (V + 1) + before, return_inverse=True)
                contexts = dict(zip(keys.tolist(), range(len(keys)), strict=True))
            grams, first, gram, occurrences = np.unique(
                context * V + corpus, return_index=True, return_inverse=True, return_counts=True
            )
            levels.append((contexts, grams, first, gram, occurrences))
        for length, (contexts, grams, _, gram, occurrences) in enumerate(levels):
            if length + 1 < self.order:
                # The n-grams one longer differ in the token on the left alone: their number is the count.
                counts = np.bincount(gram[levels[length + 1][2]], minlength=len(grams))
            else:
                counts = occurrences
            self._orders.append(_order_from_counts(contexts, grams // V, grams % V, counts))
        lowest = self._orders[0]
        base = np.full(V, lowest.backoff[0] / V)
        base[lowest.tokens] += lowest.discounted
        self._base = base

    def start(self, prompt: Sequence[int]) -> NGramState:
        """Decode all but the last token of `prompt`.

        Raises
        ------
        ValueError
            If `prompt` is empty.
        IndexError
            If a token is outside [0, V).
        """
        tokens = as_tokens(prompt, self.vocab_size)
        if not tokens:
            raise ValueError("the prompt is empty: there is no last token to decode from")
        return NGramState(tokens[:-1])

    def forward(self, state: NGramState, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` and give the logits after each of them.

        Parameters
        ----------
        state : NGramState
            Changed in place.
        tokens : sequence of int, length n

        Returns
        -------
        ndarray of float32, shape (n, V)
            Log-probabilities: ``exp`` of a row sums to 1 within float32 rounding.

        Raises
        ------
        IndexError
            If a token is outside [0, V). The state is unchanged.
        """
        appended = as_tokens(tokens, self.vocab_size)
        rows = np.empty((len(appended), self.vocab_size), dtype=np.float32)
        # A copy of the little that is read: an interrupt below must not leave half of the tokens decoded.
        recent = state.tokens[max(0, len(state.tokens) - self.order) :]
        for row, token in zip(rows, appended, strict=True):
            recent.append(token)
            np.log(self._probabilities(recent), out=row, casting="same_kind")
        state.tokens.extend(appended)
        return rows

    def rollback(self, state: NGramState, n: int) -> None:
        """Un-decode the last `n` tokens.

        Raises
        ------
        ValueError
            If `n` is negative or larger than the number of decoded tokens. The state is unchanged.
        """
        if not 0 <= n <= len(state.tokens):
            raise ValueError(f"cannot roll back {n} tokens: {len(state.tokens)} are decoded")
        del state.tokens[len(state.tokens) - n :]

    def _probabilities(self, history: list[int]) -> NDArray[np.float64]:
        known = []
        context = 0
        for order, token in zip(self._orders[1:], reversed(history), strict=False):
            child = order.contexts.get(context * (self.vocab_size + 1) + token)
            if child is None:
                break
            context = child
            known.append((order, context))
        shares = []
        mass = 1.0
        for order, context in reversed(known):
            successors = slice(order.starts[context], order.starts[context + 1])
            shares.append((order.tokens[successors], mass * order.discounted[successors]))
            mass *= order.backoff[context]
        row = self._base * mass
        for tokens, share in shares:
            row[tokens] += share
        return row


def _order_from_counts(
    contexts: dict[int, int],
    context: NDArray[np.int64],
    tokens: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> _Order:
    once = np.count_nonzero(counts == 1)
    twice = np.count_nonzero(counts == 2)
    # Without n-grams that were seen once the formula gives 0 and unseen tokens would be impossible.
    discount = once / (once + 2 * twice) if once else 0.5
    totals = np.bincount(context, weights=counts)
    successors = np.bincount(context)
    return _Order(
        contexts=contexts,
        starts=[0, *np.cumsum(successors).tolist()],
        tokens=tokens,
        discounted=(counts - discount) / totals[context],
        backoff=(discount * successors / totals).tolist(),
    )


@dataclass(frozen=True, slots=True)
class NGramPair:
    """A target and a draft model over one tokenizer."""

    tokenizer: PieceTokenizer
    target: NGramModel
    draft: NGramModel


def default_corpus() -> str:
    """Give about half a megabyte of English that every CPython carries: the topics of ``help()``.

    The text differs between versions of Python, and with it the models trained on it.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def train_pair(
    text: str, *, target_order: int = 5, draft_order: int = 2, vocab_size: int = 4096
) -> NGramPair:
    """Train tokenizer, target and draft on one text, encoding it once.

    Parameters
    ----------
    text : str
        The corpus.
    target_order, draft_order : int
        Orders of the two models.
    vocab_size : int
        Largest V.

    Raises
    ------
    ValueError
        If `text` is empty or holds a lone surrogate, or an order or `vocab_size` is too small.

    Examples
    --------
    >>> pair = train_pair("a rose is a rose is a rose")
    >>> pair.target.order, pair.draft.order
    (5, 2)
    """
    if not text:
        raise ValueError("the corpus is empty")
    tokenizer = PieceTokenizer(text, vocab_size)
    tokens = np.array(tokenizer.encode(text), dtype=np.int64)
    return NGramPair(
        tokenizer,
        NGramModel(tokens, tokenizer.vocab_size, target_order),
        NGramModel(tokens, tokenizer.vocab_size, draft_order),
    )
