"""What a template's snapshot fixes for the sandboxes made from it."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from agentenv.errors import UserError
from agentenv.model import Guest, ImageConfig, Resources
from agentenv.node.origin import fixed_size, guest_of, made_by
from agentenv.sandbox.record import NewSandbox
from agentenv.snapshot.manifest import Manifest

SIZE = Resources(1, 512, 8192)
SAVED = Manifest(
    "snap", datetime.now(UTC), "sbx", None, "img", SIZE, Guest(), {"engine": "gvisor"}, (), ()
)


def test_sizes_are_those_it_was_saved_with():
    asked = NewSandbox("base", memory_mib=512)
    assert fixed_size(asked, SAVED) == SIZE
    with pytest.raises(UserError) as caught:
        fixed_size(replace(asked, disk_mib=1), SAVED)
    assert caught.value.code == "fixed_by_template" and "diskSizeMB" in caught.value.message


def test_so_is_the_engine():
    assert {made_by(SAVED, asked) for asked in (None, "auto", "gvisor")} == {"gvisor"}
    with pytest.raises(UserError) as caught:
        made_by(SAVED, "qemu")
    assert caught.value.code == "fixed_by_template"
    assert "with the engine qemu" in caught.value.fix
    assert "aenv template init --engine qemu" in caught.value.fix


def test_a_request_adds_to_an_images_variables():
    image = ImageConfig(env=("A=1", "B=2", "bad"), user="", working_dir="/w")
    assert guest_of(image, {"B": "3"}) == Guest({"A": "1", "B": "3"}, None, "/w", image.volumes)
