"""The same calls by other packages, each on one thread: what `mtplx` is compared with beside its reference.

They keep the same tokens up to ties and rounding, but promise less: none certifies a boundary, none checks
its input, and their draws follow streams of their own. Each function takes the arguments and returns the
call to time.
"""

from functools import lru_cache, partial
from typing import Any

import numpy as np

# Imported by name where they are needed: each is optional, and torch takes seconds.


# ---- torch ---------------------------------------------------------------------------------------


def torch_module() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


def tensor(array: Any) -> Any:
    # Rows that the benchmarks share are read-only, which torch warns about.
    return torch_module().from_numpy(np.array(array))


def torch_softmax(x: Any, temperature: float, dtype: str = "float64") -> Any:
    torch = torch_module()
    logits, wide = tensor(x), getattr(torch, dtype)
    return lambda: torch.softmax(logits.to(wide) / temperature, 0)


def torch_top_k_top_p(x: Any, temperature: float, top_k: int, top_p: float) -> Any:
    torch = torch_module()
    logits = tensor(x)

    def call() -> Any:
        p = torch.softmax(logits.to(torch.float64) / temperature, 0)
        values, ids = torch.topk(p, top_k)
        if top_p < 1.0:
            kept = torch.cumsum(values, 0) - values < top_p
            values, ids = values[kept], ids[kept]
        return ids, values / values.sum()

    return call


def torch_top_p(probs: Any, top_p: float) -> Any:
    torch = torch_module()
    p = tensor(probs)

    def call() -> Any:
        values, ids = torch.sort(p, descending=True, stable=True)
        kept = torch.cumsum(values, 0) - values < top_p
        result = torch.zeros_like(p)
        result[ids[kept]] = values[kept]
        return result / result.sum()

    return call


def torch_draw(probs: Any) -> Any:
    torch = torch_module()
    return partial(torch.multinomial, tensor(probs), 1)


def torch_residual(target_p: Any, draft_q: Any, draw: bool = False) -> Any:
    torch = torch_module()
    p, q = tensor(target_p), tensor(draft_q)

    def call() -> Any:
        weights = torch.clamp(p - q, min=0.0)
        return torch.multinomial(weights, 1) if draw else weights / weights.sum()

    return call


# ---- onnxruntime ---------------------------------------------------------------------------------


def _session(nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any]) -> Any:
    import onnxruntime
    from onnx import helper

    graph = helper.make_graph(nodes, "kernel", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def onnxruntime_softmax(x: Any, temperature: float, double: bool = True) -> Any:
    """Needs the package onnx too, which builds the graph."""
    import pytest

    onnx = pytest.importorskip("onnx")
    from onnx import helper

    element = onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT
    session = _session(
        [
            helper.make_node("Cast", ["x"], ["wide"], to=element),
            helper.make_node("Div", ["wide", "T"], ["z"]),
            helper.make_node("Softmax", ["z"], ["p"], axis=0),
        ],
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [x.size])],
        [helper.make_tensor_value_info("p", element, [x.size])],
        [helper.make_tensor("T", element, [1], [temperature])],
    )
    return partial(session.run, None, {"x": x})


def onnxruntime_top_k(x: Any, temperature: float, top_k: int) -> Any:
    """The k best logits and their softmax, renormalised: top-k alone, where the full sum cancels."""
    import pytest

    onnx = pytest.importorskip("onnx")
    from onnx import helper

    session = _session(
        [
            helper.make_node("TopK", ["x", "k"], ["best", "ids"], axis=0),
            helper.make_node("Cast", ["best"], ["wide"], to=onnx.TensorProto.DOUBLE),
            helper.make_node("Div", ["wide", "T"], ["z"]),
            helper.make_node("Softmax", ["z"], ["p"], axis=0),
        ],
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [x.size])],
        [
            helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [top_k]),
            helper.make_tensor_value_info("p", onnx.TensorProto.DOUBLE, [top_k]),
        ],
        [
            helper.make_tensor("T", onnx.TensorProto.DOUBLE, [1], [temperature]),
            helper.make_tensor("k", onnx.TensorProto.INT64, [1], [top_k]),
        ],
    )
    return partial(session.run, None, {"x": x})


# ---- numba ---------------------------------------------------------------------------------------
# Plain loops, as someone would write them who moves a NumPy sampler to numba. The first call compiles.


@lru_cache
def _numba_functions() -> Any:
    from types import SimpleNamespace

    import numba

    @numba.njit
    def softmax(x: Any, temperature: float) -> Any:
        out = np.empty(x.size)
        top = -np.inf
        for i in range(x.size):
            top = max(top, x[i] / temperature)
        total = 0.0
        for i in range(x.size):
            out[i] = np.exp(x[i] / temperature - top)
            total += out[i]
        for i in range(x.size):
            out[i] /= total
        return out

    @numba.njit
    def top_p(p: Any, mass: float) -> Any:
        order = np.argsort(-p)
        out = np.zeros(p.size)
        before = 0.0
        kept = 0
        while kept < p.size and (kept == 0 or before < mass):
            before += p[order[kept]]
            kept += 1
        for i in order[:kept]:
            out[i] = p[i] / before
        return out

    @numba.njit
    def draw(p: Any) -> int:
        total = 0.0
        for i in range(p.size):
            total += p[i]
        target = np.random.random() * total  # noqa: NPY002  (the stream that numba compiles)
        cumulative = 0.0
        for i in range(p.size):
            cumulative += p[i]
            if cumulative > target:
                return i
        return p.size - 1

    @numba.njit
    def residual(p: Any, q: Any) -> Any:
        out = np.empty(p.size)
        total = 0.0
        for i in range(p.size):
            out[i] = max(p[i] - q[i], 0.0)
            total += out[i]
        for i in range(p.size):
            out[i] /= total
        return out

    @numba.njit
    def residual_draw(p: Any, q: Any) -> int:
        total = 0.0
        for i in range(p.size):
            total += max(p[i] - q[i], 0.0)
        target = np.random.random() * total  # noqa: NPY002  (the stream that numba compiles)
        cumulative = 0.0
        for i in range(p.size):
            cumulative += max(p[i] - q[i], 0.0)
            if cumulative > target:
                return i
        return p.size - 1

    return SimpleNamespace(
        softmax=softmax, top_p=top_p, draw=draw, residual=residual, residual_draw=residual_draw
    )


def numba_call(name: str, *arguments: Any) -> Any:
    call = partial(getattr(_numba_functions(), name), *arguments)
    call()  # compiles
    return call
