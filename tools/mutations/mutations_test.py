"""The list of faults, and the runner with a stand-in for Bazel.

The list is compared with the sources of the checkout, as in checkout_test: so
the target is `external` and `local`.
"""

import ast
import collections
import json
import pathlib
import stat
import subprocess
import sys
import textwrap

import pytest

from paxon.tools.dependencies import workspace
from paxon.tools.mutations import mutate_main, planted_copy

_ROOT = workspace.find_root(pathlib.Path(__file__))
_FAULTS = planted_copy.read_faults()

# The least number of faults in each area, by folders.
_SPREAD = {
  ("layers",): 25,
  ("learners",): 12,
  ("inputs",): 8,
  ("sharding",): 4,
  ("pipeline", "quantization"): 6,
  ("runner/checkpoints",): 6,
  (
    "runner/training",
    "runner/session",
    "runner/evaluation",
    "runner/generation",
  ): 6,
  ("runner/endpoint",): 4,
  ("runner/plan", "runner/planning"): 4,
}


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file(fault):
  text = (_ROOT / fault.file).read_text()
  planted = fault.plant(text)
  assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))


def test_names_and_changes_are_unique():
  names = collections.Counter(fault.name for fault in _FAULTS)
  assert names.most_common(1)[0][1] == 1
  assert all(name.isidentifier() and name.islower() for name in names)
  assert len({fault.digest for fault in _FAULTS}) == len(_FAULTS)


@pytest.mark.parametrize("folders", _SPREAD)
def test_each_area_has_faults(folders):
  found = [
    fault
    for fault in _FAULTS
    if fault.file.startswith(tuple(f"{folder}/" for folder in folders))
  ]
  assert len(found) >= _SPREAD[folders]


# Fails, in the tier and for the targets that the value in a/x.py names.
_BAZEL = """\
#!{python}
import json, os, pathlib, signal, sys, time
if sys.argv[1] == "shutdown":
  sys.exit(0)
value = pathlib.Path("a/x.py").read_text().split('"')[1]
tier = "nightly" if "--config=nightly" in sys.argv else "default"
ends_early = "--notest_keep_going" in sys.argv
with open({log!r}, "a") as file:
  file.write(f"{{value}} {{tier}} {{sys.argv[-1]}} {{ends_early}}\\n")
given = dict(a[2:].split("=", 1) for a in sys.argv if a.startswith("--b"))
if value == "interrupted":
  os.kill(os.getppid(), signal.SIGINT)
  time.sleep(0.3)
  sys.exit(8)
if value == "unbuilt":
  print("ERROR: a/BUILD:3:1: no such target")
  sys.exit(1)
if sys.argv[-1] == "//a/..." and value != "killed" and value != "broken":
  sys.exit(4)
message = {{
  ("killed", "default"): "assert 1 == 2",
  ("everywhere", "default"): "assert 1 == 2",
  ("night", "nightly"): "assert 1 == 2",
  ("broken", "default"): "collection failure",
  ("unnamed", "default"): "NameError: name 'x' is not defined",
  ("endless", "default"): None,
}}.get((value, tier), "")
if message == "":
  sys.exit(0)
output = []
if message:
  report = pathlib.Path({log!r}).with_name("test.xml")
  report.write_text(
    '<testsuites><testsuite><testcase name="test_good"/>'
    f'<testcase name="test_bad"><failure message="{{message}}">text</failure>'
    '</testcase></testsuite></testsuites>'
  )
  output = [{{"name": "test.xml", "uri": report.as_uri()}}]
status = "FAILED" if message else "TIMEOUT"
events = [
  {{"id": {{"testResult": {{"label": "//a:good_test"}}}},
    "testResult": {{"status": "PASSED"}}}},
  {{"id": {{"testResult": {{"label": "//a:x_test"}}}},
    "testResult": {{"status": status, "testActionOutput": output}}}},
]
text = "".join(json.dumps(event) + "\\n" for event in events) + '{{"id'
pathlib.Path(given["build_event_json_file"]).write_text(text)
# Of a test that ends the run; not 3, which is that of failed tests.
sys.exit(1)
"""


def _make_fault(value):
  return planted_copy.Fault(
    name=f"is_{value}", file="a/x.py", before='"right"', after=f'"{value}"'
  )


