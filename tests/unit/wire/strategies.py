"""Hypothesis strategies for wire messages, derived from their types."""

import math
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from engine.wire.messages import (
    AbortRequest,
    AddRequest,
    ClientReport,
    EngineCoreOutputs,
    EngineReady,
    EngineReport,
    GroupState,
    LoadSnapshot,
    SupervisorReport,
    UtilityRequest,
)
from engine.wire.tensors import ITEM_BYTES, Tensor

MESSAGES: tuple[type[msgspec.Struct], ...] = (
    AddRequest,
    AbortRequest,
    UtilityRequest,
    EngineReady,
    EngineCoreOutputs,
    EngineReport,
    ClientReport,
    SupervisorReport,
    GroupState,
    LoadSnapshot,
)

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a small tensor, possibly without items or without dimensions."""
    dtype = draw(st.sampled_from(list(ITEM_BYTES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    return Tensor(dtype, shape, draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


@cache
def messages(message_type: type[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for every value of a wire type that its encoder can write."""
    return _values(inspect.type_info(message_type))


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            return _structs(kind)
        case inspect.IntType():
            low, high = -(2**63) if kind.ge is None else kind.ge, 2**63 - 1 if kind.le is None else kind.le
            return st.integers(low, high)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType():
            return st.text(max_size=10)
        case inspect.BytesType():
            return st.binary(max_size=12)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.ListType():
            return st.lists(_values(kind.item_type), max_size=3)
        case inspect.VarTupleType():
            return st.lists(_values(kind.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of([_values(member) for member in kind.types])
        case inspect.AnyType():
            return _ANY
        case inspect.CustomType(cls) if cls is Tensor:
            return tensors()
    raise NotImplementedError(f"no strategy for {kind}: add one when a wire message needs it")


def _structs(kind: inspect.StructType) -> st.SearchStrategy[Any]:
    return st.builds(kind.cls, *(_values(field.type) for field in kind.fields))
