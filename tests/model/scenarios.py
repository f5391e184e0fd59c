"""Scenarios: a world to begin with and a budget of what may happen in it."""

import random
from typing import NamedTuple

from tests.model.events import Rules
from tests.model.settle import Settler
from tests.model.world import Budget, World


class Scenario(NamedTuple):
    """A search to be made. is_formed: it begins with an idle group of all ranks, else with loaded engines."""

    num_ranks: int
    budget: Budget
    is_formed: bool = True
    min_size: int = 1
    repeats: bool = False
    is_calm: bool = False

    def __str__(self) -> str:
        kinds = [f"{name}={count}" for name, count in self.budget._asdict().items() if count]
        flags = [name for name in ("repeats", "is_calm") if getattr(self, name)]
        start = "formed" if self.is_formed else "loaded"
        sizes = [f"min_size={self.min_size}"] if self.min_size > 1 else []
        return " ".join([f"{self.num_ranks} {start}:", *kinds, *sizes, *flags])

    def rules(self) -> Rules:
        """Return the real machines."""
        return Rules(min_size=self.min_size, repeats=self.repeats, is_calm=self.is_calm)

    def start(self, rules: Rules) -> World:
        """Return the world it begins with."""
        make = formed if self.is_formed else Rules.new_world
        return make(rules, self.num_ranks, self.budget)


def formed(rules: Rules, num_ranks: int, budget: Budget) -> World:
    """Return a world whose ranks are an idle group.

    Raises:
        ViolationError: they do not become one.
    """
    return Settler(rules).settled(rules.new_world(num_ranks, budget))


SMALL = [
    Scenario(2, Budget(), is_formed=False),
    Scenario(3, Budget(), is_formed=False),
    Scenario(2, Budget(requests=1), repeats=True, is_calm=True),
    Scenario(2, Budget(requests=2), is_calm=True),
    Scenario(2, Budget(requests=1, firstreqs=1), is_calm=True),
    Scenario(3, Budget(requests=1), is_calm=True),
    Scenario(2, Budget(restarts=1), is_calm=True),
    Scenario(2, Budget(rebalances=1), is_calm=True),
    Scenario(2, Budget(leaves=1), is_calm=True),
    Scenario(1, Budget(joins=1), is_calm=True),
    Scenario(2, Budget(deaths=2)),
    Scenario(3, Budget(deaths=2)),
    Scenario(2, Budget(deaths=1, restarts=1)),
    Scenario(2, Budget(failures=1, rebalances=1)),
    Scenario(2, Budget(deaths=1, replacements=1), min_size=2),
    Scenario(2, Budget(cuts=1, rebalances=1)),
]
"""Exhausted in a second or two each."""

LARGE = [
    Scenario(3, Budget(deaths=1, failures=1)),
    Scenario(2, Budget(leaves=1, returns=1), is_calm=True),
    Scenario(2, Budget(requests=1, cuts=1)),
    Scenario(2, Budget(requests=1, deaths=1)),
    Scenario(2, Budget(deaths=2, replacements=1)),
    Scenario(1, Budget(requests=1, joins=1), is_calm=True),
    Scenario(2, Budget(requests=1, pauses=1), is_calm=True),
    Scenario(2, Budget(requests=1, leaves=1), is_calm=True),
    Scenario(2, Budget(requests=1, restarts=1), is_calm=True),
    Scenario(1, Budget(joins=1, restarts=1)),
    Scenario(2, Budget(leaves=1, restarts=1)),
    Scenario(2, Budget(joins=1, deaths=1)),
    Scenario(2, Budget(requests=1, pauses=1, deaths=1)),
    Scenario(3, Budget(leaves=1, deaths=1)),
    Scenario(3, Budget(requests=1, deaths=1)),
    Scenario(3, Budget(deaths=1, restarts=1)),
    Scenario(3, Budget(requests=1, pauses=1), is_calm=True),
]
"""Smaller ones first; the time that these leave is for the others."""


class Walk(NamedTuple):
    """A walk at random, its start chosen by the seed as well."""

    seed: int
    rules: Rules
    start: World


def random_walk(seed: int, max_ranks: int) -> Walk:
    """Return a walk through a world of up to so many ranks, with a bit of everything or much of a few things."""
    dice = random.Random(seed)
    budget = Budget(
        requests=dice.choice([0, 2, 4]),
        pauses=dice.choice([0, 1, 2]),
        deaths=dice.choice([0, 1, 2, 3]),
        replacements=dice.choice([0, 2, 4]),
        joins=dice.choice([0, 1, 2]),
        leaves=dice.choice([0, 1, 2]),
        restarts=dice.choice([0, 0, 1, 2]),
        failures=dice.choice([0, 0, 1, 2]),
        rebalances=dice.choice([0, 0, 1]),
        firstreqs=dice.choice([0, 0, 1]),
        returns=dice.choice([0, 0, 1, 2]),
        cuts=dice.choice([0, 0, 0, 1]),
    )
    is_calm = not (budget.deaths or budget.failures or budget.restarts or budget.cuts)
    rules = Rules(
        min_size=dice.choice([1, 1, 2]),
        mail_depth=dice.choice([1, 2, 3]),
        repeats=dice.random() < 0.2,
        is_calm=is_calm,
    )
    num_ranks = dice.randint(1, max_ranks)
    if dice.random() < 0.6:
        return Walk(seed, rules, formed(rules, max(num_ranks, rules.min_size), budget))
    return Walk(seed, rules, rules.new_world(num_ranks, budget, is_loaded=dice.random() < 0.5))
