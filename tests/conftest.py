"""Fixtures of suites that need the whole product: a server of each engine and one base image a
session."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.leaks import nothing_left
from tests.server import serving_copy, with_base

ENGINES = ("gvisor", "qemu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What stands on a server is tested with each engine. Where QEMU emulates that takes long:
    beside what is ``both``, and what is ``only`` for it, it is for `make test-full`."""
    kept: list[pytest.Item] = []
    for item in items:
        engine = engine_of(item)
        only = item.get_closest_marker("only")
        if engine and only and engine not in only.args:
            continue
        if engine == "qemu" and not only and not item.get_closest_marker("both"):
            item.add_marker("full")
        kept.append(item)
    config.hook.pytest_deselected(items=[each for each in items if each not in set(kept)])
    items[:] = kept


def engine_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("any_engine") if callspec else None


@pytest.fixture(scope="session")
def scratch():
    """A folder with a short path on the disk, gone at the end."""
    path = Path(tempfile.mkdtemp(prefix="aenv-", dir="/var/tmp"))
    path.chmod(0o755)  # engines run as users of their own and must reach their files
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session", params=ENGINES)
def any_engine(request):
    return request.param


@pytest.fixture(scope="session")
def base(scratch):
    """A server that never runs, with the image `base` in its home, to be copied."""
    with with_base(scratch) as made:
        yield made


@pytest.fixture(scope="session")
def server(scratch, base, any_engine):
    """A server with the template `base`; suites that kill or fill things start their own."""
    with nothing_left(scratch) as watched:
        with serving_copy(scratch, base, AENV_ENGINE=any_engine) as running:
            yield running
        # Every server of the session has a log, which outlives its home.
        watched.extend(log.with_suffix("") for log in scratch.glob("h*.log"))
