"""`mtplx sweep`: counts, intervals, the state file, what is shown."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtplx import sweep
from mtplx.cli import run
from mtplx.decoding import speculative_generate
from mtplx.distributions import SamplerConfig
from mtplx.setups import Setup, ngram_setup

CORPUS = "the red cat and the green dog saw the blue bird, and the old dog saw the red bird. " * 40
CONFIG = SamplerConfig(0.8, 0.95, 20)
PLAN = sweep.Plan(
    prompts=("the red", "the old dog"),
    texts=3,
    max_tokens=30,
    config=CONFIG,
    draft_temperatures=(0.0, 0.8),
    depths=(1, 3),
    seed=5,
    backend="compiled",
)
COPIES = ["sweep", "--texts", "2", "--max-tokens", "20", "--depths", "1,3", "--draft", "lookup"]
QUICK = ["sweep", "--texts", "2", "--max-tokens", "20", "--draft-temperatures", "0,0.8", "--depths", "1,3"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "corpus.txt"
    path.write_text(CORPUS)
    return path


@pytest.fixture(scope="module")
def setup(corpus: Path) -> Setup:
    return ngram_setup(corpus)


@pytest.fixture
def quick(corpus: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run([*QUICK, "--corpus", str(corpus), "--cost-ratio", "0.1", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def sweep_all(setup: Setup, plan: sweep.Plan) -> sweep.Run:
    from rich.console import Console

    whole = sweep.Run(setup, plan, given_cost_ratio=0.1)
    sweep.measure(whole, Console(quiet=True))
    return whole


# --- cells


@pytest.mark.parametrize(("temperature", "depth"), [(0.0, 1), (0.8, 3)])
def test_counts_are_those_of_the_same_decodes(setup: Setup, temperature: float, depth: int) -> None:
    cell = sweep.measure_cell(setup, PLAN, temperature, depth)
    assert setup.make_drafter is not None
    expected: dict[str, list[int]] = {"tokens": [], "target_calls": [], "tested": [], "accepted": []}
    seeds = iter(np.random.SeedSequence(PLAN.seed).generate_state(6, np.uint64).tolist())
    for prompt in PLAN.prompts:
        for _ in range(PLAN.texts):
            stream = speculative_generate(
                setup.target,
                setup.make_drafter("compiled"),
                setup.encode(prompt),
                config=CONFIG,
                draft_config=replace(CONFIG, temperature=temperature),
                depth=depth,
                max_tokens=1000,
                seed=next(seeds),
            )
            # Block by block: accepted drafts, then one token that is not.
            tokens = calls = tested = accepted = 0
            for _ in stream:
                tokens += 1
                if stream.kind == "accepted":
                    accepted += 1
                    tested += 1
                    continue
                tested += stream.kind == "correction"
                calls += 1
                if tokens >= PLAN.max_tokens:
                    break
            for name, value in (
                ("tokens", tokens),
                ("target_calls", calls),
                ("tested", tested),
                ("accepted", accepted),
            ):
                expected[name].append(value)
    assert {name: getattr(cell, name) for name in expected} == expected
    assert 0 < sum(cell.accepted) < sum(cell.tested)


def test_numbers_of_a_cell_by_hand() -> None:
    cells = [
        sweep.Cell(0.5, 2, tokens=[30, 30], target_calls=[10, 20], tested=[25, 30], accepted=[20, 13]),
        sweep.Cell(0.5, 4, tokens=[40, 40], target_calls=[10, 10], tested=[40, 40], accepted=[30, 30]),
    ]
    one, two = sweep.estimates(cells, 0.25)
    assert (one.tokens, one.target_calls, one.tested, one.accepted, one.texts) == (60, 30, 55, 33, 2)
    assert one.acceptance == 0.6
    assert one.tokens_per_call == 2.0
    assert one.speed_up == 2.0 / 1.5
    # A resample holds the first text twice, each once, or the second twice: 3, 2, or 1.5 tokens a call.
    assert one.tokens_per_call_interval == (1.5, 3.0)
    assert one.speed_up_interval == (1.0, 2.0)
    assert (two.speed_up, two.speed_up_interval) == (2.0, (2.0, 2.0))
    # The first cell reaches the second when its first text is drawn twice: in a quarter of the resamples.
    assert two.best_share == 1.0
    assert one.best_share == pytest.approx(0.25, abs=0.05)


def test_intervals_cover_what_they_should() -> None:
    # Texts of exchangeable counts; the ratio of the means is 2.5. With 30 texts the bootstrap covers a
    # little less than 95 %. 400 repetitions: below 355 or above 395 in fewer than one of 10**4 choices of
    # seeds at a coverage of 0.935 +- 0.01. Intervals of a third of the width, the planted fault, cover 50 %.
    rng = np.random.default_rng(0)
    covered = narrow = 0
    for repetition in range(400):
        calls = rng.integers(20, 40, 30)
        tokens = calls + rng.binomial(3 * calls, 0.5)
        cell = sweep.Cell(0.0, 3, tokens.tolist(), calls.tolist(), [1] * 30, [1] * 30)
        (estimate,) = sweep.estimates([cell], 0.0, seed=repetition)
        low, high = estimate.tokens_per_call_interval
        covered += low <= 2.5 <= high
        middle, third = (low + high) / 2, (high - low) / 6
        narrow += middle - third <= 2.5 <= middle + third
    assert 355 <= covered <= 395
    assert narrow < 355


def test_a_cost_ratio_is_measured(setup: Setup) -> None:
    class Slow:
        """A target whose calls take four milliseconds, far more than anything else here."""

        def __init__(self, model: Any) -> None:
            self.model = model
            self.vocab_size = model.vocab_size
            self.start, self.rollback = model.start, model.rollback

        def forward(self, state: Any, tokens: Any) -> Any:
            from time import sleep

            sleep(0.004)
            return self.model.forward(state, tokens)

    slow: Any = replace(setup, target=Slow(setup.target))
    assert 0 < sweep.measure_cost_ratio(slow, PLAN) < 0.5 * sweep.measure_cost_ratio(setup, PLAN)


# --- resuming


def test_an_interrupted_sweep_goes_on_where_it_was(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    state = tmp_path / "state.json"
    whole = sweep_all(setup, PLAN)
    original = sweep.measure_cell
    measured: list[tuple[float, int]] = []

    def interrupted(*arguments: Any) -> sweep.Cell:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(arguments[2:])
        return original(*arguments)

    first = sweep.Run(setup, PLAN, given_cost_ratio=0.1, state=state)
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "measure_cell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep.measure(first, Console(quiet=True))
    assert first.estimates() == sweep.estimates(whole.cells[:2], 0.1, seed=PLAN.seed)
    second = sweep.Run(setup, PLAN, given_cost_ratio=0.1, state=state)
    assert second.remaining() == [place for place in PLAN.grid() if place not in measured]
    sweep.measure(second, Console(quiet=True))
    assert second.estimates() == whole.estimates()
    assert len(whole.estimates()) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    # A finished sweep measures nothing.
    monkeypatch.setattr(sweep, "measure_cell", interrupted)
    third = sweep.Run(setup, PLAN, given_cost_ratio=0.1, state=state)
    sweep.measure(third, Console(quiet=True))
    assert third.estimates() == whole.estimates()


def test_a_terminal_sees_the_progress(setup: Setup) -> None:
    import io

    from rich.console import Console

    shown = io.StringIO()
    sweep.measure(sweep.Run(setup, PLAN), Console(file=shown, force_terminal=True, width=100))
    for text in ("cost of a draft", "draft temperature 0.8, depth 3", "4/4"):
        assert text in shown.getvalue()
    piped = io.StringIO()
    sweep.measure(sweep.Run(setup, PLAN, given_cost_ratio=0.1), Console(file=piped))
    assert piped.getvalue() == ""


def test_a_measured_cost_ratio_is_kept(setup: Setup, tmp_path: Path) -> None:
    from rich.console import Console

    state = tmp_path / "state.json"
    first = sweep.Run(setup, PLAN, state=state)
    assert math.isnan(first.cost_ratio)
    sweep.measure(first, Console(quiet=True))
    assert first.cost_ratio > 0
    assert sweep.Run(setup, PLAN, state=state).cost_ratio == first.cost_ratio


def test_a_failure_while_writing_keeps_the_old_state(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    under_way = sweep.Run(setup, PLAN, given_cost_ratio=0.1, state=state)
    cell = sweep.Cell(0.0, 1, [1], [1], [1], [1])
    under_way.add(cell)
    before = state.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(sweep.SweepError, match=r"cannot write the state .*: No space left on device"):
        under_way.add(replace(cell, depth=3))
    assert state.read_text() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", "1"], "seed is 0 there, 1 here"),
        (["--depths", "1,2"], r"depths is \[1, 3\] there, \[1, 2\] here"),
        (["--cost-ratio", "0.2"], "cost_ratio is 0.1 there, 0.2 here"),
        (["--top-k", "7"], "config is "),
        (["--draft-temperatures", "0,0.9"], "draft_temperatures is "),
        (["--prompt", "the"], "prompts is "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_state_of_other_settings_is_refused(
    quick: Callable[..., tuple[int, str, str]], tmp_path: Path, change: list[str], message: str
) -> None:
    state = tmp_path / "state.json"
    assert quick("--state", str(state))[0] == 0
    before = state.read_text()
    import re

    status, out, err = quick("--state", str(state), *change)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert state.read_text() == before


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"settings": {}, "cost_ratio": 1, "cells": [3]}', "\xff"]
)
def test_a_file_that_is_no_state_is_refused(
    quick: Callable[..., tuple[int, str, str]], tmp_path: Path, content: str
) -> None:
    state = tmp_path / "state.json"
    state.write_text(content, "latin-1")
    status, out, err = quick("--state", str(state))
    assert (status, out) == (2, "")
    assert err == f"mtplx: error: {state} is not the state of a sweep\n"
    assert state.read_text("latin-1") == content


# --- the command


def test_the_table_names_the_best_with_its_interval(quick: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = quick()
    assert (status, err) == (0, "")
    table, _, sentence = out.partition("best: ")
    (starred,) = [line for line in table.splitlines() if "* " in line]
    temperature, depth = starred.replace("*", "").replace("\u2502", " ").split()[:2]
    assert sentence.startswith(f"draft temperature {temperature}, depth {depth}: ")
    assert "95% interval" in out
    assert "percentile bootstrap over 8 texts, 2000 resamples" in out
    assert "tokens per call / (1 + 0.1 * depth)" in out
    assert "\x1b" not in out
    assert quick()[1] == out


def test_csv_holds_what_was_estimated(quick: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path, state = tmp_path / "sweep.csv", tmp_path / "state.json"
    assert quick("--csv", str(path), "--state", str(state))[0] == 0
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(float(row["draft_temperature"]), int(row["depth"])) for row in rows] == [
        (0.0, 1),
        (0.0, 3),
        (0.8, 1),
        (0.8, 3),
    ]
    for row, cell in zip(rows, json.loads(state.read_text())["cells"], strict=True):
        tokens, calls = sum(cell["tokens"]), sum(cell["target_calls"])
        assert (int(row["tokens"]), int(row["target_calls"])) == (tokens, calls)
        assert float(row["acceptance"]) == sum(cell["accepted"]) / sum(cell["tested"])
        assert float(row["tokens_per_call"]) == tokens / calls
        assert float(row["speed_up"]) == tokens / calls / (1 + 0.1 * cell["depth"])
        for name in ("tokens_per_call", "speed_up"):
            assert float(row[f"{name}_low"]) <= float(row[name]) <= float(row[f"{name}_high"])


@pytest.mark.parametrize(
    ("speed", "interval", "verdict"),
    [
        (1.2, (1.01, 1.4), "1.20x, 95% interval"),
        (1.2, (0.9, 1.4), "1.20x (plain decoding may be as fast), 95% interval"),
        (0.9, (0.8, 1.0), "0.90x (plain decoding may be as fast), 95% interval"),
        (0.9, (0.8, 0.99), "0.90x (plain decoding is faster), 95% interval"),
    ],
    ids=str,
)
def test_the_verdict_goes_by_the_interval(speed: float, interval: tuple[float, float], verdict: str) -> None:
    best = sweep.Estimate(0.0, 2, 4, 40, 20, 9, 5, 5 / 9, 2.0, (1.5, 2.5), speed, interval, 1.0)
    assert verdict in sweep.best_sentence([best], 0.1, draws=True)


def test_figures_are_readable_on_every_colour() -> None:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    steps = np.linspace(0, 1, 12)
    for colour in product(steps, steps, steps):
        ink = 0.0 if sweep._ink(colour) == "black" else 1.0
        low, high = sorted((ink, luminance(colour)))
        # Black and white differ by 21, so the better of the two by its square root at least.
        assert (high + 0.05) / (low + 0.05) >= 4.58


@pytest.mark.parametrize("name", ["map.png", "map.svg"])
def test_a_heat_map(quick: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / name
    assert quick("--plot", str(path))[0] == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    if name.endswith("svg"):
        assert b"modelled speed-up" in content


def test_copies_have_no_temperature(corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    assert run([*COPIES, "--corpus", str(corpus), "--cost-ratio", "0.1", "--csv", str(path)]) == 0
    assert "best: depth " in capsys.readouterr().out
    assert len(path.read_text().splitlines()) == 3


def test_prompts_from_a_file(quick: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the red\n\n  the old dog\n")
    status, out, _ = quick("--prompts", str(prompts), "--prompt", "a")
    assert status == 0
    assert "over 6 texts" in out


def test_an_interrupt_shows_what_was_done(
    quick: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quick()[1]
    original = sweep.measure_cell
    calls = 0

    def interrupted(*arguments: Any) -> sweep.Cell:
        nonlocal calls
        calls += 1
        if calls in (3, 4):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(sweep, "measure_cell", interrupted)
    path, state = tmp_path / "sweep.csv", tmp_path / "state.json"
    status, out, err = quick("--csv", str(path), "--state", str(state))
    assert status == 130
    assert "best: " in out
    assert err == "mtplx: interrupted after 2 of 4 cells: the same command goes on\n"
    assert len(path.read_text().splitlines()) == 3
    status, out, err = quick("--state", str(tmp_path / "other.json"))
    assert (status, out) == (130, "")
    assert err == "mtplx: interrupted after 0 of 4 cells: the same command goes on\n"
    assert quick("--state", str(state))[:2] == (0, whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depths", "0,1"], "--depths must be whole numbers from 1 up, separated by commas; got '0,1'"),
        (["--depths", "1,x"], "got '1,x'"),
        (["--depths", ""], "got ''"),
        (["--depths", "2,1,2"], "--depths has a number twice: '2,1,2'"),
        (["--draft-temperatures", "0.5,nan"], "--draft-temperatures must be finite numbers"),
        (["--texts", "0"], "--texts"),
        (["--texts", "1", "--prompt", "the"], "an interval needs two texts at least"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--cost-ratio", "-1"], "--cost-ratio"),
        (["--cost-ratio", "nan"], "--cost-ratio"),
        (["--draft", "none"], "--draft none: without drafts there is nothing to measure"),
        (["--draft", "other"], "--draft"),
        (["--draft", "lookup"], "--draft-temperatures has no effect on drafts that are copied"),
        (["--draft-model", "x.gguf"], "--draft-model needs --model"),
        (["--context", "9"], "--context needs --model"),
        (["--raw"], "--raw needs --model"),
        (["--model", "x.gguf", "--draft-model", "y"], "--corpus cannot be combined with --model"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompts", "no/such/file"], "cannot read the prompts no/such/file"),
        (["--csv", "no/such/folder/x.csv"], "cannot write no/such/folder/x.csv: there is no directory"),
        (["--state", "no/such/folder/x"], "cannot write no/such/folder/x: there is no directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line(
    quick: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    status, out, err = quick(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("mtplx: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("name", "message"), [("map.xyz", "the name must end in one of"), ("no/map.png", "there is no directory")]
)
def test_a_heat_map_that_cannot_be_written_is_refused_at_once(
    quick: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str, message: str
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    status, out, err = quick("--plot", str(tmp_path / name))
    assert (status, out) == (2, "")
    assert message in err
