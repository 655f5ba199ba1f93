"""What the streams of a fake card do, and when: one thread does all of it, late, choosing between streams at random."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

FELL_OFF = "the card has fallen off the bus"
FOREIGN_POLL_S = 0.001
"""Another card's, or process's, event is asked for so often."""


class Operation(NamedTuple):
    what: str
    can_run: Callable[[], bool]
    run: Callable[[], None]


class Queue:
    """The work of one stream."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.operations: deque[Operation] = deque()
        self.is_stalled = False
        self.is_closed = False
        """Nothing more comes; it is forgotten when it is empty."""


class FakeWork:
    """Thread-safe. `died_of`: nothing is done any more. `faults`: operations that raised: they kill the card."""

    def __init__(self, seed: int, max_delay_s: float) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.died_of: str | None = None
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._queues: dict[int, Queue] = {0: Queue(0)}
        self._last_handle = 0
        self._operations_left: int | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def new_queue(self) -> Queue:
        with self.changed:
            self._last_handle += 1
            queue = self._queues[self._last_handle] = Queue(self._last_handle)
            return queue

    def queue(self, handle: int) -> Queue | None:
        with self.changed:
            return self._queues.get(handle)

    def put(self, queue: Queue, operation: Operation) -> bool:
        """Put it behind what is there; say whether the queue is open, and one of these."""
        with self.changed:
            if queue.is_closed or self._queues.get(queue.handle) is not queue:
                return False
            queue.operations.append(operation)
            self.changed.notify_all()
            return True

    def die(self, reason: str) -> None:
        with self.changed:
            self.died_of = self.died_of or reason
            self.changed.notify_all()

    def die_after(self, num_operations: int) -> None:
        with self.changed:
            self._operations_left = num_operations

    def stall(self, handle: int | None) -> None:
        with self.changed:
            for queue in self._queues.values() if handle is None else [self._queues[handle]]:
                queue.is_stalled = True

    def resume(self) -> None:
        with self.changed:
            for queue in self._queues.values():
                queue.is_stalled = False
            self.changed.notify_all()

    def close(self) -> None:
        """Idempotent. What has not been done is dropped."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._thread.join()
        with self.changed:
            for queue in self._queues.values():
                queue.operations.clear()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            queue, operation = taken
            if self._random.random() < 0.5:
                time.sleep(self._random.random() * self._max_delay_s)
            try:
                operation.run()
            except Exception as error:  # noqa: BLE001 - a card that is used wrongly dies, and says so to all
                self.faults.append(f"{operation.what}: {error}")
                self.die(f"{operation.what}: {error}")
            with self.changed:
                queue.operations.popleft()
                self.changed.notify_all()

    def _take(self) -> tuple[Queue, Operation] | None:
        """Return what to do next; it stays the first of its queue until it is done. None: nothing any more."""
        with self.changed:
            while not self._is_closed and self.died_of is None:
                waiting = [queue for queue in self._queues.values() if queue.operations and not queue.is_stalled]
                able = [queue for queue in waiting if queue.operations[0].can_run()]
                if able and self._operations_left == 0:
                    self.die(FELL_OFF)
                elif able:
                    if self._operations_left is not None:
                        self._operations_left -= 1
                    queue = self._random.choice(able)
                    return queue, queue.operations[0]
                else:
                    self._forget_closed()
                    self.changed.wait(FOREIGN_POLL_S if waiting else None)
        return None

    def _forget_closed(self) -> None:
        for handle in [h for h, queue in self._queues.items() if queue.is_closed and not queue.operations]:
            del self._queues[handle]
