"""Poisoned memory: buffers full of one value, so that a test sees what nobody wrote."""

import ctypes

#: What poisoned memory is filled with.
POISON = 0xA5

Buffer = ctypes.Array[ctypes.c_ubyte]


def buffer(size: int) -> tuple[Buffer, int]:
    """A buffer of ``size`` poisoned bytes and its address; the memory lives as long as the buffer."""
    made = (ctypes.c_ubyte * size).from_buffer(bytearray([POISON]) * size)
    return made, ctypes.addressof(made)
