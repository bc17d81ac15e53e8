"""A published run is planned again."""

import pytest

from paxon.runner.plan import testing, topology
from paxon.tasks.plans import published

_BY_NAME = {row.name: row for row in published.read()}


@pytest.mark.nightly
def test_a_stored_row_is_what_its_plan_says(monkeypatch):
  row = _BY_NAME["torchtitan-8b"]
  testing.target(row.target)
  if wheels := topology.missing_for_cudnn():
    pytest.skip(f"needs {' and '.join(wheels)}: --config=plan_cudnn")
  found = []
  monkeypatch.setattr(published, "_write", found.append)
  published.update([row])
  (rows,) = found
  new = next(each for each in rows if each.name == row.name)
  assert new.simulated == pytest.approx(row.simulated, rel=0.02)
  assert new.ideal == pytest.approx(row.ideal, rel=0.001)
