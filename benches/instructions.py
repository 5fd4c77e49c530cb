"""Instructions of each kernel per element: a measure that a busy machine cannot disturb.

    python benches/instructions.py                  the whole table, some two minutes under valgrind
    python benches/instructions.py --only top-k --isa baseline

A row of `mtplx bench` is called a few times and then a few times more; the difference of the counts, divided
by the difference of the calls, is free of start-up, inputs and warm-up. The counter is ``perf stat`` where
the processor's counters can be read (not in most virtual machines), else valgrind's callgrind, which only has
to be installed. Callgrind knows no AVX-512, so it counts the AVX2 kernels at best.

With callgrind one process does all rows and calls `getppid` between the parts: callgrind is told to write its
counts and start from zero before that function, which nothing else here calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtplx._csampling import dispatch

from mtplx import bench, sampling

FEW, MANY = 4, 24


def calls_of(row: bench.Row, vocab: int) -> Any:
    return row.build(sampling, *row.make(row.kinds[0], row.vocab or vocab))


def rows_of(only: str) -> list[bench.Row]:
    return [row for row in bench.ROWS if only.casefold() in row.name.casefold()]


# ---- the process that is counted -----------------------------------------------------------------


def work(only: str, vocab: int, isa: str | None, calls: int | None) -> None:
    """Call every row, a `getppid` before and after each part; or one number of times, without."""
    if isa is not None:
        dispatch.use_isa(isa)
    for row in rows_of(only):
        call = calls_of(row, vocab)
        for _ in range(3):
            call()
        for part in (FEW, MANY) if calls is None else (calls,):
            if calls is None:
                os.getppid()
            for _ in range(part):
                call()
            if calls is None:
                os.getppid()


def command(only: str, vocab: int, isa: str | None, calls: int | None) -> list[str]:
    request = {"only": only, "vocab": vocab, "isa": isa, "calls": calls}
    return [sys.executable, __file__, "--work", json.dumps(request)]


def run(words: list[str]) -> str:
    """What the process writes to standard error."""
    environment = {
        **os.environ,
        # With str hashes seeded at random the interpreter takes another way each time.
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        # memset and memcpy by `rep`, which callgrind would count byte for byte.
        "GLIBC_TUNABLES": "glibc.cpu.x86_rep_stosb_threshold=2000000000:"
        "glibc.cpu.x86_rep_movsb_threshold=2000000000",
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words[:3])} ... failed:\n{done.stderr[-2000:]}")
    return done.stderr


# ---- counters ------------------------------------------------------------------------------------

PERF = ["perf", "stat", "-x,", "-e", "instructions:u"]


def perf_count(words: list[str]) -> int | None:
    """Instructions of a process; None where the processor's counters cannot be read."""
    found = re.search(r"^(\d+),.*instructions", run([*PERF, *words]), re.M)
    return int(found[1]) if found else None


def with_perf(rows: list[bench.Row], vocab: int, isa: str | None) -> Iterator[float]:
    for row in rows:
        few, many = (perf_count(command(row.name, vocab, isa, calls)) for calls in (FEW, MANY))
        assert few is not None
        assert many is not None
        yield (many - few) / (MANY - FEW)


def with_callgrind(only: str, vocab: int, isa: str | None) -> Iterator[float]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "counts"
        tool = ["valgrind", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={out}"]
        run([*tool, *command(only, vocab, isa, None)])
        totals = []
        for number in range(1, len(list(Path(directory).iterdir()))):
            text = (Path(directory) / f"counts.{number}").read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^(?:totals|summary): (\d+)", text, re.M)
            assert found is not None
            totals.append(int(found[1]))
    # Four dumps a row: what came before, FEW calls, between, MANY calls. After the last comes the rest.
    for few, many in zip(totals[1::4], totals[3::4], strict=True):
        yield (many - few) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="PART", help="rows with this in their name")
    parser.add_argument("--vocab", type=int, default=bench.DESIGN_VOCABULARY)
    parser.add_argument("--isa", choices=dispatch.available_isas(), help="instruction set of the core")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(**json.loads(options.work))
        return
    rows = rows_of(options.only)
    if not rows:
        parser.error(f"no row has {options.only!r} in its name")
    if shutil.which("perf") and perf_count(["true"]) is not None:
        tool, counts = "perf stat", with_perf(rows, options.vocab, options.isa)
    elif shutil.which("valgrind"):
        tool, counts = "callgrind", with_callgrind(options.only, options.vocab, options.isa)
    else:
        parser.error("neither perf with the processor's counters nor valgrind is here")
    print(
        f"Counted by {tool}, V = {options.vocab:,}, instruction set {options.isa or dispatch.active_isa()}.\n"
    )
    print("| kernel | input | instructions per call | per element |\n| --- | --- | ---: | ---: |")
    for row, count in zip(rows, counts, strict=True):
        per_element = "-" if row.vocab else f"{count / options.vocab:.2f}"
        print(f"| {row.name} | {row.kinds[0]} | {count:,.0f} | {per_element} |", flush=True)


if __name__ == "__main__":
    main()
