"""Arena: equal slots in four halves, lent one at a time."""

import itertools
import threading

import pytest
import torch

from kvshare_connector.worker.arena import Arena


@pytest.mark.parametrize(
    ("total", "slot", "slots"), [(4096, 64, 16), (4096, 1024, 1), (5000, 192, 6), (1 << 20, 64, 4096)]
)
def test_halves_have_equal_slots_that_do_not_overlap(total: int, slot: int, slots: int) -> None:
    """Every slot lies inside the one registered buffer."""
    arena = Arena(total)
    arena.cut(slot)
    halves = [lender.borrow() for lender in (arena.send, arena.send, arena.receive, arena.receive)]
    start = arena.buffer.data_ptr()
    places: list[tuple[int, int]] = []
    for half in halves:
        assert half is not None
        assert half.slots == slots
        places += [(half.address(i), half.address(i) + slot) for i in range(half.slots)]
    places.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
    assert start <= places[0][0]
    assert places[-1][1] <= start + total


def test_rows_are_the_beginnings_of_slots() -> None:
    """An object smaller than its slot leaves the rest alone."""
    arena = Arena(4096)
    arena.buffer.fill_(7)
    arena.cut(128)
    half = arena.send.borrow()
    assert half is not None
    half.memory[2:5, :100].copy_(torch.zeros(3, 100, dtype=torch.uint8))
    assert int((half.memory == 0).sum()) == 300
    assert half.memory[2:3].data_ptr() == half.address(2)


def test_an_object_that_does_not_fit_is_refused_with_the_remedy() -> None:
    """D16: never silently skipped; the verdict has asked before."""
    with pytest.raises(ValueError, match="at least 4352 expected: raise staging_bytes"):
        Arena(4096).cut(1088)


def test_an_engine_without_packed_objects_needs_no_slots() -> None:
    """Direct transfers only."""
    arena = Arena(0)
    arena.cut(0)
    assert arena.send.slots == 0


def test_closing_wakes_everybody_who_waits() -> None:
    """A thread that waits for a half must not keep the process."""
    arena = Arena(4096)
    arena.cut(64)
    lent = [arena.send.borrow(), arena.send.borrow()]
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(arena.send.borrow())) for _ in range(3)]
    for thread in threads:
        thread.start()
    arena.close()
    for thread in threads:
        thread.join(timeout=30)
    assert got == [None] * 3
    assert all(lent)
