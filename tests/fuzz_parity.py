"""Compare the two faces over very many random cases; resumable.

    python tests/fuzz_parity.py --cases 1000000 --seed 0 --state parity.json --workers 2

Cases take turns on the instruction sets of this machine. A mismatch is printed with the command that
reproduces it alone; the last line says how many cases were run and how many did not match. Exit status
1 on any mismatch. With `--state`, a run that was stopped goes on where it was.
"""

import sys

from mtplx._csampling import dispatch
from support import fuzz
from support.cases import make_case
from support.parity import Expected, mismatches


def check(seed: int, number: int) -> list[str]:
    """Every broken promise of one case, with the instruction set it was broken on."""
    case = make_case(number, seed)
    isas = dispatch.available_isas()
    isa = isas[number % len(isas)]
    dispatch.use_isa(isa)
    try:
        return [f"{case}: {isa}: {line}" for line in mismatches(Expected(case))]
    except Exception as error:
        return [f"{case}: {isa}: {type(error).__name__}: {error}"]


def describe(seed: int, number: int) -> str:
    return str(make_case(number, seed))


if __name__ == "__main__":
    sys.exit(fuzz.main(__doc__.splitlines()[0], check, describe))
