"""Vectors of whole prompts on their way to whoever asked for them."""

import math
from array import array

from engine.wire.tensors import Tensor


def shorten(vector: Tensor, dimensions: int | None) -> "array[float]":
    """Return the first ``dimensions`` numbers of a float32 vector, of length 1 again; all as they are for None."""
    values = array("f", vector.data.tobytes())
    if dimensions is None or dimensions >= len(values):
        return values
    values = values[:dimensions]
    length = math.hypot(*values) or 1.0
    return array("f", [value / length for value in values])
