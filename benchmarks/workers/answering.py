"""What every trainer's process does: it reads its work, trains whenever it is told a seed, and answers in JSON.

Imports the standard library alone: it runs under the interpreter of every peer.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Train = Callable[[int], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], Train]) -> None:
    """Reads seeds from the standard input, a line each, until it ends; answers each with a line.

    An answer holds the `seconds` that the training took, this process's largest resident set so far in MiB as
    `memory`, and what the training told: `compile`, the part of the seconds that compiling took, and `returns`.

    Args:
      prepare: work, see `side_by_side.WORK` -> a function that trains with a seed and waits until that is done.
    """
    train = prepare(json.loads(sys.argv[1]))
    for line in sys.stdin:
        started = time.perf_counter()
        told = train(int(line))
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(json.dumps({"seconds": seconds, "memory": memory, **told}), flush=True)
