"""mtplx beside torch, onnxruntime and numba, as one table.

    python benches/compare.py                       zipf rows of 151,936

Runs the benchmarks of this directory that other packages take part in, and prints the minima. An
implementation that is not installed has an empty column.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mtplx.bench_report import ALLOCATOR

IMPLEMENTATIONS = ("compiled", "reference", "torch", "onnxruntime", "numba")
HERE = Path(__file__).resolve().parent
SHOWN = ("implementation", "kind", "vocab")  # in the columns or above the table
FILES = ("bench_softmax.py", "bench_truncation.py", "bench_draws.py", "bench_residual.py")


def versions() -> str:
    found = []
    for package in ("numpy", *IMPLEMENTATIONS[2:]):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vocab", type=int, default=151_936, choices=(32_000, 128_256, 151_936, 262_144))
    parser.add_argument("--input", default="zipf", choices=("zipf", "normal", "tied", "masked"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "found.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *(str(HERE / name) for name in FILES)),
                *("-k", f"{options.vocab} and {options.input}", "-q", f"--benchmark-json={path}"),
            ],
            cwd=HERE.parent,
            env={**os.environ, **ALLOCATOR, "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout[-3000:])
        found = json.loads(path.read_text(encoding="utf-8"))
    cases: dict[str, dict[str, float]] = {}
    for one in found["benchmarks"]:
        others = {name: value for name, value in one["params"].items() if name not in SHOWN}
        case = one["name"].removeprefix("test_").partition("[")[0].replace("_", " ")
        case += "".join(f", {name} {value}" for name, value in others.items())
        cases.setdefault(case, {})[one["params"]["implementation"]] = one["stats"]["min"] * 1e6
    print(f"{versions()}; {options.input}, V = {options.vocab:,}, microseconds.\n")
    print("| call | " + " | ".join(IMPLEMENTATIONS) + " |\n| --- |" + " ---: |" * len(IMPLEMENTATIONS))
    for case, times in cases.items():
        if times.keys() & set(IMPLEMENTATIONS[2:]):
            cells = (f"{times[name]:,.1f}" if name in times else "" for name in IMPLEMENTATIONS)
            print(f"| {case} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
