"""The official Python SDK, both generations, unmodified, against a real server."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("e2b_flow.py")


@pytest.mark.parametrize("generation", ["e2b-current", "e2b-2.45"])
def test_the_official_sdk_drives_a_sandbox(server, generation):
    python = ROOT / ".cache" / "venvs" / generation / "bin" / "python"
    assert python.exists(), "run: make setup"
    done = subprocess.run(
        [python, SCRIPT],
        env=server.sdk_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("held ") == SCRIPT.read_text().count("\n@step\n")
