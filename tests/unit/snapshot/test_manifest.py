"""Manifests: what a snapshot needs, across versions of its parts."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from agentenv.errors import InfraError
from agentenv.model import Guest, Resources
from agentenv.snapshot import manifest as m
from agentenv.snapshot.manifest import Element, Manifest

LAYER, OTHER = "a" * 64, "b" * 64
HERE = {
    "engine": "qemu", "version": "10.0.2", "accelerator": "tcg", "cpu": "max", "kernel": "6.12",
    "tsc_khz": 2_000_000,
}  # fmt: skip
MADE = Manifest(
    id="s" * 20,
    created=datetime(2026, 12, 2, tzinfo=UTC),
    sandbox_id="b" * 20,
    parent=None,
    image_id="i" * 20,
    resources=Resources(1),
    guest=Guest({"A": "b"}, "user", None, ("/data",)),
    features={**HERE},
    disk=(Element(8, LAYER), Element(8, raw="d1"), Element(8, raw="d2")),
    memory=(Element(4, LAYER), Element(4, raw="m1"), Element(4, raw="m2")),
    state=m.pack(b"\0state\xff"),
)


def test_it_survives_its_record_and_its_object():
    assert m.from_doc(m.to_doc(MADE)) == MADE == m.from_json(m.to_json(MADE))
    assert m.unpack(MADE.state) == b"\0state\xff"
    assert m.to_row(MADE).sandbox_id == MADE.sandbox_id


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"id": 3}', b"\xff"])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(InfraError) as caught:
        m.from_json(data)
    assert caught.value.code == "snapshot_damaged"


def test_layers_must_be_named_as_layers_are():
    doc = m.to_doc(MADE)
    doc["disk"][0]["layer"] = "../../etc/passwd"
    with pytest.raises(InfraError):
        m.from_doc(doc)


def test_elements_in_a_row_become_one_in_each_stack():
    merged = MADE.replaced((Element(4, raw="m1"), Element(4, raw="m2")), Element(4, raw="new"))
    assert merged.memory == (Element(4, LAYER), Element(4, raw="new"))
    assert merged.disk == MADE.disk
    stored = merged.replaced((Element(4, raw="new"),), Element(4, OTHER))
    assert stored.raws == {"d1", "d2"} and stored.layers == {LAYER, OTHER}
    assert MADE.replaced((Element(4, raw="m2"), Element(4, raw="m1")), Element(4, LAYER)) == MADE
    assert (
        replace(MADE, memory=None).replaced((Element(4, raw="m1"),), Element(4, LAYER)).memory
        is None
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"engine": "gvisor"}, "gvisor"),
        ({"version": "9.2"}, "version 9.2"),
        ({"accelerator": "kvm"}, "kvm"),
        ({"cpu": "EPYC"}, "EPYC"),
        ({"tsc_khz": 2_100_000}, "2100000"),
    ],
)
def test_another_engine_is_named(change, word):
    why = m.misfit({**HERE, **change}, HERE)
    assert why and word in why


def test_what_differs_harmlessly_fits():
    assert m.misfit({**HERE, "kernel": "6.1", "tsc_khz": 2_000_500}, HERE) is None
