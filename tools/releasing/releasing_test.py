"""Checks of a release, its archives and its requirements."""

import io
import pathlib
import subprocess
import tarfile

from packaging import requirements
import pytest

from paxon.tools.dependencies import workspace
from paxon.tools.releasing import (
  archives,
  changelog,
  release_checks,
  release_files,
  release_main,
  upgrade_main,
)

_ROOT = workspace.find_root(pathlib.Path(__file__))
_ENTRY = "## 0.2.0 (2026-12-01)\n\n### Added\n- A.\n- B.\n\n### Fixed\n- C.\n"


@pytest.fixture(name="checkout")
def _checkout(tmp_path):
  """A repository whose version 0.2.0 can be released; 0.1.0 was."""
  root = tmp_path / "checkout"
  root.mkdir()
  (root / "__init__.py").write_text('__version__ = "0.2.0"\n')
  (root / changelog.FILE).write_text(f"# Changelog\n\n{_ENTRY}")
  names = ("-c", "user.name=A", "-c", "user.email=a@example.com")
  for arguments in (
    ("init", "--quiet"),
    ("add", "."),
    (*names, "commit", "--quiet", "--message=Begin"),
    ("tag", "v0.1.0"),
    ("tag", "v-unrelated"),
  ):
    release_checks.run_git(root, *arguments)
  return root


def test_entries_have_changes_by_category():
  (entry,) = changelog.parse(f"# Changelog\n\nText.\n\n{_ENTRY}")
  assert entry.version == "0.2.0"
  assert str(entry.date) == "2026-12-01"
  assert entry.changes == {"Added": "- A.\n- B.", "Fixed": "- C."}
  assert entry.to_markdown() == (
    "# Paxon 0.2.0\n\n## Added\n- A.\n- B.\n\n## Fixed\n- C.\n"
  )


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("(2026-12-01)", "", "'## 0.2.0' must be `## VERSION"),
    ("2026-12-01", "soon", "date of 0.2.0 must be .*, got 'soon'"),
    ("Added", "New", "0.2.0 has the category 'New'; each of Added, Changed"),
    ("Fixed", "Added", "has the category 'Added' twice"),
    ("- C.", "C.", "Fixed of 0.2.0 must be a list"),
    ("### ", "", "0.2.0 has no category"),
  ],
)
def test_wrong_entries_are_named(old, new, message):
  with pytest.raises(ValueError, match=message):
    changelog.parse(_ENTRY.replace(old, new))


def test_this_changelog_has_categories():
  newest, *_ = changelog.parse((_ROOT / changelog.FILE).read_text())
  assert newest.version == release_checks.read_version(_ROOT)
  assert newest.changes


@pytest.mark.parametrize(
  ("version", "message"),
  [
    ("0.2", None),
    ("0.2.0rc1", None),
    ("v0.2.0", "must be written 0.2.0, got 'v0.2.0'"),
    ("0.2.0-rc1", "must be written 0.2.0rc1"),
    ("0.2.0+mine", "must be written 0.2.0, got"),
    ("two", "must be one of PEP 440"),
  ],
)
def test_versions_are_those_of_pep_440(version, message):
  if message is None:
    release_checks.check_version(version)
    return
  with pytest.raises(ValueError, match=message):
    release_checks.check_version(version)


def test_a_clean_checkout_can_be_released(checkout):
  assert release_checks.find_problems(checkout, "0.2.0") == []
  assert release_checks.find_previous(checkout, "0.2.0") == "v0.1.0"


def test_reasons_against_a_release_are_named(checkout):
  (checkout / "new.py").touch()
  text = (checkout / changelog.FILE).read_text()
  unreleased = text.replace("2026-12-01", changelog.UNRELEASED)
  (checkout / changelog.FILE).write_text(unreleased)
  release_checks.run_git(checkout, "tag", "v0.2.0")
  release_checks.run_git(checkout, "tag", "v0.3.0")
  dirty, tagged, older, dated = release_checks.find_problems(checkout, "0.2.0")
  assert dirty.startswith("The checkout must be clean; 2 files differ")
  assert tagged == "The tag v0.2.0 exists: 0.2.0 was released."
  assert older == "VERSION must be above 0.3.0, the newest tag, got 0.2.0."
  assert dated == (
    "CHANGELOG.md: 0.2.0 must have a date, got `not released yet`."
  )
  first, *_, last = release_checks.find_problems(checkout, "0.4.0")
  assert first == "__init__.py: __version__ must be '0.4.0', got '0.2.0'."
  assert last.endswith("the first entry must be that of 0.4.0, got 0.2.0.")


def test_a_wrong_command_line_is_one_line(tmp_path, capsys):
  (tmp_path / "file").touch()
  assert release_main.main(["v1"]) == 2
  assert release_main.main(["99.0", f"--output={tmp_path}"]) == 2
  version, output = capsys.readouterr().err.splitlines()
  assert version == "release: VERSION must be written 1, got 'v1'."
  assert output == (
    f"release: --output must be an empty folder, got {tmp_path}."
  )


def _make_archive(path, names, *, time, owner, permissions=0o644):
  with tarfile.open(path, "w:gz") as archive:
    for name in names:
      member = tarfile.TarInfo(name)
      member.size, member.mtime, member.uid = len(name), time, owner
      member.mode = permissions
      archive.addfile(member, io.BytesIO(name.encode()))


