"""The files in examples/ run, warning-free, and say what they are there to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAYS = {
    "engine_loop.py": "200 tokens, the same from both",
    "batch_server.py": "7 requests: together, in another order and alone the same tokens",
    "other_arrays.py": "MB of logits were read in place",
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, tmp_path: Path) -> None:
    # Elsewhere, so that the installed package is used and not the one in the checkout.
    process = subprocess.run(
        [sys.executable, "-I", "-W", "error", str(EXAMPLES / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    assert SAYS[name] in process.stdout
    assert list(tmp_path.iterdir()) == []
