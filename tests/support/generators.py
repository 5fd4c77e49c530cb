"""Generators whose coming numbers are known, and stand-ins that record how they are used."""

import numpy as np

STEP = 2.0**-53  # a uniform double is a multiple of this
LAST = 1.0 - STEP  # and this is the largest one

BIT_GENERATORS = {
    "PCG64": np.random.PCG64,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


def script(rng, *uniforms):
    """Make the next `random()` calls of a Philox generator return these (at most 4) multiples of 2**-53.

    Philox keeps four finished words in a buffer, and `random()` is the upper 53 bits of a word.
    """
    state = rng.bit_generator.state
    words = [int(u * 2.0**53) << 11 for u in uniforms]
    state["buffer"] = np.array([0] * (4 - len(words)) + words, dtype=np.uint64)
    state["buffer_pos"] = 4 - len(words)
    rng.bit_generator.state = state
    return rng


def scripted(*uniforms):
    """A plain `Generator` with this script."""
    return script(np.random.Generator(np.random.Philox(0)), *uniforms)


def long_script(*uniforms):
    """A plain `Generator` that gives these multiples of 2**-53 first, at most 312.

    A Mersenne Twister gives the words of its state one by one, each through four steps that are undone here.
    """
    whole = (np.array(uniforms) * 2.0**53).astype(np.uint64)
    words = np.stack(
        [whole >> np.uint64(26) << np.uint64(5), (whole & np.uint64(2**26 - 1)) << np.uint64(6)], 1
    )
    words = words.ravel().astype(np.uint32)
    words ^= words >> 18
    words ^= words << 15 & 0xEFC60000
    known = words
    for _ in range(4):
        known = words ^ (known << 7 & 0x9D2C5680)
    words = known
    for _ in range(2):
        known = words ^ (known >> 11)
    bits = np.random.MT19937(0)
    state = bits.state
    state["state"]["key"][: words.size] = known
    state["state"]["pos"] = 0
    bits.state = state
    return np.random.Generator(bits)


def around(value):
    """The uniforms next to `value`: two below or at it, two above, none outside [0, 1)."""
    below = int(np.floor(value * 2.0**53))
    return [k * STEP for k in (below - 1, below, below + 1, below + 2) if 0 <= k < 2**53]


def plain_state(rng):
    """The state of a generator as nested tuples, to be compared with ==."""

    def flatten(value):
        if isinstance(value, dict):
            return tuple((key, flatten(item)) for key, item in value.items())
        return tuple(value.tolist()) if isinstance(value, np.ndarray) else value

    bits = rng if isinstance(rng, np.random.RandomState) else rng.bit_generator
    return flatten(bits.get_state(legacy=False) if bits is rng else bits.state)


class Stub:
    """Draws through `random` and `choice` of its own, from a list of uniforms; keeps a journal."""

    def __init__(self, *uniforms):
        self.uniforms = list(uniforms)
        self.calls = []

    def random(self):
        self.calls.append("random")
        return self.uniforms.pop(0)

    def choice(self, ids, p=None):
        self.calls.append(("choice", np.array(ids), np.array(p)))
        return ids[int(np.searchsorted(np.cumsum(p), self.uniforms.pop(0), side="right"))]


class Falsy(Stub):
    """Its truth value and its length say "nothing here"; only None may be replaced."""

    def __bool__(self):
        return False

    def __len__(self):
        return 0


class Recorder(np.random.Generator):
    """A subclass with methods of its own: drawing past them would change a user's stream."""

    def __init__(self, bits):
        super().__init__(bits)
        self.calls = []

    def random(self, *args, **kwargs):
        self.calls.append("random")
        return super().random(*args, **kwargs)

    def choice(self, *args, **kwargs):
        self.calls.append("choice")
        return super().choice(*args, **kwargs)
