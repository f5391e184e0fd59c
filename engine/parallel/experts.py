"""The shared experts function, which a transformers model calls in every mixture-of-experts layer instead of its own.

Dispatch: each member sends the rows of its tokens, with the experts chosen for them, to every member. Compute: each
runs the experts it holds over the tokens of all. Combine: each gets the parts of its own tokens back and adds them up
in the order of the members. Sizes follow from the step's headers, so a layer costs two exchanges and no padding. No
member waits for an exchange that brings it nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import embedding_bag, linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.model.expert_weights import ExpertTensors, find_experts
from engine.parallel.transport import Exchange, Transport

EXPERTS_NAME = "shoal"
_HOOK = "shoal_hook"


class ExpertsStep(Protocol):
    """One forward pass, as the experts function of each layer sees it."""

    def compute(
        self, module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, H] for hidden [T, H], the experts chosen for each token [T, k] and their weights [T, k]."""


class ExpertsHook:
    """The connection from a model's experts modules to what computes them now.

    step: may be exchanged between two forward passes.
    """

    def __init__(self, step: ExpertsStep) -> None:
        self.step = step

    def attach(self, model: Any) -> None:
        """Make the model's experts modules call ``step``."""
        for module in find_experts(model).values():
            setattr(module, _HOOK, self)


def register_experts() -> None:
    """Make ``EXPERTS_NAME`` known to transformers; idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)


def _experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    hook: ExpertsHook = getattr(module, _HOOK)
    return hook.step.compute(module, hidden, top_k_index, top_k_weights)


# --- learning the order of the layers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """One call of an experts module, without its tokens: hidden, index and weights have no rows."""

    module: Any
    hidden: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


class CallRecorder:
    """Records which experts modules a forward pass calls, and with what. Its experts give zero."""

    def __init__(self) -> None:
        self.calls: list[ExpertsCall] = []

    def compute(
        self, module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``ExpertsStep``."""
        self.calls.append(ExpertsCall(module, hidden[:0].clone(), top_k_index[:0].clone(), top_k_weights[:0].clone()))
        return torch.zeros_like(hidden)


def replay(calls: Sequence[ExpertsCall], step: ExpertsStep) -> None:
    """Take part in a step without own tokens: as many exchanges as the others enter, in the same order."""
    # The model itself cannot run without tokens: no family takes zero rows.
    for call in calls:
        step.compute(call.module, call.hidden, call.top_k_index, call.top_k_weights)


# --- computing --------------------------------------------------------------------------------------------------------


class ExpertTable:
    """Which member computes an expert for a token. Made once per placement; every member makes the same decisions.

    num_own: experts that this member holds.
    """

    def __init__(self, placement: Sequence[Sequence[int]], index: int, num_experts: int, device: torch.device) -> None:
        """placement: ascending expert ids of each member. index: this member's position among them."""
        owners: list[list[int]] = [[] for _ in range(num_experts)]
        for member, experts in enumerate(placement):
            for expert in experts:
                owners[expert].append(member)
        unplaced = [expert for expert, members in enumerate(owners) if not members]
        assert not unplaced, f"experts {unplaced} are placed nowhere"
        max_copies = max(map(len, owners))
        padded = [(members * max_copies)[:max_copies] for members in owners]
        self.num_own = len(placement[index])
        self._index = index
        self._owners = torch.tensor(padded, device=device)
        self._num_copies = torch.tensor([len(members) for members in owners], device=device)
        rows = torch.full((num_experts,), self.num_own, dtype=torch.int64)
        rows[torch.tensor(list(placement[index]), dtype=torch.int64)] = torch.arange(self.num_own)
        self._rows = rows.to(device)

    def own_rows(self, top_k_index: torch.Tensor) -> torch.Tensor:
        """Return [T, k]: the row of the chosen expert in this member's weights, ``num_own`` where others compute it."""
        # What came from another rank must not index out of bounds here, whatever it is.
        chosen = top_k_index.clamp(0, len(self._num_copies) - 1)
        # Replicas take turns by the token's position in the step, which is the same for all members.
        positions = torch.arange(len(chosen), device=chosen.device)[:, None]
        owner = self._owners[chosen, positions % self._num_copies[chosen]]
        return torch.where(owner == self._index, self._rows[chosen], self.num_own)


