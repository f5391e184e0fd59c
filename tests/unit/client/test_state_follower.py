"""What group states and load snapshots of the coordinator change in a client."""

from collections import Counter
from typing import Any

from msgspec.structs import replace

from client.connection_table import ConnectionTable, Gone
from client.engine_connection import EngineConnection
from client.state_follower import SNAPSHOT_STALE_S, StateFollower
from engine.wire.control import ClusterSettings, Membership, MemberStatus
from engine.wire.drop_counter import DropCounter
from engine.wire.ids import ClientId, EngineId
from engine.wire.load import Load
from engine.wire.messages import ClientInfo, EngineReport, GroupState, LoadSnapshot
from engine.wire.replicas import ReplicaInfo, Suspect
from engine.wire.states import EnginePhase, ReplicaState
from lb.views.totals import RankTotals
from tests.unit.client.builders import CLIENT, make_add, make_ready

E0, E1 = EngineId(0, 1), EngineId(1, 1)
ALIVE = [ReplicaInfo(E0, ReplicaState.ALIVE), ReplicaInfo(E1, ReplicaState.ALIVE)]
GROUP = Membership(1, [E1, E0], [[0], [1]], "here:1")


def make_state(*replicas: ReplicaInfo, seq: int = 1, **changes: Any) -> GroupState:
    """Return a group state with these replicas."""
    state = GroupState(1, seq, Membership(1, [E1, E0]), None, False, [], 0, [], list(replicas))
    return replace(state, **changes)


def make_report(engine_id: EngineId, applied: int = 0, phase: EnginePhase = EnginePhase.IDLE, **more: Any) -> Any:
    """Return an engine's report."""
    report = EngineReport(engine_id, 1, 1, 1, 1, 0, phase, 0, False, {CLIENT: applied}, Load(num_running=2))
    return replace(report, **more)


class Follower(StateFollower):
    """A follower with two engines that have shaken hands."""

    def __init__(self) -> None:
        self.table = ConnectionTable(None, Counter(), DropCounter())
        super().__init__(CLIENT, self.table, RankTotals())
        for rank in (0, 1):
            self.table.on_ready(make_ready(rank), 0.0)

    def connection(self, rank: int = 0) -> EngineConnection:
        """Return the connection of a rank."""
        return next(c for c in self.table.connections.values() if c.engine_id.rank == rank)

    def deaths(self, *replicas: ReplicaInfo, seq: int = 1) -> list[Gone]:
        """Take a group state; return the deaths in it."""
        change = self.on_group_state(make_state(*replicas, seq=seq))
        assert change is not None
        return change.deaths

    def hear_loads(self, *reports: EngineReport, seq: int = 1, now: float = 5.0) -> None:
        """Take a load snapshot."""
        self.on_snapshot(LoadSnapshot(1, seq, list(reports)), now)


def test_a_state_that_is_not_newer_changes_nothing() -> None:
    follower = Follower()
    assert follower.on_group_state(make_state(seq=5, wave_started=3)) is not None
    assert follower.on_group_state(make_state(seq=5, wave_started=9)) is None
    assert follower.on_group_state(make_state(seq=4, wave_started=9)) is None
    assert follower.current_wave == 3
    assert follower.on_group_state(make_state(seq=1, generation=2, wave_started=9)) is not None
    follower.hear_loads(make_report(E0), seq=2, now=5.0)
    follower.hear_loads(seq=1, now=9.0)
    assert follower.snapshot_age_s(6.0) == 1.0


def test_a_group_state_tells_membership_clients_and_wave() -> None:
    follower = Follower()
    clients = [ClientInfo(ClientId(index, 1), "", "") for index in range(3)]
    follower.on_group_state(make_state(clients=clients, wave_started=4))
    assert (follower.lb_engines, follower.num_clients, follower.current_wave) == ([E0, E1], 3, 4)
    follower.on_group_state(make_state(seq=2))
    assert follower.num_clients == 1, "this client lives, whoever has not heard of it"


def test_settings_are_news_once_and_a_restarted_coordinator_takes_none_back() -> None:
    follower = Follower()
    newest = ClusterSettings(seq=7, cordoned=[1])
    changes = [
        follower.on_group_state(make_state(seq=seq, settings=settings))
        for seq, settings in ((1, newest), (2, newest), (3, ClusterSettings()))
    ]
    assert [change and change.settings for change in changes] == [newest, None, None]
    assert follower.settings == newest
    assert [follower.connection(rank).cordoned for rank in (0, 1)] == [False, True]


def test_a_dead_replaced_or_removed_replica_is_a_death() -> None:
    assert Follower().deaths(*ALIVE) == []
    dead = ReplicaInfo(E0, ReplicaState.DEAD, "exit code 9")
    assert Follower().deaths(dead, ALIVE[1]) == [Gone(E0, "exit code 9")]
    replaced = ReplicaInfo(EngineId(0, 2), ReplicaState.STARTING)
    assert Follower().deaths(replaced, ALIVE[1]) == [Gone(E0, "0.2 replaced it")]
    assert Follower().deaths(ALIVE[1]) == [Gone(E0, "its replica was removed")]


