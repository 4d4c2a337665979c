"""Images from recipes, small ones: one run of mmdebstrap each."""

from dataclasses import replace

import pytest
from tests.library import opened

from agentenv.errors import InfraError
from agentenv.image.reference import DebianImage
from agentenv.image.source import quiet
from agentenv.layer.verify import verify
from agentenv.template.shipped import assemble, recipes
from agentenv.template.shipped.assemble import Assembled

SMALL = replace(
    recipes.find("base"), packages=DebianImage(recipes.SUITE), hooks=('echo own > "$1/etc/own"',)
)


@pytest.fixture
async def library(tmp_path):
    async with opened(tmp_path / "home") as library:
        yield library


async def test_a_recipe_is_assembled_once_and_goes_on_from_another(library, monkeypatch, lock):
    monkeypatch.setattr(recipes, "SHIPPED", {**recipes.SHIPPED, "base": SMALL})
    monkeypatch.setattr(recipes, "LOCK", lock)
    interpreter = recipes.find("code-interpreter-v1")
    made = await assemble.image(library.catalog, interpreter)
    base = await library.catalog.find(str(recipes.reference(SMALL)))
    assert made.diff_ids[0] == base.diff_ids[0] and len(made.diff_ids) == 3
    assert made.parts[1] == base.parts[1]
    assert made.config.user == "user" and made.config.working_dir == "/home/user"
    verdict = await verify(library.layers, made, library.catalog.settings)
    assert verdict.differences == () and verdict.entries > 1000

    again = []
    assert (await assemble.image(library.catalog, SMALL, lambda *_: again.append(1))).id == base.id
    assert not again


async def test_a_layer_below_has_no_bytes_here():
    source = Assembled(recipes.CONFIG, assemble.stored(["sha256:" + "0" * 64]), ())
    with pytest.raises(InfraError, match="removed meanwhile"):
        source.blob(source.layers[0], quiet)
