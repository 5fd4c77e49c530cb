"""Exact speculative sampling for language-model decoding on the CPU.

The names below are those of `mtplx.sampling`; each module is imported when a name of it is first used,
so that ``import mtplx.sampling`` loads nothing but itself, `mtplx.distributions` and the compiled core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtplx.sampling import *  # noqa: F403  (the checker's view of __getattr__ below)

_SUBMODULES = (
    "batch",
    "decisions",
    "decoding",
    "distributions",
    "integrations",
    "models",
    "oracle",
    "policy",
    "reference",
    "sampling",
    "verification",
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"mtplx.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("mtplx-sampling")
    if not name.startswith("_"):
        sampling = import_module("mtplx.sampling")
        if name in sampling.__all__:
            return getattr(sampling, name)
    raise AttributeError(f"module 'mtplx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_SUBMODULES, *import_module("mtplx.sampling").__all__, "__version__"])
