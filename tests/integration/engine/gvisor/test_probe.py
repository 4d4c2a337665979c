"""The look whether gVisor runs programs, at programs that do and do not."""

import shutil
from pathlib import Path

import pytest

from agentenv.engine.gvisor import probe
from agentenv.errors import InfraError


async def test_runsc_runs_a_program_here():
    await probe.must_run(Path(shutil.which("runsc")))


@pytest.mark.parametrize("script", ["echo no seccomp >&2; exit 1", "exec sleep 600"])
async def test_one_that_cannot_is_found_out(script, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "DEADLINE", 1.0)
    program = tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(InfraError) as caught:
        await probe.must_run(program)
    assert caught.value.code == "engine_failed"
