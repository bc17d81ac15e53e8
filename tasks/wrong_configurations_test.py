"""Random command lines: each is accepted, or refused by one clear line.

Values, paths and their combinations are drawn by hypothesis, and go through the
real program up to the point where memory would be taken and files written. A
larger search, with other examples at each run:

  PAXON_WRONG_CONFIGURATIONS=5000 bazel test //tasks:wrong_configurations_test \
      --test_env=PAXON_WRONG_CONFIGURATIONS --test_timeout=3600
"""

import contextlib
import io
import os
import pathlib
import signal
import string
from typing import Any

import hypothesis
from hypothesis import strategies as st
import pytest

from paxon.runner import main
from paxon.runner.checkpoints import checkpointer
from paxon.runner.configuration import dump, find_experiment, tree
from paxon.runner.training import train

_EXPERIMENTS = (
  "tasks.lm.params.quickstart.PythonStdlibLm",
  "runner.training.testing.TinyLm",
)
_MORE = os.environ.get("PAXON_WRONG_CONFIGURATIONS")
_NUM_EXAMPLES = int(_MORE or 300)
# Most take a tenth of one; this is for a busy machine.
_SECONDS = 30

_NUMBERS = (
  *(-1, 0, 1, 2, 3, 5, 7, 8, 16, 33, 1000, 10**6, 10**9),
  *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(10**30)),
)
_WORDS = (
  *("", " ", "None", "none", "True", "false", "nan", "NaN", "inf", "-inf"),
  *("1.5", "-0.0", "1e-400", "1e400", "1e308", "1e-9", "0.5", "3.0", "1_0"),
  *("'", '"', "'a", "''", "'None'", "()", "(1,)", "[]", "[1, 2]", "{}"),
  *("{'a': 1}", "[[[[[[]]]]]]", "(" * 300, "[None]", "b'x'", "...", "1+1j"),
  *("__import__('os').system('touch pwned')", "lambda: 0", "os", "self"),
  *("é", "日本", "\u202e", "\x00", "\x1b[31m", "\udcff", "a\nb", "a" * 5000),
  *("0x" + "f" * 5000, "9" * 5000, "1e" + "9" * 400, "--mode=eval", "=", "%s"),
  *("float16", "bfloat16", "float64", "int8", "complex64", "float8_e4m3fn"),
  *("train", "validation", "data", "/nonexistent", "/etc", ".", "~"),
)
_MESHES = (
  *("data=-1", "fsdp=-1", "tensor=-1", "sequence=-1", "data=3", "data=0"),
  *("data=-1,fsdp=-1", "data=2,fsdp=2,tensor=2", "tensor=8", "data=-2"),
  *("expert=8", "stage=8", "stage=2,data=-1", "sequence=8", "dcn.data=2"),
  *("dcn.data=8", "dcn.data=3,data=-1", "data=8,data=8", "fsdp", "=8", "x=8"),
  *(
    "data=²",
    "data=8,,",
    "data=1e3",
    "tensor=2,sequence=4",
    "data=" + "9" * 30,
  ),
)
_ARGUMENTS = (
  *("--exp", "--exp=", "--exp=tasks", "--exp=a.b.C", "--exp=..", "--exp=é.é"),
  *("--exp=tasks.lm.params.quickstart.Q", "--exp=paxon", "--exp=" + "a." * 999),
  *("--mode", "--mode=", "--mode=plan9", "--mode=eval", "--mode=decode"),
  *("--prompt=x", "--list=3", "--help=3", "--fdl", "--fdl.", "--fdl.=3"),
  *("--fdl.seed", "--fdl..seed=3", "--fdl.[0]=3", "--fdl.seed[0]=3", "--", "-"),
  *("--fdl.task[", "--fdl.task]=1", "--fdl.task=x", "--fdl.task.model=None"),
  *("x", "", "--seed=1", "--nomode", "--flagfile=/etc/passwd", "--fdl.=", "-x"),
  *("--job_log_dir=", "--job_log_dir", "--job_log_dir=/dev/null/x"),
)


class _AcceptedError(Exception):
  """The configuration has passed every check."""


def _fields(name: str) -> dict[str, object]:
  """Returns the values of all knobs and paths of an experiment."""
  experiment = find_experiment.find_experiment(name)()
  knobs = {knob: getattr(experiment, knob) for knob in experiment.knobs()}
  fields = {
    tree.join(path, field): tree.get_value(node, field)
    for path, node in tree.nodes(experiment.job())
    for field in tree.field_names(node)
  }
  return {**fields, **knobs}


_FIELDS = {name: _fields(name) for name in _EXPERIMENTS}


@st.composite
def _misspelled(draw: Any, path: str) -> str:
  position = draw(st.integers(0, max(len(path) - 1, 0)))
  before, after = path[:position], path[position:]
  return draw(
    st.sampled_from(
      (
        before + after[1:],
        before + after[:1] + after,
        before + after[1:2] + after[:1] + after[2:],
        before + draw(st.sampled_from(string.printable)) + after,
        *(f"{path}.x", f"{path}[0]", f"{path}[-1]", f"{path}['a']", f"{path}."),
        before,
      )
    )
  )


