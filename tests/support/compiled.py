"""The laws of the compiled rules, found from outside.

Nothing of the core is known here but its calls. Its uniforms come from a bit generator of the test's own, so
that each can be set to any double; every threshold is found by halving [0, 1) until two adjacent multiples of
2**-53 decide differently, and so is every step of the last token. What the coins do is put together by the
formulas of probability alone. Which coin belongs to which draft is how `docs/rules.md` tells the rules.
"""

import ctypes
import threading
from itertools import product

import numpy as np

from mtplx import verification
from mtplx.decisions import TokenTree, Typical

STEP = 2.0**-53
LAST = 1.0 - STEP

_DOUBLE = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)
_UINT64 = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
_UINT32 = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)


class _Bits(ctypes.Structure):
    """`bitgen_t` of numpy/random/bitgen.h."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        ("next_uint64", _UINT64),
        ("next_uint32", _UINT32),
        ("next_double", _DOUBLE),
        ("next_raw", _UINT64),
    )


class Written:
    """A bit generator whose doubles are written down beforehand; behind them comes LAST for ever."""

    def __init__(self):
        self.numbers = ()
        self.taken = 0
        self.lock = threading.Lock()
        self._bits = _Bits(
            None, _UINT64(lambda _: 0), _UINT32(lambda _: 0), _DOUBLE(self._next), _UINT64(lambda _: 0)
        )
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self._name = b"BitGenerator"
        self.capsule = make(ctypes.addressof(self._bits), self._name, None)

    def _next(self, _):
        self.taken += 1
        return self.numbers[self.taken - 1] if self.taken <= len(self.numbers) else LAST


_WRITTEN = Written()
_GENERATOR = np.random.Generator(_WRITTEN)


def run(call, numbers):
    """``call(generator)`` with these uniforms; what it gives, and how many it took."""
    _WRITTEN.numbers, _WRITTEN.taken = tuple(numbers), 0
    decision = call(_GENERATOR)
    return decision, _WRITTEN.taken


def measure(holds):
    """How likely a uniform u has ``holds(u)``, true up to some u and false from there on."""
    if not holds(0.0):
        return 0.0
    if holds(LAST):
        return 1.0
    low, high = 0, 2**53 - 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle * STEP):
            low = middle
        else:
            high = middle
    # At and below `low` of the 2**53 uniforms; a threshold between two of them is anywhere there.
    return low * STEP


def last_token(call, numbers, V):
    """The law of the last token as its uniform, the one behind `numbers`, takes all values."""

    def token(u):
        return int(run(call, (*numbers, u))[0].tokens[-1])

    below = [measure(lambda u, v=v: token(u) <= v) for v in range(V)]
    return {v: share for v, share in enumerate(np.diff([0.0, *below])) if share > 0.0}


def add(law, tokens, probability):
    if probability > 0.0:
        law[tokens] = law.get(tokens, 0.0) + probability


def block_law(rule, target, draft, K, V):
    """The law of the tokens that the compiled `verify_block` emits, over all drafted blocks."""
    law = {}
    for drafts in product(range(V), repeat=K):
        q = [draft(drafts[:i]) for i in range(K)]
        drafted = float(np.prod([q[i][x] for i, x in enumerate(drafts)]))
        if drafted == 0.0:
            continue
        p = [target(drafts[:i]) for i in range(K + 1)]
        rows = np.array(p), (np.array(q) if K else None)

        def call(rng, length=K, bonus=True, rows=rows, drafts=drafts):
            p, q = rows[0][: length + bonus], None if rows[1] is None else rows[1][:length]
            return verification.verify_block(p, q, list(drafts[:length]), rng, rule=rule)

        for tokens, probability in _outcomes(call, rule, drafts, V):
            add(law, tokens, drafted * probability)
    return law


def _outcomes(call, rule, drafts, V):
    if rule == "greedy":
        yield tuple(run(call, ())[0].tokens.tolist()), 1.0
    elif rule == "match":
        yield from _matched(call, drafts, V)
    elif rule == "block":
        yield from _longest_first(call, drafts, V)
    elif isinstance(rule, Typical) or rule == "typical":
        accepted = run(call, ())[0].accepted
        for token, share in last_token(call, (), V).items():
            yield (*drafts[:accepted], token), share
    else:
        yield from _in_order(call, drafts, V)


def _in_order(call, drafts, V):
    alive, coins = 1.0, ()
    for i in range(len(drafts)):
        keep = measure(lambda u, i=i, coins=coins: run(call, (*coins, u))[0].accepted > i)
        # The same drafts up to this one, all kept, without a bonus token: nothing but their coins is taken.
        alone, taken = run(lambda rng, i=i: call(rng, i + 1, False), (*coins, 0.0))
        takes_coin = alone.accepted == i or taken > len(coins)
        if keep < 1.0:
            for token, share in last_token(call, (*coins, LAST), V).items():
                yield (*drafts[:i], token), alive * (1.0 - keep) * share
        alive *= keep
        if keep == 0.0:
            return
        coins = (*coins, 0.0) if takes_coin else coins
    for token, share in last_token(call, coins, V).items():
        yield (*drafts, token), alive * share


def _matched(call, drafts, V):
    def walk(numbers, mass):
        i = len(numbers)
        if i == len(drafts):
            for token, share in last_token(call, numbers, V).items():
                yield (*drafts, token), mass * share
            return

        def token(u):
            return int(run(call, (*numbers, u))[0].tokens[i])

        below = [measure(lambda u, v=v: token(u) <= v) for v in range(V)]
        for v, share in enumerate(np.diff([0.0, *below])):
            if share > 0.0 and v != drafts[i]:
                yield (*drafts[:i], v), mass * share
        x = drafts[i]
        if below[x] > (below[x - 1] if x else 0.0):
            inside = below[x] if below[x] < 1.0 else LAST
            yield from walk((*numbers, inside), mass * (below[x] - (below[x - 1] if x else 0.0)))

    yield from walk((), 1.0)


def _longest_first(call, drafts, V):
    K = len(drafts)
    alive = 1.0
    for length in range(K, -1, -1):
        # Longer prefixes fail, shorter ones do not matter.
        def coins(u, length=length):
            return tuple(0.0 if i < length - 1 else (u if i == length - 1 else LAST) for i in range(K))

        keep = 1.0
        if length:
            keep = measure(lambda u, length=length: run(call, coins(u, length))[0].accepted >= length)
        if keep > 0.0:
            for token, share in last_token(call, coins(0.0), V).items():
                yield (*drafts[:length], token), alive * keep * share
        alive *= 1.0 - keep
        if alive == 0.0:
            return


def tree_law(rule, target, draft, parents, replacement, V, drafted_trees):
    """The law of the tokens that the compiled `verify_tree` emits, over all drafted trees of one shape."""
    law = {}
    n = len(parents)
    children = {node: [i for i in range(n) if parents[i] == node] for node in range(-1, n)}
    for tokens, drafted in drafted_trees:
        prefixes = [()]
        for node in range(n):
            prefixes.append((*prefixes[parents[node] + 1], tokens[node]))
        p, q = (np.array([model(prefix) for prefix in prefixes]) for model in (target, draft))
        tree = TokenTree(tokens, parents)

        def call(rng, rows=(p, q), tree=tree):
            return verification.verify_tree(*rows, tree, rng, rule=rule, replacement=replacement)

        walk = _bottom_up if rule == "traversal" else _top_down
        for node, probability, numbers in walk(call, children, parents):
            for token, share in last_token(call, numbers, V).items():
                add(law, (*prefixes[node + 1], token), drafted * probability * share)
    return law


def _top_down(call, children, parents):
    """(where the path ends, how likely, the coins that lead there)."""
    pending = [(-1, 1.0, ())]
    while pending:
        node, alive, coins = pending.pop()
        for child in children[node]:
            keep = measure(lambda u, coins=coins, c=child: c in run(call, (*coins, u))[0].path)
            if keep > 0.0:
                pending.append((child, alive * keep, (*coins, 0.0)))
            alive *= 1.0 - keep
            coins = (*coins, LAST)
            if keep == 1.0:
                break
        if alive > 0.0:
            yield node, alive, coins


def _bottom_up(call, children, parents):
    alive, coins = 1.0, ()
    left = {node: list(below) for node, below in children.items()}
    while True:
        node = -1
        while left[node]:
            node = left[node][0]
        if node == -1:
            yield -1, alive, coins
            return

        def ends_here(u, coins=coins, node=node):
            path = run(call, (*coins, u))[0].path
            return path.size > 0 and path[-1] == node

        keep = measure(ends_here)
        if keep > 0.0:
            yield node, alive * keep, (*coins, 0.0)
        alive *= 1.0 - keep
        if alive == 0.0:
            return
        coins = (*coins, LAST)
        left[parents[node]].remove(node)