class _Checkout:
  """A repository with one file, and a stand-in for Bazel."""

  def __init__(self, folder, monkeypatch):
    self.root = folder / "checkout"
    self.log = folder / "log"
    self.output = folder / "out" / "results.jsonl"
    self._bazel = folder / "bazel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (self.root / "a").mkdir(parents=True)
    (self.root / "a" / "x.py").write_text('value = "right"\n')
    self._bazel.write_text(
      _BAZEL.format(python=sys.executable, log=str(self.log))
    )
    self._bazel.chmod(self._bazel.stat().st_mode | stat.S_IXUSR)
    self.git("init", "--quiet")
    self.commit()

  def git(self, *arguments):
    settings = ("user.name=a", "user.email=a@b.example", "commit.gpgsign=false")
    options = [word for each in settings for word in ("-c", each)]
    return subprocess.run(
      ["git", "-C", str(self.root), *options, *arguments],
      check=True,
      capture_output=True,
      text=True,
    ).stdout

  def commit(self):
    self.git("add", ".")
    self.git("commit", "--quiet", "--allow-empty", "-m", "x")

  def mutate(self, *values, arguments=()):
    """Returns the exit status for faults with these values."""
    self.log.write_text("")
    return mutate_main.main(
      [f"--output={self.output}", *arguments],
      root=self.root,
      read=lambda: [_make_fault(value) for value in values],
      bazel=str(self._bazel),
    )

  def runs(self):
    return self.log.read_text().splitlines()

  def results(self):
    lines = self.output.read_text().splitlines()
    found = [mutate_main.Result(**json.loads(line)) for line in lines]
    return {each.fault.removeprefix("is_"): each for each in found}

  def check_clean(self):
    """The checkout is as it was, and there is no worktree."""
    assert self.git("status", "--porcelain") == ""
    assert len(self.git("worktree", "list").splitlines()) == 1
    assert not list(self.root.parent.glob("cache/*/*/*/paxon"))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  return _Checkout(tmp_path, monkeypatch)


def test_the_table_says_what_killed_each_fault(checkout, capsys):
  status = checkout.mutate("killed", "everywhere", "night", "survivor")
  assert status == 1  # The default tier kills two of three.
  assert checkout.runs() == [
    # Without a fault, to the end.
    "right default //... False",
    "right nightly //... False",
    "killed default //a/... True",
    "everywhere default //a/... True",
    "everywhere default //... True",
    *(
      f"{value} {tier} {targets} True"
      for value in ("night", "survivor")
      for tier in ("default", "nightly")
      for targets in ("//a/...", "//...")
    ),
  ]
  found = {
    name: (each.status, each.tier, each.target, each.case)
    for name, each in checkout.results().items()
  }
  assert found == {
    "killed": ("killed", "default", "//a:x_test", "test_bad"),
    "everywhere": ("killed", "default", "//a:x_test", "test_bad"),
    "night": ("killed", "nightly", "//a:x_test", "test_bad"),
    "survivor": ("survived", "nightly", "", ""),
  }
  printed = capsys.readouterr().out
  table = printed[printed.index("\nfault ") + 1 :].splitlines()
  assert [line.split()[:3] for line in table[1:5]] == [
    ["is_killed", "killed", "default"],
    ["is_everywhere", "killed", "default"],
    ["is_night", "killed", "nightly"],
    ["is_survivor", "survived", "nightly"],
  ]
  assert table[1].endswith("//a:x_test test_bad")
  assert table[5:] == [
    "The default tier kills 66.7% of what all tiers kill.",
    "survived: is_survivor",
  ]
  checkout.check_clean()


def test_the_default_tier_alone(checkout, capsys):
  assert checkout.mutate("killed", arguments=["--tier=default"]) == 0
  assert not any("nightly" in line for line in checkout.runs())
  assert "kills 100.0% of all faults" in capsys.readouterr().out
  assert checkout.mutate("night", arguments=["--tier=default"]) == 1
  # The other tier was not tried.
  assert checkout.mutate("night") == 1
  assert checkout.results()["night"].tier == "nightly"
  # It was, before the other.
  assert checkout.mutate("night", arguments=["--tier=default"]) == 1
  assert checkout.runs() == []


@pytest.mark.parametrize(
  ("value", "reason"),
  [
    ("broken", "test_bad"),
    ("unnamed", "test_bad"),
    ("unbuilt", "ERROR: a/BUILD:3:1: no such target"),
  ],
)
def test_a_fault_that_breaks_the_build_is_an_error(
  checkout, capsys, value, reason
):
  assert checkout.mutate(value, "killed") == 1
  result = checkout.results()[value]
  assert (result.status, result.case) == ("error", reason)
  printed = capsys.readouterr().out
  assert "kills 100.0% of what" in printed
  assert printed.endswith(f"error: is_{value}\n")
  # It is tried again, because it may have been repaired.
  checkout.mutate(value, "killed")
  assert {line.split()[0] for line in checkout.runs()} == {"right", value}


