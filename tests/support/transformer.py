"""A small decoder-only transformer with state, and a multi-token-prediction head that drafts for it.

Random weights from a seed: root-mean-square normalisation, rotary positions, grouped-query attention, a
key/value cache, a gated feed-forward part, and, where asked, a sliding window of attention. It implements
`mtplx.decoding.TargetModel`.

Everything is computed for one token at a time, matrix times vector, and attention reads a fresh copy of
the rows it needs in the order of their positions. So logits are the same bits however tokens are cut into
calls, and two states that hold the same tokens give the same bits.

A window keeps `slack` rows more than it attends to: a row that left the window comes back into it when the
tokens behind it are rolled back. A rollback that would need a row that is gone is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtplx.distributions import SamplerConfig
from mtplx.reference import distribution_from_logits, sample_from_distribution

ALONE = SamplerConfig(1.0, 1.0, 0)
EPSILON = 1e-6
ROTARY_BASE = 10_000.0


def normalised(x, weight):
    return x / np.sqrt(np.mean(x * x) + EPSILON) * weight


def rotated(heads, position):
    """Rotary positions: pair i of the entries of each head, turned by ``position * base**(-i / pairs)``."""
    pairs = heads.shape[1] // 2
    angles = position * ROTARY_BASE ** (-np.arange(pairs) / pairs)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = heads[:, :pairs], heads[:, pairs:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=1)


@dataclass
class LayerCache:
    """Keys and values of one layer: those of the positions ``first``, ``first + 1``, .."""

    first: int = 0
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def end(self):
        """The position after the last one."""
        return self.first + len(self.keys)


@dataclass
class State:
    """What was decoded: `position` tokens, and for each of the last ones the hidden state after it."""

    caches: list[LayerCache]
    position: int = 0
    hidden: list[np.ndarray] = field(default_factory=list)


class Transformer:
    """See the head of the module.

    `noise` perturbs the weights: a model with the same seed and some noise is a good drafter for one
    without. `window` positions are attended to, all if None. `latest` is the state of the latest text.
    """

    def __init__(
        self,
        seed,
        *,
        vocab_size=24,
        width=16,
        layers=2,
        heads=4,
        key_heads=2,
        hidden=24,
        window=None,
        slack=16,
        noise=0.0,
        sharpness=2.0,
    ):
        self.vocab_size = vocab_size
        self.width = width
        self.heads = heads
        self.key_heads = key_heads
        self.head_size = width // heads
        self.window = window
        self.slack = slack
        rng = np.random.default_rng(seed)
        disturbed = np.random.default_rng([seed, 1])

        def weights(rows, columns, scale=1.0):
            drawn = rng.normal(0.0, scale / np.sqrt(columns), (rows, columns))
            return drawn * (1.0 + noise * disturbed.normal(size=drawn.shape))

        self.embedding = weights(vocab_size, width, np.sqrt(width))
        key_width = key_heads * self.head_size
        self.layers = [
            {
                "attention norm": 1.0 + 0.1 * rng.normal(size=width),
                # Large enough for attention to look at something: with small ones it is a plain mean.
                "q": weights(width, width, 2.0),
                "k": weights(key_width, width, 2.0),
                "v": weights(key_width, width, 1.5),
                "o": weights(width, width, 1.5),
                "feed norm": 1.0 + 0.1 * rng.normal(size=width),
                "gate": weights(hidden, width),
                "up": weights(hidden, width),
                "down": weights(width, hidden),
            }
            for _ in range(layers)
        ]
        self.latest = None
        self.final_norm = 1.0 + 0.1 * rng.normal(size=width)
        self.unembedding = weights(vocab_size, width, sharpness)

    # ---- the protocol

    def start(self, prompt: Sequence[int]) -> State:
        tokens = self._checked(prompt)
        if not tokens:
            raise ValueError("the prompt is empty")
        state = State([LayerCache() for _ in self.layers])
        self._append(state, tokens[:-1])
        self.latest = state
        return state

    def forward(self, state: State, tokens: Sequence[int]) -> np.ndarray:
        hidden = self._append(state, self._checked(tokens))
        return np.array([self.logits(h) for h in hidden]).reshape(len(tokens), self.vocab_size)

    def rollback(self, state: State, n: int) -> None:
        length = state.position - operator.index(n)
        if not 0 <= length <= state.position:
            raise ValueError(f"cannot roll back {n} tokens: {state.position} are decoded")
        oldest = 0 if self.window is None else max(0, length + 1 - self.window)
        if any(cache.first > oldest for cache in state.caches):
            raise ValueError(f"cannot roll back {n} tokens: the window's rows are gone")
        for cache in state.caches:
            self._drop(cache, n)
        del state.hidden[max(0, len(state.hidden) - n) :]
        state.position = length

    # ---- what it is made of

    def logits(self, hidden):
        return self.unembedding @ normalised(hidden, self.final_norm)

    def _checked(self, tokens):
        checked = [operator.index(token) for token in tokens]
        for token in checked:
            if not 0 <= token < self.vocab_size:
                raise IndexError(f"token {token} is outside [0, {self.vocab_size})")
        return checked

    def _append(self, state, tokens):
        """Decode `tokens`, all or (should something raise) none, and give the hidden state after each."""
        before = state.position
        added = []
        try:
            for token in tokens:
                added.append(self._decode(state, token))
        except BaseException:
            for cache in state.caches:
                self._drop(cache, cache.end - before)
            state.position = before
            raise
        state.hidden += added
        if self.window is not None:
            self._evict(state)
            del state.hidden[: max(0, len(state.hidden) - self._kept_rows())]
        return added

    def _decode(self, state, token):
        x = self.embedding[token]
        for layer, cache in zip(self.layers, state.caches, strict=True):
            x = x + self._attend(layer, cache, normalised(x, layer["attention norm"]), state.position)
            y = normalised(x, layer["feed norm"])
            gate = layer["gate"] @ y
            x = x + layer["down"] @ (gate / (1.0 + np.exp(-gate)) * (layer["up"] @ y))
        state.position += 1
        return x

    def _attend(self, layer, cache, x, position):
        q = rotated((layer["q"] @ x).reshape(self.heads, self.head_size), position)
        cache.keys.append(rotated((layer["k"] @ x).reshape(self.key_heads, self.head_size), position))
        cache.values.append((layer["v"] @ x).reshape(self.key_heads, self.head_size))
        seen = slice(0 if self.window is None else -self.window, None)
        keys, values = np.array(cache.keys[seen]), np.array(cache.values[seen])
        heads = []
        for head in range(self.heads):
            group = head * self.key_heads // self.heads
            scores = np.ascontiguousarray(keys[:, group]) @ q[head] / np.sqrt(self.head_size)
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ np.ascontiguousarray(values[:, group]))
        return layer["o"] @ np.concatenate(heads)

    def _drop(self, cache, n):
        """Forget the last `n` rows."""
        del cache.keys[len(cache.keys) - n :]
        del cache.values[len(cache.values) - n :]

    def _kept_rows(self):
        return self.window + self.slack

    def _evict(self, state):
        for cache in state.caches:
            excess = max(0, len(cache.keys) - self._kept_rows())
            del cache.keys[:excess]
            del cache.values[:excess]
            cache.first += excess


# ---- planted bugs: each is one that engines have had ------------------------------------------------


class StaleRow(Transformer):
    """Rolls back all layers but the last, whose rejected rows are attended to from then on."""

    def rollback(self, state, n):
        last = state.caches[-1]
        rows = list(last.keys), list(last.values)
        super().rollback(state, n)
        last.keys, last.values = rows
        last.first -= n  # it believes its end to be where the others end


class OffByOne(Transformer):
    """Drops one row too few, and the position with it."""

    def rollback(self, state, n):
        super().rollback(state, max(0, n - 1))


class PositionNotRewound(Transformer):
    """Drops the rows, and goes on counting positions from where it was."""

    def rollback(self, state, n):
        position = state.position
        super().rollback(state, n)
        state.position = position


class EvictedTooEarly(Transformer):
    """Keeps the rows of the window alone, and does not notice that a rollback needs one more."""

    def _kept_rows(self):
        return self.window

    def rollback(self, state, n):
        firsts = [cache.first for cache in state.caches]
        for cache in state.caches:
            cache.first = 0
        super().rollback(state, n)
        for cache, first in zip(state.caches, firsts, strict=True):
            cache.first = first


BUGS = (StaleRow, OffByOne, PositionNotRewound, EvictedTooEarly)


# ---- the multi-token-prediction head ---------------------------------------------------------------


class PredictionHead:
    """Drafts from the target's own hidden state: a drafter, not a model.

    From the hidden state h after a token and the embedding of the next token it predicts the hidden
    state after that one, ``h' = A h + B e + c``, and the target's unembedding turns it into logits. Deeper
    drafts go on from h'. The matrices are fitted by least squares to texts that the target draws itself.

    The target must be the one that the loop decodes with: the head reads the state of its latest text. At
    the time of `propose` that holds all committed tokens but the pending one, rejected drafts being
    rolled back.
    """

    def __init__(self, target, *, seed=0, tokens=600):
        self.target = target
        rng = np.random.default_rng(seed)
        state = target.start([0, 0])
        pending, features, wanted = 0, [], []
        for _ in range(tokens):
            before = state.hidden[-1]
            row = distribution_from_logits(target.forward(state, [pending])[0], ALONE)
            features.append(np.concatenate([before, target.embedding[pending], [1.0]]))
            wanted.append(state.hidden[-1])
            pending = sample_from_distribution(row, rng)
        self.matrix = np.linalg.lstsq(np.array(features), np.array(wanted), rcond=None)[0].T
        self._pending = 0

    def start(self, prompt):
        self._pending = prompt[-1]

    def propose(self, depth, config, rng):
        known = self.target.latest.hidden
        hidden = known[-1] if known else np.zeros(self.target.width)
        token, drafts, rows = self._pending, [], []
        for _ in range(depth):
            hidden = self.matrix @ np.concatenate([hidden, self.target.embedding[token], [1.0]])
            row = distribution_from_logits(self.target.logits(hidden), config)
            token = sample_from_distribution(row, rng)
            drafts.append(token)
            rows.append(row)
        return drafts, rows

    def commit(self, tokens):
        self._pending = tokens[-1]
