"""How far from the target's law each rule is, exactly, on random models over three tokens.

Run ``python benches/laws.py``. Rows depend on the whole prefix; distances are in total variation, of the
first K + 1 tokens (chains) or four tokens (trees), the worst of all pairs for lossless rules and the mean
for the others. The second number is the expected number of accepted drafts, the mean of all pairs.
"""

import argparse

import numpy as np

from mtplx.decisions import Cascade, Typical
from mtplx.oracle import expected_accepted, law_distance, sequence_law, target_law

V = 3
CHAINS = ["exact", "block", "match", "greedy", Typical(), Cascade(0.3), Cascade(0.9)]
LOSSLESS = {"exact", "block", "match", "recursive", "kseq", "traversal"}
SHAPES = {
    "3 children": [-1, -1, -1],
    "2-2-1": [-1, -1, 0, 0, 1, 1, 2],
    "3-3-3": [-1, -1, -1, *(node for node in range(12) for _ in range(3))],
}


def model(seed):
    """A function from prefixes to rows; in a third of the models one token of each row is impossible."""
    rows = {}

    def row(prefix):
        if prefix not in rows:
            rng = np.random.default_rng([seed, *(token + 1 for token in prefix)])
            weights = rng.exponential(size=V)
            if seed % 3 == 0:
                weights[rng.integers(V)] = 0.0
            rows[prefix] = weights / weights.sum()
        return rows[prefix]

    return row


def line(name, rule, pairs, depth=None, **tree):
    length = 4 if depth is None else depth + 1
    distances, accepted = [], []
    for target, draft in pairs:
        law = sequence_law(rule, target, draft, depth, length, **tree)
        distances.append(law_distance(law, target_law(target, length)))
        accepted.append(expected_accepted(target, draft, rule, depth, **tree))
    distance = f"{max(distances):.0e}" if rule in LOSSLESS else f"{np.mean(distances):.3f}"
    print(f"| {name} | `{rule}` | {distance} | {np.mean(accepted):.3f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    count = parser.parse_args().pairs
    pairs = [(model(2 * i), model(2 * i + 1)) for i in range(count)]
    print(f"{count} pairs of models, V = {V}\n\n| drafts | rule | distance | accepted |\n|---|---|---|---|")
    for depth in (1, 2, 3, 4):
        for rule in CHAINS:
            line(f"chain of {depth}", rule, pairs, depth)
    wide = [(target, model(6 * i + 1)) for i, (target, _) in enumerate(pairs)]
    for shape, parents in SHAPES.items():
        for rule in ("recursive", "kseq", "traversal"):
            if rule != "traversal" or len(parents) < 10:
                line(f"tree {shape}", rule, wide, tree=parents)
        for rule in ("recursive", "traversal"):
            if rule != "traversal" or len(parents) < 10:
                line(f"tree {shape}, without replacement", rule, wide, tree=parents, replacement=False)


if __name__ == "__main__":
    main()
