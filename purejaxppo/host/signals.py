"""Signals that ask a process to end."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noted() -> Iterator[Callable[[], int]]:
    """Within it SIGINT and SIGTERM are only noted, so that work can be brought to a good end; a second one ends it.

    Yields:
      A function: the signal that came, or 0.

    Raises:
      KeyboardInterrupt: at the second signal.
    """
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield lambda: received[0] if received else 0
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
