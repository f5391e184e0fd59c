"""The reader of prompts of embeddings: base64 of a NumPy ``.npy`` file, without ever unpickling anything."""

import ast
import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.wire.errors import InvalidRequestError
from engine.wire.tensors import Tensor
from orchestrator.llm.embeds import FIELD, from_matrix

_NPY = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
_PLAIN_DTYPE = re.compile(r"[<>=|]?[biufc]\d{1,2}")
_PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_PICKLED = "a pickle or an archive (torch.save, numpy.savez), which is not read here"
_HINT = "send base64 of a NumPy .npy file (numpy.save) of float32 or float16, [number of tokens, hidden size]"


class _Header(NamedTuple):
    """The header of a ``.npy`` file; the numbers begin at ``offset``."""

    descr: str
    is_fortran: bool
    shape: tuple[int, ...]
    offset: int


def read_prompts(encoded: Sequence[str]) -> list[Tensor]:
    """Return the embeddings of each prompt. Takes its time, the first time also to import NumPy: not for an event loop.

    Raises:
        InvalidRequestError: one is no such file, or holds no matrix of finite floating-point numbers.
    """
    return [_read_prompt(text) for text in encoded]


def _read_prompt(text: str) -> Tensor:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal("no base64") from error
    if not data.startswith(_NPY):
        raise _refusal(_PICKLED if data.startswith(_PICKLES) else "no .npy file")
    try:
        header = _read_header(data)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise _refusal("a broken .npy file") from error
    if not _PLAIN_DTYPE.fullmatch(header.descr):
        raise _refusal(f"an array of {header.descr[:20]!r}")
    return from_matrix(_view(data, header))


def _read_header(data: bytes) -> _Header:
    """Read the header by hand.

    NumPy's own reader raises half a dozen kinds of errors, and makes room for whatever size is claimed before it looks
    for the numbers.
    """
    num_length_bytes = {1: 2, 2: 4, 3: 4}.get(data[len(_NPY)] if len(data) > len(_NPY) else 0, 0)
    begin = len(_NPY) + 2 + num_length_bytes
    length = int.from_bytes(data[begin - num_length_bytes : begin], "little")
    if num_length_bytes == 0 or length > _MAX_HEADER_BYTES:
        raise ValueError("unknown version, or a header that is too long")
    match ast.literal_eval(data[begin : begin + length].decode("utf-8").strip()):
        case {"descr": str(descr), "fortran_order": bool(is_fortran), "shape": tuple(shape)} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            return _Header(descr, is_fortran, shape, begin + length)
        case {"descr": descr}:
            return _Header(repr(descr), False, (), begin + length)  # fields or objects, to be refused by name
    raise ValueError("no header")


def _view(data: bytes, header: _Header) -> Any:
    import numpy as np

    try:
        numbers = np.frombuffer(data, np.dtype(header.descr), offset=header.offset)
        return numbers.reshape(header.shape, order="F" if header.is_fortran else "C")
    except (ValueError, TypeError, OverflowError) as error:
        raise _refusal("a .npy file that does not hold what it says") from error


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{FIELD} is {what}: {_HINT}", FIELD)
