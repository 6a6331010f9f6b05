"""Pictures of made-up sweeps: which there are, and that what they show stands where it belongs."""

import math
import types
import warnings

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from purejaxppo import results
from purejaxppo.config import Config
from purejaxppo.host import sweep_axes, sweep_plots
from purejaxppo.types import Metrics

INF = math.inf
PNG = b"\x89PNG\r\n\x1a\n"


def sweep(levels, num_seeds=4, broken=(), configs=None):
    """A finished sweep whose setting s returns about levels[s]; of the settings in `broken` every run diverged.

    What lies beyond the updates of a setting would be seen: its returns are 1e9.
    """
    configs = tuple(configs or [Config(total_timesteps=20 * 512)] * len(levels))
    shape = (len(levels), num_seeds, max(config.num_updates for config in configs))
    returns = np.asarray(levels, float)[:, None, None] + np.arange(num_seeds)[:, None] / 10 + np.zeros(shape)
    finite = np.ones(shape, bool)
    finite[list(broken)] = False
    for index, config in enumerate(configs):
        returns[index, :, config.num_updates :] = 1e9
        finite[index, :, config.num_updates :] = False
    fields = dict.fromkeys(Metrics._fields, np.zeros(shape, np.float32))
    fields |= {"episode_return": returns, "num_episodes": np.ones(shape, int), "all_finite": finite}
    return types.SimpleNamespace(configs=configs, metrics=Metrics(**fields))


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    """The figures that were saved, by the name of their file; a warning while drawing is an error."""
    saved, save = {}, Figure.savefig

    def savefig(figure, path, **options):
        saved[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield saved


def draw(path, result, axes):
    """The names of the pictures; each is a PNG."""
    paths = sweep_plots.pictures(result, axes, path)
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    return [path.name for path in paths]


GRID = {"clip_eps": (0.2, 0.2, 0.2, 0.1, 0.1, 0.1), "learning_rate": (1e-3, 1e-2, 1e-4) * 2}


def test_the_axes_choose_the_pictures(tmp_path):
    assert draw(tmp_path, sweep([1.0]), {}) == ["curves.png"]
    assert draw(tmp_path, sweep(range(6)), GRID) == ["curves.png", "heat_map.png"]
    assert draw(tmp_path, sweep(range(3)), {"learning_rate": (1e-3, 1e-2, 1e-4)}) == ["curves.png", "marginals.png"]
    half = {name: column[:5] for name, column in GRID.items()}
    assert sweep_axes.is_grid(GRID)
    assert not sweep_axes.is_grid(half)
    three = {
        "clip_eps": (0.1, 0.2) * 4,
        "gamma": (0.9, 0.9, 0.99, 0.99) * 2,
        "activation": ("tanh",) * 4 + ("elu",) * 4,
    }
    assert draw(tmp_path, sweep(range(8), num_seeds=1), three) == ["curves.png", "marginals.png"]


def test_the_heat_map_puts_every_number_in_its_cell(tmp_path, figures):
    draw(tmp_path, sweep([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], num_seeds=1), GRID)
    panel = figures["heat_map.png"].axes[0]
    assert (panel.get_ylabel(), panel.get_xlabel()) == ("clip_eps", "learning_rate")
    assert [label.get_text() for label in panel.get_yticklabels()] == ["0.1", "0.2"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    cells = {text.get_position(): text.get_text() for text in panel.texts}
    assert cells == {(1, 1): "10", (2, 1): "20", (0, 1): "30", (1, 0): "40", (2, 0): "50", (0, 0): "60"}
    np.testing.assert_array_equal(panel.images[0].get_array(), [[60, 40, 50], [30, 10, 20]])
    (frame,) = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    assert tuple(frame.get_center()) == pytest.approx((0, 0))  # the best


def test_the_heat_map_marks_what_cannot_be_told_from_the_best(tmp_path, figures):
    draw(tmp_path, sweep([10.0, 20.0, 59.8, 40.0, 50.0, 60.0], num_seeds=8, broken=[1]), GRID)
    panel = figures["heat_map.png"].axes[0]
    frames = {tuple(np.round(frame.get_center())): frame.get_linewidth() for frame in panel.patches}
    assert set(frames) == {(0, 0), (0, 1)}
    assert frames[0, 0] > frames[0, 1]
    assert {text.get_position(): text.get_text() for text in panel.texts}[2, 1] == "-inf\n8 of 8 diverged"


def test_curves_are_in_environment_steps_and_end_with_their_setting(tmp_path, figures):
    configs = [
        Config(total_timesteps=total, num_steps=steps) for total, steps in ((8192, 128), (8192, 512), (4096, 64))
    ]
    draw(tmp_path, sweep([1.0, 2.0, 3.0], configs=configs), {"num_steps": (128, 512, 64)})
    lines = figures["curves.png"].axes[0].lines
    assert [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines] == [
        (4096, pytest.approx(3.15)),  # from the best down
        (8192, pytest.approx(2.15)),
        (8192, pytest.approx(1.15)),
    ]


def test_a_larger_grid_has_a_panel_a_value_of_its_first_axis(tmp_path, figures):
    axes = {"clip_eps": (0.1, 0.2, 0.3, 0.4, INF) * 3, "gamma": (0.9,) * 5 + (0.99,) * 5 + (0.5,) * 5}
    draw(tmp_path, sweep(range(15)), axes)
    panels = [panel for panel in figures["curves.png"].axes if panel.axison]
    assert [panel.get_title() for panel in panels] == [f"clip_eps = {x}" for x in ("0.1", "0.2", "0.3", "0.4", "inf")]
    ends = [sorted(line.get_ydata()[-1] for line in panel.lines) for panel in panels]
    np.testing.assert_allclose(ends, [[x + 0.15, x + 5.15, x + 10.15] for x in range(5)])
    assert [bool(panel.get_xlabel()) for panel in panels] == [False, False, True, True, True]  # nothing hangs below


def test_of_many_settings_the_best_stand_out(tmp_path, figures):
    draw(tmp_path, sweep(np.arange(20.0)[::-1], num_seeds=2), {"learning_rate": tuple(np.logspace(-5, -2, 20))})
    figure = figures["curves.png"]
    assert [line.get_ydata()[-1] for line in figure.axes[0].lines] == pytest.approx(np.arange(19.05, 12, -1))
    (background,) = [lines for lines in figure.axes[0].collections if len(lines.get_paths()) == 12]
    assert max(path.vertices[:, 1].max() for path in background.get_paths()) == pytest.approx(11.05)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "19.1 [19, 19.1]: learning_rate=1e-05"
    assert labels[-1].startswith("the other 12 settings")


def test_marginals_show_each_axis_by_its_kind(tmp_path, figures):
    rng = np.random.default_rng(0)
    axes = {
        "learning_rate": tuple(10 ** rng.uniform(-5, -2, 20)),
        "ent_coef": tuple(rng.uniform(0.0001, 0.05, 20)),
        "num_epochs": tuple(rng.permutation([1, 4, 16, 4] * 5).tolist()),
        "hidden_sizes": ((64, 64), (256,)) * 10,
    }
    draw(tmp_path, sweep(np.arange(20.0), broken=[3]), axes)
    panels = figures["marginals.png"].axes[:4]
    assert [panel.get_xlabel() for panel in panels] == list(axes)
    assert [panel.get_xscale() for panel in panels] == ["log", "linear", "linear", "linear"]
    assert [label.get_text() for label in panels[2].get_xticklabels()] == ["1", "4", "16"]
    assert [label.get_text() for label in panels[3].get_xticklabels()] == ["64 x 64", "256"]
    for panel, column in zip(panels[:2], list(axes.values())[:2], strict=True):
        points = np.concatenate([points.get_offsets() for points in panel.collections if points.get_offsets().any()])
        shown = {round(float(x), 9): y for x, y in points}
        assert shown[round(column[7], 9)] == pytest.approx(7.15)
        assert shown[round(column[3], 9)] == 0.02  # at the foot: it diverged


def test_every_environment_has_pictures_of_its_own(tmp_path, figures):
    configs = [Config(env=env, total_timesteps=4096) for env in ("CartPole-v1", "Acrobot-v1") for _ in range(3)]
    axes = {"env": ("CartPole-v1",) * 3 + ("Acrobot-v1",) * 3, "gamma": (0.9, 0.99, 0.999) * 2}
    names = draw(tmp_path, sweep([1.0, 2.0, 3.0, -100.0, -90.0, -80.0], configs=configs), axes)
    assert names == [f"{kind}-{env}.png" for env in ("CartPole-v1", "Acrobot-v1") for kind in ("curves", "marginals")]
    ends = [line.get_ydata()[-1] for line in figures["curves-Acrobot-v1.png"].axes[0].lines]
    assert ends == pytest.approx([-79.85, -89.85, -99.85])


@pytest.mark.parametrize(("num_seeds", "broken"), [(1, ()), (3, (0, 1, 2, 3, 4, 5))])
def test_one_seed_and_nothing_but_diverged_runs(tmp_path, num_seeds, broken):
    result = sweep([5.0] * 6, num_seeds, broken)
    assert draw(tmp_path, result, GRID) == ["curves.png", "heat_map.png"]
    assert draw(tmp_path, result, GRID | {"gamma": (0.9, 0.99) * 3}) == ["curves.png", "marginals.png"]
    assert draw(tmp_path, sweep([5.0], num_seeds, broken[:1]), {}) == ["curves.png"]


def test_runs_in_which_no_episode_ended(tmp_path):
    result = sweep([5.0] * 6)
    result.metrics.num_episodes[:] = 0
    assert draw(tmp_path, result, GRID) == ["curves.png", "heat_map.png"]
    assert draw(tmp_path, result, GRID | {"gamma": (0.9, 0.99) * 3}) == ["curves.png", "marginals.png"]


def test_one_setting_quotes_what_the_summary_says(tmp_path, figures):
    draw(tmp_path, sweep([5.0], broken=[0]), {})
    assert figures["curves.png"].axes[0].get_title(loc="left").endswith("final return -inf [-inf, -inf]")


def test_settings_that_overlap_the_best():
    final = [(5.0, 4.0, 6.0), (4.5, 3.0, 4.0), (3.0, 2.0, 3.9), (-INF, -INF, 4.5), (math.nan, math.nan, math.nan)]
    rows = [{"final_return": {"interquartile_mean": mean, "interval_95": [low, high]}} for mean, low, high in final]
    best, close, other = sweep_plots.BEST, sweep_plots.CLOSE, sweep_plots.OTHER
    assert sweep_plots._kinds(rows) == [best, close, other, close, other]
    assert sweep_plots._kinds(rows[3:]) == [other, other]
    assert results.best(rows) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5e-4, "0.00025"),
        (np.float32(0.3), "0.3"),
        (0.9995, "0.9995"),
        (INF, "inf"),
        (128, "128"),
        (True, "true"),
        ("tanh", "tanh"),
        ((64, 64), "64 x 64"),
        ((), "none"),
        ((("gravity", 9.8), ("length", 1)), "gravity 9.8, length 1"),
    ],
)
def test_values_are_written_short(value, text):
    assert sweep_axes.text(value) == text


def test_the_order_and_the_kind_of_an_axis():
    assert sweep_axes.levels((3, INF, 0.5, 3)) == [0.5, 3, INF]
    assert sweep_axes.levels(("tanh", "elu", "tanh")) == ["tanh", "elu"]
    assert sweep_axes.levels((True, False)) == [True, False]
    assert sweep_axes.is_continuous(range(7))
    assert not sweep_axes.is_continuous(range(6))
    assert not sweep_axes.is_continuous([*range(7), INF])
    assert not sweep_axes.is_continuous("abcdefgh")
    assert sweep_axes.is_logarithmic(np.logspace(-4, -2, 9))
    assert not sweep_axes.is_logarithmic(np.logspace(-4, -3.1, 9))  # less than a decade
    assert not sweep_axes.is_logarithmic(np.linspace(0.001, 1, 9))
    assert not sweep_axes.is_logarithmic([0.0, *np.logspace(-4, -2, 9)])


def test_strips_stand_side_by_side_in_order_of_height():
    places = sweep_axes.strips(("a", "b", "a", "a"), np.array([2.0, 5.0, -INF, 1.0]))
    np.testing.assert_allclose(places, [0.3, 1.0, -0.3, 0.0])
