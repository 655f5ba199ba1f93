"""The last steps of a process: what came, and what was decided on it. For who asks what led to something."""

from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from services.engine.messages import StepResult
from services.holder.core.events import OwnersEvent
from services.holder.limits import MAX_STEPS_KEPT
from services.runtime import now_ms


class _Step(NamedTuple):
    cause: str
    event: str
    actions: str


class Journal:
    """Keeps words, not what they are about: prompts and blocks are free as soon as they are."""

    def __init__(self) -> None:
        self._steps: deque[tuple[_Step, list[int]]] = deque(maxlen=MAX_STEPS_KEPT)
        """Each with when it first and last was so, and how often in a row."""

    def note(self, cause: str, event: object, actions: Sequence[object]) -> None:
        """Note an event (`cause`: where it came from) and what was decided on it. Like ones in a row are one."""
        step, now = _Step(cause, _described(event), _counted(actions)), now_ms()
        if self._steps and self._steps[-1][0] == step:
            self._steps[-1][1][1:] = [now, self._steps[-1][1][2] + 1]
        else:
            self._steps.append((step, [now, now, 1]))

    def lines(self) -> tuple[str, ...]:
        """Return a line for each, the latest last, with its age."""
        now = now_ms()
        return tuple(
            f"{(now - last_ms) / 1000:9.3f} s ago{f', {count} times since {(now - first_ms) / 1000:.3f}' * (count > 1)}"
            f"  {step.cause}: {step.event} → {step.actions}"
            for step, (first_ms, last_ms, count) in self._steps
        )

    @contextmanager
    def explains(self) -> Generator[None]:
        """Have an assertion that fails inside say what led to it."""
        try:
            yield
        except AssertionError as error:
            if not hasattr(error, "__notes__"):
                error.add_note("what happened before, the latest last:\n" + "\n".join(self.lines()))
            raise


def _described(event: object) -> str:
    name = type(event).__name__
    if isinstance(event, StepResult):
        return f"{name} of {event.num_prefill_tokens} prompt tokens and {event.num_decode_tokens} answers"
    if isinstance(event, OwnersEvent):
        return f"{name} {event.about}"
    return f"{name} {about}" if (about := _request_of(event)) else name


def _request_of(event: Any) -> str:
    """Return whose an event is, as far as it is known: a request's id, else a worker's."""
    for part in ("request", "message", "read", "lease"):
        event = getattr(event, part, event)
    key = getattr(event, "key", None)
    return str(key[0] if key else getattr(event, "request_id", getattr(event, "worker_id", "")))


def _counted(actions: Sequence[object]) -> str:
    names = Counter(type(action).__name__ for action in actions)
    return ", ".join(f"{name} ×{number}" if number > 1 else name for name, number in names.items()) or "nothing"
