"""Embeddings on both ways: prompts given as embeddings, how much of them may be held at once, vectors of prompts."""

import math
import weakref
from array import array
from typing import Any

from engine.wire.errors import InvalidRequestError, OverloadedError
from engine.wire.tensors import Tensor

FIELD = "prompt_embeds"

MAX_HELD_BYTES = 1024 * 1024 * 1024

_FLOATS = {"f2": "float16", "f4": "float32"}


class EmbedsBudget:
    """Bounds the memory of all prompts of embeddings in this process.

    They are kept until their end is known, by the facade, the client and its table of what can be resumed. So what
    counts is the life of the tensors themselves.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_held_bytes = 0

    def hold(self, embeds: Tensor) -> None:
        """Count a tensor until it is let go.

        Raises:
            OverloadedError: with it there would be too much.
        """
        num_bytes = embeds.num_bytes
        if self.num_held_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(f"prompts hold {self.num_held_bytes} bytes of embeddings, close to the limit")
        self.num_held_bytes += num_bytes
        # Not at exit: nobody reads the count any more, and tens of thousands of calls would delay the end.
        weakref.finalize(embeds, self._let_go, num_bytes).atexit = False

    def _let_go(self, num_bytes: int) -> None:
        self.num_held_bytes -= num_bytes


def from_array(value: Any) -> Tensor:
    """Return the embeddings of one prompt from a NumPy array, a torch tensor or anything else that NumPy reads.

    Raises:
        InvalidRequestError: it is no matrix of finite floating-point numbers.
    """
    import numpy as np

    if hasattr(value, "detach"):  # a torch tensor, which may live on a device, or in a format that NumPy has not
        value = value.detach().float().cpu()
    return from_matrix(np.asarray(value), keeps_float64=True)


def from_matrix(matrix: Any, *, keeps_float64: bool = False) -> Tensor:
    """Return the embeddings of one prompt from a NumPy array [num_tokens, hidden_size]; shares memory where it can.

    keeps_float64: round doubles to floats instead of refusing them.

    Raises:
        InvalidRequestError: it is no matrix of finite floating-point numbers.
    """
    import numpy as np

    if keeps_float64 and matrix.dtype.kind == "f" and matrix.dtype.itemsize > 4:
        matrix = matrix.astype("<f4")
    kind = matrix.dtype.str[1:]
    if kind not in _FLOATS:
        raise InvalidRequestError(f"{FIELD} are {matrix.dtype}; they must be float32 or float16", FIELD)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise InvalidRequestError(
            f"{FIELD} have the shape {list(matrix.shape)}; it must be [number of tokens, hidden size]", FIELD
        )
    if not np.isfinite(matrix).all():
        raise InvalidRequestError(f"{FIELD} hold a value that is no number", FIELD)
    # The wire is little-endian and without strides; nothing is copied when the caller's array is so already.
    matrix = np.ascontiguousarray(matrix, dtype=f"<{kind}")
    return Tensor(_FLOATS[kind], matrix.shape, matrix.view(np.uint8))


def shorten(vector: Tensor, dimensions: int | None) -> "array[float]":
    """Return the first ``dimensions`` numbers of a float32 vector, of length 1 again; all as they are for None."""
    values = array("f", vector.data.tobytes())
    if dimensions is None or dimensions >= len(values):
        return values
    values = values[:dimensions]
    length = math.hypot(*values) or 1.0
    return array("f", [value / length for value in values])
