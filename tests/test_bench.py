"""`mtplx bench`: what it prints and what it refuses. Never how fast anything is."""

from __future__ import annotations

import json
import math
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtplx._csampling import dispatch

from mtplx import bench, bench_blocks, bench_report, reference, sampling
from mtplx.cli import run

TINY = ["--seconds", "0.5", "--vocab", "4096"]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mtplx_bench(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(["bench", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def timing(minimum: float) -> bench.Timing:
    return bench.Timing(minimum, 1.5 * minimum)


def line(
    row: bench.Row, theirs: float, ours: float, kind: str = "zipf", V: int = bench.DESIGN_VOCABULARY
) -> bench.Line:
    return bench.Line(row, kind, V, timing(theirs), timing(ours))


def row(**changes: Any) -> bench.Row:
    settings: dict[str, Any] = {"goal": 10.0, "floor": 5.0, "column": 100.0} | changes
    return bench.Row("a row", lambda kind, vocab: (), lambda face: lambda: None, **settings)


# ---- the table -----------------------------------------------------------------------------------


def test_json_has_a_line_for_each_row_and_input(mtplx_bench: Command) -> None:
    status, out, err = mtplx_bench(*TINY, "--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    result = json.loads(out)
    expected = [(r.name, kind) for r in bench.ROWS for kind in r.kinds if r.name not in result["skipped"]]
    assert [(found["name"], found["input"]) for found in result["rows"]] == expected
    for found in result["rows"]:
        assert 0.0 < found["reference_us"]["minimum"] <= found["reference_us"]["median"]
        assert 0.0 < found["compiled_us"]["minimum"] <= found["compiled_us"]["median"]
        assert found["ratio"] == found["reference_us"]["minimum"] / found["compiled_us"]["minimum"]
        assert found["verdict"] in ("goal", "floor", "below")
    assert result["machine"]["isa"] == dispatch.active_isa()
    assert result["machine"]["numpy"] == np.__version__
    assert result["settings"]["vocab"] == 4096


def test_text_and_markdown_have_every_row(mtplx_bench: Command) -> None:
    names = {r.name for r in bench.ROWS if "draw" in r.name}
    for form in ([], ["--markdown"]):
        status, out, err = mtplx_bench(*TINY, "--only", "DRAW", *form)
        assert (status, err) == (0, "")
        assert {name for name in names if name in out} == names
        assert "softmax" not in out
        assert "\x1b" not in out
    assert out.startswith("`mtplx bench --vocab 4096 --only DRAW --seconds 0.5 --markdown`\n")
    table = [words for words in out.splitlines() if words.startswith("|")]
    assert len({words.count("|") for words in table}) == 1


def test_every_row_runs_on_both_faces_and_every_input() -> None:
    V = 2048
    for r in bench.ROWS:
        kinds = [*r.kinds, *(bench.WORST_INPUTS if r.worst else ())]
        for kind in kinds:
            try:
                arguments = r.make(kind, r.vocab or V)
            except bench.BenchError:
                continue
            expected, found = (r.build(face, *arguments)() for face in (reference, sampling))
            if isinstance(expected, np.ndarray):
                tolerance = 1e-6 if expected.dtype == np.float32 else 1e-12
                np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-300)
            elif isinstance(expected, bench.PlainSparseDistribution | sampling.SparseDistribution):
                assert np.array_equal(found.token_ids, expected.token_ids)
            elif "block" in r.name:
                assert found.tokens.tolist() == expected.tokens.tolist()
            else:
                assert found == expected


def test_the_rows_named_rejected_reject_and_the_others_accept() -> None:
    for r in bench.ROWS:
        if "accepted" in r.name or "rejected" in r.name or r.name == "residual + draw":
            every = bench.DRAFTS if "block" in r.name else 1
            for kind in r.kinds:
                call = r.build(sampling, *r.make(kind, r.vocab or 4096))
                assert {int(call().accepted) for _ in range(20)} == {every if "accepted" in r.name else 0}


def test_the_nuclei_have_the_sizes_that_the_goals_name() -> None:
    rows = [r for r in bench.ROWS if r.kernel == "top-p"]
    kept = [np.count_nonzero(r.build(sampling, *r.make("zipf", bench.DESIGN_VOCABULARY))()) for r in rows]
    assert kept == pytest.approx([208, 15_000, 86_000], rel=0.12)


def test_inputs_are_what_they_are_called() -> None:
    V = 5000
    made = {kind: bench.logits(kind, V) for kind in (*bench.LLM_INPUTS, *bench.WORST_INPUTS)}
    assert all(x.dtype == np.float32 and x.shape == (V,) and not np.isnan(x).any() for x in made.values())
    assert np.unique(made["tied"]).size < 100
    assert 0.4 < np.isinf(made["masked"]).mean() < 0.6
    assert np.unique(made["two values"]).size == 2
    assert (np.diff(made["ascending"]) > 0).all()
    assert (np.diff(made["descending"]) < 0).all()
    assert np.isfinite(made["all -inf but one"]).sum() == 1
    p = bench.probabilities("subnormal", V)
    assert np.count_nonzero((p > 0.0) & (p < np.finfo(np.float64).tiny)) == V - 1
    p = bench.probabilities("16-bit valued", V)
    assert (p.astype(np.float16) == p).all()


# ---- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (100.0, 10.0, ("goal", "ratio")),
        (50.0, 10.0, ("goal", "time")),  # half the ratio, yet the goal's 10 us
        (60.0, 12.0, ("floor", "ratio")),
        (60.0, 20.0, ("floor", "time")),
        (60.0, 20.1, ("below", None)),
        (1000.0, 100.0, ("goal", "ratio")),  # a slow machine
    ],
)
def test_a_line_counts_by_its_ratio_or_by_its_time(
    theirs: float, ours: float, expected: tuple[str, str | None]
) -> None:
    assert line(row(), theirs, ours).judgement() == expected


def test_absolute_time_counts_at_the_vocabulary_it_was_set_at() -> None:
    assert line(row(), 50.0, 10.0, V=4096).judgement() == ("floor", "ratio")
    assert line(row(vocab=3), 50.0, 10.0, V=3).judgement() == ("goal", "time")
    assert line(row(column=None), 40.0, 10.0).judgement() == ("below", None)
    assert line(row(column=None), 40.0, 10.0).as_dict()["goal_us"] is None


def test_a_slow_reference_is_told() -> None:
    assert not line(row(), 114.0, 10.0).slow_reference()
    assert line(row(), 116.0, 10.0).slow_reference()
    assert not line(row(), 116.0, 10.0, V=4096).slow_reference()
    assert not line(row(vocab=3), 116.0, 10.0, V=3).slow_reference()


def test_a_worst_case_is_measured_by_the_slowest_llm_like_line() -> None:
    one, other = row(kernel="k"), row(kernel="k", kinds=("normal",), worst=False)
    lines = [
        line(one, 100.0, 10.0),
        line(other, 100.0, 20.0, "normal"),
        line(one, 100.0, 60.0, "two values"),
        line(one, 100.0, 61.0, "organ pipe"),
        line(one, 29.0, 30.0, "all equal"),
    ]
    found = bench.summarise_worst(lines)
    assert [(f["input"], f["slowdown"], f["passes"]) for f in found] == [
        ("two values", 3.0, True),
        ("organ pipe", 3.05, False),
        ("all equal", 1.5, False),
    ]


def test_scaling_compares_times_per_element() -> None:
    flat, steep = row(), row()
    object.__setattr__(steep, "name", "another")
    found = bench.summarise_scaling(
        [
            ((flat, "zipf", 1000), timing(10.0)),
            ((flat, "zipf", 2000), timing(25.0)),
            ((steep, "zipf", 1000), timing(10.0)),
            ((steep, "zipf", 2000), timing(40.0)),
        ]
    )
    assert found[0]["ns_per_element"] == {"1000": 10.0, "2000": 12.5}
    assert [(f["spread"], f["passes"]) for f in found] == [(1.25, True), (2.0, False)]


def test_measuring_calls_both_sides_in_turns() -> None:
    order: list[str] = []
    ticks = iter(range(10**9))

    def reference_call() -> None:
        order.append("r")
        for _ in zip(range(3000), ticks, strict=False):
            pass

    def compiled_call() -> None:
        order.append("c")
        for _ in zip(range(300), ticks, strict=False):
            pass

    theirs, ours = bench.measure(reference_call, compiled_call, 0.05)
    assert theirs.minimum > ours.minimum > 0.0
    assert theirs.median >= theirs.minimum
    assert "".join(order).count("rc") > bench.LEAST_ROUNDS


# ---- the other modes -----------------------------------------------------------------------------


def test_worst_cases(mtplx_bench: Command) -> None:
    status, out, _ = mtplx_bench(*TINY, "--worst", "--json", "--only", "categorical")
    assert status == 0
    found = json.loads(out)["rows"]
    assert [r["input"] for r in found] == list(bench.WORST_INPUTS)
    assert all(r["slowdown"] > 0.0 and r["passes"] in (True, False) for r in found)
    status, out, _ = mtplx_bench(*TINY, "--worst", "--only", "categorical")
    assert status == 0
    assert all(kind in out for kind in bench.WORST_INPUTS)


def test_worst_cases_in_markdown_are_a_line_a_kernel(mtplx_bench: Command) -> None:
    status, out, _ = mtplx_bench(*TINY, "--worst", "--markdown", "--only", "categorical draw")
    assert status == 0
    table = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert table[0] == ["kernel", *bench.WORST_INPUTS, "least ratio"]
    (cells,) = table[2:]
    assert cells[0] == "categorical draw"
    assert len(cells) == len(table[0])
    assert all(float(cell.strip("*")) > 0.0 for cell in cells[1:-1])


def test_a_worst_case_that_does_not_pass_is_bold() -> None:
    rows = [
        {"name": "k", "input": name, "slowdown": slowdown, "ratio": ratio, "passes": passes}
        for name, slowdown, ratio, passes in (("one", 1.25, 9.5, True), ("two", 3.5, 4.0, False))
    ]
    settings = {"mode": "worst", "numpy_avx2": False}
    machine = dict.fromkeys(("cpu", "cpus", "system", "python", "mtplx", "isa", "numpy"), "-")
    result = {"rows": rows, "settings": settings, "skipped": {}}
    result["machine"] = {**machine, "available_isas": [], "numpy_simd": [], "allocator": {}}
    out = bench_report.markdown(result, "mtplx bench")
    assert "| kernel | one | two | least ratio |" in out
    assert "| k | 1.25 | **3.50** | 4.0x |" in out
    assert "1 of 2 pass" in out


def test_scaling(mtplx_bench: Command) -> None:
    status, out, _ = mtplx_bench("--seconds", "0.5", "--scaling", "--json", "--only", "categorical")
    assert status == 0
    (found,) = json.loads(out)["rows"]  # the small rows have a length of their own
    assert list(found["ns_per_element"]) == [str(V) for V in bench.SCALING_VOCABULARIES]
    status, out, _ = mtplx_bench("--seconds", "0.5", "--scaling", "--only", "categorical")
    assert status == 0
    assert "V = 262,144" in out


def test_blocks(mtplx_bench: Command) -> None:
    status, out, _ = mtplx_bench(*TINY, "--blocks", "--json", "--only", "K = 3, B = 8")
    assert status == 0
    found = json.loads(out)["rows"]
    asked = [(form, outcome) for form in bench_blocks.FORMS for outcome in bench_blocks.OUTCOMES]
    assert [(r["form"], r["outcome"]) for r in found] == asked
    for r in found:
        assert r["ratio"] == pytest.approx(r["reference_us"] / r["compiled_us"]["minimum"])
        assert (r["reads"] is None) == (r["form"] == "sparse")
        assert r["reads"] is None or r["reads"] == pytest.approx(r["compiled_us"]["minimum"] / r["read_us"])
    status, out, _ = mtplx_bench(
        *TINY, "--blocks", "--markdown", "--only", "sparse, K = 3, B = 8, rejected never"
    )
    assert status == 0
    assert "| form | rejected | K | B = 8: us | ratio | reads |" in out
    assert "| sparse | never | 3 | " in out
    assert mtplx_bench(*TINY, "--blocks", "--only", "nothing of that name")[0] == 2


@pytest.mark.parametrize(
    "shape", [s for s in bench_blocks.shapes() if s.sequences != 32], ids=lambda s: s.name
)
def test_blocks_are_rejected_where_they_say(shape: bench_blocks.Shape) -> None:
    result = bench_blocks.compiled_call(shape, 1500)()
    assert np.all(np.asarray(result.accepted) == shape.rejected)


def test_the_grid_of_blocks() -> None:
    grid = bench_blocks.shapes()
    assert {(s.form, s.drafts, s.sequences, s.rejected) for s in grid} == {
        (form, K, B, j)
        for form in bench_blocks.FORMS
        for K in (1, 3, 5, 8)
        for B in (1, 8, 32)
        for j in (0, K // 2, K)
    }
    assert len(grid) == len({s.name for s in grid}) == 165


def test_isa_is_the_core_s(mtplx_bench: Command) -> None:
    name = dispatch.available_isas()[-1]
    status, out, _ = mtplx_bench(*TINY, "--json", "--only", "V = 3", "--isa", name)
    assert status == 0
    assert json.loads(out)["machine"]["isa"] == name


def test_numpy_can_be_held_at_avx2(mtplx_bench: Command) -> None:
    status, out, err = mtplx_bench(*TINY, "--json", "--only", "V = 3", "--numpy-avx2")
    if any(name.startswith(("AVX512", "X86_V4")) for name in bench.numpy_simd()):
        assert status == 0
        assert not [n for n in json.loads(out)["machine"]["numpy_simd"] if n.startswith(("AVX512", "X86_V4"))]
    else:
        assert status == 2
        assert err.startswith("mtplx: error: NumPy has no AVX-512 to switch off here")


def test_the_allocator_keeps_memory_in_the_measuring_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_report.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert bench_report.environment(bench_report.Request()).items() >= bench_report.ALLOCATOR.items()
    monkeypatch.setattr(bench_report.platform, "libc_ver", lambda: ("", ""))
    for name in bench_report.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert not bench_report.environment(bench_report.Request()).keys() & bench_report.ALLOCATOR.keys()


def test_a_terminal_shows_progress_and_a_table() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "mtplx", "bench", *TINY, "--only", "draw, V"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment
    ) as process:
        os.close(follower)
        received = b""
        while True:
            try:
                chunk = os.read(leader, 4096)
            except OSError:  # how Linux reports that the other side is closed
                break
            if not chunk:
                break
            received += chunk
        os.close(leader)
        assert process.wait() == 0
    text = received.decode()
    assert "0/3" in text
    assert "categorical draw, V = 20" in text
    assert "reached" in text


# ---- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab", "1023"], "--vocab"),
        (["--vocab", "many"], "--vocab"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--only", "nothing of that name"], "'nothing of that name'"),
        (["--isa", "sse9"], "'sse9'"),
        (["--worst", "--scaling"], "--worst cannot be combined with --scaling"),
        (["--json", "--markdown"], "--json cannot be combined with --markdown"),
        (["--worst", "--blocks"], "--worst cannot be combined with --blocks"),
        (["--worst", "--plot", "x.png"], "--plot cannot be combined with --worst"),
        (["--blocks", "--plot", "x.png"], "--plot cannot be combined with --blocks"),
        (["--frequency"], "--frequency"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(mtplx_bench: Command, arguments: list[str], words: str) -> None:
    status, out, err = mtplx_bench(*TINY, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("mtplx: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_chart_without_matplotlib_names_the_extra(
    mtplx_bench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = mtplx_bench(*TINY, "--plot", str(tmp_path / "ratios.png"))
    assert (status, out) == (2, "")
    assert err == 'mtplx: error: a chart needs matplotlib: pip install "mtplx-sampling[plot]"\n'
    assert not list(tmp_path.iterdir())


def test_a_chart(mtplx_bench: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ratios.svg"
    status, out, _ = mtplx_bench(*TINY, "--only", "draw", "--plot", str(path))
    assert status == 0
    assert "categorical draw" in out
    drawn = path.read_text(encoding="utf-8")
    assert drawn.count("</svg>") == 1
    for meaning in ("at the goal", "between floor and goal", "below the floor"):
        assert f"<!-- {meaning}, by ratio or by time -->" in drawn


def test_a_chart_that_cannot_be_written_is_refused_before_measuring(
    mtplx_bench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_report, "measure", lambda *arguments: pytest.fail("measured"))
    for path, words in (
        (tmp_path / "ratios.xyz", "cannot draw ratios.xyz"),
        (tmp_path / "missing" / "ratios.png", "there is no directory"),
    ):
        status, _, err = mtplx_bench(*TINY, "--plot", str(path))
        assert status == 2
        assert words in err
        assert err.count("\n") == 1


def test_a_measuring_process_that_dies_is_reported(
    mtplx_bench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_report.sys, "executable", shutil.which("false"))
    status, _, err = mtplx_bench(*TINY)
    assert status == 2
    assert err == "mtplx: error: the measuring process ended with status 1\n"


def test_goals_are_those_of_a_table_that_is_complete() -> None:
    for r in bench.ROWS:
        assert r.goal > r.floor > 1.0
        assert r.column is None or math.isfinite(r.column)
    assert len({r.name for r in bench.ROWS}) == len(bench.ROWS)
