"""Each rule of the machines is needed: without it a trace breaks an invariant or never comes to rest.

The traces were found by walks and shortened, or written by hand where a walk would take too long.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from engine.parallel.group_member import DPGroupMember
from lb.coordinator.lockstep_group import LockstepGroup
from tests.model.events import Rules
from tests.model.mutated_coordinators import GROUPS, REPLICAS
from tests.model.mutated_ranks import MEMBERS, RANKS
from tests.model.scenarios import formed
from tests.model.settle import Settler
from tests.model.traces import broken_by, play
from tests.model.world import Budget, ViolationError, World

_PLENTY = Budget(*[9] * len(Budget._fields))

_JOINING = "send0 recv0 join load1 replicas send1 recv1 get0 get1 meet0 meet1 send0 send1 "
_STEP = "take0 take1 take0 take1 "  # of ranks 0 and 1, with tokens: the exchange, then the layers
_STEP_OF_3 = "take0 take1 take2 take0 take1 take2 "
_READY = "rebalance replicas get0 get1 request1 send0 send1 recv0 recv1 get0 get1 meet0 meet1 " + _STEP


class Shown(NamedTuple):
    """How a rule is shown to be needed: the events, in an idle group of so many ranks.

    loaded: the ranks are in no group yet. calm: it shows in a member that parks. repeats: old states come after new
    ones. min_size, mail_depth: see ``Rules``.
    """

    num_ranks: int
    trace: str
    loaded: bool = False
    calm: bool = False
    repeats: bool = False
    mail_depth: int = 1
    min_size: int = 1

    def rules(self, mutated: str = "") -> Rules:
        """Return the machines, without a rule."""
        return {**RANKS, **REPLICAS}.get(mutated, Rules)(
            MEMBERS.get(mutated, DPGroupMember),
            GROUPS.get(mutated, LockstepGroup),
            min_size=self.min_size,
            mail_depth=self.mail_depth,
            repeats=self.repeats,
            is_calm=self.calm,
        )

    def start(self, rules: Rules) -> World:
        return rules.new_world(self.num_ranks, _PLENTY) if self.loaded else formed(rules, self.num_ranks, _PLENTY)


SHOWN = {
    # a rank
    "the newest state wins": Shown(
        1, _JOINING + "recv0 recv1 get0 take0 get1 take0 take1 get0-3", calm=True, repeats=True
    ),
    "a higher generation is newer": Shown(2, "restart join", mail_depth=2),
    "a pause makes no rank ignore a started wave": Shown(2, "rebalance pause"),
    "only consensus ends a wave": Shown(3, "request2", calm=True),
    "an idle rank that has seen a newer wave goes straight on": Shown(
        3,
        "request0 send0 send1 send2 recv1 recv2 recv0 cordon2 replicas get0 get1 get2 "
        + (_STEP_OF_3 + "meet0 meet1 send0 send1 recv0 recv1 ")
        + (_STEP_OF_3 + "send0 send1 recv0 recv1 get0 get1 get2 ")
        + (_STEP_OF_3 * 2 + "send0 send1 recv0 recv1 restore2 replicas send2 recv2 get0 get1 get2 ")
        + (_STEP + "meet0 meet1 meet2 ")
        + (_STEP + "send0 send1 send2 recv2 recv0 recv1 get0 ")
        + "take0 take1 take0* take1 take0 take1",
    ),
    "no rank rests where the group switches": Shown(2, "join", mail_depth=2),
    "the highest wave of an exchange is everybody's": Shown(
        3,
        "join load3 replicas request1 send1 send3 recv3 recv1 get0 get1 get3 get2-1 meet2 get2 take0",
        calm=True,
        min_size=2,
    ),
    "the highest step of an exchange is everybody's": Shown(2, "die1* request0", min_size=2),
    "the switch waits for the last to have seen the commit": Shown(3, "cordon2 request2", mail_depth=2),
    "a member has seen a commit only when it is ready": Shown(
        2,
        _READY
        + "send0 send1 recv0 recv1 restart replicas send0 send1 get0-2 "
        + (_STEP + "recv0 recv1 get0 get1-4 " + _STEP * 2),
    ),
    "a leaving rank has seen a commit without being ready": Shown(3, "cordon2"),
    "a new attempt makes the rank unready for the one before": Shown(
        3,
        "cordon2 replicas get0 get1 meet0 send0 meet1 recv0 send1 recv1 get1 break1*",
        repeats=True,
        min_size=2,
    ),
    "a newer proposal is prepared though another was begun": Shown(3, "cordon2 replicas get1 die2", mail_depth=2),
    "an idle rank parks too": Shown(3, "die2*"),
    "a parked rank installs on sight": Shown(3, "die0*"),
    "a joining rank installs on sight": Shown(3, "", loaded=True),
    "a rank that steps in a group switches only at a step boundary": Shown(
        3, "rebalance replicas request0 get2 get0 get1 meet0", calm=True, repeats=True, mail_depth=2
    ),
    "a group starts running": Shown(3, "request2 die0 cordon1 join", repeats=True, mail_depth=2),
    "a broken exchange parks": Shown(3, "die0*"),
    "a rank reports which group it let go of": Shown(
        2,
        "rebalance pause pause replicas get1 get0 meet0 send0 request1 recv0 meet1 send1 recv1 get0 break0*",
        mail_depth=2,
    ),
    "a rank does not run again in a wave that ended": Shown(3, "request2", calm=True),
    "a rank leaves a collective of a group that is over": Shown(
        2, "request0 send0 recv0 get1 get0 break1*", mail_depth=2
    ),
    "a planned proposal ends the groups before the committed one": Shown(
        2,
        "send0 recv0 cordon1 replicas get0 meet0 send0 request1 request0 send1 recv1 recv0 get0 get1-1 break0* "
        "restore1",
    ),
    "a rank leaves a group with a dead member": Shown(2, "die1*", mail_depth=2, min_size=2),
    # the coordinator
    "silence is no death": Shown(3, "restart", calm=True),
    "what predecessors committed is in force": Shown(3, "request1 send1 recv1 get1 restart"),
    "each generation has numbers of its own": Shown(1, "die0 restart", mail_depth=2),
    "a rank that was confirmed dead is dead": Shown(3, "die0*"),
    "a parked member breaks the group": Shown(2, "request0 send0 recv0 get1 break1*", mail_depth=2),
    "a member that is elsewhere breaks the group": Shown(
        2, "die0* confirm0 replicas get1 meet1 replacement0 send1 recv1 get0 restart", mail_depth=2
    ),
    "a rank that waits in a group that another let go of breaks the group": Shown(
        2,
        "rebalance pause pause replicas get1 get0 meet0 send0 request1 recv0 meet1 send1 recv1 get0 break0*",
        mail_depth=2,
    ),
    "a further death voids a direct proposal": Shown(3, "die1* confirm1 replicas die2"),
    "a failed preparation voids a direct proposal": Shown(3, "die2 confirm2 replicas get1 fail1*"),
    "healing goes before scaling": Shown(2, "request0 send0 recv0 get0 rebalance break0*", mail_depth=2, min_size=2),
    "no direct proposal is made to too few": Shown(2, "die1", min_size=2),
    "a direct proposal of too few is void": Shown(2, "die1 confirm1 replicas die0*", mail_depth=2),
    "where a group broke nobody hands over experts": Shown(
        2, "die0* confirm0 replicas get1 meet1 replacement0 send1 recv1 get0 restart", mail_depth=2
    ),
    "a failed preparation voids its proposal": Shown(3, "cordon2 replicas get1 fail1*", repeats=True, min_size=2),
    "a planned proposal ends with a death": Shown(2, "rebalance replicas die1*", mail_depth=2, min_size=2),
    "a planned proposal ends with a new rank that is to leave": Shown(
        1, _JOINING + "cordon1 replicas recv1 go1 recv0", calm=True
    ),
    "all must be ready": Shown(3, "", loaded=True, calm=True),
    "one change at a time": Shown(2, "die0* die1*", mail_depth=2),
    "no planned proposal is made to too few": Shown(
        2, "send0 recv0 cordon1 replicas get0 meet0 send0 recv0", min_size=2
    ),
    "a rebalance request stands until it is in force": Shown(2, "die0* rebalance"),
    "a proposal is repeated": Shown(3, "cordon2 replicas"),
    "a commit is repeated until all step in it": Shown(2, "die1* confirm1 replicas get0 meet0 send0 recv0"),
    "a wave is repeated until all have seen it": Shown(2, "send0 recv0 firstreq", min_size=2),
    "a death is repeated until no rank waits for the dead": Shown(
        2, "send0 recv0 firstreq get0 send0 recv0 cordon0 join die1* confirm1 replicas", min_size=2
    ),
    "a rank that rests in an old group is woken": Shown(2, "join", mail_depth=2),
    "a rank that rests with work is woken": Shown(3, "request2", calm=True),
    "waves of predecessors count": Shown(2, "restart", mail_depth=2),
    # whom others count on
    "a leaving rank stays until the members step without it": Shown(3, "cordon0", calm=True),
    "a leaving rank stays until the coordinator knows that it leaves": Shown(
        1, _JOINING + "cordon1 recv1 go1 recv0", calm=True
    ),
}


def outcome(rules: Rules, shown: Shown) -> str | None:
    try:
        return broken_by(shown.trace, rules, shown.start(rules))
    except ViolationError as error:
        return str(error)


@pytest.mark.parametrize("rule", SHOWN)
def test_without_the_rule_something_breaks_and_with_it_nothing(rule: str) -> None:
    shown = SHOWN[rule]
    assert outcome(shown.rules(mutated=rule), shown) is not None
    assert outcome(shown.rules(), shown) is None


# --- rules that others make good: what they save ---------------------------------------------------------------------


class Price(NamedTuple):
    """What it took to come to rest, and what was left over.

    epochs: put in force. waves: started. collectives: of the last group. moved: sequences that a
    rank had when it left its group, so that they went on elsewhere.
    """

    epochs: int
    waves: int
    collectives: int
    moved: int


SAVED = {
    "what is learned voids what was proposed": (
        "epochs",
        Shown(
            2,
            "rebalance replicas get0 get1 meet0 meet1 send0 send1 recv0 recv1 restart replicas send0 send1 get0-2 "
            "get1-2 recv0 recv1",
        ),
    ),
    "what was committed is not taken back": (
        "epochs",
        Shown(
            2,
            _READY
            + "send0 send1 recv0 recv1 restart replicas get0-2 "
            + (_STEP + "get0 " + _STEP)
            + "send0 send1 recv0 recv1",
        ),
    ),
    "a group starts in the newest wave seen": ("collectives", Shown(2, "", loaded=True)),
    "the first group waits for every replica": ("epochs", Shown(2, "replicas send0 recv0", loaded=True)),
    "a leaving rank with sequences stays": (
        "moved",
        Shown(
            2,
            "send0 recv0 request1 send1 recv1 cordon1 replicas get0 get1 meet0 "
            + (_STEP + "send0 recv0 get0 get1 " + _STEP * 2),
        ),
    ),
    "a rank that is behind has not seen the newest wave yet": (
        "waves",
        Shown(3, "request0 send0 recv0 request1 send1 recv1"),
    ),
    "a running rank is not woken": (
        "waves",
        Shown(2, "request0 send0 recv0 get0 get1 send0 recv0 send1 recv1"),
    ),
    "a request for a wave counts when all rest": (
        "waves",
        Shown(2, "request0 send0 recv0 get0 send0 recv0 firstreq"),
    ),
}


def price(rules: Rules, shown: Shown) -> Price:
    world = shown.start(rules)
    play(shown.trace, rules, world)
    moved = sum(it.has_work and it.member.epoch == 0 for it in world.ranks.values())
    group = Settler(rules).settled(world).coordinator.group
    collectives = max(world.groups[group.committed.epoch].entered)
    return Price(len(world.committed), group.waves.started, collectives, moved)


@pytest.mark.parametrize("rule", SAVED)
def test_without_the_rule_more_is_done(rule: str) -> None:
    measure, shown = SAVED[rule]
    with_it, without = price(shown.rules(), shown), price(shown.rules(mutated=rule), shown)
    assert getattr(without, measure) > getattr(with_it, measure), f"{without} instead of {with_it}"


def test_each_rule_is_switched_off_once_and_stands_in_the_table() -> None:
    rules = [*MEMBERS, *RANKS, *GROUPS, *REPLICAS]
    assert sorted(rules) == sorted([*SHOWN, *SAVED])
    readme = Path(__file__).with_name("README.md").read_text()
    assert [rule for rule in rules if f"| {rule} |" not in readme] == []
