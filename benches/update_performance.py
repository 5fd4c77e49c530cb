"""Run the commands of docs/performance.md again and put their tables in place.

    python benches/update_performance.py                     all of them, some ten minutes on a quiet machine
    python benches/update_performance.py --only instructions those with this in the command

A table stands between ``<!-- run: COMMAND -->`` and ``<!-- end -->``; the rest of the file is left alone.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"(?P<start><!-- run: (?P<command>.+?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
PROGRAMS = {"mtplx": [sys.executable, "-m", "mtplx"], "python": [sys.executable]}


def output_of(command: str) -> str:
    program, *arguments = shlex.split(command)
    words = [*PROGRAMS.get(program, [program]), *arguments]
    print(f"{command} ...", file=sys.stderr, flush=True)
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", metavar="PART", help="commands with this in them")
    options = parser.parse_args()

    def table(found: re.Match[str]) -> str:
        if options.only not in found["command"]:
            return found[0]
        return f"{found['start']}\n{output_of(found['command'])}\n\n{found['end']}"

    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(TABLE.sub(table, text), encoding="utf-8")


if __name__ == "__main__":
    main()
