"""What the block rule and trees cost beside single verifications.

    python benches/rules.py                 K = 5, V = 151,936, dense rows; a minute
    python benches/rules.py --passes        how often kseq goes through its rows to find r; no times

All on the core, in one process, in turns; figures are minima. *The block rule* stands beside the exact rule
on the same rows, then on rows where some prefixes are tested and fail, each of which may cost one pass over
a pair of rows beside the correction (the correction and a pass each are what the exact rule takes longer to
reject than to test). *Trees* of 24 nodes stand beside the calls of `verify_one_token` (and the draw of a
bonus token) that their walk reaches, on rows made ready beforehand: p what earlier siblings left, q without
their tokens where they were drawn without replacement, or r q for kseq. Traversal stands beside one call for
each node that it tests, on the rows as given: a pass over them where the node fails, and what is drawn then.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mtplx._csampling import kseq
from numpy.typing import NDArray

from mtplx import sampling, verification
from mtplx.bench_report import ALLOCATOR
from mtplx.decisions import TokenTree
from mtplx.reference import trees
from mtplx.reference.streams import BONUS_LANE, NODE_LANE, GeneratorStream

PARENTS = [-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3 + list(range(3, 12)) + [12, 13, 14]
SHAPES = 6  # walks that are measured
Rows = NDArray[np.float64]


def in_turns(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Microseconds of each, the least of all rounds."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter_ns()
            call()
            best[i] = min(best[i], (time.perf_counter_ns() - start) / 1e3)
    return best


def normalised(rows: Rows) -> Rows:
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def model_rows(rng: np.random.Generator, count: int, V: int) -> tuple[Rows, Rows]:
    """Zipf-like rows of a target, and those of a draft that is near it."""
    zipf = rng.permutation(1.0 / (np.arange(V) + 2.7) ** 1.1)
    target = zipf * np.exp(0.5 * rng.standard_normal((count, V)))
    return normalised(target), normalised(target * np.exp(0.7 * rng.standard_normal((count, V))))


def line(call: str, taken: float, beside: str, other: float) -> None:
    print(f"| {call} | {taken:.1f} | {beside} | {other:.1f} | {taken / other:.2f}x |")


# ---- the block rule --------------------------------------------------------------------------------


def failing_prefixes(rng: np.random.Generator, K: int, V: int, passes: int) -> tuple[Rows, Rows, list[int]]:
    """Rows on which that many prefixes pass u <= P and fail, and the correction comes from row 0.

    From some row on p = q and P = 1 - 2^-40, so that nothing is left over; the last draft is impossible.
    Without any, the first draft is.
    """
    target, _ = model_rows(rng, K + 1, V)
    draft = target[:K].copy()
    token = int(np.argmax(target[0]))
    if passes:
        target[K - 1 - passes, token] *= 1.0 - 2.0**-40
        target[K - 1 - passes, token - 1] *= 2.0
        target[K - 1, token] = 0.0
    else:
        target[0, token] = 0.0
        target[0, token - 1] *= 2.0
    return target, draft, [token] * K


def block_lines(K: int, V: int, rounds: int) -> None:
    rng = np.random.default_rng(1)
    target, draft = model_rows(rng, K + 1, V)
    draft = draft[:K]
    kept = [int(np.argmax(np.where(p >= q, q, 0.0))) for p, q in zip(target, draft, strict=False)]
    generator = np.random.default_rng(2)

    def verify(rule: Any, rows: tuple[Rows, Rows, list[int]]) -> Callable[[], object]:
        return lambda: verification.verify_block(*rows, generator, rule=rule)

    all_kept = target, draft, kept
    lost = failing_prefixes(rng, K, V, 0)
    exact, block, rejected = in_turns(
        [verify("exact", all_kept), verify("block", all_kept), verify("exact", lost)], rounds
    )
    one_row = in_turns([lambda: sampling.sample_from_distribution(target[K], generator)], rounds)[0]
    one_pass = rejected - (exact - one_row)
    line(f"block, all {K} accepted", block, f"exact, all {K} accepted", exact)
    for passes in range(K):
        rows = failing_prefixes(rng, K, V, passes)
        taken = in_turns([verify("block", rows)], rounds)[0]
        allowed = one_pass * (passes + 1)
        line(f"block, {passes} tested in vain", taken, f"{passes} passes and the correction", allowed)


# ---- trees -----------------------------------------------------------------------------------------


def scripted(lot: float) -> dict[str, Any]:
    """The state of a generator whose next number is near `lot`."""
    bits = np.random.PCG64(1)
    while True:
        state = dict(bits.state)
        if abs(np.random.Generator(bits).random() - lot) < 1e-3:
            return state


Single = tuple[Any, Any, int, bool]
"""p, q, token, whether it is accepted."""


def reached(
    target: Rows, draft: Rows, tree: TokenTree, path: list[int], rule: str, replacement: bool
) -> list[Single]:
    """The single verifications of a rule along a path."""
    calls = []
    for node in [-1, *path]:
        p, q = target[node + 1], draft[node + 1]
        children = tree.children(node)
        if len(children) > 1 and rule == "kseq":
            q = q * trees.KSeqNode(p, q, len(children)).division
        for child in children:
            token, kept = int(tree.tokens[child]), child in path
            calls.append((p, q, token, kept))
            if kept:
                break
            if rule == "recursive":
                p = sampling.residual_distribution(p, q)
            if not replacement:
                q = np.where(np.arange(q.size) == token, 0.0, q)
                q /= q.sum()
    return calls


class Journal(GeneratorStream):
    """Takes note of the nodes whose coins are tossed."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.nodes: list[int] = []

    def coin(self, i: int) -> float:
        if i != BONUS_LANE:
            self.nodes.append(i - NODE_LANE)
        return super().coin(i)


