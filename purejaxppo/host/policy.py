"""Policies to take away: loaded from a run directory, kept as one small file, exported to run without this package."""

import dataclasses
import functools
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from purejaxppo import results
from purejaxppo.agent import acting
from purejaxppo.agent.envs import Spaces
from purejaxppo.config import Config, config_from_mapping
from purejaxppo.host import checkpoints, files
from purejaxppo.host.checkpoints import Checkpoint, Found

PARAMS = "params/"  # where they stand among the leaves of a TrainState
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A trained policy. Needs neither its environment nor its optimiser.

    Attributes:
      config: of the run that trained it.
      spaces: of its environment.
      params: of its network, by the paths that they have in a checkpoint.
    """

    config: Config
    spaces: Spaces
    params: dict[str, np.ndarray]

    @classmethod
    def load(cls, path: Path | str, run: int | str = "best", checkpoint: int | str = "last") -> "Policy":
        """The policy of a run directory, or of a file that `save` wrote.

        Args:
          path: of the directory or the file.
          run: index of a run, or "best": the one with the highest final return. Of a directory.
          checkpoint: "last", "best" (by the return of all runs), or the updates of one that is kept. Of a directory.

        Raises:
          ValueError: for what holds no policy, or a run or checkpoint that there is not.
        """
        path = Path(path)
        if path.is_dir():
            content = checkpoints.read(find_run(path, checkpoint))
            index = choose_run(content, run)
            params = {name: leaf[index] for name, leaf in content.state.items() if name.startswith(PARAMS)}
            return cls(content.experiment.config, spaces_from(content.spaces), params)
        if run != "best" or checkpoint != "last":
            raise ValueError(f"{path}: is not a run directory, so there is no run = {run!r} or checkpoint to choose")
        return _read(path)

    def __call__(self, obs: Any) -> jax.Array:
        """The most likely action of each observation.

        Args:
          obs: one observation or any batch of them, as the environment shows them or flattened.

        Returns:
          Actions [...] int32.

        Raises:
          ValueError: for observations of another shape.
        """
        return _act(self.config, self.spaces, self.tree, jnp.asarray(obs))

    def sample(self, obs: Any, key: jax.Array) -> jax.Array:
        """An action of each observation, drawn from the policy; as calling it.

        Args:
          key: () typed key.
        """
        return _sample(self.config, self.spaces, self.tree, jnp.asarray(obs), key)

    @functools.cached_property
    def tree(self) -> Any:
        """The parameters as the network takes them."""
        tree: dict[str, Any] = {}
        for name, leaf in self.params.items():
            *folders, last = name.removeprefix(PARAMS).split("/")
            place = functools.reduce(lambda place, folder: place.setdefault(folder, {}), folders, tree)
            place[last] = leaf  # of NumPy: made while something is traced, it must not belong to that
        return tree

    def save(self, path: Path | str) -> None:
        """Writes it as one file, which `load` reads: an npz of the parameters and of what they are for."""
        settings = dataclasses.asdict(self.config) | {"env_params": dict(self.config.env_params)}
        about = json.dumps({"config": settings, "spaces": self.spaces._asdict(), "versions": files.versions()})
        with files.partial(Path(path)) as written, written.open("wb") as file:
            np.savez(file, about=np.array(about), **self.params)  # type: ignore[arg-type]

    def export(self, path: Path | str) -> None:
        """Writes the program observations [batch, ...] -> most likely actions [batch], for any size of batch.

        What it takes to run it is JAX alone:

            policy = jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
            actions = policy.call(obs)
        """
        dtype, shape = (jnp.int32, ()) if self.spaces.num_values else (jnp.float32, self.spaces.obs_shape)
        (batch,) = jax.export.symbolic_shape("batch")
        program = jax.jit(functools.partial(acting.act, self.config, self.spaces, self.tree))
        exported = jax.export.export(program, platforms=PLATFORMS)(jax.ShapeDtypeStruct((batch, *shape), dtype))
        files.replace(Path(path), bytes(exported.serialize()))


def find_run(directory: Path, which: int | str = "last") -> Found:
    """A checkpoint of a run directory, chosen as in `Policy.load`; a damaged one is passed over with a warning.

    Raises:
      ValueError: when there is none.
    """
    found, notes = checkpoints.find(directory, which)
    if found is None:
        raise ValueError(f"{directory}: {notes[-1] if notes else 'holds no checkpoint of a training run'}")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return found


def choose_run(content: Checkpoint, run: int | str) -> int:
    """The index of a run: of the one with the highest final return, if that is asked for.

    Raises:
      ValueError: for a run that there is not, or when no run has a return yet.
    """
    num_runs = content.experiment.num_seeds
    if run == "best":
        scores = np.full(num_runs, np.nan)
        if content.update_index:
            scores = results.final_return(checkpoints.split_metrics(content.metrics))
        if np.isnan(scores).all():
            raise ValueError("run = 'best': no run has a return yet; choose one by its index")
        return int(np.nanargmax(scores))
    if str(run) not in map(str, range(num_runs)):
        raise ValueError(f"run = {run!r}: must be 'best' or one of the {num_runs} runs, 0 to {num_runs - 1}")
    return int(run)


def spaces_from(values: dict[str, Any]) -> Spaces:
    """The spaces that a file says."""
    return Spaces(**values | {"obs_shape": tuple(values["obs_shape"])})


def _read(path: Path) -> Policy:
    try:
        with np.load(path) as arrays:
            params = dict(arrays)
        about = json.loads(str(params.pop("about")))
        return Policy(config_from_mapping(about["config"]), spaces_from(about["spaces"]), params)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is neither a run directory nor a saved policy ({error})") from None


_act = jax.jit(acting.act, static_argnums=(0, 1))
_sample = jax.jit(acting.sample, static_argnums=(0, 1))
