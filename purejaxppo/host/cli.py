"""The command line: `purejaxppo train CONFIG.toml`, `resume DIR`, `evaluate DIR`, `sweep SWEEP.toml` and so on.

Bad input ends with one line on standard error and exit code 2 before anything is written; a run that did not stay
finite with exit code 1 after everything is saved; a training that was asked to end with 130 or 143 after a checkpoint.
"""

import atexit
import dataclasses
import functools
import gc
import math
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import (
    cache,
    checkpoints,
    chunks,
    files,
    flags,
    loggers,
    progress,
    resuming,
    signals,
    store,
    training,
)
from purejaxppo.host import experiment as experiments
from purejaxppo.host.checkpoints import Found
from purejaxppo.host.experiment import Experiment
from purejaxppo.host.policy import Policy
from purejaxppo.host.training import Options
from purejaxppo.plan import Plan
from purejaxppo.types import Metrics

USAGE = """usage: purejaxppo COMMAND ... ; purejaxppo COMMAND --help lists what it takes

  train CONFIG.toml   train every seed of one experiment as one program; leaves a run directory
  resume DIR          go on with a training that was stopped or killed, or on to more steps; bitwise as if it never was
  evaluate DIR        episodes of every run, with its most likely actions and with sampled ones
  render DIR OUT.gif  an episode of the best run as a moving picture
  sweep SWEEP.toml    train a grid, a random search or a list of settings; goes on where it was interrupted
  plot DIR            draw a finished run or sweep again
  lab                 the CartPole lab of the trust-region family, over many seeds
  rlhf CONFIG.toml    RLHF on token sequences: reference, reward models and RL; goes on where it was interrupted
  bandit              the 300-seed statistics of the bandit, with intervals

Compiled programs are kept in the user's cache directory; with --no-compilation-cache a command compiles its own."""
NO_CACHE = "--no-compilation-cache"