def _plausible(current: object) -> st.SearchStrategy[str]:
  """Returns values of the right type, some of which can be trained."""
  if isinstance(current, bool):
    return st.sampled_from(("True", "False"))
  if isinstance(current, int) or current is None:
    return st.sampled_from(("1", "2", "4", "8", "16", "3", "6", "24", "None"))
  if isinstance(current, float):
    return st.sampled_from(("0.5", "1e-3", "1.0", "2", "0.0"))
  return st.just(str(current))


# As `st.text` has them, without encoding each one first to find that out.
_CHARACTERS = st.characters(exclude_categories=("Cs",))


def _values() -> st.SearchStrategy[str]:
  return st.one_of(
    st.sampled_from(_NUMBERS).map(str),
    st.sampled_from(_WORDS),
    st.sampled_from(_MESHES),
    st.integers(-4, 300).map(str),
    st.floats().map(repr),
    st.text(_CHARACTERS, max_size=12),
    st.recursive(
      st.none()
      | st.booleans()
      | st.integers()
      | st.text(_CHARACTERS, max_size=3),
      lambda inner: st.lists(inner, max_size=3),
      max_leaves=4,
    ).map(repr),
  )


@st.composite
def _overrides(draw: Any, name: str) -> str:
  path = draw(st.sampled_from(sorted(_FIELDS[name])))
  if path == "mesh" or path.endswith(".mesh"):
    return f"--fdl.{path}={draw(st.sampled_from(_MESHES) | _values())}"
  kind = draw(st.integers(0, 9))
  if kind < 2:
    return f"--fdl.{path}={draw(_plausible(_FIELDS[name][path]))}"
  if kind == 5:
    path = draw(_misspelled(path))
  return f"--fdl.{path}={draw(_values())}"


@st.composite
def _command_lines(draw: Any) -> list[str]:
  name = draw(st.sampled_from(_EXPERIMENTS))
  # Half of them with one override, so that it is the one that is refused.
  number = draw(st.sampled_from((1, 1, 2, 3)))
  arguments = [draw(_overrides(name)) for _ in range(number)]
  if draw(st.integers(0, 7)) == 0:
    arguments.append(f"--fdl.mesh={draw(st.sampled_from(_MESHES))}")
  if draw(st.integers(0, 7)) == 0:
    arguments.append(
      draw(
        st.sampled_from(_ARGUMENTS)
        | st.text(_CHARACTERS, max_size=8).map("--{}".format)
      )
    )
  return [f"--exp={name}", *draw(st.permutations(arguments))]


@contextlib.contextmanager
def _time_limit(arguments: list[str]):
  def stop(*_: object) -> None:
    raise TimeoutError(f"No answer after {_SECONDS} seconds to {arguments}.")

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, _SECONDS)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _answer(arguments: list[str]) -> tuple[int, str]:
  """Returns the status, 0 where accepted, and what was said on stderr."""
  errors = io.StringIO()
  with (
    _time_limit(arguments),
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(errors),
  ):
    try:
      main.run(["paxon.tasks"], ["main", *arguments])
    except SystemExit as done:
      return int(done.code or 0), errors.getvalue()
    except _AcceptedError:
      return 0, errors.getvalue()


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch) -> pathlib.Path:
  """The folder of all runs; nothing is trained."""
  accepted = set[str]()
  check = train.run

  def accept(*_: object, **__: object) -> None:
    raise _AcceptedError

  def run(job: Any, config: Any, *rest: Any, **more: Any) -> train.Result:
    # Tracing takes most of the time, and every other one has been traced.
    text = dump.to_text(config)
    if text in accepted:
      raise _AcceptedError
    try:
      return check(job, config, *rest, **more)
    except _AcceptedError:
      accepted.add(text)
      raise

  monkeypatch.setattr(train, "run", run)
  # The first thing that a run writes.
  monkeypatch.setattr(checkpointer, "Checkpointer", accept)
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
  monkeypatch.chdir(tmp_path)
  return tmp_path


def test_every_command_line_is_accepted_or_refused_by_one_line(folder):
  statuses = []

  @hypothesis.settings(
    max_examples=_NUM_EXAMPLES,
    derandomize=_MORE is None,
    database=None,
    deadline=None,
    # A command line says enough; a simpler one would be looked for for minutes.
    phases=(hypothesis.Phase.generate,),
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(_command_lines())
  def check(arguments: list[str]) -> None:
    run_dir = folder / "run"
    given = [*arguments, f"--job_log_dir={run_dir}"]
    if any(a.startswith("--job_log_dir") for a in arguments):
      given = arguments
    status, said = _answer(given)
    statuses.append(status)
    if status == 0:
      assert said == ""
      _remove(run_dir)
      return
    assert status == 2
    assert said.endswith("\n")
    assert said.count("\n") == 1, said
    assert said[:-1].isprintable()
    assert 10 < len(said) < 2000, said
    assert "Traceback" not in said
    assert not run_dir.exists()
    assert not (folder / "pwned").exists()

  check()
  # Not everything is refused; what passes takes long and is tried elsewhere.
  assert 0 < statuses.count(0) < 0.5 * len(statuses)
  assert statuses.count(2) >= 0.5 * _NUM_EXAMPLES


def _remove(folder: pathlib.Path) -> None:
  if folder.exists():
    for path in sorted(folder.rglob("*"), reverse=True):
      path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_the_unchanged_experiments_are_accepted(folder):
  for name in _EXPERIMENTS:
    assert _answer([f"--exp={name}", "--job_log_dir=run"]) == (0, "")
    assert (folder / "run").exists()
