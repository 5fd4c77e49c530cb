"""What the installed package loads: run by check-wheel where neither typer nor rich is installed."""

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

DROP_IN = ("sampling.py", "distributions.py", "_csampling")


def loaded(package: str) -> set[str]:
    return {name for name in sys.modules if name == package or name.startswith(package + ".")}


for absent in ("typer", "rich"):
    assert importlib.util.find_spec(absent) is None, f"{absent} is here: this environment proves nothing"

importlib.import_module("mtplx.sampling")
core = loaded("mtplx._csampling")
others = loaded("mtplx") - core - {"mtplx", "mtplx.sampling", "mtplx.distributions"}
assert not others, f"import mtplx.sampling also loads {sorted(others)}"
assert core, "import mtplx.sampling does not load the compiled core"
print(f"import mtplx.sampling loads {len(core)} modules of the core and mtplx.distributions", flush=True)

# In an engine's own package of the same name: the three pieces, and an empty __init__.py.
package = Path("engine") / "mtplx"
package.mkdir(parents=True)
(package / "__init__.py").touch()
for piece in DROP_IN:
    source = Path(sys.modules["mtplx"].__file__).parent / piece
    if source.is_dir():
        shutil.copytree(source, package / piece)
    else:
        shutil.copy(source, package / piece)
program = """
import sys
sys.path.insert(0, "engine")
import mtplx.sampling
print("drop-in:", mtplx.sampling.__file__, mtplx.sampling.softmax([0.0, 0.0]))
"""
subprocess.run([sys.executable, "-I", "-c", program], check=True)
