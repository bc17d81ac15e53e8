"""Tests for the files by which supervisors agree on their processes."""

from etils import epath
import pytest

from paxon.runner.hosts import membership, process_failures


def _membership(folder, process, *, count=4, least=1):
  return membership.Membership(
    run_dir=epath.Path(folder),
    coordinator_address="first:123",
    process_id=process,
    num_processes=count,
    min_processes=least,
  )


@pytest.fixture(name="members")
def _members(tmp_path):
  """Four supervisors, of which the first and the third are left."""
  found = [_membership(tmp_path, index) for index in range(4)]
  for each, generation in zip(found, (1, 0, 1, 0), strict=True):
    each.announce(generation)
  for each in (found[0], found[2]):
    each.note_fewer(1, found[0].find_present(1))
  return found


def test_a_smaller_run_is_known_to_all(members):
  for each in members:
    assert sorted(each.find_fewer().hosts) == [0, 2]
    assert each.find_fewer().generation == 1


def test_a_living_supervisor_changes_what_others_see(members):
  before = members[3].find_fewer()
  members[0].refresh_fewer()
  after = members[3].find_fewer()
  assert after != before
  assert (after.generation, after.hosts) == (before.generation, before.hosts)
  # Not after its end.
  members[0].withdraw(is_first=True)
  members[0].refresh_fewer()
  assert members[3].find_fewer() is None


def test_nobody_is_admitted_who_did_not_come_back(members):
  assert not members[0].admit(1)
  assert members[0].find_admission(1) is None
  assert members[0].find_fewer() is not None


def test_all_agree_on_a_larger_start(members):
  members[1].ask()
  assert members[1].find_admission(1) is None
  assert members[0].admit(1)
  found = [each.find_admission(1) for each in members]
  assert found[3] is None
  for each in found[:3]:
    assert (each.generation, sorted(each.hosts)) == (2, [0, 1, 2])
  assert members[1].make_flags(found[1].hosts)[:2] == [
    *("--num_processes=3", "--process_id=1")
  ]
  # It still is a smaller run, which takes the last one too.
  assert sorted(members[3].find_fewer().hosts) == [0, 1, 2]
  assert not members[0].admit(2)
  for each in members[:3]:
    each.announce(2)
  members[3].ask()
  assert members[0].admit(2)
  assert sorted(members[3].find_admission(1).hosts) == [0, 1, 2, 3]
  assert members[0].find_fewer() is None


def test_an_end_is_known_to_those_that_wait(members):
  members[1].ask()
  members[1].withdraw(is_first=False)
  assert not members[0].admit(1)
  members[0].withdraw(is_first=True)
  assert members[1].find_fewer() is None


def test_files_of_earlier_starts_are_cleared(members):
  members[1].ask()
  members[0].admit(1)
  members[2].clear()
  assert members[0].find_fewer() is None
  assert members[1].find_admission(1) is None


@pytest.mark.parametrize(
  "text", ["{", "[]", '{"generation": 1, "hosts": 3, "count": 0}']
)
def test_a_damaged_file_counts_as_missing(members, tmp_path, text):
  folder = tmp_path / process_failures.FOLDER
  for name in ("fewer.json", "more.json", "return-1.json", "member-2.json"):
    (folder / name).write_text(text)
  assert members[0].find_fewer() is None
  assert members[0].find_admission(0) is None
  assert not members[0].admit(1)
  assert sorted(members[0].find_present(1)) == [0]
