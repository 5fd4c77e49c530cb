"""Charts, for which matplotlib is an optional extra."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ChartError", "new_figure", "require_plotting", "save"]


class ChartError(Exception):
    """A chart that cannot be drawn; the text is one line for the user."""


def require_plotting(path: Path) -> None:
    """Refuse what could only fail after a minute of measuring.

    Raises
    ------
    ChartError
        matplotlib is not installed, or cannot write such a file there.
    """
    known = new_figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ChartError(f"cannot draw {path.name}: the name must end in one of .{', .'.join(sorted(known))}")
    if not path.parent.is_dir():
        raise ChartError(f"cannot write {path}: there is no directory {path.parent}")


def new_figure(**options: Any) -> Any:
    """Give a new `matplotlib.figure.Figure`; ChartError if matplotlib is not installed."""
    try:
        figure: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise ChartError('a chart needs matplotlib: pip install "mtplx-sampling[plot]"') from error
    return figure.Figure(**options)


def save(figure: Any, path: Path) -> None:
    """Write `figure`; ChartError if the file cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ChartError(f"cannot write {path}: {error.strerror or error}") from error
