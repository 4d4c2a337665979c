"""What a copy takes from its source, and what it must not."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from agentenv.model import Guest, Resources, new_id
from agentenv.node.fork import child
from agentenv.sandbox.network import Policy
from agentenv.sandbox.record import Idempotency, Lifecycle, SandboxInfo
from agentenv.sandbox.state import State
from agentenv.snapshot.manifest import Element, Manifest

NOW = datetime.now(UTC)
SOURCE = SandboxInfo(
    new_id(), State.RUNNING, "tpl", "build", "img", NOW, NOW, Resources(2, 256), Guest({"A": "b"}),
    slot=3, access_token="secret", traffic_token="traffic", network=Policy(internet=False),
    network_pending=True, idempotency=Idempotency("key", "digest"), generation=4,
    lifecycle=Lifecycle(pause=True, resume=True), metadata={"k": "v"}, phases={"slot": 1.0},
)  # fmt: skip
SAVED = Manifest(
    "s" * 20, NOW, SOURCE.id, None, "img", SOURCE.resources, SOURCE.guest, {"engine": "gvisor"},
    (Element(1, "a" * 64),), (Element(1, "b" * 64),),
)  # fmt: skip


def test_a_copy_has_what_its_owner_chose_and_nothing_that_is_the_sources_own():
    made = child(new_id(), SOURCE, SAVED, timedelta(seconds=60))
    assert made.engine == "gvisor"
    for same in ("template_id", "build_id", "resources", "guest", "network", "lifecycle"):
        assert getattr(made, same) == getattr(SOURCE, same)
    assert made.metadata == SOURCE.metadata and made.origin == SOURCE.id
    assert made.snapshot_id == made.disk_id == SAVED.id
    assert (made.state, made.slot, made.generation) == (State.CREATING, None, 1)
    assert made.idempotency is None and not made.network_pending and not made.phases
    assert made.end_at - made.started_at == timedelta(seconds=60)


def test_tokens_are_fresh_where_the_source_has_any():
    one, other = (child(new_id(), SOURCE, SAVED, timedelta(60)) for _ in range(2))
    tokens = {t for each in (SOURCE, one, other) for t in (each.access_token, each.traffic_token)}
    assert len(tokens) == 6 and None not in tokens
    bare = child(
        new_id(), replace(SOURCE, access_token=None, traffic_token=None), SAVED, timedelta(9)
    )
    assert (bare.access_token, bare.traffic_token) == (None, None)
