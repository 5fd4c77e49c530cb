"""What `mtplx sweep` measures: acceptance and modelled speed-up over draft temperatures and depths.

Design
------
**Cells.** A cell of the grid is one draft temperature and one depth. Each cell decodes the same texts: every
prompt, several times over, with seeds that are the same in all cells. A text ends at the first block that
reaches its length; the decode itself is allowed `depth` tokens more, so that no block of it is cut short,
and short texts tell what long ones would.

**Speed-up**, against plain decoding, is modelled: ``tokens per target call / (1 + cost_ratio * depth)``,
where a draft costs `cost_ratio` calls of the target, and checking several tokens costs a call the same as
one token. Where the latter does not hold the number is an upper bound.

**Intervals** are 95% percentile bootstraps over the texts: texts, not blocks, since the blocks of a text
depend on one another. All cells are resampled with the same texts, which tells in what share of the
resamples the best setting stays the best. The cost ratio is taken as exact.

**Resuming.** A cell depends on the settings and on nothing else, so a state file that holds the finished
cells is all that is needed. It is replaced in one step after every cell.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.style import Style
from rich.table import Table

from mtplx.charts import new_figure, save
from mtplx.decoding import BackendName, TokenStream, generate, speculative_generate
from mtplx.distributions import SamplerConfig
from mtplx.setups import Setup

__all__ = [
    "Cell",
    "Estimate",
    "Plan",
    "Run",
    "SweepError",
    "best_sentence",
    "estimates",
    "measure",
    "measure_cell",
    "measure_cost_ratio",
    "plot",
    "speed_up",
    "table",
    "write_csv",
]

RESAMPLES = 2000
CONFIDENCE = 0.95

# Tokens over which the cost of a draft and of a call are averaged.
COST_TOKENS = 64
COST_DEPTH = 4


class SweepError(Exception):
    """A sweep that cannot be done as asked for; the text is one line for the user."""


@dataclass(frozen=True)
class Plan:
    """The settings of a sweep.

    Attributes
    ----------
    prompts : tuple of str
    texts : int
        Texts per prompt.
    max_tokens : int
        Length of a text: it ends with the block that reaches it.
    config : SamplerConfig
        The target's.
    draft_temperatures : tuple of float
    depths : tuple of int
    seed : int
    backend : {"compiled", "reference"}
    """

    prompts: tuple[str, ...]
    texts: int
    max_tokens: int
    config: SamplerConfig
    draft_temperatures: tuple[float, ...]
    depths: tuple[int, ...]
    seed: int
    backend: BackendName

    def grid(self) -> Iterator[tuple[float, int]]:
        """Give all draft temperatures with all depths."""
        return product(self.draft_temperatures, self.depths)

    def seeds(self) -> list[int]:
        """Give a seed for each text, prompt by prompt."""
        count = len(self.prompts) * self.texts
        seeds: list[int] = np.random.SeedSequence(self.seed).generate_state(count, np.uint64).tolist()
        return seeds


@dataclass(frozen=True)
class Cell:
    """Counts of one cell, one entry a text.

    `tested` drafts are those up to the first rejection of their block; the others were drafted in vain.
    """

    draft_temperature: float
    depth: int
    tokens: list[int]
    target_calls: list[int]
    tested: list[int]
    accepted: list[int]


@dataclass(frozen=True)
class Estimate:
    """What a cell comes to; pairs are the ends of the 95% interval.

    `best_share` is the share of resamples in which no cell had a larger speed-up.
    """

    draft_temperature: float
    depth: int
    texts: int
    tokens: int
    target_calls: int
    tested: int
    accepted: int
    acceptance: float
    tokens_per_call: float
    tokens_per_call_interval: tuple[float, float]
    speed_up: float
    speed_up_interval: tuple[float, float]
    best_share: float


def _stream(
    setup: Setup, plan: Plan, prompt: Sequence[int], draft_temperature: float, depth: int, seed: int
) -> TokenStream:
    assert setup.make_drafter is not None
    return speculative_generate(
        setup.target,
        setup.make_drafter(plan.backend),
        prompt,
        config=plan.config,
        draft_config=replace(plan.config, temperature=draft_temperature),
        depth=depth,
        max_tokens=plan.max_tokens + depth,
        stop_tokens=setup.stop_tokens,
        seed=seed,
        backend=plan.backend,
    )


def measure_cell(setup: Setup, plan: Plan, draft_temperature: float, depth: int) -> Cell:
    """Decode all texts of a cell.

    Raises
    ------
    SetupError
        A prompt is empty or does not fit into the context.
    """
    cell = Cell(draft_temperature, depth, [], [], [], [])
    prompts = [setup.prompt_tokens(prompt, plan.max_tokens + depth) for prompt in plan.prompts]
    for i, seed in enumerate(plan.seeds()):
        stream = _stream(setup, plan, prompts[i // plan.texts], draft_temperature, depth, seed)
        for _ in stream:
            if stream.stats.tokens >= plan.max_tokens:
                break
        stats = stream.stats
        cell.tokens.append(stats.tokens)
        cell.target_calls.append(stats.target_calls)
        cell.tested.append(stats.accepted_tokens + sum(stats.rejected_by_depth))
        cell.accepted.append(stats.accepted_tokens)
    return cell


def measure_cost_ratio(setup: Setup, plan: Plan) -> float:
    """Measure what a draft costs, in calls of the target with one token."""
    prompt = setup.prompt_tokens(plan.prompts[0], COST_TOKENS + COST_DEPTH)
    plain = generate(
        setup.target,
        prompt,
        config=plan.config,
        max_tokens=COST_TOKENS,
        seed=plan.seed,
        backend=plan.backend,
    )
    # The prompt was decoded before the first block and is not part of what a block costs.
    before = plain.stats.target_seconds
    _exhaust(plain)
    call = (plain.stats.target_seconds - before) / plain.stats.target_calls
    short = replace(plan, max_tokens=COST_TOKENS)
    drafted = _stream(setup, short, prompt, plan.config.temperature, COST_DEPTH, plan.seed)
    before = drafted.stats.draft_seconds
    _exhaust(drafted)
    return (drafted.stats.draft_seconds - before) / max(drafted.stats.drafted_tokens, 1) / call


def _exhaust(stream: TokenStream) -> None:
    for _ in stream:
        pass


# ---- estimates -----------------------------------------------------------------------------------


def speed_up(tokens_per_call: float, depth: int, cost_ratio: float) -> float:
    """Model the speed-up over plain decoding.

    Examples
    --------
    >>> speed_up(3.0, depth=4, cost_ratio=0.125)
    2.0
    """
    return tokens_per_call / (1 + cost_ratio * depth)


def estimates(cells: Sequence[Cell], cost_ratio: float, *, seed: int = 0) -> list[Estimate]:
    """Estimate acceptance, tokens per target call, and speed-up of each cell, with intervals."""
    if not cells:
        return []
    tokens, calls = (np.array([getattr(cell, name) for cell in cells]) for name in ("tokens", "target_calls"))
    texts = tokens.shape[1]
    drawn = np.random.default_rng(seed).integers(texts, size=(RESAMPLES, texts))
    # How often each text is in each resample; [cells, texts] times [texts, resamples].
    places = (drawn + texts * np.arange(RESAMPLES)[:, None]).ravel()
    times = np.bincount(places, minlength=RESAMPLES * texts).reshape(RESAMPLES, texts).T
    resampled = (tokens @ times) / (calls @ times)
    costs = np.array([1 + cost_ratio * cell.depth for cell in cells])
    speeds = resampled / costs[:, None]
    winners = (speeds == speeds.max(axis=0)).mean(axis=1)
    results = []
    for i, cell in enumerate(cells):
        total, tested, accepted = sum(cell.tokens), sum(cell.tested), sum(cell.accepted)
        per_call = total / sum(cell.target_calls)
        results.append(
            Estimate(
                cell.draft_temperature,
                cell.depth,
                texts,
                total,
                sum(cell.target_calls),
                tested,
                accepted,
                accepted / tested if tested else math.nan,
                per_call,
                _interval(resampled[i]),
                speed_up(per_call, cell.depth, cost_ratio),
                _interval(speeds[i]),
                float(winners[i]),
            )
        )
    return results


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _best(results: Sequence[Estimate]) -> Estimate:
    return max(results, key=lambda result: result.speed_up)


# ---- the run and its state file ------------------------------------------------------------------


class Run:
    """A sweep under way: the cells that are done, and the file that keeps them.

    Parameters
    ----------
    setup : Setup
    plan : Plan
    given_cost_ratio : float, optional
        None: it is measured.
    state : Path, optional
        Cells that are in this file already are not measured again.

    Attributes
    ----------
    cells : list of Cell
    cost_ratio : float
        NaN until it is measured.

    Raises
    ------
    SweepError
        The file cannot be read, is no state of a sweep, or is one of other settings.
    """

    def __init__(
        self, setup: Setup, plan: Plan, *, given_cost_ratio: float | None = None, state: Path | None = None
    ) -> None:
        self.setup = setup
        self.plan = plan
        self.cells: list[Cell] = []
        self.cost_ratio = math.nan if given_cost_ratio is None else given_cost_ratio
        self._state = state
        settings = {**asdict(plan), "models": setup.identity, "cost_ratio": given_cost_ratio}
        # As JSON gives it back: tuples are lists.
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        if state is not None and state.exists():
            self._load(state)

    def remaining(self) -> list[tuple[float, int]]:
        """Give draft temperature and depth of the cells that are to be done."""
        done = {(cell.draft_temperature, cell.depth) for cell in self.cells}
        return [place for place in self.plan.grid() if place not in done]

    def add(self, cell: Cell) -> None:
        """Take up a cell and replace the file in one step.

        Raises
        ------
        SweepError
            The file cannot be written.
        """
        self.cells.append(cell)
        if self._state is None:
            return
        state = {
            "settings": self._settings,
            "cost_ratio": self.cost_ratio,
            "cells": [asdict(cell) for cell in self.cells],
        }
        beside = self._state.with_name(self._state.name + ".part")
        try:
            with open(beside, "w", encoding="utf-8") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._state)
        except OSError as error:
            raise SweepError(f"cannot write the state {self._state}: {error.strerror or error}") from error

    def estimates(self) -> list[Estimate]:
        """Estimate the cells done so far, in the order of the grid."""
        order = {place: i for i, place in enumerate(self.plan.grid())}
        cells = sorted(self.cells, key=lambda cell: order[cell.draft_temperature, cell.depth])
        return estimates(cells, self.cost_ratio, seed=self.plan.seed)

    def _load(self, path: Path) -> None:
        try:
            state = json.loads(path.read_text("utf-8"))
            settings, ratio = dict(state["settings"]), float(state["cost_ratio"])
            cells = [Cell(**cell) for cell in state["cells"]]
        except OSError as error:
            raise SweepError(f"cannot read the state {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SweepError(f"{path} is not the state of a sweep") from error
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise SweepError(
                    f"{path} is the state of a sweep with other settings: {name} is {settings.get(name)!r} "
                    f"there, {value!r} here"
                )
        self.cells, self.cost_ratio = cells, ratio


def measure(run: Run, console: Console) -> None:
    """Measure what is left to do; `console` shows the progress where it is a terminal.

    An interrupt leaves in `run` what was done.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(
            "cost of a draft", total=len(list(run.plan.grid())), completed=len(run.cells)
        )
        if math.isnan(run.cost_ratio):
            run.cost_ratio = measure_cost_ratio(run.setup, run.plan)
        for draft_temperature, depth in run.remaining():
            progress.update(task, description=f"draft temperature {draft_temperature:g}, depth {depth}")
            run.add(measure_cell(run.setup, run.plan, draft_temperature, depth))
            progress.advance(task)


