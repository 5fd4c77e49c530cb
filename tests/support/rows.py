"""Rows that are hard on a kernel, and one row's values in every layout a caller may hand in."""

import ml_dtypes
import numpy as np

# Around the widths of vectors (2 to 16 numbers), lanes (16, 32), blocks (256) and chunks (512).
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 255, 256, 257, 511, 512, 513, 1000, 1025, 4097)
VOCABULARY = 151_936

FLOAT_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def weights(V):
    """Unnormalised probability rows by name: the shapes on which selections degenerate."""
    i = np.arange(V, dtype=np.float64)
    one = np.zeros(V)
    one[V // 2] = 1.0
    huge = np.full(V, 1e-9)
    huge[2 * V // 3] = 1.0
    return {
        "all equal": np.full(V, 1.0),
        "ascending": i + 1.0,
        "descending": V - i,
        "organ pipe": np.minimum(i, V - 1 - i) + 1.0,
        "two values": 1.0 + i % 2,
        "one huge": huge,
        "all zero but one": one,
        "subnormal": (i % 7 + 1.0) * 5e-324,
        "16-bit valued": (((i * 37) % 101 + 1.0) / 64.0).astype(np.float16).astype(np.float64),
        "geometric": 0.75 ** (i % 600),
    }


def probabilities(V):
    """The rows of `weights` divided by their sum (subnormal ones as they are)."""
    return {name: w if name == "subnormal" else w / w.sum() for name, w in weights(V).items()}


def logits(V):
    """Rows of logits by name, float64."""
    i = np.arange(V, dtype=np.float64)
    lone = np.full(V, -np.inf)
    lone[V // 2] = -3.0
    huge = np.zeros(V)
    huge[2 * V // 3] = 700.0
    half = ((i * 37) % 101) / 16.0
    half[1::2] = -np.inf
    return {
        "all equal": np.full(V, 2.5),
        "ascending": i * (20.0 / V),
        "descending": -i * (20.0 / V),
        "organ pipe": np.minimum(i, V - 1 - i) * (20.0 / V),
        "two values": i % 2,
        "one huge": huge,
        "all -inf but one": lone,
        "half -inf": half,
        "subnormal results": -((i * 13) % 745.0),
        "16-bit valued": (((i * 37) % 101) / 8.0).astype(np.float16).astype(np.float64),
        "wide": ((i * 7919) % 1009 - 504.0) * 1e3,
    }


class ArrayOnly:
    """An array of another library, reachable through `__array__` alone."""

    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype=dtype) if copy else np.asarray(self._array, dtype=dtype)


class DLPackOnly:
    """An array of another library, reachable through DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OtherDevice(DLPackOnly):
    """Claims to lie on a GPU, as DLPack names it (kDLCUDA)."""

    def __dlpack__(self, **options):
        raise BufferError("the memory is not on the CPU")

    def __dlpack_device__(self):
        return (2, 0)


def shifted(row, offset):
    """A copy of `row` that starts `offset` bytes after a 64-byte boundary; not aligned for odd offsets."""
    room = np.zeros(row.nbytes + 192, dtype=np.uint8)
    start = (-room.ctypes.data) % 64 + offset
    there = room[start : start + row.nbytes].view(row.dtype) if row.nbytes else row.copy()
    there[:] = row
    return there


def layouts(row):
    """The same numbers, of the same dtype, in every memory layout; name -> array_like."""
    n = row.size
    strided = np.zeros(3 * n, dtype=row.dtype)[::3]
    strided[:] = row
    column = np.zeros((n, 3), dtype=row.dtype, order="F")[:, 1]
    column[:] = row
    across = np.zeros((n, 3), dtype=row.dtype)[:, 1]
    across[:] = row
    frozen = row.copy()
    frozen.flags.writeable = False
    found = {
        "plain": row.copy(),
        "strided": strided,
        "reversed": row[::-1].copy()[::-1],
        "Fortran column": column,
        "column of C order": across,
        "read-only": frozen,
        "unaligned": shifted(row, 1),
        "__array__": ArrayOnly(row.copy()),
    }
    if row.dtype.kind == "f":  # NumPy exports and swaps its own types only
        found["big-endian"] = row.astype(row.dtype.newbyteorder(">"))
        found["DLPack"] = DLPackOnly(row.copy())
    if row.dtype == np.float64:
        found["list"] = row.tolist()
        found["tuple"] = tuple(row.tolist())
        found["memoryview"] = memoryview(row.copy())
        found["objects"] = row.astype(object)
    return found
