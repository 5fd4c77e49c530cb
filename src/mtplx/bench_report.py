"""What `mtplx bench` does around the measuring: a clean process, progress, tables, charts.

Design
------
- The measuring runs in a child process, since two things have to be in the environment before it starts.
  glibc's allocator gives large blocks back to the system and fetches them anew, zeroed page by page, on
  every call; with its thresholds raised it keeps them, which is how a process that samples all day runs.
  Left alone, NumPy would look twice as slow as it is. And NumPy picks its instruction sets when imported.
- The child writes one JSON object a line (`mtplx.bench`), so it draws nothing and has no second thread.
- Tables are lists of strings until the end; text, Markdown and the chart read the same JSON that ``--json``
  prints.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from mtplx.bench import (
    DESIGN_VOCABULARY,
    SCALING_SPREAD,
    SLOW_REFERENCE,
    WORST_SLOWDOWN,
    BenchError,
    numpy_simd,
)
from mtplx.charts import new_figure, save

__all__ = ["BenchError", "Request", "environment", "markdown", "measure", "plot", "show"]

Mode = Literal["table", "worst", "scaling", "blocks"]
Result = dict[str, Any]

# 32 MiB is the most that every glibc accepts; rows are far smaller. Trimming starts at the top of the heap.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}

WIDE = 120  # columns from which medians and absolute goals are shown too
STYLES = {"goal": "green", "floor": "yellow", "below": "red", "yes": "green", "NO": "red"}


@dataclass(frozen=True)
class Request:
    """What to measure, and how long."""

    mode: Mode = "table"
    vocab: int = DESIGN_VOCABULARY
    only: str = ""
    seconds: float = 40.0
    isa: str | None = None
    numpy_avx2: bool = False

    def command(self) -> str:
        """The command line that asks for this."""
        words = ["mtplx", "bench"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if field.name == "mode":
                words.append(f"--{value}")
            elif value is True:
                words.append(f"--{field.name.replace('_', '-')}")
            else:
                words += [f"--{field.name}", str(value)]
        return shlex.join(words)


def environment(request: Request) -> dict[str, str]:
    """The environment of the measuring process."""
    variables = dict(os.environ)
    variables["OPENBLAS_NUM_THREADS"] = "1"  # nothing here multiplies matrices; idle threads still wake up
    if platform.libc_ver()[0] == "glibc":
        variables |= ALLOCATOR
    if request.numpy_avx2:
        above = [name for name in numpy_simd() if name.startswith("AVX512") or name == "X86_V4"]
        if not above:
            used = " ".join(numpy_simd()) or "nothing beyond its baseline"
            raise BenchError(f"NumPy has no AVX-512 to switch off here: it uses {used}")
        variables["NPY_DISABLE_CPU_FEATURES"] = " ".join(above)
    return variables


def measure(request: Request, console: Console) -> Result:
    """Measure in a child process; `console` shows the progress where it is a terminal.

    Raises
    ------
    BenchError
        The request cannot be met.
    """
    if request.isa is not None:
        from mtplx._csampling.dispatch import available_isas

        if request.isa not in available_isas():
            known = ", ".join(available_isas())
            raise BenchError(f"instruction set {request.isa!r} is not available; there are {known}")
    asked = {name: getattr(request, name) for name in ("mode", "vocab", "only", "seconds", "isa")}
    command = [sys.executable, "-m", "mtplx.bench", json.dumps(asked)]
    with (
        _progress(console) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment(request)
        ) as child,
    ):
        task = progress.add_task("", total=None)
        try:
            for event in _events(child):
                if "error" in event:
                    raise BenchError(event["error"])
                if "result" in event:
                    result: Result = event["result"]
                    break
                if "total" in event:
                    progress.update(task, total=event["total"], completed=-1)
                if "at" in event:
                    progress.update(task, description=event["at"], advance=1)
            else:
                raise BenchError(f"the measuring process ended with status {child.wait()}")
        except BaseException:
            child.terminate()
            raise
    result["settings"] = {**asked, "numpy_avx2": request.numpy_avx2}
    return result


def _events(child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None
    for line in child.stdout:
        yield json.loads(line)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    headings: list[str]
    rows: list[list[str]]
    words: int  # columns at the left that hold words; all others hold numbers
    notes: list[str]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 100 else f"{value:.1f}x"


def _grid(result: Result, wide: bool) -> _Grid:
    mode: Mode = result["settings"]["mode"]
    rows = result["rows"]
    if mode == "scaling":
        return _scaling_grid(rows)
    if mode == "worst":
        return _worst_grid(rows)
    if mode == "blocks":
        return _blocks_grid(rows)
    if wide:
        headings = ["kernel", "input", "reference us", "(median)", "compiled us", "(median)", "ratio", "goal"]
        headings += ["floor", "goal us", "reached"]
    else:
        headings = ["kernel", "input", "reference us", "compiled us", "ratio", "goal", "reached"]
    cells = []
    for row in rows:
        theirs, ours = row["reference_us"], row["compiled_us"]
        reached = row["verdict"] + (" (time)" if row["by"] == "time" else "")
        star = "*" if row["slow_reference"] else ""
        ratio, goal, floor = star + _ratio(row["ratio"]), f"{row['goal']:.3g}x", f"{row['floor']:.3g}x"
        if wide:
            times = [theirs["minimum"], theirs["median"], ours["minimum"], ours["median"]]
            cells.append([row["name"], row["input"], *map(_us, times)])
            cells[-1] += [ratio, goal, floor, _us(row["goal_us"]), reached]
        else:
            times = [theirs["minimum"], ours["minimum"]]
            cells.append([row["name"], row["input"], *map(_us, times), ratio, goal, reached])
    counts = {
        verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("goal", "floor", "below")
    }
    notes = [
        f"{len(rows)} lines: {counts['goal']} at the goal, {counts['floor']} between floor and goal, "
        f"{counts['below']} below the floor.",
        "Times are minima of many calls, both sides in turns. (time): not by the ratio but by the time",
        "itself, for which the goal is the reference's time where the goals were set, over the ratio.",
    ]
    if any(row["slow_reference"] for row in rows):
        notes.append(
            f"Where the ratio has a *, the reference takes more than {SLOW_REFERENCE:g} times what it took "
            "where the goals were set: that flatters."
        )
    return _Grid(headings, cells, 2, notes)


def _worst_grid(rows: list[dict[str, Any]]) -> _Grid:
    cells = [
        [
            row["name"],
            row["input"],
            _us(row["reference_us"]["minimum"]),
            _us(row["compiled_us"]["minimum"]),
            _ratio(row["ratio"]),
            f"{row['slowdown']:.2f}",
            "yes" if row["passes"] else "NO",
        ]
        for row in rows
    ]
    headings = ["kernel", "input", "reference us", "compiled us", "ratio", "times LLM-like", "passes"]
    return _Grid(headings, cells, 2, [_worst_note(rows)])


def _worst_note(rows: list[dict[str, Any]]) -> str:
    passed = sum(row["passes"] for row in rows)
    return (
        f"{passed} of {len(rows)} pass: at most {WORST_SLOWDOWN:g} times the slowest LLM-like row of the "
        "kernel, and not slower than the reference."
    )


def _worst_matrix(rows: list[dict[str, Any]]) -> _Grid:
    """A line a kernel, a column an input; what does not pass is bold."""
    kernels = _by(rows, "name")
    inputs = list(_by(rows, "input"))
    cells = []
    for (name,), found in kernels.items():
        of = {row["input"]: row for row in found}
        marks = {row["input"]: "" if row["passes"] else "**" for row in found}
        cells.append([name, *(f"{marks[i]}{of[i]['slowdown']:.2f}{marks[i]}" for (i,) in inputs)])
        cells[-1].append(_ratio(min(row["ratio"] for row in found)))
    notes = [
        "Times what the slowest LLM-like row takes; at the right the smallest ratio to the reference.",
        _worst_note(rows),
    ]
    return _Grid(["kernel", *(i for (i,) in inputs), "least ratio"], cells, 1, notes)


def _by(rows: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows by their values of these columns, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _scaling_grid(rows: list[dict[str, Any]]) -> _Grid:
    sizes = list(rows[0]["ns_per_element"]) if rows else []
    cells = [
        [
            row["name"],
            row["input"],
            *(f"{row['ns_per_element'][size]:.3f}" for size in sizes),
            f"{row['spread']:.2f}",
            "yes" if row["passes"] else "NO",
        ]
        for row in rows
    ]
    passed = sum(row["passes"] for row in rows)
    notes = [
        f"Nanoseconds per element of the compiled core; {passed} of {len(rows)} grow linearly "
        f"(largest over smallest at most {SCALING_SPREAD:g})."
    ]
    headings = ["kernel", "input", *(f"V = {int(size):,}" for size in sizes), "spread", "linear"]
    return _Grid(headings, cells, 2, notes)


BLOCKS_NOTES = [
    "The reference is the loop over rows that are reached, timed on one sequence; B takes B times it.",
    "One read is numpy.max over the rows that the call looks at; reads is how many of these it takes.",
]


def _reads(row: dict[str, Any]) -> str:
    return "-" if row["reads"] is None else f"{row['reads']:.1f}"


def _blocks_grid(rows: list[dict[str, Any]]) -> _Grid:
    cells = [
        [
            row["form"],
            row["outcome"],
            str(row["drafts"]),
            str(row["sequences"]),
            _us(row["reference_us"]),
            _us(row["compiled_us"]["minimum"]),
            _ratio(row["ratio"]),
            _us(row["read_us"]),
            _reads(row),
        ]
        for row in rows
    ]
    headings = ["form", "rejected", "K", "B", "reference us", "compiled us", "ratio", "one read us", "reads"]
    return _Grid(headings, cells, 2, BLOCKS_NOTES)


def _blocks_matrix(rows: list[dict[str, Any]]) -> _Grid:
    """A line a form, outcome and K; for every B the time, the ratio and the reads."""
    sequences = sorted(B for (B,) in _by(rows, "sequences"))
    cells = []
    for (form, outcome, K), found in _by(rows, "form", "outcome", "drafts").items():
        of = {row["sequences"]: row for row in found}
        cells.append([form, outcome, str(K)])
        for B in sequences:
            if B in of:
                row = of[B]
                cells[-1] += [_us(row["compiled_us"]["minimum"]), _ratio(row["ratio"]), _reads(row)]
            else:  # left out by --only
                cells[-1] += ["", "", ""]
    headings = ["form", "rejected", "K"]
    for B in sequences:
        headings += [f"B = {B}: us", "ratio", "reads"]
    return _Grid(headings, cells, 2, BLOCKS_NOTES)


def _description(result: Result) -> list[str]:
    m = result["machine"]
    simd = " ".join(m["numpy_simd"]) or "its baseline"
    restricted = ", AVX-512 switched off (--numpy-avx2)" if result["settings"]["numpy_avx2"] else ""
    allocator = " ".join(f"{name}={value}" for name, value in m["allocator"].items())
    lines = [
        f"{m['cpu']}, {m['cpus']} CPUs, {m['system']}, Python {m['python']}",
        f"mtplx {m['mtplx']}, instruction set {m['isa']} (available: {' '.join(m['available_isas'])})",
        f"NumPy {m['numpy']} with {simd}{restricted}",
    ]
    if allocator:
        lines.append(f"glibc keeps freed memory: {allocator}")
    lines += [f"skipped: {name} ({reason})" for name, reason in result["skipped"].items()]
    return lines


def show(result: Result, console: Console) -> None:
    """The result as a table on a terminal or in plain text."""
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a pipe has no width; 80 would break the lines
    grid = _grid(result, console.width >= WIDE)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, heading in enumerate(grid.headings):
        drawn.add_column(heading, justify="left" if i < grid.words else "right")
    for row in grid.rows:
        style = STYLES.get(row[-1].split(" ")[0], "")
        drawn.add_row(*row[:-1], Text(row[-1], style))
    for line in _description(result):
        console.print(line, markup=False)
    console.print()
    console.print(drawn)
    console.print()
    for line in grid.notes:
        console.print(line, markup=False)


def markdown(result: Result, command: str) -> str:
    """The result as docs/performance.md shows it, with the command that made it.

    What is measured on a grid is shown as one, and the times of the reference are left to the other forms.
    """
    shapes = {"worst": _worst_matrix, "blocks": _blocks_matrix}
    mode = result["settings"]["mode"]
    grid = shapes[mode](result["rows"]) if mode in shapes else _grid(result, wide=True)
    rule = ["---"] * grid.words + ["---:"] * (len(grid.headings) - grid.words)
    lines = [f"`{command}`", "", *(f"- {line}" for line in _description(result)), ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (grid.headings, rule, *grid.rows)]
    return "\n".join([*lines, "", *grid.notes])


# ---- chart ---------------------------------------------------------------------------------------


def plot(result: Result, path: Path) -> None:
    """A bar for each line of the table, as long as its ratio, with a tick at the goal."""
    rows = result["rows"][::-1]  # bars are drawn from the bottom up
    colours = {"goal": "tab:green", "floor": "tab:olive", "below": "tab:red"}
    meanings = {"goal": "at the goal", "floor": "between floor and goal", "below": "below the floor"}
    figure = new_figure(figsize=(9, 1.6 + 0.24 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.barh(places, [row["ratio"] for row in rows], color=[colours[row["verdict"]] for row in rows])
    axes.scatter(
        [row["goal"] for row in rows], places, marker="|", s=90, color="black", zorder=3, label="goal"
    )
    for verdict, meaning in meanings.items():
        axes.barh([0], [0], color=colours[verdict], label=f"{meaning}, by ratio or by time")
    axes.set_yticks(places, [f"{row['name']} ({row['input']})" for row in rows], fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log")
    axes.set_xlim(1, 1.6 * max(max(row["ratio"], row["goal"]) for row in rows))
    axes.set_xticks(
        [1, 2, 5, 10, 20, 50, 100, 200, 500], [f"{n}x" for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)]
    )
    axes.set_xlabel("times as fast as the NumPy reference")
    m = result["machine"]
    sides = f"mtplx {m['mtplx']} ({m['isa']}) against NumPy {m['numpy']} ({' '.join(m['numpy_simd'])})"
    axes.set_title(f"{sides}\n{m['cpu']}", fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    save(figure, path)