def test_a_test_that_hangs_kills(checkout):
  assert checkout.mutate("endless") == 0
  result = checkout.results()["endless"]
  assert (result.status, result.case) == ("killed", "(timeout)")


def test_an_interrupted_output_is_continued(checkout, capsys):
  with pytest.raises(KeyboardInterrupt):
    checkout.mutate("killed", "interrupted", "everywhere")
  assert [*checkout.results()] == ["killed"]
  checkout.check_clean()
  with checkout.output.open("a") as file:
    file.write('{"fault": "is_every')  # Killed while it wrote.
  assert checkout.mutate("killed", "everywhere") == 0
  tried = [line.split()[0] for line in checkout.runs()]
  assert [*dict.fromkeys(tried)] == ["right", "everywhere"]
  assert [*checkout.results()] == ["killed", "everywhere"]
  capsys.readouterr()
  # Nothing is left: the table only.
  assert checkout.mutate("killed", "everywhere") == 0
  assert checkout.runs() == []
  assert capsys.readouterr().out.startswith("fault ")


def test_a_killed_process_leaves_no_obstacle(checkout):
  with planted_copy.open_copy(
    checkout.root, mutate_main._find_scratch(checkout.root), bazel="true"
  ) as copy:
    path, files = copy.path, [*copy.path.rglob("x.py")]
    assert len(files) == 1
  path.mkdir()
  (path / "rest").write_text("")
  assert checkout.mutate("killed") == 0
  checkout.check_clean()


def test_the_unchanged_copy_must_pass(checkout, capsys):
  source = checkout.root / "a" / "x.py"
  source.write_text('value = "killed"  # "right"\n')
  checkout.commit()
  assert checkout.mutate("night") == 1
  assert "without a fault, //a:x_test fails in the default tier (test_bad)" in (
    capsys.readouterr().err
  )
  assert len(checkout.runs()) == 1
  checkout.check_clean()


def test_uncommitted_changes_stay_and_are_not_tested(checkout):
  source = checkout.root / "a" / "x.py"
  source.write_text('value = "everywhere"\n')
  assert checkout.mutate("killed") == 0
  assert checkout.runs()[0].startswith("right ")
  assert source.read_text() == 'value = "everywhere"\n'


def test_wrong_use_is_one_line_and_status_2(checkout, capsys, tmp_path):
  def fails(*arguments, values=("killed",)):
    assert checkout.mutate(*values, arguments=arguments) == 2
    captured = capsys.readouterr()
    assert checkout.runs() == []
    return captured.err

  assert "matches the name of no fault" in fails("--faults=is_kill")
  assert "is no regular expression" in fails("--faults=(")
  assert "--jobs must be at least 1, got 0" in fails("--jobs=0")
  assert "invalid choice: 'some'" in fails("--tier=some")
  assert "Is a directory" in fails(f"--output={tmp_path}")
  notes = tmp_path / "notes"
  notes.write_text("words\n")
  assert "a line that is no result: 'words'" in fails(f"--output={notes}")
  (checkout.root / "a" / "x.py").write_text("value = 1\n")
  checkout.commit()
  assert "exactly once, and has it 0 times" in fails()
  (checkout.root / "a" / "x.py").rename(checkout.root / "a" / "y.py")
  checkout.commit()
  assert "there is no file a/x.py in the commit" in fails()
  checkout.check_clean()


def test_results_of_another_commit_are_rejected(checkout, capsys):
  assert checkout.mutate("killed") == 0
  checkout.commit()
  assert checkout.mutate("killed") == 2
  assert "has results of the commit" in capsys.readouterr().err


def test_two_processes_do_not_share_a_copy(checkout, capsys):
  scratch = mutate_main._find_scratch(checkout.root)
  with planted_copy.open_copy(checkout.root, scratch, bazel="true"):
    assert checkout.mutate("killed") == 2
  assert "Another tools/mutate runs" in capsys.readouterr().err


def test_jobs_limit_what_bazel_runs(checkout, tmp_path):
  seen = tmp_path / "seen"
  bazel = tmp_path / "other"
  bazel.write_text(
    textwrap.dedent(f"""\
      #!/bin/sh
      echo "$@" >> {seen}
    """)
  )
  bazel.chmod(0o755)
  scratch = tmp_path / "scratch"
  with planted_copy.open_copy(
    checkout.root, scratch, bazel=str(bazel), jobs=3
  ) as copy:
    assert copy.find_failure("nightly", "//b/...") is None
  words = seen.read_text().splitlines()[0].split()
  assert {"--jobs=3", "--local_test_jobs=3", "--config=nightly"} <= {*words}
  assert f"--disk_cache={scratch}/results" in words