@dataclasses.dataclass(frozen=True)
class Train(Experiment):
    """Train every seed of an experiment as one program, and leave a run directory.

    Attributes:
      out: run directory; by default runs/NAME-TIME.
      options: of the host.
    """

    out: Path | None = None
    options: tyro.conf.OmitArgPrefixes[Options] = dataclasses.field(default_factory=Options)

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return Experiment(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Experiment)})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Tracing makes many objects and little garbage: an eighth of the time to the first update. What is left at the end
    # of the process would be searched for garbage once more, for a quarter of a second.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    try:
        if argv[0] not in COMMANDS:
            raise ValueError(f"{argv[0]}: there is no such command; allowed: {', '.join(COMMANDS)}")
        if NO_CACHE in argv:
            argv = [argument for argument in argv if argument != NO_CACHE]
        else:
            cache.use()
        with warnings.catch_warnings():
            warnings.showwarning = _note  # type: ignore[assignment]
            return COMMANDS[argv[0]](argv[1:])
    except ValueError as error:
        print(f"purejaxppo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("purejaxppo: stopped; nothing was saved", file=sys.stderr)
        return 130


def _note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    """A warning in one line."""
    text = " ".join(str(message).split())
    print(f"purejaxppo: {text}" if category is UserWarning else f"{category.__name__}: {text}", file=sys.stderr)


def train(argv: list[str]) -> int:
    """`purejaxppo train`."""
    name = "run"
    default = Train()
    if argv and not argv[0].startswith("-"):
        path = Path(argv.pop(0))
        name = path.stem
        default = Train(**vars(experiments.read(path)))
    elif not {"-h", "--help"} & set(argv):
        raise ValueError("train: must be followed by the path of a TOML file")
    arguments: Train = flags.parse(Train, argv, "train CONFIG.toml", default=default)
    experiment, out = arguments.experiment, arguments.out or files.fresh(name)
    ppo.use_all_cores()
    plan = training.plan_of(experiment)
    files.claim(out)
    with resuming.held(out):
        files.replace(out / "config.toml", experiments.to_toml(experiment).encode())
        return _train(out, experiment, plan, arguments.options)


def resume(argv: list[str]) -> int:
    """`purejaxppo resume`."""
    directory = _directory(argv, "resume")
    arguments: Train = flags.parse(Train, argv, "resume DIR", default=Train(**vars(resuming.begun(directory))))
    if arguments.out is not None:
        raise ValueError(f"--out {arguments.out}: a resumed run stays in its directory")
    experiment = arguments.experiment
    with resuming.held(directory):
        found, notes = resuming.prepare(directory, experiment)
        for note in notes:
            print(f"purejaxppo: {note}", file=sys.stderr)
        done = 0 if found is None else found.update_index
        if done == experiment.config.num_updates and (directory / "summary.json").exists():
            print(f"{directory}: is finished; a larger --config.total-timesteps would go on from here")
            return 0
        ppo.use_all_cores(at_least=1 if found is None else found.shape.num_devices)
        plan = training.plan_of(experiment)
        checkpoints.clean(directory, done)
        (directory / "summary.json").unlink(missing_ok=True)
        files.replace(directory / "config.toml", experiments.to_toml(experiment).encode())
        return _train(directory, experiment, plan, arguments.options, found)


def evaluate(argv: list[str]) -> int:
    """`purejaxppo evaluate`."""
    from purejaxppo.host.evaluation import evaluate as function

    directory = _directory(argv, "evaluate")
    report = flags.parse(functools.partial(function, directory), argv, "evaluate DIR")
    title = f"{report['env']} after {report['update_index']} updates: {report['num_episodes']} episodes of each run"
    rows = Table("actions", "return", "95% interval", "length", title=title)
    for name in ("deterministic", "sampled"):
        found = report[name]
        length = np.mean(found["episode_length_per_run"])
        rows.add_row(name, *_shown(found["interquartile_mean"], *found["interval_95"]), f"{length:.4g}")
    Console().print(rows)
    print(f"{directory}/evaluation.json")
    return 0


def render(argv: list[str]) -> int:
    """`purejaxppo render`."""
    from purejaxppo.host.render import render as draw

    directory = _directory(argv, "render")
    if not argv or argv[0].startswith("-"):
        raise ValueError("render: the run directory must be followed by the path of a GIF")
    path = Path(argv.pop(0))

    def function(run: str = "best", num_episodes: int = 1, seed: int = 0, checkpoint: str = "last") -> int:
        """Draw episodes of a trained policy with gymnax's own visualiser.

        Args:
          run: index of a run, or "best": the one with the highest final return.
          num_episodes: how many, one after another.
          seed: chooses the episodes.
          checkpoint: "last", "best" by return, or the updates of one that is kept.
        """
        returns = draw(Policy.load(directory, run, checkpoint), path, num_episodes, seed)
        print(f"{path}: return {', '.join(f'{value:.4g}' for value in returns)}")
        return 0

    return flags.parse(function, argv, "render DIR OUT.gif")


@dataclasses.dataclass(frozen=True)
class Sweep(Experiment):
    """Train every setting of a sweep with every seed; the same command goes on where it was interrupted.

    Attributes:
      out: directory of the sweep; by default runs/NAME.
      chunk_size: runs that are trained at once; by default what is fast and fits in memory.
      executor: local, or ray for a cluster.
      ray_address: host:port of the cluster; without it Ray is started on this machine.
      threshold: a return; the environment steps until it is reached are reported.
      dry_run: only say what would be trained, in which memory and time.
    """

    out: Path | None = None
    chunk_size: int | None = None
    executor: str = "local"
    ray_address: str | None = None
    threshold: float | None = None
    dry_run: bool = False


def sweep(argv: list[str]) -> int:
    """`purejaxppo sweep`."""
    from purejaxppo.host import sweep_command

    default, axes, name = Sweep(), experiments.ONE, "sweep"
    if argv and not argv[0].startswith("-"):
        path = Path(argv.pop(0))
        base, axes = experiments.read_sweep(path)
        default, name = Sweep(**vars(base)), path.stem
    elif not {"-h", "--help"} & set(argv):
        raise ValueError("sweep: must be followed by the path of a TOML file")
    arguments: Sweep = flags.parse(Sweep, argv, "sweep SWEEP.toml", default=default)
    base = Experiment(arguments.num_seeds, arguments.seed, arguments.config, arguments.hparams)
    if arguments.eval_every:
        raise ValueError(f"eval_every = {arguments.eval_every}: is read by `train` alone")
    if arguments.ray_address is not None and arguments.executor != "ray":
        raise ValueError(f"--ray-address {arguments.ray_address}: is read only with --executor ray")
    experiments.check_base(base, axes)
    out, size = arguments.out or Path("runs") / name, (base.num_seeds, base.seed)
    begun = chunks.find(out)
    ppo.use_all_cores(at_least=1 if begun is None else chunks.num_devices(begun))
    settings = ppo.settings(base.config, base.hparams, experiments.points_of(axes))
    if arguments.dry_run:
        return sweep_command.dry_run(settings, *size, arguments.chunk_size, out)
    options = {name: getattr(arguments, name) for name in ("chunk_size", "executor", "ray_address")}
    try:
        return sweep_command.train(
            out, experiments.to_toml(base, axes), settings, *size, arguments.threshold, **options
        )
    except KeyboardInterrupt:
        print(f"purejaxppo: stopped; {out} keeps what is finished, the same command goes on", file=sys.stderr)
        return 130


def plot(argv: list[str]) -> int:
    """`purejaxppo plot`."""
    from purejaxppo.host import sweep_command

    def run_plot(directory: tyro.conf.Positional[Path], /, threshold: float | None = None) -> int:
        """Draw a finished run or sweep again.

        Args:
          directory: of the run or sweep.
          threshold: a return; the environment steps until it is reached are reported.
        """
        return sweep_command.plot(directory, threshold)

    return flags.parse(run_plot, argv, "plot")


def lab(argv: list[str]) -> int:
    """`purejaxppo lab`."""
    from purejaxppo.host.lab import run_lab

    ppo.use_all_cores()
    return flags.parse(run_lab, argv, "lab")


def bandit(argv: list[str]) -> int:
    """`purejaxppo bandit`."""
    from purejaxppo.host.bandit import run_bandit

    ppo.use_all_cores()
    return flags.parse(run_bandit, argv, "bandit")


def rlhf(argv: list[str]) -> int:
    """`purejaxppo rlhf`."""
    from purejaxppo.host import rlhf as command

    if argv and not argv[0].startswith("-"):
        path = Path(argv.pop(0))
    elif {"-h", "--help"} & set(argv):
        path = Path("CONFIG.toml")
    else:
        raise ValueError("rlhf: must be followed by the path of a TOML file")

    def run(
        out: Path | None = None,
        num_seeds: int | None = None,
        seed: int | None = None,
        num_updates: int | None = None,
        eval_responses: int | None = None,
    ) -> int:
        """Train policies on token sequences, with what comes before; the same command goes on where it was interrupted.

        Args:
          out: directory; by default runs/NAME.
          num_seeds: runs of each setting, in place of the file's.
          seed: of the whole experiment, in place of the file's.
          num_updates: of each run, in place of the file's.
          eval_responses: responses that each policy is measured by, in place of the file's.
        """
        changes = {"num_seeds": num_seeds, "seed": seed, "num_updates": num_updates, "eval_responses": eval_responses}
        experiment = command.read(path, **changes)
        ppo.use_all_cores()
        return command.run_rlhf(experiment, out or Path("runs") / path.stem)

    return flags.parse(run, argv, "rlhf CONFIG.toml")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "evaluate": evaluate,
    "render": render,
    "sweep": sweep,
    "plot": plot,
    "lab": lab,
    "bandit": bandit,
    "rlhf": rlhf,
}


