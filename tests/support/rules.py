"""Every acceptance rule once more, written from its formula and from nothing else.

The second derivation beside `mtplx.oracle`. The oracle walks through the functions that decide in
production and takes each coin out of them; this module does not know them. It writes down, for one fully
drafted block or tree, the probability of each outcome, and sums over all drafts there are. Nothing is
clever and nothing is shared between the rules beyond `positive_part` and `normalised`, so a misreading
would have to be made twice.

Numbers are whatever the rows hold. With `fractions.Fraction` every law is exact, and "lossless" means
that two dictionaries are equal, without a tolerance.

A *row* is a list of V numbers that sum to 1, a *model* a function from a prefix (tuple of tokens) to a
row, a *law* a dictionary from tuples of tokens to probabilities. An *outcome* of a drafted block is
(probability, accepted tokens, row that the next token is drawn from).
"""

from itertools import product
from math import exp, log


def positive_part(row):
    return [max(entry, 0) for entry in row]


def normalised(row, otherwise):
    total = sum(row)
    return [entry / total for entry in row] if total else otherwise


def residual(p, q):
    """norm((p - q)+), p where nothing is positive."""
    return normalised(positive_part([a - b for a, b in zip(p, q, strict=True)]), p)


def ratio(numerator, denominator):
    """min(1, a/b), where a token that the draft could not draw counts as kept, unless impossible."""
    if denominator == 0:
        return 1 if numerator > 0 else 0
    return min(1, numerator / denominator)


def likeliest(row):
    return row.index(max(row))


def point_mass(token, V):
    return [1 if v == token else 0 for v in range(V)]


# ---- chains: rows of K + 1 positions and the K drafted tokens, to outcomes ---------------------------


def exact(ps, qs, drafts):
    alive = 1
    for i, x in enumerate(drafts):
        a = ratio(ps[i][x], qs[i][x])
        yield alive * (1 - a), drafts[:i], residual(ps[i], qs[i])
        alive = alive * a
    yield alive, drafts, ps[len(drafts)]


def greedy(ps, qs, drafts):
    kept = 0
    while kept < len(drafts) and drafts[kept] == likeliest(ps[kept]):
        kept += 1
    yield 1, drafts[:kept], point_mass(likeliest(ps[kept]), len(ps[kept]))


def match(ps, qs, drafts):
    alive = 1
    for i, x in enumerate(drafts):
        others = [0 if v == x else p for v, p in enumerate(ps[i])]
        yield alive * sum(others), drafts[:i], normalised(others, ps[i])
        alive = alive * ps[i][x]
    yield alive, drafts, ps[len(drafts)]


def block(ps, qs, drafts):
    K = len(drafts)
    P = [1]
    for i, x in enumerate(drafts):
        numerator, denominator = P[i] * ps[i][x], qs[i][x]
        P.append(ratio(numerator, denominator))
    D = [positive_part([P[i] * p - q for p, q in zip(ps[i], qs[i], strict=True)]) for i in range(K)]
    h = []
    for i in range(K):
        R = sum(D[i])
        h.append(R / (R + 1 - P[i]) if R + 1 - P[i] else 1)
    h.append(P[K])
    for kept in range(K + 1):
        stops_here = h[kept]
        for later in range(kept + 1, K + 1):
            stops_here = stops_here * (1 - h[later])
        row = ps[K] if kept == K else normalised(D[kept], ps[kept])
        yield stops_here, drafts[:kept], row


def typical(eps, delta):
    def rule(ps, qs, drafts):
        for i, x in enumerate(drafts):
            entropy = -sum(p * log(p) for p in ps[i] if p > 0)
            if not ps[i][x] > min(eps, delta * exp(-entropy)):
                yield 1, drafts[:i], ps[i]
                return
        yield 1, drafts, ps[len(drafts)]

    return rule


def cascade(alpha, deferral):
    def deferred(p, q):
        if deferral == "tokenv1":
            return [b < max(p) - alpha for b in q]
        if deferral == "tokenv2":
            return [a < max(p) - alpha for a in p]
        return [a < max(p) * (1 - alpha) for a in p]

    def rule(ps, qs, drafts):
        alive = 1
        for i, x in enumerate(drafts):
            p, q = ps[i], qs[i]
            r = deferred(p, q)
            handed_over = sum(b for b, defer in zip(q, r, strict=True) if defer)
            pi = [b * (not defer) + a * handed_over for a, b, defer in zip(p, q, r, strict=True)]
            a = ratio(pi[x], q[x]) if r[x] else 1
            yield alive * (1 - a), drafts[:i], residual(pi, q)
            alive = alive * a
        yield alive, drafts, ps[len(drafts)]

    return rule


def chain_law(rule, target, draft, depth, V):
    """The law of what `rule` emits, summed over all V**depth drafted blocks."""
    law = {}
    for drafts in product(range(V), repeat=depth):
        qs = [draft(drafts[:i]) for i in range(depth)]
        drafted = 1
        for i in range(depth):
            drafted = drafted * qs[i][drafts[i]]
        if not drafted:
            continue
        ps = [target(drafts[:i]) for i in range(depth + 1)]
        for probability, kept, row in rule(ps, qs, drafts):
            add_next(law, drafted * probability, kept, row)
    return law


