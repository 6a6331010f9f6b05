"""What the README says to type, typed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_is_short_and_has_both_examples():
    assert len(README.splitlines()) < 120
    assert len(BLOCKS) == 2


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=["api", "sweep"])
def test_the_python_examples_run_as_written(block):
    finished = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout


def test_every_file_that_the_readme_points_to_exists():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target