def _train(out: Path, experiment: Experiment, plan: Plan, options: Options, found: Found | None = None) -> int:
    """Trains to the end, or to where somebody or something ends it."""
    config = experiment.config
    name = f"{experiment.num_seeds} seeds of {config.env}"
    steps, done = experiment.num_seeds * config.batch_size, 0 if found is None else found.update_index
    try:
        with signals.noted() as came:
            with (
                loggers.opened(options.log, out, experiment, options.log_runs, done) as log,
                progress.training_bar(Console(stderr=True), name, steps, done, config.num_updates) as moved,
            ):
                listeners = [moved, lambda piece: log(piece.update_index, piece.metrics)]
                trained = training.train(out, experiment, plan, options, found, listeners, came)
            if trained.result is not None:
                summary = store.write(out, experiment, trained.result, trained.eval_return)
                return _report(out, summary, Metrics(*(leaf[0] for leaf in trained.result.metrics)), config)
        ended = f"stopped after update {trained.update_index} of {config.num_updates}"
        code = 128 + trained.stopped_by
    except KeyboardInterrupt as stop:
        ended, code = "stopped at once", 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except OSError as error:
        ended, code = f"{out}: cannot be written to ({error.strerror or error})", 1
    last = max(checkpoints.indices(out), default=None)
    kept = "there is no checkpoint yet" if last is None else f"the last checkpoint is of update {last}"
    again = " ".join(["purejaxppo resume", shlex.quote(str(out)), *options.flags()])
    print(f"purejaxppo: {ended}; {kept}; to go on: {again}", file=sys.stderr)
    return code


def _directory(argv: list[str], command: str) -> Path:
    """The run directory that a command begins with."""
    if not argv or argv[0].startswith("-"):
        raise ValueError(f"{command}: must be followed by a run directory")
    return Path(argv.pop(0))


def _report(out: Path, summary: dict[str, Any], metrics: Metrics, config: ppo.Config) -> int:
    """The last lines of a training command, and its exit code."""
    final = summary["final_return"]
    rows = Table("steps per run", "return", "95% interval", title=f"{config.env}: interquartile mean of the seeds")
    updates, returns = results.return_curve(metrics, max_points=5)
    for update, value, low, high in zip(
        updates, results.interquartile_mean(returns), *results.interval(returns), strict=True
    ):
        rows.add_row(f"{update * config.batch_size:,}", *_shown(value, low, high))
    rows.add_section()
    rows.add_row("last tenth", *_shown(final["interquartile_mean"], *final["interval_95"]))
    Console().print(rows)
    print(
        f"{summary['steps_per_second']:,} environment steps/s; "
        f"compiled in {summary['compile_seconds']:.1f} s, ran {summary['run_seconds']:.1f} s"
    )
    print(f"{out}/: curves.png, summary.json, metrics.npz, checkpoints/, config.toml")
    if summary["diverged"]:
        runs = ", ".join(f"{run} (from update {update} on)" for run, update in summary["diverged"].items())
        print(f"purejaxppo: not finite: run {runs}; everything is saved in {out}", file=sys.stderr)
        return 1
    return 0


def _shown(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """A value and its interval as text; a dash for what is not known."""
    texts = ["-" if x is None or math.isnan(x) else f"{x:.4g}" for x in (value, low, high)]
    return texts[0], f"{texts[1]} to {texts[2]}"


if __name__ == "__main__":
    sys.exit(main())
