"""The cheap histogram counts exactly what prometheus_client's counts."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ReferenceHistogram

from metrics.stats import FIRST_TOKEN_BOUNDS_S, INTER_TOKEN_BOUNDS_S, PROMPT_BOUNDS_TOKENS, REQUEST_BOUNDS_S, Histogram

ALL_BOUNDS = [FIRST_TOKEN_BOUNDS_S, INTER_TOKEN_BOUNDS_S, REQUEST_BOUNDS_S, PROMPT_BOUNDS_TOKENS]


def reference(bounds: Sequence[float], values: Sequence[float]) -> tuple[list[float], float]:
    """Return the cumulative bucket counts and the sum of prometheus_client's own histogram."""
    histogram = ReferenceHistogram("x", "x", registry=CollectorRegistry(), buckets=[float(bound) for bound in bounds])
    for value in values:
        histogram.observe(value)
    samples = next(iter(histogram.collect())).samples
    return [s.value for s in samples if s.name == "x_bucket"], next(s.value for s in samples if s.name == "x_sum")


@given(st.sampled_from(ALL_BOUNDS), st.data())
def test_buckets_and_sum_equal_the_reference_also_on_the_bounds(bounds: tuple[float, ...], data: st.DataObject) -> None:
    any_value = st.one_of(st.sampled_from(bounds), st.floats(0, 1e7))
    values = data.draw(st.lists(any_value, max_size=40))
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    counts, total = reference(bounds, values)
    assert [count for _, count in histogram.cumulative()] == counts
    assert histogram.total == total


@given(st.floats(0, 100), st.integers(1, 64))
def test_a_weighted_observation_equals_that_many_single_ones(value: float, weight: int) -> None:
    weighted, single = Histogram(INTER_TOKEN_BOUNDS_S), Histogram(INTER_TOKEN_BOUNDS_S)
    weighted.observe(value, weight)
    for _ in range(weight):
        single.observe(value)
    assert weighted.cumulative() == single.cumulative()
    assert weighted.total == pytest.approx(single.total)


@pytest.mark.parametrize("bounds", ALL_BOUNDS)
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
