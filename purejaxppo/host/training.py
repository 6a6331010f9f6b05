"""Training as a person starts it: in segments of seconds, with checkpoints from which it goes on to the same bits."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from purejaxppo import segments
from purejaxppo.agent import envs
from purejaxppo.config import check_size
from purejaxppo.host import checkpoints, loggers, memory
from purejaxppo.host.checkpoints import Checkpoint, Found
from purejaxppo.host.experiment import Experiment
from purejaxppo.host.programs import compiled
from purejaxppo.host.signals import Noted
from purejaxppo.host.sweeps import SweepResult
from purejaxppo.plan import Chunk, Plan, make_plan
from purejaxppo.segments import Programs
from purejaxppo.types import TrainState

COST_FACTOR = 50  # writing a checkpoint takes at most a fiftieth of the time between two


@dataclasses.dataclass(frozen=True)
class Options:
    """What the host does besides training; no number of any run depends on it.

    Attributes:
      checkpoint_every: seconds between checkpoints, or longer where writing one takes over 2% of it; 0 for one after
        every segment. There is always one at the end.
      keep: the last checkpoints that are kept, besides the best by return.
      log: "tensorboard", "wandb" or both: where the curves go while they grow.
      log_runs: runs that have curves of their own there, the first ones; together with what all runs say.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    checkpoint_every: float = 60.0
    keep: int = 2
    log: tuple[str, ...] = ()
    log_runs: int = 16

    def __post_init__(self) -> None:
        if not self.checkpoint_every >= 0:
            raise ValueError(f"checkpoint_every = {self.checkpoint_every:g}: must be seconds, 0 or more")
        check_size("keep", self.keep)
        check_size("log_runs", self.log_runs, lowest=0)
        loggers.check(self.log)

    def flags(self) -> list[str]:
        """What a command line must say for these options."""
        fields = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields}
        return [f"--{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in values.items()]


class Piece(NamedTuple):
    """One segment, done."""

    update_index: int  # updates done at its end
    state: TrainState  # padded, on the devices; gone when the next piece is asked for
    metrics: dict[str, np.ndarray]  # [n, updates of the piece]; eval_return is NaN where no evaluation was


class Trained(NamedTuple):
    """How a training command ended."""

    result: SweepResult | None  # None if it was stopped before the end
    eval_return: np.ndarray | None  # [n, num_updates], NaN where no evaluation was
    update_index: int  # updates done, and in the last checkpoint
    stopped_by: int  # the signal; 0 if it came to its end


Listener = Callable[[Piece], None]


def plan_of(experiment: Experiment) -> Plan:
    """All runs as one chunk.

    Raises:
      ValueError: for an invalid setting.
    """
    config, num_seeds = experiment.config, experiment.num_seeds
    return make_plan(config, experiment.hparams, num_seeds, experiment.seed, chunk_size=num_seeds)


def chunk_of(plan: Plan, found: Found | None) -> Chunk:
    """All runs, on the devices as they lay when the checkpoint was written.

    Raises:
      ValueError: when there are fewer devices.
    """
    chunk, there = plan.chunk(0), len(jax.local_devices())
    if found is None:
        return chunk
    if found.shape.num_devices > there:
        raise ValueError(f"these runs lay on {found.shape.num_devices} devices, of which there are {there} here")
    return chunk._replace(shape=found.shape)


def train(
    directory: Path,
    experiment: Experiment,
    plan: Plan,
    options: Options,
    found: Found | None = None,
    listeners: Sequence[Listener] = (),
    came: Noted | None = None,
) -> Trained:
    """Trains all runs of an experiment from their beginning, or from a checkpoint of theirs, to their end.

    Args:
      directory: of the run, in which the checkpoints are.
      experiment: the settings; those of the checkpoint, but `total_timesteps` may be larger.
      plan: of it, by `plan_of`.
      options: of the host.
      found: the checkpoint to go on from.
      listeners: called after each segment.
      came: the signal that came, after which the segment is finished and a checkpoint written.

    Raises:
      KeyboardInterrupt: when a signal came before the first segment.
      ValueError: for runs that do not fit in memory, or a checkpoint that is not of such runs.
      OSError: when a checkpoint cannot be written; those before it stay.
    """
    started, came = time.perf_counter(), came or Noted()
    chunk = chunk_of(plan, found)
    programs = _compile(chunk, experiment)
    compile_seconds = time.perf_counter() - started
    if came.number:
        raise KeyboardInterrupt(came.number)
    beginning = None if found is None else checkpoints.read(found)
    hparams, state = _begin(chunk, programs, beginning)
    record = Record(chunk, beginning)
    spaces = envs.spaces_to_mapping(envs.spaces_of(experiment.config.env, experiment.config.env_params))
    earlier = 0.0 if beginning is None else beginning.run_seconds
    ran = time.perf_counter()

    def save(update_index: int, state: TrainState) -> None:
        taken = checkpoints.flatten(segments.take(chunk, state))
        seconds = earlier + time.perf_counter() - ran
        content = Checkpoint(experiment, update_index, taken, record.until(update_index), chunk.shape, spaces, seconds)
        checkpoints.write(directory, content, options.keep)

    done = 0 if beginning is None else beginning.update_index
    clock, stopped_by = Clock(options.checkpoint_every), 0
    came.patient = True
    for piece in pieces(chunk, programs, hparams, state, done, experiment.eval_every):
        done = piece.update_index
        record.add(piece)
        for listen in listeners:
            listen(piece)
        stopped_by = came.number
        if stopped_by or clock.due() or done == chunk.config.num_updates:
            with clock:
                save(done, piece.state)
        if stopped_by:
            break
    run_seconds = earlier + time.perf_counter() - ran
    metrics = record.until(done)
    result = None
    if done == chunk.config.num_updates:
        whole = jax.tree.map(lambda leaf: leaf[None], checkpoints.split_metrics(metrics))
        result, stopped_by = SweepResult(plan, whole, None, compile_seconds, run_seconds), 0
    return Trained(result, metrics.get("eval_return"), done, stopped_by)


def pieces(
    chunk: Chunk, programs: Programs, hparams: jax.Array, state: TrainState, done: int, eval_every: int
) -> Iterator[Piece]:
    """The segments of all runs from update `done` on. Their lengths follow the clock and change no number."""
    num_updates, per_update = chunk.config.num_updates, None
    most = segments.capacity(num_updates, chunk.shape.num_runs)
    while done < num_updates:
        stop = min(num_updates, (done // eval_every + 1) * eval_every) if eval_every else num_updates
        length = segments.next_length(per_update, min(most, stop - done))
        started = time.perf_counter()
        state, metrics = segments.advance(chunk, programs, hparams, state, length)
        per_update = (time.perf_counter() - started) / length
        done += length
        values = metrics._asdict()
        if eval_every:
            values["eval_return"] = np.full((len(chunk.seeds), length), np.nan, np.float32)
        if eval_every and done == stop:
            episodes = segments.evaluate_runs(chunk, programs, state, done)
            values["eval_return"][:, -1] = episodes.episode_return.mean(1)
        yield Piece(done, state, values)


class Record:
    """The metrics of all runs, as far as they are."""

    def __init__(self, chunk: Chunk, beginning: Checkpoint | None) -> None:
        self.size = (len(chunk.seeds), chunk.config.num_updates)
        self.arrays: dict[str, np.ndarray] = {}
        if beginning is not None:
            self._set(0, beginning.metrics)

    def add(self, piece: Piece) -> None:
        """Takes in a segment."""
        length = next(iter(piece.metrics.values())).shape[1]
        self._set(piece.update_index - length, piece.metrics)

    def until(self, update_index: int) -> dict[str, np.ndarray]:
        """[n, update_index] of each metric."""
        return {name: array[:, :update_index] for name, array in self.arrays.items()}

    def _set(self, start: int, values: dict[str, np.ndarray]) -> None:
        for name, value in values.items():
            whole = self.arrays.setdefault(name, np.empty(self.size, value.dtype))
            whole[:, start : start + value.shape[1]] = value


class Clock:
    """Says when the next checkpoint is due, and keeps their cost below a share of the time. Write within it."""

    def __init__(self, every: float) -> None:
        self.every, self.cost, self.last = every, 0.0, time.perf_counter()

    def due(self) -> bool:
        """Whether the time has come."""
        return time.perf_counter() - self.last >= (max(self.every, COST_FACTOR * self.cost) if self.every else 0)

    def __enter__(self) -> None:
        self.last = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        started, self.last = self.last, time.perf_counter()
        self.cost = self.last - started


def _compile(chunk: Chunk, experiment: Experiment) -> Programs:
    """The programs, if the runs fit in the devices."""
    num_episodes = experiment.eval_episodes if experiment.eval_every else 0
    programs = compiled(chunk.config, chunk.shape, num_episodes)
    if programs.num_bytes > (free := memory.of_device()):
        raise ValueError(
            f"num_seeds = {experiment.num_seeds}: needs {memory.text(programs.num_bytes)} of each device, of which "
            f"{memory.text(free)} are free; `purejaxppo sweep` trains as many seeds in chunks"
        )
    return programs


def _begin(chunk: Chunk, programs: Programs, beginning: Checkpoint | None) -> tuple[jax.Array, TrainState]:
    if beginning is None:
        return segments.begin(chunk, programs)
    return segments.put(chunk, checkpoints.unflatten(beginning.state, segments.state_shapes(chunk)))
