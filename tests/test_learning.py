"""What the shipped configs learn, over all their seeds."""

import dataclasses
from pathlib import Path

import pytest

import purejaxppo as ppo
from purejaxppo import results
from purejaxppo.host import experiment
from purejaxppo.types import Metrics

CONFIGS = Path(__file__).parents[1] / "configs"


def trained(name, **changes):
    """Metrics [num_seeds, num_updates] of a shipped config."""
    settings = experiment.read(CONFIGS / f"{name}.toml")
    config = dataclasses.replace(settings.config, **changes)
    result = ppo.sweep(config, settings.hparams, settings.num_seeds)
    return Metrics(*(leaf[0] for leaf in result.metrics))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "floor"), [("cartpole", 490.0), ("acrobot", -90.0), ("catch", 0.95)])
def test_the_interquartile_mean_reaches_its_floor(name, floor):
    metrics = trained(name)
    assert results.interquartile_mean(results.final_return(metrics)) >= floor
    assert not results.diverged(metrics)
