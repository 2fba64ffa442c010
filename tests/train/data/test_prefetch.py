"""Batches made ahead: in order, within the limit, by a thread that ends when it is closed."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from nsa.train.data import prefetch
from nsa.train.data.prefetch import Prefetcher, StarvedError


def test_items_come_in_order_and_no_more_than_two_ahead():
    numbers = itertools.count()
    items = Prefetcher(lambda: next(numbers))
    assert [items.get(1.0) for _ in range(100)] == list(range(100))
    time.sleep(0.05)
    assert next(numbers) <= 104  # two ready, one in the thread's hand
    items.close()


def test_an_error_comes_out_where_its_item_would():
    items = Prefetcher(iter([1, 2]).__next__)
    assert [items.get(1.0), items.get(1.0)] == [1, 2]
    with pytest.raises(StopIteration):
        items.get(1.0)
    items.close()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_ends_the_thread(taken):
    before = threading.enumerate()
    items = Prefetcher(lambda: time.sleep(0.01))
    for _ in range(taken):
        items.get(1.0)
    time.sleep(0.1)  # it waits for room by now
    items.close()
    assert threading.enumerate() == before


def test_a_read_that_hangs_starves_and_is_left_behind(monkeypatch):
    monkeypatch.setattr(prefetch, "_CLOSING_S", 0.2)
    end = threading.Event()
    items = Prefetcher(end.wait)
    begin = time.monotonic()
    with pytest.raises(StarvedError, match=r"no batch in 0\.1 s"):
        items.get(0.1)
    items.close()
    assert 0.3 < time.monotonic() - begin < 5
    end.set()
