"""A small producer of DLPack capsules, in ctypes, that counts what is done with them."""

import ctypes
import gc
from typing import ClassVar

import ml_dtypes
import numpy as np

CPU, CUDA = 1, 2
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
READ_ONLY = 1


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
is_capsule = ctypes.pythonapi.PyCapsule_IsValid
is_capsule.argtypes = [ctypes.py_object, ctypes.c_char_p]

NAMES = {False: b"dltensor", True: b"dltensor_versioned"}
USED = {False: b"used_dltensor", True: b"used_dltensor_versioned"}


class Producer:
    """The numbers of a NumPy array as another library would hand them out.

    `exported` and `deleted` count capsules made and deleters called; memory is this object's, which a
    capsule that is not deleted keeps alive, as a library's would.
    """

    # What the struct at an address needs until its deleter is called.
    alive: ClassVar[dict] = {}

    def __init__(
        self,
        array,
        versioned=True,
        device=CPU,
        claimed=None,
        strides=True,
        byte_offset=0,
        flags=0,
        major=1,
        dtype=None,
        knows_versions=True,
    ):
        self.array = array
        self.versioned, self.device, self.claimed = versioned, device, claimed or device
        self.strides, self.byte_offset, self.flags, self.major = strides, byte_offset, flags, major
        self.dtype = dtype or code_of(array.dtype)
        self.knows_versions = knows_versions
        self.exported = self.deleted = 0
        self.capsules = []

    def __dlpack_device__(self):
        return (self.claimed, 0)

    def __dlpack__(self, **options):
        if options and not self.knows_versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        array, ndim = self.array, self.array.ndim
        shape = (ctypes.c_int64 * ndim)(*array.shape)
        steps = (ctypes.c_int64 * ndim)(*(step // array.itemsize for step in array.strides))
        tensor = Tensor(
            array.ctypes.data - self.byte_offset,
            Device(self.device, 0),
            ndim,
            DataType(*self.dtype),
            shape,
            steps if self.strides else None,
            self.byte_offset,
        )

        def delete(address):
            self.deleted += 1
            del Producer.alive[address]

        deleter = Deleter(delete)
        if self.versioned:
            struct = Versioned(self.major, 0, None, deleter, self.flags, tensor)
        else:
            struct = Managed(tensor, None, deleter)
        address = ctypes.addressof(struct)
        Producer.alive[address] = (struct, deleter, shape, steps, self)
        self.exported += 1
        capsule = new_capsule(address, NAMES[self.versioned], None)
        self.capsules.append(capsule)
        return capsule

    def used(self):
        """Whether every capsule bears the name of one that was taken over."""
        return all(is_capsule(capsule, USED[self.versioned]) for capsule in self.capsules)

    def settled(self):
        """Whether everything that was handed out was given back, once."""
        if self.deleted < self.exported:
            gc.collect()
        return self.deleted == self.exported


def code_of(dtype):
    if dtype == ml_dtypes.bfloat16:
        return BFLOAT, 16, 1
    return {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}[dtype.kind], 8 * dtype.itemsize, 1


class AlsoArray(Producer):
    """Offers `__array__` too, which has no type for these numbers, as PyTorch has none for bfloat16."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("unsupported ScalarType BFloat16")


def bfloat16(values):
    return np.asarray(values, dtype=ml_dtypes.bfloat16)