class SharedExperts:
    """Computes experts together with the other members of a group, for one step after another.

    loads: [num_experts] on the device, how often this rank's own tokens chose each expert, over all layers of the steps
    that were ended; only grows. _under_way: an exchange that brings this member nothing, and that it did not wait for.
    """

    def __init__(
        self, transport: Transport, table: ExpertTable, index: int, num_experts: int, device: torch.device
    ) -> None:
        self.loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._step_loads = torch.zeros_like(self.loads)
        self._sizes: Sequence[int] = ()
        self._under_way: Exchange | None = None
        self._transport = transport
        self._table = table
        self._index = index

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a step. sizes: tokens of each member."""
        self._sizes = sizes
        self._step_loads.zero_()  # a step that broke is taken again, and counts once

    def end(self) -> None:
        """End a step that nothing broke, so that it counts.

        Raises:
            GroupBrokenError: its last exchange broke.
        """
        self._finish_exchange()
        self.loads += self._step_loads

    def abandon(self) -> None:
        """Drop the exchange under way: while it is kept, connections stay open, and peers notice no break."""
        self._under_way = None

    def compute(
        self, module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See ``ExpertsStep``; must be called by every member for the same module at the same time.

        Raises:
            GroupBrokenError: a member is gone.
        """
        assert len(hidden) == self._sizes[self._index], "the headers announced another number of tokens"
        chosen = top_k_index.flatten().long()
        self._step_loads.scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount makes the host wait for a device
        all_hidden, all_index, all_weights = self._dispatch(hidden, top_k_index, top_k_weights)
        mine = compute_rows(module, all_hidden, self._table.own_rows(all_index), all_weights)
        return self._combine(mine, hidden)

    def _dispatch(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Send this member's tokens to all, and return those of all in the order of the members."""
        num = self._transport.num_members
        rows = _pack(hidden, top_k_index, top_k_weights).repeat(num, 1)
        dispatch = self._transport.begin(rows, [len(hidden)] * num, self._sizes)
        if sum(self._sizes) == len(hidden):  # no other member has tokens
            self._under_way = dispatch
            return hidden, top_k_index, top_k_weights
        all_rows = dispatch.wait()
        self._finish_exchange()
        return _unpack(all_rows, hidden, top_k_index, top_k_weights)

    def _combine(self, mine: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Send all members the parts of their tokens; return the sum of the parts of this member's own."""
        num = self._transport.num_members
        combine = self._transport.begin(mine.contiguous(), self._sizes, [len(hidden)] * num)
        if not len(hidden):
            self._under_way = combine
            return hidden
        parts = combine.wait()
        self._finish_exchange()
        return _add_up(parts.view(num, *hidden.shape))

    def _finish_exchange(self) -> None:
        """Wait for the exchange that was left under way. Behind a later one this takes hardly any time."""
        exchange, self._under_way = self._under_way, None
        if exchange is not None:
            exchange.wait()


def install_rows(model: Any, tensors: ExpertTensors) -> None:
    """Make a model's experts modules hold these rows: an exchange of references, nothing is copied."""
    for name, module in find_experts(model).items():
        for parameter, tensor in tensors[name].items():
            getattr(module, parameter).data = tensor
        module.num_experts = len(next(iter(tensors[name].values())))


def compute_rows(module: Any, hidden: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [T, H]: for each token the weighted sum of what the chosen rows of ``module`` give.

    rows: [T, k], rows of the module's stacked weights; ``module.num_experts`` and above are left out.
    """
    chosen = rows.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()[: module.num_experts]
    num_given = sum(counts)
    order = order[:num_given]  # rows that are left out have the highest numbers, so they come last
    given = hidden.new_empty(num_given + 1, hidden.shape[1], dtype=torch.promote_types(hidden.dtype, weights.dtype))
    given[num_given] = 0
    start = 0
    for row, tokens in enumerate(torch.split(hidden[order // rows.shape[1]], counts)):
        if len(tokens):
            given[start : start + len(tokens)] = _run_expert(module, row, tokens)
            start += len(tokens)
    positions = torch.full_like(chosen, num_given)  # what others compute adds the last row, and that is zero
    positions[order] = torch.arange(num_given, device=chosen.device)
    # Adds in the order of the choices; index_add_ does not on CUDA.
    total = embedding_bag(positions.view_as(rows), given, mode="sum", per_sample_weights=weights.to(given.dtype))
    return total.to(hidden.dtype)


def _run_expert(module: Any, row: int, hidden: torch.Tensor) -> torch.Tensor:
    inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", row, hidden)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return _linear(module, "down_proj", row, inner)


def _linear(module: Any, name: str, row: int, hidden: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[row]
    product = hidden @ weight if module.is_transposed else linear(hidden, weight)
    return product + getattr(module, f"{name}_bias")[row] if module.has_bias else product


def _add_up(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension."""
    total = parts[0]  # one by one: the order of ``sum`` depends on the device and the shape
    for part in parts[1:]:
        total = total + part
    return total


def _pack(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return one row of bytes per token, so that a layer's three tensors travel in one exchange."""
    parts = (hidden, index.to(torch.int32), weights)
    return torch.cat([part.contiguous().view(torch.uint8).view(len(part), _width(part)) for part in parts], dim=1)


def _unpack(
    rows: torch.Tensor, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Undo ``_pack``. hidden, index, weights: of any number of tokens, for their types and widths."""
    widths = [_width(hidden), 4 * index.shape[1], _width(weights)]
    # Copied also where a part is contiguous, as that of a single row is: its bytes may not be aligned for its type.
    parts = [part.clone(memory_format=torch.contiguous_format) for part in torch.split(rows, widths, dim=1)]
    return (
        parts[0].view(hidden.dtype),
        parts[1].view(torch.int32).long(),
        parts[2].view(weights.dtype),
    )


def _width(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1] * tensor.dtype.itemsize)
