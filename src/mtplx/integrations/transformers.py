"""Causal language models of the library transformers as targets and as drafters of `mtplx.decoding`.

Design
------
A state is a cache of keys and values that belongs to one text, so one model can decode several texts, and
be target and drafter at once. The cache is a `DynamicCache` made without the model's configuration: such a
cache keeps every position, in layers with a sliding window too, where the model masks what lies outside of
the window. So every rollback is possible, and exact: cropping drops rows that nothing else was computed
from.

Logits are handed on as the memory that PyTorch wrote them to, bfloat16 included, unless the model runs on
another device.

**Chunking.** Matrix products of one row and of several add up in other orders. Greedy text under speculation
is that of plain decoding up to the first near tie: `NEAR_TIE` is how close the two best logits of a float32
model must be where the texts part. Half precision is coarser in proportion.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from mtplx._csampling.dlpack import from_dlpack
from mtplx.arguments import as_tokens
from mtplx.decoding import BackendName, ModelDrafter

__all__ = ["NEAR_TIE", "TransformersModel", "TransformersState"]

try:
    # Not import statements: the types of the libraries must be Any whether or not they are installed.
    _torch: Any = import_module("torch")
    _transformers: Any = import_module("transformers")
except ImportError as error:
    raise ImportError(
        f"mtplx.integrations.transformers needs {error.name or 'transformers'}: "
        'pip install "mtplx-sampling[transformers]"'
    ) from error

NEAR_TIE = 1e-3
"""The two best logits of a float32 model may change places with the chunks when closer than this."""


class TransformersState:
    """A text and its keys and values.

    Attributes
    ----------
    tokens : list of int
        All decoded tokens, oldest first.
    cache : transformers.DynamicCache
    """

    __slots__ = ("cache", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cache: Any = _transformers.DynamicCache()


class TransformersModel:
    """A causal language model with the target protocol of `mtplx.decoding`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One made by ``AutoModelForCausalLM``, say, in evaluation mode. Texts do not disturb one another.

    Raises
    ------
    ValueError
        The model is in training mode (dropout would make its logits random), is an encoder and decoder, or
        keeps its past in a state that cannot be rolled back.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer  # doctest: +SKIP
    >>> from mtplx.decoding import PromptLookupDrafter, speculative_generate
    >>> from mtplx.distributions import SamplerConfig
    >>> tokenizer = AutoTokenizer.from_pretrained("folder")  # doctest: +SKIP
    >>> target = TransformersModel(AutoModelForCausalLM.from_pretrained("folder"))  # doctest: +SKIP
    >>> prompt = tokenizer("Rivers of Europe:")["input_ids"]  # doctest: +SKIP
    >>> stream = speculative_generate(
    ...     target, PromptLookupDrafter(), prompt, config=SamplerConfig(), max_tokens=100
    ... )  # doctest: +SKIP
    >>> print(tokenizer.decode(list(stream)))  # doctest: +SKIP
    """

    def __init__(self, model: Any) -> None:
        if model.training:
            raise ValueError("the model is in training mode: call its eval() first")
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder and decoder, not a causal model")
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"{type(model).__name__} keeps its past in a state that cannot be rolled back")
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self._vocab_size: int = config.vocab_size
        self._context: int | None = getattr(config, "max_position_embeddings", None)
        parameters = inspect.signature(model.forward).parameters
        # Some versions of the library, and models of others, call the cache `past_key_values`.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        # Of a prompt no logits are wanted; where the model can leave them out, one row is computed.
        self._without_logits: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, V."""
        return self._vocab_size

    def start(self, prompt: Sequence[int], /) -> TransformersState:
        """Decode all but the last token of `prompt`.

        Raises
        ------
        ValueError
            `prompt` is empty or longer than the model's positions, or the model did not keep it in the cache.
        IndexError
            A token is outside [0, V).
        """
        tokens = as_tokens(prompt, self._vocab_size)
        if not tokens:
            raise ValueError("the prompt is empty: there is no last token to decode from")
        state = TransformersState()
        self._require_room(state, len(tokens))
        if len(tokens) > 1:
            self._decode(state, tokens[:-1], self._without_logits)
        return state

    def forward(self, state: TransformersState, tokens: Sequence[int], /) -> NDArray[Any]:
        """Append `tokens` and give the logits after each of them.

        Returns
        -------
        ndarray, shape (n, V)
            In the model's type; bfloat16 as the core reads it (`mtplx._csampling.dlpack.BFLOAT16`).

        Raises
        ------
        ValueError
            No position is left. The state is unchanged.
        IndexError
            A token is outside [0, V). The state is unchanged.
        """
        appended = as_tokens(tokens, self._vocab_size)
        if not appended:
            raise ValueError("no tokens to decode: there is no logit row without one")
        self._require_room(state, len(appended))
        logits = self._decode(state, appended, {})[0].cpu()
        array: NDArray[Any] = from_dlpack(logits) if logits.dtype == _torch.bfloat16 else logits.numpy()
        return array

    def rollback(self, state: TransformersState, n: int, /) -> None:
        """Un-decode the last `n` tokens.

        Raises
        ------
        ValueError
            `n` is negative or more than what was decoded. The state is unchanged.
        """
        if not 0 <= n <= len(state.tokens):
            raise ValueError(f"cannot roll back {n} tokens: {len(state.tokens)} are decoded")
        length = len(state.tokens) - n
        _crop(state.cache, length)
        del state.tokens[length:]

    def drafter(self, draft: Any, *, backend: BackendName = "compiled") -> ModelDrafter:
        """Make a drafter for this model of another model, or a `TransformersModel`.

        Raises
        ------
        ValueError
            The two have vocabularies of different sizes. That equal ones hold the same tokens is for the
            caller to see: a model does not know its tokenizer.
        """
        model = draft if isinstance(draft, TransformersModel) else TransformersModel(draft)
        if model.vocab_size != self.vocab_size:
            raise ValueError(
                f"different vocabularies: the target has {self.vocab_size} tokens, "
                f"the draft model {model.vocab_size}"
            )
        return ModelDrafter(model, backend=backend)

    def _require_room(self, state: TransformersState, n: int) -> None:
        decoded = len(state.tokens)
        if self._context is not None and decoded + n > self._context:
            raise ValueError(
                f"the model's {self._context} positions are full: {decoded} are decoded, {n} more do not fit"
            )

    def _decode(self, state: TransformersState, tokens: list[int], options: dict[str, Any]) -> Any:
        length = len(state.tokens) + len(tokens)
        try:
            with _torch.inference_mode():
                output = self.model(
                    input_ids=_torch.tensor([tokens], device=self.model.device),
                    use_cache=True,
                    **{self._cache_name: state.cache, **options},
                )
            if state.cache.get_seq_length() != length:
                raise ValueError(
                    f"{type(self.model).__name__} did not keep {len(tokens)} tokens in the cache"
                )
        except BaseException:
            # A failure or an interrupt between two layers leaves some of them longer than others.
            _crop(state.cache, len(state.tokens))
            raise
        state.tokens += tokens
        return output.logits


def _crop(cache: Any, length: int) -> None:
    for layer in cache.layers:
        excess = layer.get_seq_length() - length
        if excess > 0:
            layer.crop(-excess)
