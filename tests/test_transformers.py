"""The adapter for transformers, on small models of random weights. Skipped without torch and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.adapters import GREEDY, require_greedy_is_plain, require_same_up_to_near_ties

from mtplx.decoding import PromptLookupDrafter, generate, speculative_generate
from mtplx.distributions import SamplerConfig

torch = pytest.importorskip("torch", reason="torch is not installed", exc_type=ImportError)
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed", exc_type=ImportError
)

from mtplx.integrations.transformers import NEAR_TIE, TransformersModel  # noqa: E402  (needs both)

# Threads that wait spin, which is slow where processors are scarce.
torch.set_num_threads(1)

# Float32 logits of a few units are 2.4e-7 apart; a hundred or two roundings of other sums are allowed.
ROUNDING = 5e-5
V = 50
WINDOW = 8
PROMPT = [1, 20, 31, 42, 5]


def make(kind: str = "llama", seed: int = 0, *, V: int = V, dtype: Any = None) -> Any:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Of the usual size, weights of so small a model would make all logits nearly equal.
        "initializer_range": 0.3,
    }
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=WINDOW))
    return model.to(dtype or torch.float32).eval()


@pytest.fixture(scope="module", params=["llama", "sliding window"])
def model(request: pytest.FixtureRequest) -> TransformersModel:
    return TransformersModel(make(request.param))


@pytest.fixture(scope="module")
def llama() -> TransformersModel:
    return TransformersModel(make())


def test_logits_are_those_of_the_model_without_a_cache(model: TransformersModel) -> None:
    tokens = np.random.default_rng(0).integers(0, V, 40).tolist()
    with torch.inference_mode():
        whole = model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    state = model.start(tokens[:5])
    rows = [model.forward(state, tokens[i : i + 5]) for i in range(4, 39, 5)]
    np.testing.assert_allclose(np.concatenate(rows), whole[4:39], rtol=0, atol=ROUNDING)
    # A window that was not masked would show.
    assert np.abs(whole[4:39]).max() > 1


def test_logits_after_a_rollback_are_those_of_a_text_without_it(model: TransformersModel) -> None:
    # 10 cycles of 6 tokens kept cross the window, which is 8 long.
    rng = np.random.default_rng(1)
    state, other = model.start(PROMPT), model.start(PROMPT)
    for _ in range(10):
        kept = rng.integers(0, V, 6).tolist()
        extra = rng.integers(0, V, int(rng.integers(1, 12))).tolist()
        rows = model.forward(state, kept)
        model.forward(state, extra)
        model.rollback(state, len(extra))
        np.testing.assert_array_equal(rows, model.forward(other, kept))
        assert state.tokens == other.tokens
    np.testing.assert_array_equal(model.forward(state, [7]), model.forward(other, [7]))
    # All of it, and from the beginning again.
    model.rollback(state, len(state.tokens))
    fresh = model.start([9])
    np.testing.assert_array_equal(model.forward(state, [9, 8]), model.forward(fresh, [9, 8]))


def test_the_comparison_sees_a_stale_token(llama: TransformersModel) -> None:
    state, other = llama.start(PROMPT), llama.start(PROMPT)
    llama.forward(other, [20])
    assert np.abs(llama.forward(other, [7]) - llama.forward(state, [7])).max() > 0.1


def test_logits_are_the_memory_that_torch_wrote(
    llama: TransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    original = type(llama.model).forward

    def recording(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        written.append(output.logits)
        return output

    monkeypatch.setattr(type(llama.model), "forward", recording)
    rows = llama.forward(llama.start(PROMPT), [7, 8])
    assert rows.ctypes.data == written[-1].data_ptr()


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: Any, backend: Any) -> None:
    half = TransformersModel(make(dtype=dtype))
    rows = half.forward(half.start(PROMPT), [7, 8])
    assert rows.dtype.itemsize == 2
    config = SamplerConfig(0.8, 0.9, 10)
    drafter = half.drafter(make(seed=1, dtype=dtype), backend=backend)
    stream = speculative_generate(
        half, drafter, PROMPT, config=config, max_tokens=20, seed=1, backend=backend
    )
    assert len(list(stream)) == 20
    # The first row, widened by torch, gives the same law.
    from mtplx.sampling import distribution_from_logits

    with torch.inference_mode():
        wide = half.model(input_ids=torch.tensor([[*PROMPT[:-1], 7, 8]])).logits[0, -2:].float().numpy()
    np.testing.assert_allclose(
        distribution_from_logits(rows[1], SamplerConfig(1.0, 1.0, 0)),
        distribution_from_logits(wide[1], SamplerConfig(1.0, 1.0, 0)),
        rtol=0.2,  # of other chunks, in 8 bits
    )


def test_greedy_text_is_that_of_plain_decoding(model: TransformersModel) -> None:
    # A model may draft for itself: every text has a cache of its own.
    drafters = [(model.drafter(make(seed=1)), 0.0), (model.drafter(model), 1.2), (PromptLookupDrafter(), 0.0)]
    require_greedy_is_plain(model, drafters, PROMPT, NEAR_TIE)
    assert len(set(generate(model, PROMPT, config=GREEDY, max_tokens=60))) > 3  # a text worth the name


def test_another_text_is_no_near_tie(llama: TransformersModel) -> None:
    plain = list(generate(llama, PROMPT, config=GREEDY, max_tokens=10))
    row = llama.forward(llama.start(PROMPT), [PROMPT[-1], *plain[:5]])[-1]
    second = int(np.argsort(-row)[1])
    with pytest.raises(AssertionError, match=r"token 5: .* apart"):
        require_same_up_to_near_ties(llama, PROMPT, plain, [*plain[:5], second, *plain[6:]], NEAR_TIE)


def test_same_seed_same_text(llama: TransformersModel) -> None:
    def text(seed: int) -> list[int]:
        config = SamplerConfig(1.0, 1.0, 0)
        drafter = llama.drafter(make(seed=1))
        return list(speculative_generate(llama, drafter, PROMPT, config=config, max_tokens=40, seed=seed))

    assert text(1) == text(1) != text(2)


def test_bad_calls_change_nothing(llama: TransformersModel) -> None:
    state = llama.start(PROMPT)
    before = llama.forward(state, [7]).copy()
    llama.rollback(state, 1)
    for call, error, message in (
        (lambda: llama.start([]), ValueError, "the prompt is empty"),
        (lambda: llama.start([3, V]), IndexError, f"token {V} is outside"),
        (lambda: llama.start([3] * 257), ValueError, "256 positions are full: 0 are decoded, 257 more"),
        (lambda: llama.forward(state, []), ValueError, "no tokens to decode"),
        (lambda: llama.forward(state, [3, -1]), IndexError, "token -1 is outside"),
        (lambda: llama.forward(state, [3] * 253), ValueError, "4 are decoded, 253 more do not fit"),
        (lambda: llama.rollback(state, 5), ValueError, "cannot roll back 5 tokens: 4 are decoded"),
        (lambda: llama.rollback(state, -1), ValueError, "cannot roll back -1 tokens"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert len(state.tokens) == 4
    np.testing.assert_array_equal(llama.forward(state, [7]), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_between_two_layers_leaves_the_state(
    llama: TransformersModel, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    state = llama.start(PROMPT)
    before = llama.forward(state, [7, 8]).copy()
    llama.rollback(state, 2)
    second = llama.model.model.layers[1]
    with monkeypatch.context() as patched:

        def failing(*arguments: Any, **options: Any) -> Any:
            raise error

        patched.setattr(second, "forward", failing)
        with pytest.raises(error):
            llama.forward(state, [20, 21, 22])
    assert len(state.tokens) == 4
    np.testing.assert_array_equal(llama.forward(state, [7, 8]), before)


def test_models_that_do_not_fit_are_refused(llama: TransformersModel) -> None:
    with pytest.raises(ValueError, match="in training mode"):
        TransformersModel(make().train())
    with pytest.raises(ValueError, match=f"the target has {V} tokens, the draft model {V + 1}"):
        llama.drafter(make(V=V + 1))
    recurrent = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM keeps its past in a state"):
        TransformersModel(recurrent.eval())
    both = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="encoder and decoder"):
        TransformersModel(both.eval())
