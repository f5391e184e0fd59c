"""Membership, settings and what a lockstep rank reports: parts of reports and states, not messages of their own."""

from enum import IntEnum

from msgspec import Struct

from engine.wire.ids import EngineId


class Membership(Struct, array_like=True, frozen=True):
    """Members of the group at one epoch, in the order of their ranks.

    expert_placement: ascending expert ids of each member; empty for independent ranks.
    store_address: endpoint of the store through which the members of a lockstep group connect; the first member's.
    held: expert ids each member holds already, for peers to hand over; empty when nobody can be asked.
    rebalance_seq: the newest request to place experts anew (``ClusterSettings``) that the placement follows.
    """

    epoch: int
    members: list[EngineId]
    expert_placement: list[list[int]] = []
    store_address: str = ""
    held: list[list[int]] = []
    rebalance_seq: int = 0


class MemberStatus(Struct, array_like=True, frozen=True):
    """The part of a report that only ranks of a lockstep group have.

    num_experts: experts of each layer. store_address: endpoint of this rank's store, where peers can connect.
    membership: the newest committed one it has seen. failed_epoch: the newest proposal that it could not prepare.
    expert_loads: how often its own tokens chose each expert, over all layers; only grows.
    num_empty_steps: steps it took part in without a token of its own; only grows.
    collective_s: time inside the collectives of its steps, waiting for peers included; only grows.
    broken_epoch: of the newest group that it let go of because it broke, or had to be left.
    """

    num_experts: int
    store_address: str
    membership: Membership
    failed_epoch: int = 0
    expert_loads: list[int] = []
    num_empty_steps: int = 0
    collective_s: float = 0.0
    broken_epoch: int = 0


class PauseMode(IntEnum):
    """How a pause treats sequences in the engines: ABORT ends them, WAIT lets them finish, KEEP freezes them."""

    RUN = 0
    ABORT = 1
    WAIT = 2
    KEEP = 3


class ClusterSettings(Struct, array_like=True, frozen=True):
    """The desired state of the whole deployment, as the operator set it; a replacement applies it before it is ready.

    seq: rises with every change. sleep_level: 0 awake, 1 weights off the device, 2 weights dropped.
    cordoned: ranks that take no new requests. log_level: empty leaves every process its own.
    rebalance_seq: rises with every request to place experts anew by their measured load.
    """

    seq: int = 0
    pause: PauseMode = PauseMode.RUN
    sleep_level: int = 0
    cordoned: list[int] = []
    log_level: str = ""
    rebalance_seq: int = 0
