"""The command: text, JSON, colours, errors in one line, interrupts, pipes."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtplx.cli import run
from mtplx.decoding import TokenStream
from mtplx.models.ngram import NGramModel

MODULES = {"compiled": "mtplx.sampling", "reference": "mtplx.reference"}
EXISTING = [name for name, module in MODULES.items() if importlib.util.find_spec(module)]
COMMAND = [sys.executable, "-m", "mtplx"]
QUICK = ["generate", "--backend", EXISTING[0], "--max-tokens", "30", "--seed", "7"]


@pytest.fixture
def mtplx(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def as_json(mtplx: Callable[..., tuple[int, str, str]], *arguments: str) -> dict[str, Any]:
    status, out, _ = mtplx(*QUICK, "--json", *arguments)
    assert status == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def on_terminal(*arguments: str, **environment: str) -> str:
    """What a terminal of 80 columns receives from the command."""
    leader, follower = pty.openpty()
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM")
    }
    environment = {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=follower, stderr=follower, stdin=follower, env=inherited | environment
    )
    os.close(follower)
    received = io.BytesIO()
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # how Linux reports that the other side is closed
            break
        if not chunk:
            break
        received.write(chunk)
    os.close(leader)
    assert process.wait() == 0
    return received.getvalue().decode()


# --- text


@pytest.mark.parametrize("backend", EXISTING)
def test_text_goes_to_stdout_and_the_table_to_stderr(
    mtplx: Callable[..., tuple[int, str, str]], backend: str
) -> None:
    status, out, err = mtplx(*QUICK, "--backend", backend, "--prompt", "The class")
    assert status == 0
    assert out.startswith("The class")
    assert len(out) > len("The class") + 30
    assert out.endswith("\n")
    for words in ("tokens per target call", "acceptance", "draft", "target", "sampling", "seed 7"):
        assert words in err
    assert "tokens per target call" not in out
    assert "\x1b" not in out + err


def test_text_and_json_tell_the_same(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    result = as_json(mtplx)
    _, out, _ = mtplx(*QUICK)
    assert out.removesuffix("\n") == (result["prompt"] + result["text"]).removesuffix("\n")
    assert len(result["tokens"]) == len(result["kinds"]) == result["stats"]["tokens"] == 30
    assert set(result["kinds"]) <= {"accepted", "correction", "bonus"}
    assert result["interrupted"] is False
    assert result["settings"]["seed"] == 7


def test_a_seed_fixes_the_text_whatever_the_backend(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    results = [as_json(mtplx, "--backend", name) for name in (*EXISTING, EXISTING[0])]
    assert len({result["text"] for result in results}) == 1
    assert as_json(mtplx, "--seed", "8")["text"] != results[0]["text"]


def test_without_a_seed_the_one_chosen_is_told(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = mtplx("generate", "--backend", EXISTING[0], "--max-tokens", "30", "--json")
    result = json.loads(out)
    repeated = as_json(mtplx, "--seed", str(result["settings"]["seed"]))
    assert repeated["tokens"] == result["tokens"]


def test_options_reach_the_decoder(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    greedy = as_json(mtplx, "--temperature", "0", "--depth", "2")
    assert len(greedy["stats"]["drafted_by_depth"]) == 2
    # Greedy text does not depend on seed, depth or drafts; their acceptance does.
    other = as_json(mtplx, "--temperature", "0", "--depth", "3", "--seed", "1", "--draft-temperature", "2")
    assert other["text"] == greedy["text"]
    assert other["stats"]["acceptance_by_depth"][0] < greedy["stats"]["acceptance_by_depth"][0]
    for option, value in {
        "--presence-penalty": "2",
        "--frequency-penalty": "2",
        "--prompt": "A list",
    }.items():
        assert as_json(mtplx, "--temperature", "0", option, value)["text"] != greedy["text"]
    # One rank, or next to no nucleus, is greedy at any temperature.
    for option, value in {"--top-k": "1", "--top-p": "1e-9"}.items():
        assert as_json(mtplx, "--temperature", "1.5", option, value)["text"] == greedy["text"]


def test_policies_reach_the_decoder(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    def drafted(*arguments: str) -> list[int]:
        stats = as_json(mtplx, "--max-tokens", "150", *arguments)["stats"]["drafted_by_depth"]
        assert isinstance(stats, list)
        return stats

    for policy, cost in (
        ("streak", []),
        ("expected-value", ["--draft-cost", "0.3"]),
        ("cost-model", ["--draft-cost", "0.3"]),
    ):
        by_depth = drafted("--policy", policy, "--depth", "6", *cost)
        assert len(set(by_depth[:-1])) > 1  # without a policy only the blocks near the end are shorter
    # A draft that costs more than it can bring: none is made.
    assert drafted("--policy", "cost-model", "--draft-cost", "5") == []
    assert len(drafted("--policy", "expected-value", "--draft-cost", "1")) == 1
    # No block is deeper than the text is long, nor does a policy look further.
    for policy in ("expected-value", "cost-model"):
        assert len(drafted("--policy", policy, "--depth", "1000000000000", "--max-tokens", "5")) <= 4


def test_draft_temperatures_by_curve_and_adapting(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    curve = as_json(mtplx, "--temperature", "0.8", "--draft-temperature", "0.2:0.1,0.6:0.4,1:1")
    assert curve["settings"]["draft_temperature"] == pytest.approx(0.7)
    number = as_json(mtplx, "--temperature", "0.8", "--draft-temperature", "0.7")
    assert curve["tokens"] == number["tokens"]
    adaptive = as_json(mtplx, "--draft-temperature", "adaptive", "--max-tokens", "150")
    assert adaptive["settings"]["draft_temperature"] == 0.6
    assert adaptive["settings"]["draft_temperature_adapts"] is True
    fixed = as_json(mtplx, "--max-tokens", "150")
    assert fixed["settings"]["draft_temperature_adapts"] is False
    assert adaptive["tokens"][:20] == fixed["tokens"][:20]
    assert adaptive["tokens"] != fixed["tokens"]


def test_drafts_by_a_model_by_copies_or_none(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    results = {
        draft: as_json(mtplx, "--temperature", "0", "--draft", draft) for draft in ("model", "lookup", "none")
    }
    assert len({result["text"] for result in results.values()}) == 1
    drafted = {draft: result["stats"]["drafted_tokens"] for draft, result in results.items()}
    assert drafted["none"] == 0 < drafted["lookup"] < drafted["model"]
    assert results["none"]["stats"]["target_calls"] == len(results["none"]["tokens"])
    assert [result["settings"]["draft"] for result in results.values()] == list(results)


def test_no_tokens_at_all(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = mtplx(*QUICK, "--max-tokens", "0", "--prompt", "Nothing follows")
    assert (status, out) == (0, "Nothing follows\n")
    assert "nan" not in err
    assert as_json(mtplx, "--max-tokens", "0")["stats"]["tokens_per_target_call"] is None


def test_a_corpus_of_the_user(mtplx: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("red green blue " * 200)
    result = as_json(mtplx, "--corpus", str(corpus), "--prompt", "red", "--temperature", "0")
    assert (result["prompt"] + result["text"]).startswith("red green blue red green blue red")
    assert result["settings"]["corpus"] == str(corpus)
    assert result["settings"]["context"] is None  # n-gram models take texts of any length


def test_characters_are_printed_whole(mtplx: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    # More different characters than the vocabulary has room for: most are spelled in three bytes.
    rng = np.random.default_rng(0)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(chr(0x4E00 + value) + " " for value in rng.integers(0, 20000, 30000)), "utf-8")
    arguments = ["--corpus", str(corpus), "--prompt", "\N{CJK UNIFIED IDEOGRAPH-4E00}", "--temperature", "1"]
    result = as_json(mtplx, *arguments, "--max-tokens", "60")
    assert len(result["text"]) < 60
    _, out, _ = mtplx(*QUICK, *arguments, "--max-tokens", "60")
    assert out == result["prompt"] + result["text"] + "\n"


# --- colours


def test_a_terminal_gets_colours_by_kind() -> None:
    text = on_terminal(*QUICK)
    for colour in ("32", "31"):
        assert f"\x1b[{colour}m" in text
    assert "tokens per target call" in text


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colours_gets_no_styles(environment: dict[str, str]) -> None:
    text = on_terminal(*QUICK, **environment)
    assert "tokens per target call" in text
    # What is left are the cursor movements of the progress line.
    assert "m" not in {piece.lstrip("0123456789;?")[:1] for piece in text.split("\x1b[")[1:]}


def test_a_terminal_gets_no_control_characters_from_the_text() -> None:
    text = on_terminal(*QUICK, "--max-tokens", "0", "--prompt", "a\x1b[5mb\x07\x9bc\td", NO_COLOR="1")
    assert "a\ufffd[5mb\ufffd\ufffdc\td" in text


def test_a_pipe_gets_plain_text_even_when_colours_are_forced() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1"}
    process = subprocess.run([*COMMAND, *QUICK], capture_output=True, env=environment, check=True)
    assert b"\x1b" not in process.stdout + process.stderr


# --- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode"], "decode"),
        (["generate", "--max-tokens", "-1"], "--max-tokens"),
        (["generate", "--max-tokens", "ten"], "--max-tokens"),
        (["generate", "--depth", "0"], "--depth"),
        (["generate", "--seed", "-1"], "--seed"),
        (["generate", "--temperature", "nan"], "nan"),
        (["generate", "--temperature", "inf"], "inf"),
        (["generate", "--top-p", "nan"], "--top-p"),
        (["generate", "--presence-penalty", "nan"], "--presence-penalty"),
        (["generate", "--frequency-penalty", "-inf"], "--frequency-penalty"),
        (["generate", "--draft-temperature", "nan"], "--draft-temperature"),
        (["generate", "--draft-temperature", "warm"], "'warm' is no number"),
        (["generate", "--draft-temperature", "0.2:0.1,0.6"], "'--draft-temperature': a point of a draft"),
        (["generate", "--draft-temperature", "0.2:-1"], "'--draft-temperature': a draft temperature must be"),
        (["generate", "--draft-temperature", "1,2"], "got (1.0,)"),
        (["generate", "--draft", "none", "--depth", "4"], "--depth has no effect with --draft none"),
        (["generate", "--draft", "none", "--policy", "streak"], "--policy has no effect with --draft none"),
        (
            ["generate", "--draft", "none", "--draft-cost", "1"],
            "--draft-cost has no effect with --draft",
        ),
        (
            ["generate", "--draft", "none", "--draft-temperature", "1"],
            "--draft-temperature has no effect",
        ),
        (
            ["generate", "--draft", "lookup", "--draft-temperature", "1"],
            "has no effect on drafts that",
        ),
        (
            ["generate", "--model", "x.gguf", "--draft-temperature", "1"],
            "has no effect on drafts that",
        ),
        (["generate", "--draft-cost", "0.1"], "--draft-cost has no effect without --policy"),
        (["generate", "--policy", "streak", "--draft-cost", "0.1"], "has no effect with --policy streak"),
        (["generate", "--draft-temperature", "0.2:0.1,0.2:0.3"], "two points"),
        (["generate", "--draft-temperature", "adaptive", "--temperature", "0.2"], "got 0.2"),
        (["generate", "--policy", "longest"], "longest"),
        (["generate", "--draft-cost", "-1"], "--draft-cost"),
        (["generate", "--draft-cost", "nan"], "--draft-cost"),
        (["generate", "--top-k", "2.5"], "--top-k"),
        (["generate", "--backend", "cuda"], "cuda"),
        (["generate", "--prompt"], "--prompt"),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "a\udcff"], "the prompt is not UTF-8"),
        (["generate", "--no-such-option"], "--no-such-option"),
        (["generate", "stray"], "stray"),
        (["generate", "--corpus", "no/such/file"], "no/such/file: No such file"),
        (["generate", "--corpus", "."], "Is a directory"),
        (["generate", "--draft", "copies"], "--draft"),
        (["generate", "--draft-model", "x.gguf"], "--draft-model needs --model"),
        (["generate", "--context", "512"], "--context needs --model"),
        (["generate", "--raw"], "--raw needs --model"),
        (["generate", "--model", "x.gguf", "--corpus", "y"], "--corpus cannot be combined with --model"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_mistakes_get_one_line_and_status_2(
    mtplx: Callable[..., tuple[int, str, str]], arguments: list[str], message: str
) -> None:
    status, out, err = mtplx(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("mtplx: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"\xff\xfe\x00", "is not UTF-8")], ids=["empty", "binary"]
)
def test_a_bad_corpus_is_named(
    mtplx: Callable[..., tuple[int, str, str]], tmp_path: Path, content: bytes, message: str
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(content)
    status, out, err = mtplx("generate", "--corpus", str(corpus))
    assert (status, out) == (2, "")
    assert str(corpus) in err
    assert message in err
    assert err.count("\n") == 1


def test_the_process_exits_with_the_status() -> None:
    process = subprocess.run(
        [*COMMAND, "generate", "--temperature", "nan"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert process.stderr == "mtplx: error: Invalid value for '--temperature': nan is not a finite number.\n"


@pytest.mark.parametrize("command", ["info", "generate", "sweep", "bench"])
def test_an_unknown_instruction_set_is_one_line(command: str) -> None:
    environment = {**os.environ, "MTPLX_ISA": "avx9"}
    process = subprocess.run(
        [*COMMAND, command], capture_output=True, text=True, env=environment, check=False
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("mtplx: error: ")
    assert process.stderr.count("\n") == 1
    assert "avx9" in process.stderr


def test_without_a_command_the_help_is_shown(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = mtplx()
    assert (status, err) == (0, "")
    for command in ("generate", "sweep", "bench", "info"):
        assert command in out


def test_the_version(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    assert mtplx("--version") == (0, f"mtplx {version('mtplx-sampling')}\n", "")


def test_help_lists_the_options(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = mtplx("generate", "--help")
    assert status == 0
    assert "--draft-temperature" in out


# --- interrupts and pipes


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    original = TokenStream.__next__

    def interrupted(stream: TokenStream) -> int:
        nonlocal n
        n -= 1
        if n < 0:
            raise KeyboardInterrupt
        return original(stream)

    monkeypatch.setattr(TokenStream, "__next__", interrupted)


def test_an_interrupt_prints_what_there_is(
    mtplx: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = as_json(mtplx)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 10)
        status, out, err = mtplx(*QUICK, "--json")
    assert (status, err) == (130, "")
    result = json.loads(out)
    assert result["interrupted"] is True
    assert 10 <= len(result["tokens"]) < 15
    assert result["tokens"] == whole["tokens"][: len(result["tokens"])]
    assert result["stats"]["tokens"] == len(result["tokens"])

    interrupt_after(monkeypatch, 10)
    status, out, err = mtplx(*QUICK)
    assert status == 130
    assert out.removesuffix("\n") == (result["prompt"] + result["text"]).removesuffix("\n")
    assert "tokens per target call" in err


@pytest.mark.parametrize("call", [0, 3, 7])
def test_an_interrupt_inside_of_the_model_prints_the_blocks_before_it(
    mtplx: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    whole = as_json(mtplx)
    original = NGramModel.forward

    def interrupt_target(n: int) -> None:
        def interrupted(model: NGramModel, state: Any, tokens: Any) -> Any:
            nonlocal n
            rows = original(model, state, tokens)
            if model.order > 2:  # the draft's order
                n -= 1
                if n < 0:
                    raise KeyboardInterrupt
            return rows

        monkeypatch.setattr(NGramModel, "forward", interrupted)

    interrupt_target(call)
    status, out, err = mtplx(*QUICK, "--json")
    assert (status, err) == (130, "")
    result = json.loads(out)
    assert result["interrupted"] is True
    assert result["tokens"] == whole["tokens"][: len(result["tokens"])]
    assert len(result["tokens"]) >= call
    assert result["stats"]["tokens"] == len(result["tokens"])
    assert result["stats"]["target_calls"] == call
    interrupt_target(call)
    status, out, err = mtplx(*QUICK)
    assert status == 130
    assert out.removesuffix("\n") == (result["prompt"] + result["text"]).removesuffix("\n")
    assert "tokens per target call" in err


def test_the_signal_of_control_c() -> None:
    process = subprocess.Popen(
        [*COMMAND, *QUICK, "--max-tokens", "100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Shells start background jobs with the signal ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    beginning = process.stdout.read(500)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(beginning) == 500
    assert b"tokens per target call" in err
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_the_decode_quietly() -> None:
    process = subprocess.Popen(
        [*COMMAND, *QUICK, "--max-tokens", "100000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(100)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


# --- info


def test_info_names_versions_and_instruction_sets(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    from mtplx._csampling.dispatch import active_isa, available_isas

    status, out, _ = mtplx("info")
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in out.replace("instruction set", "isa").splitlines())
    assert lines["isa"] == active_isa()
    assert lines["available"].split() == available_isas()
    assert lines["numpy"] == np.__version__
    assert lines["python"] == platform.python_version()
    assert lines["drafts"].split() == ["model", "lookup", "none"]
    assert lines["policies"].split() == ["streak", "expected-value", "cost-model"]
    assert lines["mtplx"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize(
    "arguments", ["info", "generate --max-tokens 5 --seed 1", "generate --max-tokens 5 --json"]
)
def test_a_full_disk_is_one_line(arguments: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        run = subprocess.run(
            [sys.executable, "-m", "mtplx", *arguments.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert run.returncode == 2
    assert "No space left on device" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m mtplx generate --max-tokens 5 --seed 1 {closed}"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, "Traceback" in run.stderr) == (0, False)
