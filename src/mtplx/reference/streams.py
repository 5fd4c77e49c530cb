"""Where the uniforms of a block come from.

Design
------
A rule asks for two kinds of things: the coin of position i, and a token from weights. Two sources
answer, and a rule cannot tell them apart:

- a generator gives its numbers in the order in which they are asked for;
- a keyed stream has a uniform for every (seed, position, lane) and no order at all, so that a sequence
  draws the same numbers whatever its neighbours do. `position` is the absolute index of the block's
  first token and grows from block to block. Keys by token position alone would be wrong: the block rule
  looks at coins of positions that it then does not fill, and the next block would see them again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from mtplx.reference.one_row import Weights, as_generator, draw, token_at

CORRECTION_LANE = 2**32
BONUS_LANE = 2**32 + 1
DRAFTER_LANE = 2**32 + 2
"""First of the drafter's lanes, up to `NODE_LANE` - 1. Lanes below 2**32 are the coins of positions."""
NODE_LANE = 2**33
"""First of the lanes of trees: lane ``NODE_LANE + i`` belongs to node i."""


def keyed_uniform(seed: int, position: int, lane: int) -> float:
    """The uniform in [0, 1) of a lane.

    Parameters
    ----------
    seed : int
        In [0, 2**64).
    position : int
        Absolute index of the block's first token.
    lane : int

    Returns
    -------
    float

    Examples
    --------
    >>> philox = np.random.Philox(key=[7, 3], counter=[0, 5, 0, 0])
    >>> keyed_uniform(7, 3, 5) == np.random.Generator(philox).random()
    True
    """
    key = np.array([seed, position], dtype=np.uint64)
    counter = np.array([0, lane, 0, 0], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


class Stream(Protocol):
    """What a block draws from."""

    def coin(self, i: int) -> float:
        """The uniform that decides about the draft at position i."""

    def token(self, lane: int, weights: Weights) -> int:
        """A token from weights that were checked before."""

    def held(self) -> AbstractContextManager[Any]:
        """Keep other threads from drawing in between."""


class GeneratorStream:
    """Numbers of a generator, in the order in which they are asked for; lanes do not matter."""

    def __init__(self, rng: Any) -> None:
        self.rng = as_generator(rng)

    def coin(self, i: int) -> float:
        return float(self.rng.random())

    def token(self, lane: int, weights: Weights) -> int:
        return draw(self.rng, weights)

    def held(self) -> AbstractContextManager[Any]:
        if type(self.rng) is np.random.Generator:
            lock: AbstractContextManager[Any] = self.rng.bit_generator.lock
            return lock
        return nullcontext()


class KeyedStream:
    """One number a lane, whenever it is asked for."""

    def __init__(self, seed: int, position: int) -> None:
        self.seed = seed
        self.position = position

    def coin(self, i: int) -> float:
        return keyed_uniform(self.seed, self.position, i)

    def token(self, lane: int, weights: Weights) -> int:
        return token_at(weights, keyed_uniform(self.seed, self.position, lane))

    def held(self) -> AbstractContextManager[Any]:
        return nullcontext()
