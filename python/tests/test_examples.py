"""The examples run as they stand."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def test_the_parallel_example_runs(socket):
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "objects_parallel.py")],
        env={**os.environ, "BEELINE_OBJECTS_SOCKET": socket},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert "summed 30 MiB in place" in ran.stdout, ran.stdout
