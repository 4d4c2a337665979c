"""A layer that the writer made once (tests/golden/layers) is read by the extension as what it was.

The writer's side, byte for byte, is rust/blocks/tests/golden.rs.
"""

from __future__ import annotations

from pathlib import Path

from agentenv import _core

GOLDEN = Path(__file__).parents[2] / "golden/layers"
BLOCK, BLOCKS = 4096, 70


def test_a_golden_layer_is_what_it_was(tmp_path):
    (tmp_path / "store").mkdir()
    objects = _core.Objects(str(tmp_path / "store"))
    layer = _core.Layer.decode((GOLDEN / "table").read_bytes())
    name, stack = (GOLDEN / "names").read_text().split()
    assert (layer.id, layer.blocks) == (name, BLOCKS)
    assert layer.encode() == (GOLDEN / "table").read_bytes()
    assert _core.stack_id(BLOCKS, [(name, 0)]) == stack
    (pack,) = layer.packs
    objects.put_file(f"pack/{pack}", GOLDEN / "pack")
    size = (GOLDEN / "pack").stat().st_size
    assert {chunk[0] for chunk in _core.pack_chunks(objects, pack, size)} == {
        chunk[0] for chunk in layer.chunks()
    }
    assert _core.verify_chunks(objects, layer.chunks()) == []
    flat = tmp_path / "flat"
    flat.touch()
    _core.unpack_layer(objects, layer, flat, 0)
    found = flat.read_bytes().ljust(BLOCKS * BLOCK, b"\0")
    for number in range(BLOCKS):
        block = found[number * BLOCK : (number + 1) * BLOCK]
        if not (2 <= number < 41 or number >= 50) or (number % 5 == 4 and number < 30):
            assert block == bytes(BLOCK), number
        elif number % 5 == 0 and number < 64:
            assert block == bytes([number + 1]) * BLOCK, number
        else:
            assert block != bytes(BLOCK), number
