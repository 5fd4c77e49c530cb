"""Compare blocks and batches with the reference over very many random cases; resumable.

    python tests/fuzz_blocks.py --cases 80000 --seed 0 --state blocks.json --workers 2

A case is a batch of one to four blocks, two and a half in the mean, so 80,000 cases are 200,000 blocks: every
rule, probabilities and logits, generators and keyed streams, alone, in a batch, on an executor, and with
everything behind the first rejection unreadable. A mismatch is printed with the command that reproduces it
alone. Exit status 1 on any mismatch. With `--state`, a run that was stopped goes on where it was.
"""

import sys

from support import fuzz
from support.block_cases import check, describe

if __name__ == "__main__":
    sys.exit(fuzz.main(__doc__.splitlines()[0], check, describe))
