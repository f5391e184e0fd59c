"""The experts that a member holds in memory, and the transfer of experts between the members of a new group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.parallel.transport import GroupBrokenError, Transport, all_to_all

if TYPE_CHECKING:  # transformers with it, seconds that a sim rank need not take to start
    from engine.model.expert_weights import ExpertTensors


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Experts of every layer on a device. expert_ids: ascending, as the rows of ``tensors``.

    tensors: empty where nothing was read, because the rank was asleep when they were prepared.
    """

    expert_ids: tuple[int, ...]
    tensors: "ExpertTensors"

    @property
    def num_bytes(self) -> int:
        """Return the memory they take."""
        return sum(tensor.nbytes for module in self.tensors.values() for tensor in module.values())

    def gather(self, expert_ids: Sequence[int], *others: "ExpertRows") -> "ExpertRows":
        """Return these experts, ascending, each copied from here or from the first of ``others`` that has it."""
        wanted = tuple(sorted(expert_ids))
        sources = [self, *others]
        chosen = [next(source for source in sources if expert in source.expert_ids) for expert in wanted]

        def collect(name: str, parameter: str, like: torch.Tensor) -> torch.Tensor:
            gathered = like.new_empty(len(wanted), *like.shape[1:])
            for row, (expert, source) in enumerate(zip(wanted, chosen, strict=True)):
                gathered[row] = source.tensors[name][parameter][source.expert_ids.index(expert)]
            return gathered

        return ExpertRows(wanted, _each(self.tensors, collect))


class PeerRows:
    """The transfer of experts between the members of a group that is being prepared.

    It runs beside the steps that go on, over the new group's own connections, which nobody uses yet. All members take
    part, also those with nothing to send or to receive. An expert that no member held is transferred by none.
    """

    def __init__(
        self, transport: Transport, index: int, held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> None:
        """transport: on the CPU. held, wanted: expert ids of each member, before and after. index: this member."""
        self._transport = transport
        self._index = index
        self._transfers = _transfers(held, wanted)

    @property
    def to_receive(self) -> list[int]:
        """Return the experts that come from peers, in the order in which they come."""
        return [expert for sent in self._transfers for expert in sent[self._index]]

    def exchange(self, rows: ExpertRows) -> ExpertRows:
        """Send this member's share of the transfer out of ``rows``, and return what it received.

        Raises:
            GroupBrokenError: a member is gone, this one was ordered to leave, or it holds less than was announced.
        """
        mine = self._transfers[self._index]
        sends = [expert for to_one in mine for expert in to_one]
        if missing := sorted(set(sends) - set(rows.expert_ids)):
            raise GroupBrokenError(f"asked for experts {missing}, which are asleep or were let go")
        send_sizes = [len(to_one) for to_one in mine]
        receive_sizes = [len(sent[self._index]) for sent in self._transfers]

        def transfer(_name: str, _parameter: str, held: torch.Tensor) -> torch.Tensor:
            index = torch.tensor([rows.expert_ids.index(expert) for expert in sends], dtype=torch.int64)
            sent = held[index.to(held.device)].cpu().contiguous()
            received = all_to_all(
                self._transport,
                sent.view(len(sends), -1) if sends else sent.new_empty(0, held.shape[1:].numel()),
                send_sizes,
                receive_sizes,
            )
            # Left on the CPU: ``gather`` copies it to the device, where it would lie a third time.
            return received.view(-1, *held.shape[1:])

        received = _each(rows.tensors, transfer)
        return ExpertRows(tuple(self.to_receive), received)


def _transfers(held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return [sender][receiver] -> experts: the first member that holds an expert sends it."""
    transfers: list[list[list[int]]] = [[[] for _ in wanted] for _ in wanted]
    for receiver, experts in enumerate(wanted):
        for expert in sorted(set(experts) - set(held[receiver])):
            sender = next((member for member, owned in enumerate(held) if expert in owned), None)
            if sender is not None:
                transfers[sender][receiver].append(expert)
    return transfers


def _each(
    tensors: "ExpertTensors", make: Callable[[str, str, torch.Tensor], torch.Tensor]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the same structure with every tensor replaced, in the same order on every member."""
    return {
        name: {parameter: make(name, parameter, tensors[name][parameter]) for parameter in sorted(tensors[name])}
        for name in sorted(tensors)
    }
