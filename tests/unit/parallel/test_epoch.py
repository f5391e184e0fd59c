"""What each member says at the beginning of a step reaches all of them, in the same order."""

from engine.parallel.epoch import exchange_headers
from engine.parallel.group_member import StepHeader
from tests.unit.parallel.members import Company

LARGEST = 2**63 - 1


def test_every_member_sees_the_same_headers() -> None:
    company = Company(3)
    headers = [
        StepHeader(3, 7, 41, 12, 1, 4, 0),
        StepHeader(3, 8, LARGEST, 0, 0, 3, 1, 1),
        StepHeader(3, 7, 40, 2048, 1, LARGEST, 0),
    ]
    seen = company.run(lambda index: exchange_headers(company.meet(index)[0], headers[index]))
    assert seen == [headers] * 3
