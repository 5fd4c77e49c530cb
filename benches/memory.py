"""Peak memory of each call beyond its result. Linux only.

    python benches/memory.py
    python benches/memory.py --only top-k --vocab 8000000
    python benches/memory.py --reference            NumPy's, which must show its temporary rows
    python benches/memory.py --batches              a batch of blocks from float16 logits

Two measures, since neither sees everything: tracemalloc counts what Python and NumPy allocate, the growth of
the resident set (VmHWM, reset just before the call) also what the core takes from malloc itself. Every row of
`mtplx bench` runs in a process of its own, in which malloc returns to the system at once what is freed, so
that nothing freed earlier is reused unseen. A line shows the input that comes nearest to the limit, or goes
farthest beyond it, of those tried.

A call must need no more than its result and a few numbers per block of 64 elements where it streams, or
another row, two or, where ties are replayed, three where its result is dense; blocks with top-p alone hold a
nucleus, and may as much as a worker of a batch (below). Linux counts resident pages in batches, so that 300
KiB more or less mean nothing: rows are of two million elements, and 384 KiB are allowed besides.

A batch of 32 sequences of 5 drafts over 262,144 tokens must grow by less than 1 MiB in all, result included,
under every rule: half a row as float64. Where a nucleus of top-p alone is so wide that its row is written, it
may be two rows and the room to cut them, less than 12 MiB. The logits alone are 176 MiB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from mtplx import bench, reference, sampling, verification
from mtplx.decisions import Cascade, Typical

UNCOUNTED = 384 << 10
STREAMED, DENSE = 0.5, 24.0  # bytes per element beyond the result

B, K, BATCH_VOCABULARY = 32, 5, 262_144
CONFIGS = {
    "whole": sampling.SamplerConfig(0.8, 1.0, 0),
    "top-k 20 + top-p": sampling.SamplerConfig(0.8, 0.95, 20),
    "top-p": sampling.SamplerConfig(0.8, 0.95, 0),
    "top-p, wide": sampling.SamplerConfig(5.0, 0.95, 0),
}
# Every entropy is asked for: eps is above any probability.
RULES = {"exact": "exact", "block": "block", "typical": Typical(2.0, 0.09), "cascade": Cascade(0.3)}
LIMIT, WIDE_LIMIT, NUCLEUS_LIMIT = 1 << 20, 12 << 20, 16 << 20

# The environment in which freed memory is not kept.
PROMPT = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def result_bytes(result: Any) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    if isinstance(result, sampling.SparseDistribution):
        return int(result.token_ids.nbytes + result.probs.nbytes)
    return 0


def resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def work(name: str, kind: str, vocab: int, face: str) -> None:
    (row,) = (row for row in bench.ROWS if row.name == name)
    measure(
        row.build({"compiled": sampling, "reference": reference}[face], *row.make(kind, row.vocab or vocab))
    )


def batch_work(form: str, rule: str, rejected: int) -> None:
    arguments = *batch_arguments(rejected), CONFIGS[form]
    measure(partial(verification.verify_batch_from_logits, *arguments, rule=RULES[rule]))


def batch_arguments(rejected: int) -> tuple[Any, ...]:
    """Logits of target and draft, and drafts of which number `rejected` is rejected in every sequence."""
    rng = np.random.default_rng(3)
    target = np.empty((B, K + 1, BATCH_VOCABULARY), np.float16)
    for rows in target:
        rows[:] = rng.standard_normal(rows.shape, dtype=np.float32) * 3
    draft = target[:, :K].copy()
    accepted, other = 17, 4711
    target[:, :, accepted] = draft[:, :, other] = 20.0
    draft[:, :, accepted] = 19.0
    target[:, :, other] = -20.0
    tokens = np.full((B, K), accepted)
    if rejected < K:
        tokens[:, rejected] = other
    return target, draft, tokens


def measure(call: Callable[[], Any]) -> None:
    """Prints what one call needs beyond its result."""
    size = result_bytes(call())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    result = call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    gc.collect()
    resident("VmRSS")  # so that reading it the next time allocates nothing new
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # VmHWM starts from here
    start = resident("VmRSS")
    result = call()
    grown = resident("VmHWM") - start
    # A row that is written to `out` allocates no result.
    inside = any(
        isinstance(value, np.ndarray) and value is result for value in getattr(call, "keywords", {}).values()
    )
    size = 0 if inside else size
    print(json.dumps({"result": size, "traced": peak - before - size, "resident": grown - size}))


def allowed(row: bench.Row, vocab: int, result: int) -> float:
    if "logits, top-p," in row.name:
        return NUCLEUS_LIMIT  # it holds its nucleus, as long as that may be
    dense = result >= 8 * (row.vocab or vocab) or "to float32" in row.name
    return UNCOUNTED + (DENSE if dense else STREAMED) * (row.vocab or vocab)


def measured(request: dict[str, Any]) -> dict[str, int]:
    """What a process of its own finds."""
    done = subprocess.run(
        [sys.executable, __file__, "--work", json.dumps(request)],
        env={**os.environ, **PROMPT, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def batches(only: str) -> None:
    print(f"B = {B}, K = {K}, V = {BATCH_VOCABULARY:,}, float16 logits, one worker; KiB, with the result.\n")
    print("| logits | rule | rejected | tracemalloc | resident | allowed | within |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for form, rule, rejected in product(CONFIGS, RULES, (0, K)):
        if only.casefold() not in f"{form}, {rule}".casefold():
            continue
        limit = WIDE_LIMIT if "wide" in form else LIMIT
        found = measured({"form": form, "rule": rule, "rejected": rejected})
        grown = found["traced"], found["resident"]
        within = "yes" if max(grown) <= limit else "NO"
        numbers = " | ".join(f"{value / 1024:,.0f}" for value in (*grown, limit))
        where = f"at {rejected}" if rejected < K else "never"
        print(f"| {form} | {rule} | {where} | {numbers} | {within} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="PART", help="rows with this in their name")
    parser.add_argument("--vocab", type=int, default=2_000_000)
    parser.add_argument("--reference", action="store_true", help="the reference instead of the core")
    parser.add_argument("--batches", action="store_true", help="a batch of blocks instead of the rows")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        request = json.loads(options.work)
        batch_work(**request) if "form" in request else work(**request)
        return
    if options.batches:
        batches(options.only)
        return
    face = "reference" if options.reference else "compiled"
    print(f"{face}, KiB, V = {options.vocab:,}; beyond the result.\n")
    print("| kernel | input | result | tracemalloc | resident | allowed | within |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    lines: dict[str, list[tuple[bench.Row, str]]] = {}
    for row in bench.ROWS:
        if options.only.casefold() in row.name.casefold():
            kinds = (*row.kinds, *(("tied", "two values") if row.worst else ()))
            lines.setdefault(row.name, []).extend((row, kind) for kind in kinds)
    for name, inputs in lines.items():
        needs = []
        for row, kind in inputs:
            found = measured({"name": name, "kind": kind, "vocab": options.vocab, "face": face})
            limit = allowed(row, options.vocab, found["result"])
            needs.append((max(found["traced"], found["resident"]) - limit, kind, found, limit))
        over, kind, found, limit = max(needs, key=lambda need: need[0])
        cells = [found["result"], found["traced"], found["resident"], limit]
        numbers = " | ".join(f"{value / 1024:,.0f}" for value in cells)
        print(f"| {name} | {kind}, of {len(needs)} | {numbers} | {'NO' if over > 0 else 'yes'} |", flush=True)


if __name__ == "__main__":
    main()
