"""Signals that ask a process to end."""

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass
class Noted:
    """What came.

    Attributes:
      number: of the first signal; 0 if none has come.
      patient: whether what is under way should be brought to a good end: then the first signal is only noted.
    """

    number: int = 0
    patient: bool = False


@contextmanager
def noted() -> Iterator[Noted]:
    """Within it SIGINT and SIGTERM are noted. Unless something is to be brought to a good end, and from the second one
    on, they are raised as well; such an exception can be lost in somebody's callback, so look at what was noted too.

    Raises:
      KeyboardInterrupt: with the number of the signal.
    """
    came = Noted()

    def note(number: int, frame: Any) -> None:
        again, came.number = came.number != 0, came.number or number
        if again or not came.patient:
            raise KeyboardInterrupt(came.number)

    previous = {number: signal.signal(number, note) for number in ENDING}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
