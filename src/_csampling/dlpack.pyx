"""Arrays of other libraries on the CPU, through DLPack, without a copy.

NumPy has an importer, but none for bfloat16, which it has no type for. Here such an array becomes one of
`BFLOAT16`, a type that says no more than what its two bytes are, and which the rows of the core read.

A capsule is consumed as its protocol says: it is renamed when the tensor is taken over, so that the
producer's destructor leaves it alone, and the tensor's deleter is called once, when the last array that
looks at its memory is gone. Layouts are those of dlpack.h, version 1.
"""

import sys

import numpy as np

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

cdef enum:
    CPU = 1
    MAJOR_VERSION = 1

# Type codes of DLPack and NumPy's letters for them; the bytes follow. 4 is bfloat16.
cdef dict LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
cdef int BFLOAT = 4

cdef struct Tensor:
    char *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides       # in elements; NULL: C order
    uint64_t byte_offset

cdef struct Managed:
    Tensor tensor
    void *context
    void (*deleter)(Managed *self) noexcept

cdef struct Versioned:
    uint32_t major
    uint32_t minor
    void *context
    void (*deleter)(Versioned *self) noexcept
    uint64_t flags
    Tensor tensor


cdef class Borrowed:
    """The owner of a tensor that was taken over; what `numpy.asarray` makes of it keeps it alive."""

    cdef Managed *managed
    cdef Versioned *versioned
    cdef readonly dict __array_interface__

    def __dealloc__(self):
        if self.managed is not NULL and self.managed.deleter is not NULL:
            self.managed.deleter(self.managed)
        if self.versioned is not NULL and self.versioned.deleter is not NULL:
            self.versioned.deleter(self.versioned)

    cdef object take(self, object capsule):
        """The tensor is this object's from here on, whatever is wrong with it."""
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            self.versioned = <Versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
            PyCapsule_SetName(capsule, "used_dltensor_versioned")
        elif PyCapsule_IsValid(capsule, "dltensor"):
            self.managed = <Managed *>PyCapsule_GetPointer(capsule, "dltensor")
            PyCapsule_SetName(capsule, "used_dltensor")
        else:
            raise BufferError("__dlpack__ did not return a capsule that has not been used")

    cdef object array(self):
        cdef Tensor *tensor
        cdef Py_ssize_t i
        if self.versioned is NULL:
            tensor = &self.managed.tensor
        elif self.versioned.major != MAJOR_VERSION:
            raise BufferError(f"DLPack {self.versioned.major}.{self.versioned.minor} is not known")
        else:
            tensor = &self.versioned.tensor
        if tensor.device_type != CPU:
            raise BufferError(f"it lies on device {tensor.device_type}, not on the CPU")
        is_bfloat = tensor.code == BFLOAT and tensor.bits == 16
        if tensor.lanes != 1 or tensor.bits % 8 or not (is_bfloat or tensor.code in LETTERS):
            raise BufferError(f"numbers of code {tensor.code}, {tensor.bits} bits and {tensor.lanes} lanes "
                              "are not known")
        letter = "u" if is_bfloat else LETTERS[tensor.code]
        order = "<" if sys.byteorder == "little" else ">"
        itemsize = tensor.bits // 8
        shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
        if 0 in shape:
            array = np.empty(shape, f"{order}{letter}{itemsize}")  # its address may be NULL
        else:
            strides = None
            if tensor.strides is not NULL:
                strides = tuple([tensor.strides[i] * itemsize for i in range(tensor.ndim)])
            self.__array_interface__ = {
                "version": 3,
                "shape": shape,
                "typestr": f"{order}{letter}{itemsize}",
                "strides": strides,
                # Never written to, so whether the producer allows that does not matter.
                "data": (<uintptr_t>(tensor.data + tensor.byte_offset), True),
            }
            array = np.asarray(self)
        return array.view(BFLOAT16) if is_bfloat else array


def from_dlpack(values):
    """An array of the memory of `values`, read-only; BufferError where there cannot be one."""
    cdef Borrowed borrowed = Borrowed.__new__(Borrowed)
    device, _number = values.__dlpack_device__()
    if device != CPU:
        raise BufferError(f"it lies on device {int(device)}, not on the CPU")
    try:
        capsule = values.__dlpack__(max_version=(MAJOR_VERSION, 0))
    except TypeError:  # a producer older than versions
        capsule = values.__dlpack__()
    borrowed.take(capsule)
    return borrowed.array()


def imported(values, str name):
    """An array, or one of another library on the CPU, of whatever dtype, without a copy.

    What `__array__` cannot give, such as a bfloat16 array of a library without a NumPy type for that, is
    read through DLPack.
    """
    if isinstance(values, np.ndarray) or not hasattr(values, "__dlpack__"):
        return np.asarray(values)
    if hasattr(values, "__array__"):
        try:
            return np.asarray(values)
        except TypeError:
            pass
    try:
        return from_dlpack(values)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} cannot be read as a CPU array: {error}") from error


def widen_bfloat16(array):
    """An array of `BFLOAT16` as float32; any other as it is."""
    if array.dtype != BFLOAT16:
        return array
    return (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
