"""The official Python SDK, both generations and both faces, unmodified, against a real server."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOWS = ["e2b_flow.py", "e2b_async_flow.py", "e2b_suspend_flow.py", "e2b_template_flow.py"]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    "generation", [pytest.param("e2b-current", marks=pytest.mark.both), "e2b-2.45"]
)
def test_the_official_sdk_drives_a_sandbox(server, generation, flow):
    python = ROOT / ".cache" / "venvs" / generation / "bin" / "python"
    script = Path(__file__).with_name(flow)
    assert python.exists(), "run: make setup"
    server.hold(script.read_text().count("\n@step\n"), python, script)