def test_a_supervisor_that_was_not_heard_yet_has_removed_nobody() -> None:
    assert Follower().deaths() == []


def test_a_death_that_is_known_is_no_news_and_one_of_an_engine_never_spoken_to_is() -> None:
    follower = Follower()
    follower.table.on_gone(E0, "last words")
    unknown = ReplicaInfo(EngineId(2, 1), ReplicaState.DEAD)
    dead = ReplicaInfo(E0, ReplicaState.DEAD)
    assert follower.deaths(dead, ALIVE[1], unknown) == [Gone(EngineId(2, 1), "its process ended")]


def test_flags_of_a_connection_follow_the_newest_state_but_a_dismissal_stays() -> None:
    follower = Follower()
    connection = follower.connection()
    draining = ReplicaInfo(E0, ReplicaState.ALIVE, is_draining=True)
    suspect = Suspect(E0, False, "silent")
    follower.on_group_state(make_state(draining, ALIVE[1], suspects=[suspect]))
    assert (connection.leaving, connection.suspect, connection.dismissed) == (True, True, False)
    follower.on_group_state(make_state(*ALIVE, seq=2, dismissed=[E0]))
    assert (connection.leaving, connection.suspect, connection.dismissed) == (True, False, True)
    follower.on_group_state(make_state(*ALIVE, seq=3))
    assert (connection.leaving, connection.suspect, connection.dismissed) == (False, False, True)


def test_an_engine_that_shakes_hands_behind_a_state_gets_its_flags_too() -> None:
    follower = Follower()
    late = EngineId(2, 1)
    follower.on_group_state(make_state(*ALIVE, ReplicaInfo(late, ReplicaState.LEAVING)))
    follower.table.on_ready(make_ready(2), 0.0)
    follower.note_status(follower.connection(2))
    assert follower.connection(2).leaving


def test_migrating_replicas_name_their_connections() -> None:
    follower = Follower()
    migrating = ReplicaInfo(E1, ReplicaState.ALIVE, is_draining=True, is_migrating=True)
    unknown = ReplicaInfo(EngineId(2, 1), ReplicaState.ALIVE, is_migrating=True)
    change = follower.on_group_state(make_state(ALIVE[0], migrating, unknown))
    assert change is not None
    assert change.migrating == [follower.connection(1)]


def test_a_snapshot_tells_loads_proves_delivery_and_grows_old() -> None:
    follower = Follower()
    connection = follower.connection()
    connection.stage(make_add(1))
    follower.hear_loads(make_report(E0, applied=1), now=5.0)
    assert (connection.num_unapplied, connection.ledger.load(1)) == (0, 2)
    follower.on_time(5.0 + SNAPSHOT_STALE_S)
    assert not connection.ledger.stale
    follower.on_time(5.1 + SNAPSHOT_STALE_S)
    assert (connection.ledger.stale, connection.ledger.load(1)) == (True, 0)


def test_a_wave_is_requested_once_when_every_member_is_idle_in_this_one() -> None:
    follower = Follower()
    status = MemberStatus(2, "here:1", GROUP)
    idle: dict[str, Any] = {"wave": 4, "member": status}
    assert follower.wave_to_request() == 0
    follower.on_group_state(make_state(committed=GROUP, wave_started=4))
    follower.hear_loads(make_report(E0, **idle), seq=1)
    assert follower.wave_to_request() == 0, "one member was not heard"
    follower.hear_loads(make_report(E0, **idle), make_report(E1, phase=EnginePhase.RUNNING, **idle), seq=2)
    assert follower.wave_to_request() == 0, "one member runs"
    follower.hear_loads(make_report(E0, **idle), make_report(E1, **(idle | {"wave": 3})), seq=3)
    assert follower.wave_to_request() == 0, "one member is behind"
    follower.hear_loads(make_report(E0, **idle), make_report(E1, **idle), seq=4)
    assert [follower.wave_to_request() for _ in range(3)] == [5, 0, 0]
    assert follower.current_wave == 5


def test_independent_ranks_have_no_waves() -> None:
    follower = Follower()
    follower.on_group_state(make_state(*ALIVE))
    follower.hear_loads(make_report(E0), make_report(E1))
    assert follower.wave_to_request() == 0


def test_who_is_missing_is_described() -> None:
    follower = Follower()
    assert follower.describe_missing() == ["nothing was heard from the coordinator"]
    follower.on_group_state(make_state(*ALIVE, ReplicaInfo(EngineId(2, 1), ReplicaState.STARTING)))
    loading = make_report(E1, phase=EnginePhase.LOADING, detail="weights", progress=0.4)
    follower.hear_loads(make_report(E0), loading)
    assert follower.describe_missing() == [
        "engine 1.1: loading, weights (40%)",
        "engine 2.1: starting, has not reported",
    ]