def add_next(law, probability, kept, row):
    total = sum(row)
    for v, weight in enumerate(row):
        if probability * weight:
            law[(*kept, v)] = law.get((*kept, v), 0) + probability * weight / total


# ---- trees: a drafted tree, given as its parents and its tokens, to outcomes ------------------------


def children_of(parents, node):
    return [child for child, parent in enumerate(parents) if parent == node]


def prefix_of(parents, tokens, node):
    prefix = ()
    while node != -1:
        prefix = (tokens[node], *prefix)
        node = parents[node]
    return prefix


def without(q, token):
    left = [0 if v == token else weight for v, weight in enumerate(q)]
    return normalised(left, left)


def recursive(replacement):
    def rule(target, draft, parents, tokens, node=-1, alive=1):
        prefix = prefix_of(parents, tokens, node)
        p, q = target(prefix), draft(prefix)
        for child in children_of(parents, node):
            x = tokens[child]
            a = ratio(p[x], q[x])
            if alive * a:
                yield from rule(target, draft, parents, tokens, child, alive * a)
            alive = alive * (1 - a)
            p = residual(p, q)
            q = q if replacement else without(q, x)
        yield alive, prefix, p

    return rule


def kseq(target, draft, parents, tokens, node=-1, alive=1):
    prefix = prefix_of(parents, tokens, node)
    p, q = target(prefix), draft(prefix)
    children = children_of(parents, node)
    k = len(children)
    if k:

        def beta(r):
            return sum(min(a / r, b) for a, b in zip(p, q, strict=True))

        # The smallest division of p that leaves a residual without a negative entry, by plain halving.
        low, high = 1.0, float(k)
        for _ in range(60):
            middle = (low + high) / 2
            if 1 - (1 - beta(middle)) ** k > middle * beta(middle):
                low = middle
            else:
                high = middle
        r, b = high, beta(high)
        for child in children:
            x = tokens[child]
            a = ratio(p[x], r * q[x])
            if alive * a:
                yield from kseq(target, draft, parents, tokens, child, alive * a)
            alive = alive * (1 - a)
        share = (1 - (1 - b) ** k) / b if b else 0
        left = [a - min(a / r, c) * share for a, c in zip(p, q, strict=True)]
        p = normalised(positive_part(left), p)
    yield alive, prefix, p


def traversal(replacement):
    """The tree is a set of nodes from which leaves are removed; nothing is done by recursion."""

    def rule(target, draft, parents, tokens):
        nodes = [-1, *range(len(parents))]
        p = {node: target(prefix_of(parents, tokens, node)) for node in nodes}
        q = {node: draft(prefix_of(parents, tokens, node)) for node in nodes}
        P = {-1: 1}
        left = set(nodes)
        alive = 1
        while True:
            node = -1
            while True:  # down along first children that are left
                below = [child for child in children_of(parents, node) if child in left]
                if not below:
                    break
                child = below[0]
                if child not in P:  # fixed on first entry: what its own children take away must stay
                    P[child] = ratio(P[node] * p[node][tokens[child]], q[node][tokens[child]])
                node = child
            h = 1 if node == -1 else P[node]
            yield alive * h, prefix_of(parents, tokens, node), p[node]
            alive = alive * (1 - h)
            if not alive:
                return
            left.remove(node)
            parent = parents[node]
            D = positive_part([P[parent] * a - b for a, b in zip(p[parent], q[parent], strict=True)])
            R = sum(D)
            p[parent] = normalised(D, p[parent])
            P[parent] = R / (R + 1 - P[parent]) if R + 1 - P[parent] else 1
            if not replacement:
                q[parent] = without(q[parent], tokens[node])

    return rule


def drafted_trees(draft, parents, replacement, V):
    """All trees of one shape that a drafter can draw, each with its probability."""
    for tokens in product(range(V), repeat=len(parents)):
        probability = 1
        for node in range(-1, len(parents)):
            q = draft(prefix_of(parents, tokens, node))
            for child in children_of(parents, node):
                probability = probability * q[tokens[child]]
                q = q if replacement else without(q, tokens[child])
        if probability:
            yield tokens, probability


def tree_law(rule, target, draft, parents, replacement, V):
    """The law of what `rule` emits, summed over all drafted trees of one shape."""
    law = {}
    for tokens, drafted in drafted_trees(draft, parents, replacement, V):
        for probability, kept, row in rule(target, draft, parents, tokens):
            add_next(law, drafted * probability, kept, row)
    return law


# ---- what laws are compared with ---------------------------------------------------------------------


def continued(law, target, length):
    """The law of `length` tokens: what was emitted, continued with the target or cut."""
    whole = {}
    for tokens, probability in law.items():
        partial = {tokens[:length]: probability}
        while any(len(prefix) < length for prefix in partial):
            longer = {}
            for prefix, mass in partial.items():
                for v, p in enumerate(target(prefix)):
                    if p:
                        longer[(*prefix, v)] = mass * p
            partial = longer
        for prefix, mass in partial.items():
            whole[prefix] = whole.get(prefix, 0) + mass
    return whole
