"""A lockstep deployment as one value, with what is on the way between its parts.

What a world refers to is never changed: ``own_*`` puts a copy in its place first. So copies of worlds share what they
have in common, and keys are worked out once.
"""

from typing import NamedTuple

from engine.wire.control import Membership
from engine.wire.messages import EngineReport, GroupState
from engine.wire.replicas import ReplicaInfo
from tests.model.parts import Coordinator, Group, Rank, replica_in, replica_key, report_key, shallow_copy, state_key


class ViolationError(AssertionError):
    """A rule of safety or liveness does not hold."""


class Budget(NamedTuple):
    """How often each kind of event may still come from outside."""

    requests: int = 0
    pauses: int = 0
    deaths: int = 0
    replacements: int = 0
    joins: int = 0
    leaves: int = 0
    restarts: int = 0
    failures: int = 0
    rebalances: int = 0
    firstreqs: int = 0
    returns: int = 0
    cuts: int = 0


class World:
    """Everything.

    ranks: processes that live, by rank. replicas: what the supervisor knows, by rank; num_replicas: ever had.
    states: those that somebody may still get, by number. mail: by rank, reports on the way, the newest last.
    epochs: what each number named, for good; epochs_of: by rank, those that name it, each with the incarnation.
    committed: those that were ever put in force. settings: how often the operator has paused and resumed.
    rebalances: how often experts were to be placed anew.
    """

    __slots__ = (
        "budget",
        "committed",
        "coordinator",
        "epochs",
        "epochs_of",
        "groups",
        "mail",
        "num_replicas",
        "num_states",
        "ranks",
        "rebalances",
        "replicas",
        "settings",
        "states",
    )

    def __init__(self, coordinator: Coordinator, budget: Budget) -> None:
        self.ranks: dict[int, Rank] = {}
        self.coordinator = coordinator
        self.replicas: dict[int, ReplicaInfo] = {}
        self.num_replicas = 0
        self.settings = 0
        self.rebalances = 0
        self.budget = budget
        self.states: dict[int, GroupState] = {}
        self.num_states = 0
        self.mail: dict[int, tuple[EngineReport, ...]] = {}
        self.groups: dict[int, Group] = {}
        self.epochs: dict[int, Membership] = {}
        self.epochs_of: dict[int, tuple[int, ...]] = {}
        self.committed: frozenset[int] = frozenset()

    def copy(self) -> "World":
        """Return a world that can be changed."""
        copied: World = object.__new__(World)
        copied.ranks = dict(self.ranks)
        copied.coordinator = self.coordinator
        copied.replicas = self.replicas
        copied.num_replicas = self.num_replicas
        copied.settings = self.settings
        copied.rebalances = self.rebalances
        copied.budget = self.budget
        copied.states = dict(self.states)
        copied.num_states = self.num_states
        copied.mail = dict(self.mail)
        copied.groups = dict(self.groups)
        copied.epochs = self.epochs
        copied.epochs_of = self.epochs_of
        copied.committed = self.committed
        return copied

    def own_rank(self, rank: int) -> Rank:
        """Return a rank that can be changed."""
        own = self.ranks[rank] = self.ranks[rank].copy()
        return own

    def own_group(self, epoch: int) -> Group:
        """Return the connections of an epoch to be changed."""
        own = self.groups[epoch] = self.groups[epoch].copy()
        return own

    def own_coordinator(self) -> Coordinator:
        """Return the coordinator to be changed."""
        old = self.coordinator
        group = shallow_copy(old.group)
        group.waves = shallow_copy(group.waves)
        self.coordinator = Coordinator(
            old.generation, group, dict(old.reports), old.replicas, old.settings, old.rebalances, old.num_states
        )
        return self.coordinator

    def name_epoch(self, membership: Membership) -> None:
        """Note what an epoch number names: it may name nothing else, ever."""
        epoch = membership.epoch
        known = self.epochs.get(epoch)
        if known is None:
            self.epochs = {**self.epochs, epoch: membership}
            self.epochs_of = dict(self.epochs_of)
            for member in membership.members:
                self.epochs_of[member.rank] = (*self.epochs_of.get(member.rank, ()), epoch, member.incarnation)
        elif known is not membership:
            assert known == membership, f"epoch {epoch} names two memberships"

    def spend(self, kind: str) -> None:
        """Take one from the budget."""
        self.budget = self.budget._replace(**{kind: getattr(self.budget, kind) - 1})

    def key(self) -> int:
        """Return a hash of all that decides what can happen, by which worlds are compared.

        Ranks are interchangeable, so a world is the same with other numbers on them.
        """
        numbers = sorted(self.states)
        index = {number: place for place, number in enumerate(numbers, start=1)}
        ranks = {*self.replicas, *self.coordinator.replicas, *self.mail}
        for group in self.groups.values():
            ranks.update(group.keys())
        return hash(
            (
                tuple(sorted([self._key_of(rank, index) for rank in ranks])),
                self.coordinator.key(),
                self.settings,
                self.rebalances,
                self.budget,
                tuple([state_key(self.states[number]) for number in numbers]),
                self.committed,
            )
        )

    def _key_of(self, rank: int, index: dict[int, int]) -> int:
        it = self.ranks.get(rank)
        return hash(
            (
                None if it is None else (it.key(), index.get(it.slot, 0), index.get(it.seen, 0)),
                self.coordinator.key_of(rank),
                replica_key(self.replicas.get(rank)),
                tuple([report_key(report) for report in self.mail.get(rank, ())]),
                tuple([group.keys().get(rank) for _, group in sorted(self.groups.items())]),
                tuple([replica_key(replica_in(self.states[number], rank)) for number in index]),
                () if it is None else tuple([it.has_lost_peer(self.epochs, epoch) for epoch in sorted(self.groups)]),
                self.epochs_of.get(rank),
            )
        )

    def tidy(self, num_repeated: int = 0) -> None:
        """Let go of what nobody can get any more, so that worlds that differ in nothing else are the same.

        num_repeated: so many of the newest states may come again to everybody.
        """
        ranks = list(self.ranks.values())
        first = min((rank.seen for rank in ranks), default=self.num_states - 1)
        slots = {rank.slot for rank in ranks}
        last = self.num_states - 1
        kept_from = min(first + 1, last - num_repeated)
        self.states = {n: state for n, state in self.states.items() if n >= kept_from or n in slots or n == last}
        needed = {rank.member.epoch for rank in ranks}
        needed.update(rank.standby for rank in ranks)
        needed.update(rank.preparing for rank in ranks if rank.is_waited_for or rank.result is not None)
        self.groups = {epoch: group for epoch, group in self.groups.items() if epoch in needed}
