"""Batches of blocks on one worker and on two. Needs an idle machine with two cores.

    python benches/workers.py
    python benches/workers.py --only "B = 32" --seconds 60

One worker is no executor, two are a `ThreadPoolExecutor(2)`, called in turns within one process; the figures
are minima of wall-clock time, of several passes over the table, so that what else the machine does for a
while spoils no line. From logits, 8 or more sequences with more than 2 ms of work must gain by 1.5 or more.
Work that is small must not lose: an executor never makes a call slower than 0.95x. Of dense probabilities,
which are read from memory, no gain is promised.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mtplx.bench import DESIGN_VOCABULARY
from mtplx.bench_blocks import Shape, batch_call, shapes

WORTHWHILE_US, GAIN, NO_LOSS = 2000.0, 1.5, 0.95
PASSES = 3


def sample(call: Callable[[], object], number: int) -> float:
    """Microseconds per call, of `number` calls in a row."""
    start = time.perf_counter_ns()
    for _ in range(number):
        call()
    return (time.perf_counter_ns() - start) / (1e3 * number)


def in_turns(one: Callable[[], object], two: Callable[[], object], seconds: float) -> tuple[float, float]:
    best = [sample(one, 1), sample(two, 1)]
    number = max(1, round(1000.0 / best[0]))
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        best = [min(old, sample(call, number)) for old, call in zip(best, (one, two), strict=True)]
    return best[0], best[1]


def verdict(shape: Shape, one: float, two: float) -> str:
    promised = shape.form.startswith("logits") and shape.sequences >= 8 and one > WORTHWHILE_US
    least = GAIN if promised else NO_LOSS
    return f"{'yes' if one / two >= least else 'NO'} ({least:g}x)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="PART", help="lines with this in their name")
    parser.add_argument("--vocab", type=int, default=DESIGN_VOCABULARY)
    parser.add_argument("--seconds", type=float, default=120.0, help="for the whole table")
    options = parser.parse_args()
    plan = [shape for shape in shapes(options.only) if shape.drafts == 5]
    load = f"Processes at work before: {os.getloadavg()[0]:.1f}."
    print(f"V = {options.vocab:,}, K = 5; wall-clock microseconds. {load}")
    print()
    print("| form | rejected | B | one worker | two workers | ratio | within |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    best = dict.fromkeys(plan, (math.inf, math.inf))
    with ThreadPoolExecutor(2) as executor:
        for _ in range(PASSES):
            for shape in plan:
                calls = (batch_call(shape, options.vocab, workers) for workers in (None, executor))
                taken = in_turns(*calls, options.seconds / (PASSES * len(plan)))
                best[shape] = min(best[shape][0], taken[0]), min(best[shape][1], taken[1])
    for shape, (one, two) in best.items():
        print(
            f"| {shape.form} | {shape.outcome} | {shape.sequences} | {one:,.0f} | {two:,.0f} "
            f"| {one / two:.2f} | {verdict(shape, one, two)} |"
        )


if __name__ == "__main__":
    main()
