"""Operations run in the order of their tickets, on the caller's thread or on the queue's."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tagi_ddp.communicators import Timeout
from tagi_ddp.communicators.operations import OperationQueue, Ticket


@pytest.fixture
def queue() -> Iterator[OperationQueue]:
    queue = OperationQueue("test")
    yield queue
    queue.close()


def overdue(seconds: float) -> Timeout:
    return Timeout(f"overdue after {seconds:g} s")


def start(queue: OperationQueue, operation: Callable[[], Any]) -> Ticket[Any]:
    ticket = queue.ticket(overdue)

    def execute() -> Any:
        ticket.await_previous()
        return operation()

    queue.start(ticket, execute)
    return ticket


def test_order_and_threads(queue: OperationQueue) -> None:
    ran: list[tuple[int, threading.Thread]] = []
    go_on = threading.Event()

    def run(number: int) -> int:
        go_on.wait(10)
        ran.append((number, threading.current_thread()))
        return number

    first = start(queue, lambda: run(1))
    blocking = queue.ticket(overdue)
    last = start(queue, lambda: run(3))
    assert not first.done()
    threading.Timer(0.1, go_on.set).start()

    def execute() -> int:
        blocking.await_previous()
        return run(2)

    blocking.run(execute)
    assert [ticket.result() for ticket in (last, blocking, first)] == [3, 2, 1]
    assert [number for number, _ in ran] == [1, 2, 3]
    assert ran[1][1] is threading.current_thread()
    assert ran[0][1] is ran[2][1] is queue._thread
    assert queue._thread is not None
    assert queue._thread.daemon


def test_a_wait_has_a_limit_of_its_own(queue: OperationQueue) -> None:
    go_on = threading.Event()
    ticket = start(queue, lambda: go_on.wait(10))
    with pytest.raises(Timeout, match=r"overdue after 0\.05 s"):
        ticket.wait(0.05)
    go_on.set()
    assert ticket.result() is True


def test_a_timeout_of_the_operation_is_its_own(queue: OperationQueue) -> None:
    def fail() -> None:
        raise TimeoutError("of the operation")

    ticket = start(queue, fail)
    for _ in range(2):  # again and again
        with pytest.raises(TimeoutError, match="of the operation"):
            ticket.wait(10)
    assert ticket.done()
    assert start(queue, lambda: "after an error").result() == "after an error"


def test_no_thread_without_asynchronous_operations() -> None:
    queue = OperationQueue("test")
    ticket = queue.ticket(overdue)
    ticket.run(lambda: None)
    assert queue._thread is None
    queue.close()


def test_buffers_go_when_the_operation_is_complete(queue: OperationQueue) -> None:
    buffer = np.ones(3)
    gone = weakref.ref(buffer)
    ticket = start(queue, lambda held=buffer: None)
    del buffer
    ticket.wait()
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
    assert gone() is None


def test_what_is_stuck_may_be_left_alone() -> None:
    queue, go_on = OperationQueue("test"), threading.Event()
    ticket = start(queue, lambda: go_on.wait(20))
    queue.close(0.05)
    assert not ticket.done()
    go_on.set()
    assert ticket.result(20)
    queue.close()


def test_an_operation_keeps_none_before_it(queue: OperationQueue) -> None:
    """Though there was never a moment without one, and none awaited another."""
    go_on = threading.Event()
    tickets = [queue.ticket(overdue) for _ in range(3)]
    for ticket in tickets:
        queue.start(ticket, lambda: go_on.wait(10))
    first = weakref.ref(tickets[0])
    go_on.set()
    assert tickets[-1].result(10)
    del tickets[:-1], ticket
    assert first() is None
