"""Runs very many random cases over several processes, with progress; a run that was stopped goes on.

A case is a number: `check(seed, number)` gives a line of text for everything that is wrong with it. A
mismatch is printed with the command that reproduces it alone; the last line says how many cases were run and
how many did not match.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

CHUNK = 500  # cases that a worker does at a time, and that are lost when it is stopped

Check = Callable[[int, int], list[str]]


def run_chunk(check: Check, seed: int, first: int, last: int) -> list[tuple[int, str]]:
    warnings.simplefilter("error")
    return [(number, line) for number in range(first, last) for line in check(seed, number)]


def load(path: Path | None, seed: int) -> dict:
    if path is None or not path.exists():
        return {"seed": seed, "chunk": CHUNK, "done": [], "mismatches": []}
    state = json.loads(path.read_text())
    if (state["seed"], state["chunk"]) != (seed, CHUNK):
        sys.exit(f"{path} belongs to a run with seed {state['seed']} and chunks of {state['chunk']}")
    return state


def save(path: Path | None, state: dict) -> None:
    if path is not None:
        beside = path.with_suffix(path.suffix + ".new")
        beside.write_text(json.dumps(state))
        os.replace(beside, path)  # so that a stop in between leaves the old state whole


def run(check: Check, cases: int, seed: int, path: Path | None, workers: int) -> int:
    state = load(path, seed)
    done, found = set(state["done"]), state["mismatches"]
    waiting = [chunk for chunk in range((cases + CHUNK - 1) // CHUNK) if chunk not in done]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
        ProcessPoolExecutor(workers) as pool,
    ):
        begun = sum(min(CHUNK, cases - chunk * CHUNK) for chunk in done if chunk * CHUNK < cases)
        task = progress.add_task("cases", total=cases, completed=begun)
        running = {}
        while waiting or running:
            while waiting and len(running) < 2 * workers:
                chunk = waiting.pop(0)
                first, last = chunk * CHUNK, min((chunk + 1) * CHUNK, cases)
                running[pool.submit(run_chunk, check, seed, first, last)] = (chunk, first, last)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                chunk, first, last = running.pop(future)
                for number, line in future.result():
                    found.append([number, line])
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                    console.print(f"    again: {sys.argv[0]} --seed {seed} --case {number}", markup=False)
                if last - first == CHUNK:  # a part of a chunk is done again by a longer run
                    done.add(chunk)
                state.update(done=sorted(done), mismatches=found)
                save(path, state)
                progress.update(task, advance=last - first, description=f"cases ({len(found)} mismatches)")
    wrong = len({number for number, _ in found})
    print(f"{cases} cases, seed {seed}: {wrong} with a mismatch")
    return 1 if wrong else 0


def main(description: str, check: Check, describe: Callable[[int, int], str]) -> int:
    """The command line of a script: exit status 1 on any mismatch."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file that the progress is kept in")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this one case alone")
    options = parser.parse_args()
    if options.case is not None:
        found = check(options.seed, options.case)
        print("\n".join(found) or f"{describe(options.seed, options.case)}: no mismatch")
        return 1 if found else 0
    return run(check, options.cases, options.seed, options.state, options.workers)
