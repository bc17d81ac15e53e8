"""A test of the comparison of saves."""

import pytest

from paxon.tools.benchmarks import store_saves


def test_a_disk_is_always_measured(capsys, monkeypatch):
  monkeypatch.setattr(store_saves, "_PLACES", ("disk",))
  assert store_saves.main(["--megabytes=8", "--repeats=2"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "| Store | Save blocks | Complete after | Restore |"
  assert lines[2].startswith("| disk | ")
  assert lines[2].count(" s (") == 3


def test_wrong_sizes_are_rejected(capsys):
  with pytest.raises(SystemExit):
    store_saves.main(["--megabytes=1"])
  assert "--megabytes must be at least 8" in capsys.readouterr().err
