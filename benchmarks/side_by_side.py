"""Trainers side by side: every peer in a virtual environment of its own, every training in a process of its own.

A process is told its work once, as JSON. It trains each time it is told a seed, answers with a line of JSON, and
sleeps in between: so trainings alternate without being compiled again, and cannot disturb one another.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WORKERS = Path(__file__).parent / "workers"

# The work of all trainers, unless told otherwise. `num_episodes` evaluates the final policies; 0 does not.
WORK: dict[str, Any] = {
    "env": "CartPole-v1",
    "total_timesteps": 500_000,
    "num_runs": 1,
    "num_envs": 4,
    "num_steps": 128,
    "num_epochs": 4,
    "num_minibatches": 4,
    "hidden_sizes": [64, 64],
    "activation": "tanh",
    "learning_rate": 2.5e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_eps": 0.2,
    "vf_coef": 0.5,
    "ent_coef": 0.0,
    "max_grad_norm": 0.5,
    "num_episodes": 0,
}


class Trainer(NamedTuple):
    """How a trainer is installed and started."""

    worker: str  # its file among the workers
    requirements: tuple[str, ...]  # for pip; () runs this checkout under this interpreter
    packages: tuple[str, ...]  # whose versions belong to its numbers
    work: Mapping[str, Any] = {}  # what it is told besides
    single_jit: bool = True  # many runs are one program
    evaluates: bool = False  # gives returns of its final policies


TRAINERS = {
    "ours": Trainer("ours.py", (), ("purejaxppo", "jax", "gymnax", "flax", "optax"), evaluates=True),
    "rejax": Trainer(
        "with_rejax.py", ("rejax==0.1.3", "gymnax==0.0.9"), ("rejax", "jax", "gymnax", "flax", "optax"), evaluates=True
    ),
    # Its orthogonal initialiser waits for itself for ever under vmap on two cores with jaxlib 0.10.
    "purejaxrl": Trainer(
        "with_purejaxrl.py",
        ("gymnax==0.0.9", "jax<0.10", "distrax", "flax", "optax", "brax"),
        ("jax", "gymnax", "flax", "optax"),
    ),
    "sbx": Trainer("with_sb3.py", ("sbx-rl",), ("sbx-rl", "jax", "gymnasium"), {"module": "sbx"}, False),
    "sb3": Trainer(
        "with_sb3.py",
        ("stable-baselines3",),
        ("stable-baselines3", "torch", "gymnasium"),
        {"module": "stable_baselines3"},
        False,
    ),
}


class TrainerError(RuntimeError):
    """A trainer could not be installed, started, or did not answer; one line says why."""


def default_folder() -> Path:
    """Where peers are installed unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "purejaxppo-peers"


def install(name: str, folder: Path) -> None:
    """Makes the virtual environment of a peer below the folder, unless it stands there already.

    Raises:
      TrainerError: if it cannot be made, or pip fails.
    """
    requirements, mark = TRAINERS[name].requirements, folder / name / "requirements.txt"
    wanted = "".join(f"{requirement}\n" for requirement in requirements)
    if not requirements or (mark.exists() and mark.read_text() == wanted):
        return
    try:
        venv.create(folder / name, with_pip=True, clear=True)
        pip = [interpreter(name, folder), "-m", "pip", "install", "--quiet", *requirements]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=1800)
    except subprocess.CalledProcessError as error:
        raise TrainerError(last_line(str(error.stderr))) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainerError(last_line(str(error))) from None
    mark.write_text(wanted)


def interpreter(name: str, folder: Path) -> str:
    """The Python of a trainer."""
    return str(folder / name / "bin" / "python") if TRAINERS[name].requirements else sys.executable


def versions(name: str, folder: Path) -> str:
    """Of a trainer's Python and packages, in words."""
    code = (
        "import importlib.metadata, platform, sys\n"
        "print(', '.join(f'{name} {importlib.metadata.version(name)}' for name in sys.argv[1:]), end=', ')\n"
        "print('Python', platform.python_version())"
    )
    command = [interpreter(name, folder), "-c", code, *TRAINERS[name].packages]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return finished.stdout.strip() or last_line(finished.stderr)


class Training:
    """A trainer in a process of its own, in a `with` block that ends it."""

    def __init__(
        self, name: str, folder: Path, settings: Mapping[str, str] | None = None, timeout: float = 600, **changes: Any
    ) -> None:
        """Starts it.

        Args:
          name: of the trainer.
          folder: that peers are installed below.
          settings: environment variables.
          timeout: seconds that an answer may take.
          changes: of `WORK`.
        """
        trainer = TRAINERS[name]
        work = WORK | dict(trainer.work) | changes
        environment = os.environ | {"PYTHONPATH": "" if trainer.requirements else str(ROOT)} | dict(settings or {})
        self.timeout = timeout
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by __exit__
        self.process = subprocess.Popen(
            [interpreter(name, folder), str(WORKERS / trainer.worker), json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
        )

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()
        self.errors.close()

    def train(self, seed: int) -> dict[str, Any]:
        """Trains with a seed.

        Returns:
          The answer, see `answering.serve`.

        Raises:
          TrainerError: if the process ended or took too long.
        """
        timer = threading.Timer(self.timeout, self.process.kill)
        timer.start()
        try:
            print(seed, file=self.process.stdin, flush=True)
            for line in self.process.stdout:  # type: ignore[union-attr]
                if line.startswith('{"seconds"'):  # and not what the trainer itself prints
                    return json.loads(line)
        except BrokenPipeError:
            pass
        finally:
            stuck = not timer.is_alive()
            timer.cancel()
        raise TrainerError(f"no answer within {self.timeout:g} s" if stuck else self.end())

    def peak(self, seed: int, seconds: float) -> tuple[float, bool]:
        """Trains with a seed, and ends the process if that takes longer than so many seconds. Linux only.

        Returns:
          The process's largest resident set in MiB until then, and whether the training was finished.

        Raises:
          TrainerError: if the process ended by itself.
        """
        seen: list[float] = []

        def stop() -> None:
            seen.append(high_water(self.process.pid))
            self.process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            return self.train(seed)["memory"], True
        except TrainerError:
            if not seen:
                raise
            return seen[0], False
        finally:
            timer.cancel()

    def end(self) -> str:
        """Waits until the process has finished, since it is told no more seeds.

        Returns:
          The last line of its errors.
        """
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.process.wait()
        self.errors.seek(0)
        return last_line(self.errors.read())


def high_water(pid: int) -> float:
    """The largest resident set of a running process so far, MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10


def last_line(text: str) -> str:
    """The last line of what a program complained about; pip's own word for it where there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it ended without a word"])[-1]
