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

from purejaxppo import ops, results
from purejaxppo.agent import acting, envs
from purejaxppo.agent.envs import Spaces
from purejaxppo.config import Config, config_from_mapping
from purejaxppo.host import checkpoints, files
from purejaxppo.host.checkpoints import Checkpoint, Found

READ = ("params/", "obs_stats/")  # the leaves of a TrainState that a policy reads
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """A trained policy with its normaliser. Needs neither its environment nor its optimiser.

    Attributes:
      config: of the run that trained it.
      spaces: of its environment.
      leaves: parameters of its network and statistics of its normaliser, by the paths that they have in a checkpoint.
    """

    config: Config
    spaces: Spaces
    leaves: dict[str, np.ndarray]

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
            leaves = {name: leaf[index] for name, leaf in content.state.items() if name.startswith(READ)}
            return cls(content.experiment.config, envs.spaces_from_mapping(content.spaces), leaves)
        if run != "best" or checkpoint != "last":
            raise ValueError(f"{path}: is not a run directory, so there is no run = {run!r} or checkpoint to choose")
        return _read(path)

    def __call__(self, obs: Any) -> jax.Array:
        """The most likely action of each observation.

        Args:
          obs: one observation or any batch of them, raw, as the environment shows them or flattened.

        Returns:
          Actions as the environment takes them: [...] int32, or [..., D] where an action has D parts.

        Raises:
          ValueError: for observations of another shape, or a policy that remembers (see `step`).
        """
        self._check_forgetful()
        return self.step(obs)[0]

    def sample(self, obs: Any, key: jax.Array) -> jax.Array:
        """An action of each observation, drawn from the policy; as calling it.

        Args:
          key: () typed key.
        """
        self._check_forgetful()
        return self.step(obs, key=key)[0]

    def step(self, obs: Any, memory: Any = (), key: jax.Array | None = None) -> tuple[jax.Array, Any]:
        """Actions, and what a recurrent policy remembers after them; `first_memory` is what to begin an episode with.

        Args:
          obs: as of calling it.
          memory: after the step before, one an observation.
          key: () typed key to draw the actions with; without one they are the most likely ones.
        """
        return _act(self.config, self.spaces, *self.trees, jnp.asarray(obs), memory, key)

    def first_memory(self, *batch_shape: int) -> Any:
        """What a recurrent policy remembers at the start of episodes; () of others."""
        return acting.first_memory(self.config, self.spaces, batch_shape)

    @functools.cached_property
    def trees(self) -> tuple[Any, Any]:
        """The parameters and the statistics of the normaliser, as the network takes them."""
        # NumPy arrays: made while something is traced, they must not belong to that.
        tree: dict[str, Any] = {}
        for name, leaf in self.leaves.items():
            *folders, last = name.split("/")
            functools.reduce(lambda place, folder: place.setdefault(folder, {}), folders, tree)[last] = leaf
        return tree["params"], ops.Moments(**tree["obs_stats"]) if "obs_stats" in tree else ()

    def save(self, path: Path | str) -> None:
        """Writes it as one file, which `load` reads: an npz of its leaves and of what they are for."""
        settings = dataclasses.asdict(self.config) | {"env_params": dict(self.config.env_params)}
        spaces = envs.spaces_to_mapping(self.spaces)
        about = json.dumps({"config": settings, "spaces": spaces, "versions": files.versions()})
        with files.partial(Path(path)) as written, written.open("wb") as file:
            np.savez(file, about=np.array(about), **self.leaves)  # type: ignore[arg-type]

    def export(self, path: Path | str) -> None:
        """Writes the program observations [batch, ...] -> most likely actions [batch, ...], for any size of batch; of a
        recurrent policy, (observations, memory [batch, H]) -> (actions, memory).

        What it takes to run it is JAX, with flatbuffers, alone:

            policy = jax.export.deserialize(bytearray(pathlib.Path(path).read_bytes()))
            actions = policy.call(obs)
        """
        (batch,) = jax.export.symbolic_shape("batch")
        dtype, shape = jnp.float32, self.spaces.obs_shape
        if self.spaces.num_values:
            dtype, shape = jnp.int32, ()
        elif self.spaces.num_masked:
            shape = (self.spaces.num_features,)
        inputs = [jax.ShapeDtypeStruct(shape, dtype), *jax.tree.leaves(self.first_memory())]
        arguments = [jax.ShapeDtypeStruct((batch, *leaf.shape), leaf.dtype) for leaf in inputs]

        def program(obs: jax.Array, *memory: jax.Array) -> Any:
            action, after = acting.act(self.config, self.spaces, *self.trees, obs, memory[0] if memory else ())
            return (action, after) if memory else action

        exported = jax.export.export(jax.jit(program), platforms=PLATFORMS)(*arguments)
        files.replace(Path(path), bytes(exported.serialize()))

    def _check_forgetful(self) -> None:
        if self.config.network == "gru":
            raise ValueError("this policy remembers: call policy.step(obs, memory), first with policy.first_memory()")


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


def _read(path: Path) -> Policy:
    try:
        with np.load(path) as arrays:
            leaves = dict(arrays)
        about = json.loads(str(leaves.pop("about")))
        return Policy(config_from_mapping(about["config"]), envs.spaces_from_mapping(about["spaces"]), leaves)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is neither a run directory nor a saved policy ({error})") from None


_act = jax.jit(acting.act, static_argnums=(0, 1))
