"""How far a sequence's KV is computed: the bridge from the engine's thread to the threads that serve its readers."""

import threading
from collections.abc import Callable
from typing import NamedTuple


class Ready(NamedTuple):
    """What may be read: of layer l, the first `num_tokens[l]` tokens. At most one of `trailer` and `failure` is set.

    `trailer`: everything is computed, and this is for the reader. `failure`: nothing more will come. `marks`: a layer's
    bytes are there once the arena's mark of this number is reached; 0: they are.
    """

    num_tokens: tuple[int, ...]
    trailer: bytes | None
    failure: str | None
    marks: tuple[int, ...]


class KVProgress:
    """Written by one thread, read by any number of others, whose wakers it calls. Where blocks are only whole of use
    `num_tokens` is `KVLayout.padded`, and that is what is announced with the prompt's end."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self.num_layers = num_layers
        self.num_tokens = num_tokens
        self._ready = [0] * num_layers
        self._marks = [0] * num_layers
        self._trailer: bytes | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._wakers: tuple[Callable[[], None], ...] = ()

    @classmethod
    def completed(cls, num_layers: int, num_tokens: int, trailer: bytes = b"") -> "KVProgress":
        """Return the progress of KV that is all there."""
        progress = cls(num_layers, num_tokens)
        progress._ready = [num_tokens] * num_layers
        progress._trailer = trailer
        return progress

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        """Tokens [0, num_tokens) of this layer are in the arena, once its `mark` is reached. Cheap: the engine calls
        it for each layer."""
        assert num_tokens <= self.num_tokens, f"{num_tokens} tokens are more than the {self.num_tokens} of the lease"
        with self._lock:
            if num_tokens > self._ready[layer]:
                self._ready[layer] = num_tokens
                self._marks[layer] = mark
                self._wake()

    def complete(self, trailer: bytes = b"") -> None:
        """All layers of all tokens are in the arena: no mark is to be waited for any more. `trailer` goes to
        the readers behind them."""
        with self._lock:
            assert min(self._ready) == self.num_tokens, f"finished with layers at {self._ready}"
            self._marks = [0] * self.num_layers
            self._trailer = trailer
            self._wake()

    def fail(self, reason: str) -> None:
        """Nothing more will come, and what has come must not be read any more. Idempotent; also after `complete`."""
        with self._lock:
            if self._failure is None:
                self._failure = reason
                self._wake()

    def ready(self) -> Ready:
        """Return what may be read now. A failure hides a trailer."""
        with self._lock:
            trailer = None if self._failure is not None else self._trailer
            return Ready(tuple(self._ready), trailer, self._failure, tuple(self._marks))

    def subscribe(self, waker: Callable[[], None]) -> None:
        """Call `waker` after each change, on the thread that made it. It must be quick and must not raise."""
        with self._lock:
            self._wakers = (*self._wakers, waker)

    def unsubscribe(self, waker: Callable[[], None]) -> None:
        """Stop calling `waker`; it is not running any more when this returns."""
        with self._lock:
            self._wakers = tuple(w for w in self._wakers if w != waker)

    def _wake(self) -> None:
        for waker in self._wakers:
            waker()
