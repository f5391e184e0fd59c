"""The experts a member holds, and how it gets others: from what it holds, from its peers, from the checkpoint."""

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

    tensors: empty where nothing was read, because the rank was asleep when they were asked for.
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
        places = [next(source for source in sources if expert in source.expert_ids) for expert in wanted]

        def collect(name: str, parameter: str, like: torch.Tensor) -> torch.Tensor:
            gathered = like.new_empty(len(wanted), *like.shape[1:])
            for row, (expert, source) in enumerate(zip(wanted, places, strict=True)):
                gathered[row] = source.tensors[name][parameter][source.expert_ids.index(expert)]
            return gathered

        return ExpertRows(wanted, _each(self.tensors, collect))


class PeerRows:
    """Lets the members of a group that is being prepared hand each other the experts they will need.

    Beside the steps that go on, and over the group's own connections, which nobody uses yet. All members take part,
    those with nothing to give or to take too. An expert nobody held is nobody's to give.
    """

    def __init__(
        self, transport: Transport, index: int, held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> None:
        """transport: on the CPU. held, wanted: expert ids of each member, before and after. index: this member."""
        self._transport = transport
        self._index = index
        self._givers = _givers(held, wanted)

    @property
    def to_receive(self) -> list[int]:
        """Return the experts that come from peers, in the order in which they come."""
        return [expert for giver in self._givers for expert in giver[self._index]]

    def exchange(self, rows: ExpertRows) -> ExpertRows:
        """Give what is asked of ``rows``, and return what came.

        Raises:
            GroupBrokenError: a member is gone, this one was told to leave, or it holds less than was thought.
        """
        mine = self._givers[self._index]
        gives = [expert for taker in mine for expert in taker]
        if missing := sorted(set(gives) - set(rows.expert_ids)):
            raise GroupBrokenError(f"asked for experts {missing}, which are asleep or were let go")
        send_sizes = [len(taker) for taker in mine]
        receive_sizes = [len(giver[self._index]) for giver in self._givers]

        def pass_on(_name: str, _parameter: str, held: torch.Tensor) -> torch.Tensor:
            index = torch.tensor([rows.expert_ids.index(expert) for expert in gives], dtype=torch.int64)
            given = held[index.to(held.device)].cpu().contiguous()
            received = all_to_all(
                self._transport,
                given.view(len(gives), -1) if gives else given.new_empty(0, held.shape[1:].numel()),
                send_sizes,
                receive_sizes,
            )
            return received.view(-1, *held.shape[1:])  # left on the CPU: whoever gathers puts it where it belongs

        received = _each(rows.tensors, pass_on)
        return ExpertRows(tuple(self.to_receive), received)


def _givers(held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return, for each member, what it gives to each other one: the first that holds an expert gives it."""
    givers: list[list[list[int]]] = [[[] for _ in wanted] for _ in wanted]
    for taker, experts in enumerate(wanted):
        for expert in sorted(set(experts) - set(held[taker])):
            giver = next((member for member, owned in enumerate(held) if expert in owned), None)
            if giver is not None:
                givers[giver][taker].append(expert)
    return givers


def _each(
    tensors: "ExpertTensors", make: Callable[[str, str, torch.Tensor], torch.Tensor]
) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Return the same structure with every tensor replaced, in the same order on every member."""
    return {
        name: {parameter: make(name, parameter, tensors[name][parameter]) for parameter in sorted(tensors[name])}
        for name in sorted(tensors)
    }