def test_archives_do_not_depend_on_times_owners_and_order(tmp_path):
  a, b, c = (tmp_path / f"{name}.tar.gz" for name in "abc")
  _make_archive(a, ["x", "y"], time=1.5, owner=0)
  _make_archive(b, ["y", "x"], time=99, owner=1000)
  _make_archive(c, ["x", "y"], time=1.5, owner=0, permissions=0o755)
  for path in (a, b, c):
    archives.normalize(path, epoch=1_700_000_000)
  assert archives.digest(a) == archives.digest(b) != archives.digest(c)
  with tarfile.open(a) as archive:
    (x, y) = archive.getmembers()
    assert archive.extractfile(y).read() == b"y"
  assert (x.mtime, x.uid, x.name) == (1_700_000_000, 0, "x")


def test_builds_that_differ_are_named(tmp_path, monkeypatch):
  def build(root, commit, out, around):
    path = out / "paxon.whl"
    path.write_text(around.time_zone)
    return [path]

  monkeypatch.setattr(archives, "build", build)
  first, second = archives.SURROUNDINGS
  (tmp_path / "out").mkdir()
  same = archives.build_twice(tmp_path, "abc", tmp_path / "out", (first, first))
  assert list(same) == ["paxon.whl"]
  with pytest.raises(ValueError, match=r"builds of abc differ in paxon\.whl"):
    archives.build_twice(tmp_path, "abc", tmp_path / "out", (first, second))


@pytest.mark.parametrize("platform", release_files.LOCKS)
def test_frozen_requirements_are_the_pins_of_the_locks(platform):
  text = release_files.freeze(_ROOT, platform, "0.2.0")
  blocks = text.replace(" \\\n", " ").splitlines()[2:]
  pins = [
    requirements.Requirement(block.partition(" --hash=")[0]) for block in blocks
  ]
  assert all(" --hash=sha256:" in block for block in blocks)
  names = [f"{pin.name} {pin.marker}" for pin in pins]
  assert len(set(names)) == len(names)
  (jax,) = (
    pin
    for pin in pins
    if pin.name == "jax"
    and pin.marker.evaluate({"python_full_version": "3.11"})
  )
  lock = (_ROOT / "third_party/python/requirements_lock.txt").read_text()
  assert f"jax{jax.specifier} ; python_full_version < '3.12'" in lock
  extras = {"cpu": set(), "cuda": {"cuda13"}, "tpu": {"tpu"}}
  assert jax.extras == extras[platform]
  assert {"tokenizers", "uvicorn", "fiddle"} <= {pin.name for pin in pins}


def test_locks_with_different_pins_are_an_error():
  a = "one==1 \\\n    --hash=sha256:a\n    # via x\n"
  assert release_files.merge({"a": a, "b": a}) == (
    "one==1 \\\n    --hash=sha256:a\n"
  )
  with pytest.raises(ValueError, match="b has One==2, another lock one==1"):
    release_files.merge({"a": a, "b": "One==2 \\\n    --hash=sha256:b\n"})


def test_the_container_installs_the_files_of_the_release():
  text = release_files.make_container_file("0.2.0", "paxon-0.2.0.whl")
  instructions = text.replace("\\\n", "").splitlines()
  (copy,) = (line for line in instructions if line.startswith("COPY"))
  assert copy.split()[1:-1] == [
    "SHA256SUMS",
    "requirements-${PLATFORM}.txt",
    "paxon-0.2.0.whl",
  ]
  (run,) = (line for line in instructions if line.startswith("RUN"))
  subprocess.run(["sh", "-n", "-c", run.removeprefix("RUN ")], check=True)
  assert "--require-hashes" in run
  assert "sha256sum --check" in run
  assert "{" not in text.replace("${", "")


def test_losses_of_a_resumed_run_are_compared():
  alone = {1: 4.0, 4: 2.0, 8: 1.0}
  resumed = {1: 4.0, 4: 2.002, 8: 1.01}
  before, after = upgrade_main.compare_losses(resumed, alone)
  assert before == pytest.approx(1e-3)
  assert after == pytest.approx(1e-2)
  with pytest.raises(upgrade_main.UpgradeError, match=r"has steps \[1, 4\]"):
    upgrade_main.compare_losses({1: 4.0, 4: 2.0}, alone)


def test_an_unknown_commit_is_one_line(capsys):
  assert upgrade_main.main(["not-a-commit"]) == 2
  assert "check_upgrade: no commit 'not-a-commit'" in capsys.readouterr().err


def test_the_changed_default_of_a_run_is_allowed(tmp_path):
  script = tmp_path / "tools" / "python"
  script.parent.mkdir()
  # As the command line answers to a run of another configuration.
  script.write_text(
    "#!/bin/sh\ncase $* in\n*--allow_changes=a,b*)"
    " echo resuming from the checkpoint of step 4;;\n"
    "*) echo use the same values, or --allow_changes=a,b; exit 2;;\nesac\n"
  )
  script.chmod(0o755)
  assert upgrade_main.resume(tmp_path, tmp_path / "run") == "a,b"
  script.write_text("#!/bin/sh\necho step 1\n")
  with pytest.raises(upgrade_main.UpgradeError, match="began again"):
    upgrade_main.resume(tmp_path, tmp_path / "run")
