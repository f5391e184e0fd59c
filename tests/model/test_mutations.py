"""Each rule of the machines is needed: without it a sequence of events breaks something, with it it does not.

The sequences were found by walks, made shorter, or written by hand where a walk would need too long.
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

_NEWCOMER = "say0 hear0 join load1 replicas say1 hear1 get0 get1 meet0 meet1 say0 say1 "
_STEP = "take0 take1 take0 take1 "  # of ranks 0 and 1, with tokens: the exchange, then the layers
_STEP_OF_3 = "take0 take1 take2 take0 take1 take2 "
_READY = "rebalance replicas get0 get1 request1 say0 say1 hear0 hear1 get0 get1 meet0 meet1 " + _STEP


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
        1, _NEWCOMER + "hear0 hear1 get0 take0 get1 take0 take1 get0-3", calm=True, repeats=True
    ),
    "a higher generation is newer": Shown(2, "restart join", mail_depth=2),
    "a pause makes no rank ignore a started wave": Shown(2, "rebalance pause"),
    "only consensus ends a wave": Shown(3, "request2", calm=True),
    "who rests having seen a newer wave goes straight on": Shown(
        3,
        "request0 say0 say1 say2 hear1 hear2 hear0 cordon2 replicas get0 get1 get2 "
        + (_STEP_OF_3 + "meet0 meet1 say0 say1 hear0 hear1 ")
        + (_STEP_OF_3 + "say0 say1 hear0 hear1 get0 get1 get2 ")
        + (_STEP_OF_3 * 2 + "say0 say1 hear0 hear1 restore2 replicas say2 hear2 get0 get1 get2 ")
        + (_STEP + "meet0 meet1 meet2 ")
        + (_STEP + "say0 say1 say2 hear2 hear0 hear1 get0 ")
        + "take0 take1 take0* take1 take0 take1",
    ),
    "nobody rests where the group switches": Shown(2, "join", mail_depth=2),
    "the highest wave of an exchange is everybody's": Shown(
        3,
        "join load3 replicas request1 say1 say3 hear3 hear1 get0 get1 get3 get2-1 meet2 get2 take0",
        calm=True,
        min_size=2,
    ),
    "the highest step of an exchange is everybody's": Shown(2, "die1* request0", min_size=2),
    "the switch waits for the last to have seen the commit": Shown(3, "cordon2 request2", mail_depth=2),
    "a member has seen a commit only when it is ready": Shown(
        2,
        _READY
        + "say0 say1 hear0 hear1 restart replicas say0 say1 get0-2 "
        + (_STEP + "hear0 hear1 get0 get1-4 " + _STEP * 2),
    ),
    "a leaver has seen a commit without being ready": Shown(3, "cordon2"),
    "a new attempt makes the rank unready for the one before": Shown(
        3, "cordon2 replicas get0 get1 meet0 say0 meet1 hear0 say1 hear1 get1 break1*", repeats=True, min_size=2
    ),
    "a newer proposal is prepared though another was begun": Shown(3, "cordon2 replicas get1 die2", mail_depth=2),
    "who rests parks too": Shown(3, "die2*"),
    "a parked rank installs on sight": Shown(3, "die0*"),
    "a joiner installs on sight": Shown(3, "", loaded=True),
    "who steps in a group switches only at a step": Shown(
        3, "rebalance replicas request0 get2 get0 get1 meet0", calm=True, repeats=True, mail_depth=2
    ),
    "a group starts running": Shown(3, "request2 die0 cordon1 join", repeats=True, mail_depth=2),
    "a broken exchange parks": Shown(3, "die0*"),
    "a rank says which group it let go of": Shown(
        2,
        "rebalance pause pause replicas get1 get0 meet0 say0 request1 hear0 meet1 say1 hear1 get0 break0*",
        mail_depth=2,
    ),
    "a rank does not run again in a wave that ended": Shown(3, "request2", calm=True),
    "a rank leaves a collective of a group that is over": Shown(
        2, "request0 say0 hear0 get1 get0 break1*", mail_depth=2
    ),
    "a planned proposal ends the groups before the committed one": Shown(
        2,
        "say0 hear0 cordon1 replicas get0 meet0 say0 request1 request0 say1 hear1 hear0 get0 get1-1 break0* restore1",
    ),
    "a rank leaves a group with a dead member": Shown(2, "die1*", mail_depth=2, min_size=2),
    # the coordinator
    "silence is no death": Shown(3, "restart", calm=True),
    "what predecessors committed is in force": Shown(3, "request1 say1 hear1 get1 restart"),
    "each generation has numbers of its own": Shown(1, "die0 restart", mail_depth=2),
    "who was confirmed dead is dead": Shown(3, "die0*"),
    "a parked member breaks the group": Shown(2, "request0 say0 hear0 get1 break1*", mail_depth=2),
    "a member that is elsewhere breaks the group": Shown(
        2, "die0* confirm0 replicas get1 meet1 replacement0 say1 hear1 get0 restart", mail_depth=2
    ),
    "who waits in a group that somebody let go of breaks the group": Shown(
        2,
        "rebalance pause pause replicas get1 get0 meet0 say0 request1 hear0 meet1 say1 hear1 get0 break0*",
        mail_depth=2,
    ),
    "a further death voids a direct proposal": Shown(3, "die1* confirm1 replicas die2"),
    "a failed preparation voids a direct proposal": Shown(3, "die2 confirm2 replicas get1 fail1*"),
    "healing goes before scaling": Shown(2, "request0 say0 hear0 get0 rebalance break0*", mail_depth=2, min_size=2),
    "too few are not called": Shown(2, "die1", min_size=2),
    "a direct proposal of too few is void": Shown(2, "die1 confirm1 replicas die0*", mail_depth=2),
    "where a group broke nobody hands over experts": Shown(
        2, "die0* confirm0 replicas get1 meet1 replacement0 say1 hear1 get0 restart", mail_depth=2
    ),
    "a failed preparation voids its proposal": Shown(3, "cordon2 replicas get1 fail1*", repeats=True, min_size=2),
    "a planned proposal ends with a death": Shown(2, "rebalance replicas die1*", mail_depth=2, min_size=2),
    "a planned proposal ends with a newcomer that is to go": Shown(
        1, _NEWCOMER + "cordon1 replicas hear1 go1 hear0", calm=True
    ),
    "all must be ready": Shown(3, "", loaded=True, calm=True),
    "one change at a time": Shown(2, "die0* die1*", mail_depth=2),
    "too few are not planned": Shown(2, "say0 hear0 cordon1 replicas get0 meet0 say0 hear0", min_size=2),
    "a rebalance request stands until it is in force": Shown(2, "die0* rebalance"),
    "a proposal is repeated": Shown(3, "cordon2 replicas"),
    "a commit is repeated until all step in it": Shown(2, "die1* confirm1 replicas get0 meet0 say0 hear0"),
    "a wave is repeated until all have seen it": Shown(2, "say0 hear0 firstreq", min_size=2),
    "a death is repeated until nobody waits for the dead": Shown(
        2, "say0 hear0 firstreq get0 say0 hear0 cordon0 join die1* confirm1 replicas", min_size=2
    ),
    "who rests in an old group is woken": Shown(2, "join", mail_depth=2),
    "who rests with work is woken": Shown(3, "request2", calm=True),
    "waves of predecessors count": Shown(2, "restart", mail_depth=2),
    # whom others count on
    "a leaver stays until the members step without it": Shown(3, "cordon0", calm=True),
    "a leaver stays until the coordinator knows that it leaves": Shown(
        1, _NEWCOMER + "cordon1 hear1 go1 hear0", calm=True
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
            "rebalance replicas get0 get1 meet0 meet1 say0 say1 hear0 hear1 restart replicas say0 say1 get0-2 get1-2 "
            "hear0 hear1",
        ),
    ),
    "what was committed is not taken back": (
        "epochs",
        Shown(
            2,
            _READY
            + "say0 say1 hear0 hear1 restart replicas get0-2 "
            + (_STEP + "get0 " + _STEP)
            + "say0 say1 hear0 hear1",
        ),
    ),
    "a group starts in the newest wave seen": ("collectives", Shown(2, "", loaded=True)),
    "the first group waits for every replica": ("epochs", Shown(2, "replicas say0 hear0", loaded=True)),
    "a leaver with sequences stays": (
        "moved",
        Shown(
            2,
            "say0 hear0 request1 say1 hear1 cordon1 replicas get0 get1 meet0 "
            + (_STEP + "say0 hear0 get0 get1 " + _STEP * 2),
        ),
    ),
    "who is behind has not seen the newest wave yet": ("waves", Shown(3, "request0 say0 hear0 request1 say1 hear1")),
    "who runs is not woken": ("waves", Shown(2, "request0 say0 hear0 get0 get1 say0 hear0 say1 hear1")),
    "a request for a wave counts when all rest": ("waves", Shown(2, "request0 say0 hear0 get0 say0 hear0 firstreq")),
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