def tested(target: Rows, draft: Rows, tree: TokenTree, seed: int, replacement: bool) -> list[Single]:
    """The single verifications of traversal, in the order of its tests."""
    journal = Journal(np.random.default_rng(seed))
    opened = trees._opened(target, draft, tree, False)
    path = trees.decide(opened, "traversal", replacement, journal).path
    above = [int(tree.parents[node]) + 1 for node in journal.nodes]
    return [
        (target[row], draft[row], int(tree.tokens[node]), node in path)
        for row, node in zip(above, journal.nodes, strict=True)
    ]


def drafted(rng: np.random.Generator, draft: Rows, replacement: bool) -> TokenTree:
    tokens: list[int] = []
    for node, parent in enumerate(PARENTS):
        row = draft[parent + 1].copy()
        if not replacement:
            row[[tokens[other] for other in range(node) if PARENTS[other] == parent]] = 0.0
        tokens.append(int(rng.choice(row.size, p=row / row.sum())))
    return TokenTree(tokens, PARENTS)


def tree_lines(rule: Any, replacement: bool, V: int, rounds: int) -> None:
    rng = np.random.default_rng(3)
    target, draft = model_rows(rng, len(PARENTS) + 1, V)
    tree = drafted(rng, draft, replacement)
    bits = np.random.PCG64(0)
    generator = np.random.Generator(bits)
    accept, reject = scripted(1e-3), scripted(1.0 - 1e-3)
    seen: set[str] = set()
    for seed in range(60):
        start = dict(np.random.default_rng(seed).bit_generator.state)

        def whole(start: Any = start) -> Any:
            bits.state = start
            return verification.verify_tree(
                target, draft, tree, generator, rule=rule, replacement=replacement
            )

        if len(seen) >= SHAPES:
            break
        path = whole().path.tolist()
        if rule == "traversal":
            calls = tested(target, draft, tree, seed, replacement)
        else:
            calls = reached(target, draft, tree, path, rule, replacement)
        shape = "".join("a" if kept else "r" for *_, kept in calls)
        if shape in seen:
            continue
        seen.add(shape)

        leaf = path[-1] + 1 if path and not tree.children(path[-1]) else None

        def singles(calls: list[Single] = calls, leaf: int | None = leaf) -> None:
            for p, q, token, kept in calls:
                bits.state = accept if kept else reject
                sampling.verify_one_token(p, q, token, generator)
            if leaf is not None:
                sampling.sample_from_distribution(target[leaf], generator)

        def states(calls: list[Single] = calls) -> None:
            for *_, kept in calls:
                bits.state = accept if kept else reject

        one, other, setting, single = in_turns(
            [whole, singles, states, lambda start=start: setattr(bits, "state", start)], rounds
        )
        name = rule if replacement else f"{rule} without replacement"
        line(f"{name}, tests {shape}", one - single, "single verifications", other - setting)


# ---- what kseq reads ---------------------------------------------------------------------------------


def pass_lines(V: int) -> None:
    """Passes over both rows until r is known to the last bit."""
    rng = np.random.default_rng(5)
    targets, drafts = model_rows(rng, 20, V)
    peaked = normalised(np.exp(3.0 * np.log(targets)))
    pairs = {
        "a draft near the target": (targets, drafts),
        "the same at a third of the temperature": (peaked, normalised(np.exp(3.0 * np.log(drafts)))),
        "a draft within 1 % of the target": (
            targets,
            normalised(targets * np.exp(0.01 * rng.standard_normal(targets.shape))),
        ),
        "p = q": (targets, targets.copy()),
        "p = q but for rounding to float32": (targets, targets.astype(np.float32).astype(np.float64)),
    }
    print("| rows | k = 2 | k = 3 | k = 8 |\n| --- | ---: | ---: | ---: |")
    for name, (p, q) in pairs.items():
        cells = []
        for k in (2, 3, 8):
            passes = [kseq.solved(p[i], q[i], k)[2] for i in range(len(p))]
            cells.append(f"{np.mean(passes):.1f}, at most {max(passes):.1f}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--passes", action="store_true")
    options = parser.parse_args()
    if options.passes:
        pass_lines(options.vocab)
        return
    if ALLOCATOR.items() - os.environ.items():  # read by the allocator when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    print(f"V = {options.vocab:,}, dense float64 rows; microseconds. Of a tree: a accepted, r rejected.\n")
    print("| call | us | beside | us | ratio |\n| --- | ---: | --- | ---: | ---: |")
    block_lines(5, options.vocab, options.rounds)
    for rule, replacement in (
        ("recursive", True),
        ("recursive", False),
        ("kseq", True),
        ("traversal", True),
        ("traversal", False),
    ):
        tree_lines(rule, replacement, options.vocab, options.rounds)


if __name__ == "__main__":
    main()
