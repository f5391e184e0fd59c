"""Embeddings that come over HTTP: what is read, what is refused, and that nothing is ever unpickled."""

import base64
import io
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.errors import InvalidRequestError
from orchestrator.api.serving.npy import read_prompts

MATRIX = np.arange(6, dtype="<f4").reshape(3, 2)


def npy(matrix: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, matrix, **options)
    return file.getvalue()


def read(data: bytes) -> Any:
    (tensor,) = read_prompts([base64.b64encode(data).decode()])
    return tensor


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read(data)
    assert caught.value.field == "prompt_embeds"
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", ">f2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_matrix_comes_out_as_it_went_in(dtype: str, order: Any) -> None:
    tensor = read(npy(np.asarray(MATRIX, dtype=dtype, order=order)))
    assert tensor.dtype == {"4": "float32", "2": "float16"}[dtype[-1]]
    assert tensor.shape == (3, 2)
    assert (np.frombuffer(tensor.data, f"<{dtype[1:]}").reshape(3, 2) == MATRIX).all()


def test_several_prompts_keep_their_order() -> None:
    encoded = [base64.b64encode(npy(MATRIX[:length])).decode() for length in (3, 1, 2)]
    assert [tensor.shape[0] for tensor in read_prompts(encoded)] == [3, 1, 2]


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "no .npy"),
        (b"hello", "no .npy"),
        (pickle.dumps([1.0]), "pickle"),
        (npy(np.array([object()]), allow_pickle=True), "|O"),
        (npy(np.zeros(3, dtype=[("a", "f4"), ("b", "f4")])), "array of"),
        (npy(MATRIX)[:-1], "does not hold"),
        (npy(MATRIX)[:-4], "does not hold"),
        (npy(MATRIX) + b"xx", "does not hold"),
        (npy(MATRIX)[:20], "broken"),
        (b"\x93NUMPY\x07\x00" + npy(MATRIX)[8:], "broken"),
        (npy(MATRIX.astype("f8")), "float64"),
        (npy(MATRIX.astype("i4")), "int32"),
        (npy(MATRIX.astype("c8")), "complex64"),
        (npy(np.array(["a"])), "<U1"),
        (npy(np.array([b"a"])), "|S1"),
        (npy(MATRIX[0]), r"[2]"),
        (npy(MATRIX[None]), r"[1, 3, 2]"),
        (npy(MATRIX[:0]), r"[0, 2]"),
        (npy(np.float32(1)), r"[]"),
        (npy(np.where(MATRIX == 4, np.nan, MATRIX).astype("f4")), "no number"),
        (npy(np.where(MATRIX == 4, np.inf, MATRIX).astype("f2")), "no number"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(data: bytes, hint: str) -> None:
    assert hint in refusal(data)


def test_a_torch_file_is_refused_with_the_format_that_is_taken() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    message = refusal(file.getvalue())
    assert "torch.save" in message
    assert "numpy.save" in message


@pytest.mark.parametrize("text", ["*", "AAA", "\u00e9", "AA==BB=="])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="no base64"):
        read_prompts([text])


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 1000000)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 6}",
        "{'descr': '<f4', 'shape': (3, 2)}",
        "{'descr': 'fish', 'fortran_order': False, 'shape': (3, 2)}",
        "{'descr': 'f99', 'fortran_order': False, 'shape': (3, 2)}",
        "{'descr': 'f4', 'fortran_order': False, 'shape': (3, True)}",
        "{'descr': ('f4', (3, 2)), 'fortran_order': False, 'shape': ()}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3, 2)}",
        "{'descr': '<f4', 'fortran_order': __import__('os').getpid(), 'shape': (3, 2)}",
        "[" * 5000,
        "-" * 9000 + "1",
        "{{}: 1}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "3, " * 3000 + ")}",
        " " * 10_001,
        "{\n  'descr'",
        "",
    ],
)
def test_hostile_headers_are_refused_before_they_cost_anything(header: str) -> None:
    data = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n" + MATRIX.tobytes()
    refusal(data)


@given(st.binary(max_size=100), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, has_magic: bool) -> None:
    try:
        read((b"\x93NUMPY" if has_magic else b"") + data)
    except InvalidRequestError:
        return