# ---- what is shown -------------------------------------------------------------------------------


def table(results: Sequence[Estimate], *, draws: bool) -> Table:
    """The cells as a table, the best one marked."""
    grid = Table(title=f"draft temperature and depth, with {CONFIDENCE:.0%} intervals")
    for heading in ("draft\ntemperature", "depth", "acceptance", "tokens per call", "speed-up"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        best = result is _best(results)
        grid.add_row(
            ("* " if best else "") + (f"{result.draft_temperature:g}" if draws else "-"),
            str(result.depth),
            "-" if math.isnan(result.acceptance) else f"{result.acceptance:.1%}",
            _with_interval(result.tokens_per_call, result.tokens_per_call_interval),
            _with_interval(result.speed_up, result.speed_up_interval),
            style=Style(color="green") if best else None,
        )
    return grid


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return "{:.2f} ({:.2f}-{:.2f})".format(value, *interval)


def best_sentence(results: Sequence[Estimate], cost_ratio: float, *, draws: bool) -> str:
    """Name the best setting, how sure that is, and by what method."""
    best = _best(results)
    low, high = best.speed_up_interval
    setting = f"depth {best.depth}"
    if draws:
        setting = f"draft temperature {best.draft_temperature:g}, {setting}"
    verdict = ""
    if high < 1:
        verdict = " (plain decoding is faster)"
    elif low <= 1:
        verdict = " (plain decoding may be as fast)"
    return (
        f"best: {setting}: {best.speed_up:.2f}x{verdict}, "
        f"{CONFIDENCE:.0%} interval {low:.2f}x to {high:.2f}x, "
        f"the best of {len(results)} in {best.best_share:.0%} of the resamples\n"
        f"speed-up: tokens per call / (1 + {cost_ratio:.3g} * depth); intervals: percentile bootstrap over "
        f"{best.texts} texts, {RESAMPLES} resamples"
    )


def write_csv(results: Sequence[Estimate], path: Path) -> None:
    """Write one line a cell; intervals take two columns, `..._low` and `..._high`.

    Raises
    ------
    SweepError
        The file cannot be written.
    """
    headings = []
    for field in fields(Estimate):
        if field.name.endswith("_interval"):
            name = field.name.removesuffix("_interval")
            headings += [f"{name}_low", f"{name}_high"]
        else:
            headings.append(field.name)
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(headings)
            for result in results:
                cells: list[Any] = []
                for value in vars(result).values():
                    cells += value if isinstance(value, tuple) else [value]
                writer.writerow(cells)
    except OSError as error:
        raise SweepError(f"cannot write {path}: {error.strerror or error}") from error


def plot(results: Sequence[Estimate], path: Path, *, draws: bool) -> None:
    """Draw the speed-ups as a heat map, the best cell framed.

    Raises
    ------
    ChartError
        matplotlib is not installed, or the file cannot be written.
    """
    temperatures = sorted({result.draft_temperature for result in results})
    depths = sorted({result.depth for result in results})
    values = np.full((len(temperatures), len(depths)), np.nan)
    for result in results:
        values[temperatures.index(result.draft_temperature), depths.index(result.depth)] = result.speed_up
    figure = new_figure(
        figsize=(2.5 + 0.9 * len(depths), 1.8 + 0.55 * len(temperatures)), layout="constrained"
    )
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            colour = _ink(image.to_rgba(value)[:3])
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    best = _best(results)
    x, y = depths.index(best.depth), temperatures.index(best.draft_temperature)
    corners = [
        (x + dx, y + dy) for dx, dy in ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5))
    ]
    axes.plot(*zip(*corners, strict=True), color="tab:red", linewidth=3, clip_on=False)
    axes.set_xticks(range(len(depths)), list(map(str, depths)))
    axes.set_yticks(range(len(temperatures)), [f"{value:g}" if draws else "-" for value in temperatures])
    axes.set_xlabel("depth")
    axes.set_ylabel("draft temperature")
    axes.set_title("modelled speed-up over plain decoding")
    figure.colorbar(image, ax=axes, label="speed-up")
    save(figure, path)


def _ink(background: Sequence[float]) -> str:
    """Black or white, whichever stands out more against an sRGB colour: by 4.58 to 1 at least.

    Contrast is that of WCAG 2.2: the ratio of relative luminances, each plus 0.05.
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background]
    luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return "black" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "white"
