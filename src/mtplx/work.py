"""Ranges of independent work, given to an executor of the caller's.

There is no pool of our own: pools hang after a fork, and a second thread runtime beside that of a tensor
library aborts the process. Who has an executor passes it. Work is cut into a few contiguous ranges for each
worker, which takes the next one when it is done: a core that something else slows down then does fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

WORTHWHILE_LOGITS = 600_000
"""Logits whose work (some 0.5 ns each) is worth handing to another thread, which costs some 20 us."""

WORTHWHILE_PROBABILITIES = 1_200_000
"""The same of probabilities, of which some 0.2 ns each are work."""


RANGES = 4
"""For each worker, at most."""


def worker_count(executor: Any) -> int:
    """How many workers an executor has; 2 where it does not tell."""
    return int(getattr(executor, "_max_workers", 2) or 2)


def run_ranges(executor: Any, run: Callable[[int, int], None], count: int, *, least: int = 1) -> None:
    """Call ``run(first, last)`` for contiguous ranges that cover ``range(count)``.

    Of what is raised, the error of the lowest range comes out, as without an executor; then everything that
    was handed out has ended.

    Parameters
    ----------
    executor : concurrent.futures.Executor or None
        None: everything in the calling thread, which is one of the workers in any case.
    run : callable
    count : int
    least : int
        Fewest items that are worth a range of their own.
    """
    parts = count // max(least, 1)
    workers = 1 if executor is None or parts < 2 else min(worker_count(executor), parts)
    if workers < 2:
        run(0, count)
        return
    parts = min(parts, RANGES * workers)
    waiting = deque(pairwise(count * i // parts for i in range(parts + 1)))
    failed: dict[int, BaseException] = {}

    def work() -> None:
        # Ranges are taken in order, so those below one that fails are taken already.
        while True:
            try:
                first, last = waiting.popleft()
            except IndexError:
                return
            try:
                run(first, last)
            except BaseException as error:
                failed[first] = error
                waiting.clear()

    futures: list[Any] = []
    try:
        for _ in range(workers - 1):
            futures.append(executor.submit(work))
        work()
    except BaseException as error:
        failed[-1] = error
        waiting.clear()
    for future in futures:
        # A worker that has not begun need not: in a call from one of the executor's own workers there may
        # be nobody else to do it.
        if not future.cancel():
            future.result()
    if failed:
        raise failed[min(failed)]
