"""What it costs on this machine merely to touch a row: the bound of the kernels that compute little.

    python benches/machine.py

NumPy operations that do next to nothing per element, on rows of float64, once for rows that stay in the
second-level cache and once for the vocabulary of the goals. A kernel that takes as long as these has nothing
left to gain but a pass over the row.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from mtplx import bench

# einsum and not dot: BLAS would take several threads.
OPERATIONS = {
    "read a row": (1, lambda p, q, out: p.max),
    "read two rows": (2, lambda p, q, out: partial(np.einsum, "i,i->", p, q)),
    "write a row": (1, lambda p, q, out: partial(out.fill, 0.0)),
    "scale a row in place": (1, lambda p, q, out: partial(np.multiply, out, 1.0, out=out)),
    "read one, write another": (2, lambda p, q, out: partial(np.copyto, out, p)),
    "read two, write a third": (3, lambda p, q, out: partial(np.subtract, p, q, out=out)),
}


def main() -> None:
    machine = bench.machine()
    print(f"{machine['cpu']}, NumPy {machine['numpy']} with {' '.join(machine['numpy_simd'])}\n")
    print("| operation | rows touched | V | us | ns per element | GB/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, (rows, make) in OPERATIONS.items():
        for V in (32_768, bench.DESIGN_VOCABULARY):
            p, q = np.random.default_rng(0).random((2, V))
            took = bench.measure_alone(make(p, q, np.ones(V)), 0.5).minimum
            speed = 8e-3 * rows * V / took
            print(f"| {name} | {rows} | {V:,} | {took:.1f} | {took * 1e3 / V:.3f} | {speed:.0f} |")


if __name__ == "__main__":
    main()
