from datetime import UTC, datetime

import pytest

from agentenv.cluster.contract import SnapshotInfo


@pytest.mark.parametrize(
    ("names", "wanted"), [(("team/saved:one",), "team/saved:one"), ((), "tpl:default")]
)
def test_a_snapshots_id_is_its_name_or_its_templates(names, wanted):
    assert SnapshotInfo("tpl", "b", names, "s", datetime.now(UTC)).id == wanted
