"""GGUF files of a few hundred kilobytes with seeded random weights: an attention model, one whose every
second layer has a sliding window, a recurrent one. The tokenizer spells all bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CONTROL = ["<unk>", "<s>", "</s>"]
BEGIN, END = 1, 2
BYTES = 3  # the token of byte 0
PIECES = ["\u2581", *"etaoinshrdlu", "th", "the", "\u2581the", "\u2581a", "er", "in", "on"]
V = len(CONTROL) + 256 + len(PIECES)

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN = 32, 2, 4, 2, 8, 64
WINDOW = 8
CONV, STATE, RANK = 4, 8, 4


def write_model(
    path: Path,
    arch: str = "llama",
    *,
    seed: int = 0,
    pieces: Sequence[str] = PIECES,
    template: str | None = TEMPLATE,
    context: int = 512,
) -> Path:
    """Write a model of architecture "llama", "gemma2" (sliding windows), or "mamba" (recurrent)."""
    import gguf

    size = len(CONTROL) + 256 + len(pieces)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(CONV)
        writer.add_ssm_inner_size(2 * WIDTH)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(RANK)
    else:
        writer.add_feed_forward_length(HIDDEN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_rope_dimension_count(HEAD)
    if arch == "gemma2":
        writer.add_sliding_window(WINDOW)

    writer.add_tokenizer_model("llama")
    tokens = [*CONTROL, *(f"<0x{value:02X}>" for value in range(256)), *pieces]
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_scores([0.0] * BYTES + [0.0] * 256 + [float(len(piece)) for piece in pieces])
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)]
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(True)
    if template is not None:
        writer.add_chat_template(template)

    rng = np.random.default_rng(seed)
    for name, array in _tensors(arch, size, rng):
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(arch: str, size: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        return rng.normal(0.0, gain / np.sqrt(columns), size=(rows, columns))

    norm = np.ones(WIDTH)
    yield "token_embd.weight", matrix(size, WIDTH, np.sqrt(WIDTH))
    yield "output_norm.weight", norm
    if arch != "gemma2":
        yield "output.weight", matrix(size, WIDTH, 2.0)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", norm
        if arch == "mamba":
            inner = 2 * WIDTH
            yield block + "ssm_in.weight", matrix(2 * inner, WIDTH)
            yield block + "ssm_conv1d.weight", matrix(inner, CONV)
            yield block + "ssm_conv1d.bias", np.zeros(inner)
            yield block + "ssm_x.weight", matrix(RANK + 2 * STATE, inner)
            yield block + "ssm_dt.weight", matrix(inner, RANK)
            yield block + "ssm_dt.bias", np.zeros(inner)
            yield block + "ssm_a", -np.tile(np.arange(1.0, STATE + 1), (inner, 1))
            yield block + "ssm_d", np.ones(inner)
            yield block + "ssm_out.weight", matrix(WIDTH, inner)
            continue
        yield block + "attn_q.weight", matrix(HEADS * HEAD, WIDTH, 2.0)
        yield block + "attn_k.weight", matrix(KV_HEADS * HEAD, WIDTH, 2.0)
        yield block + "attn_v.weight", matrix(KV_HEADS * HEAD, WIDTH)
        yield block + "attn_output.weight", matrix(WIDTH, HEADS * HEAD)
        yield block + "ffn_norm.weight", norm
        yield block + "ffn_gate.weight", matrix(HIDDEN, WIDTH)
        yield block + "ffn_up.weight", matrix(HIDDEN, WIDTH)
        yield block + "ffn_down.weight", matrix(WIDTH, HIDDEN)
        if arch == "gemma2":
            yield block + "post_attention_norm.weight", norm
            yield block + "post_ffw_norm.weight", norm
