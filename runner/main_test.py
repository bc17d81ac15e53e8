"""Tests for the command line."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import time
import types

from etils import epath
import fiddle as fdl
import pytest

import paxon
from paxon.runner import (
  command_line,
  job,
  main,
  run_dir,
  toy_experiment,
  user_error,
)
from paxon.runner.configuration import overrides
from paxon.runner.endpoint import serve
from paxon.runner.evaluation import evaluate, infer
from paxon.runner.generation import decode
from paxon.runner.hosts import joining
from paxon.runner.session import run_files
from paxon.runner.training import inspect_input, train

_TOY = "--exp=runner.toy_experiment.Toy"
_FINISHED = types.SimpleNamespace(stopped_by=None)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)


@pytest.fixture(name="calls")
def _calls(monkeypatch):
  """Replaces the modes; returns their arguments. Training exits with 0."""
  calls = []
  for module in (train, evaluate, decode, infer, serve):

    def run(*args, module=module, **kwargs):
      calls.append((module, args, kwargs))
      return _FINISHED if module is train else 7

    monkeypatch.setattr(module, "run", run)
  return calls


@pytest.fixture(name="call")
def _call(capsys):
  """Runs the command line here; returns status, output and errors."""

  def call(*arguments, packages=("paxon.runner",)):
    with pytest.raises(SystemExit) as caught:
      main.run(packages, ["main", *arguments])
    return caught.value.code, *capsys.readouterr()

  return call


_WRONG = [
  # What is typed, and what the one line must name: the bad and the right word.
  (
    [],
    r"--exp is missing: set an experiment, such as --exp=runner\..*; --list",
  ),
  (["--exp="], r"--exp is missing"),
  (["--exp"], r"[Mm]issing value for flag --exp"),
  (["--exp=runner.toy_experiment.Tyo"], r"'Tyo'; did you mean 'Toy'"),
  (["--exp=runner.toy_experment.Toy"], r"did you mean 'runner.toy_experiment"),
  (["--exp=runner.toy_experiment"], r"is a module; name a class in it"),
  (["--exp=Toy"], r"no module; write it as a.b.C; did you mean 'runner.toy_e"),
  (["--exp=runner.toy_experiment.Layer"], r"Layer is not an experiment"),
  ([_TOY, "--mode=trian"], r"Unknown --mode=trian; did you mean .train.\?"),
  ([_TOY, "--mode=plan9"], r"Unknown --mode=plan9; did you mean 'plan'"),
  ([_TOY, "--mode="], r"Unknown --mode=; known: check_devices, decode, eval,"),
  ([_TOY, "--mdoe=eval"], r"Unknown flag --mdoe; did you mean '--mode'"),
  ([_TOY, "--mdoe", "eval"], r"Unknown flag --mdoe; did you mean '--mode'"),
  (
    [_TOY, "--job_logdir=x"],
    r"Unknown flag --job_logdir; did you mean '--job_log_",
  ),
  (
    [_TOY, "--seed=3"],
    r"Unknown flag --seed; it is a knob of the experiment: --fdl.seed=3$",
  ),
  (
    ["--num_train_steps", "60", _TOY],
    r"Unknown flag --num_train_steps; it is .*: --fdl.num_train_steps=60$",
  ),
  ([_TOY, "--seed"], r"Unknown flag --seed; it is .*: --fdl.seed=VALUE$"),
  (
    ["--exp=runner.toy_experiment.Typo", "--width=3"],
    r"Unknown flag --width; to set a knob .* --fdl.width=VALUE",
  ),
  ([_TOY, "-h"], r"Unknown flag --h; did you mean '--help'"),
  (
    [_TOY, "--fld.seed=3"],
    r"Unknown flag --fld.seed; did you mean '--fdl.seed'",
  ),
  ([_TOY, "--flagfile=/etc/hostname"], r"Unknown flag --flagfile"),
  ([_TOY, "--undefok=x", "--x=3"], r"Unknown flag --undefok"),
  ([_TOY, "--list=maybe"], r"flag --list=maybe"),
  ([_TOY, "seed=3"], r"Unexpected argument 'seed=3'; flags are written"),
  ([_TOY, "--fdl.seed"], r"--fdl.seed has no value; write --fdl.seed=VALUE"),
  (
    [_TOY, "--fdl.sede=3"],
    r"no knob and Job no field 'sede'; did you mean 'se",
  ),
  ([_TOY, "--fdl.width=3.5"], r"--fdl.width=3.5: expected int, got float\.$"),
  ([_TOY, "--fdl.width=True"], r"expected int, got bool"),
  ([_TOY, "--fdl.width="], r"expected int, got the word ''"),
  ([_TOY, "--fdl.dtype=float16"], r"'float16'; did you mean 'bfloat16'\?$"),
  ([_TOY, "--fdl.seed=None"], r"--fdl.seed=None: expected int, got None"),
  ([_TOY, "--fdl.seed.x=3"], r"seed is a int; it has no field 'x'"),
  ([_TOY, "--fdl.tsk.model=3"], r"field 'tsk'; did you mean 'task'"),
  ([_TOY, "--fdl.learner.x=3"], r"did you mean 'task.learner.x'\?$"),
  (
    [_TOY, "--fdl.task.modle.head=3"],
    r"no field 'modle'; did you mean 'model'",
  ),
  (
    [_TOY, "--fdl.task.model.layers[9].width=3"],
    r"no element 9; valid are 0 to",
  ),
  ([_TOY, "--fdl.task.model.head.name=x"], r"no field 'name'"),
  (
    [_TOY, "--fdl.task.model.head.activation=relu"],
    r"path of a function, such",
  ),
  ([_TOY, "--fdl.task..model=3"], r"cannot read '..model'"),
  # Refused by the parts themselves, while the configuration is built.
  (
    [_TOY, "--fdl.width=0"],
    r"Layer.width must be positive, got 0 \(at task.model.layers\[0\]\)",
  ),
  (
    [_TOY, "--fdl.summary_every_steps=0"],
    r"Job.summary_every_steps must be po",
  ),
  (
    [_TOY, "--fdl.train_input.length=-1"],
    r"length must be .*\(at train_input\)",
  ),
  (
    [_TOY, "--fdl.eval_inputs.validation.length=0"],
    r"\(at eval_inputs.validation\)",
  ),
  ([_TOY, "--fdl.mesh=fdsp=4"], r"'fdsp'; did you mean 'fsdp'"),
  (
    [_TOY, "--prompt=x"],
    r"--prompt requires --mode=decode \(got --mode=train\)\.",
  ),
  (
    [_TOY, "--mode=decode", "--job_log_dir=no", "--prompt=\udcff"],
    r"--prompt='\\udcff' is not valid UTF-8",
  ),
  (
    [_TOY, "--continuous"],
    r"--continuous requires --mode=eval \(got --mode=train\)",
  ),
  ([_TOY, "--profile_steps=x"], r"--profile_steps=x must be FIRST:STOP"),
  ([_TOY, "--profile_steps=3:3"], r"--profile_steps=3:3 is empty"),
  (
    [_TOY, "--profile_steps=3:6"],
    r"--profile_steps=3:6 ends at step 5, but num_train_steps is 4",
  ),
  (
    [_TOY, "--mode=decode", "--job_log_dir=x", "--profile_steps=1:2"],
    r"--profile_steps requires --mode=train \(got --mode=decode\)",
  ),
  (
    [_TOY, "--target=cpu:8"],
    r"--target requires --mode=plan \(got --mode=train",
  ),
  ([_TOY, "--mode=plan"], r"--mode=plan requires --target, the hardware: cpu"),
  ([_TOY, "--plan_search"], r"--plan_search requires --mode=plan"),
  (
    [_TOY, "--mode=plan", "--target=h300:8"],
    r"h300:8 is not a target: did you mean",
  ),
  ([_TOY, "--mode=plan", "--target=v5e:3x3"], r"no v5e slice of 3x3; there ar"),
  ([_TOY, "--mode=plan", "--target=cpu:2,"], r"--target=cpu:2, has an empty"),
  (
    [_TOY, "--mode=plan", "--num_processes=1"],
    r"--num_processes requires --mode=train or eval or decode or infer",
  ),
  (
    [_TOY, "--mode=eval", "--job_log_dir=a", "--max_restarts=1"],
    r"--max_restarts requires --mode=train \(got --mode=eval\)",
  ),
  ([_TOY, "--mode=eval"], r"--mode=eval requires --job_log_dir"),
  (
    [_TOY, "--mode=inspect_input", "--job_log_dir=x"],
    r"--job_log_dir requires --mode=train or eval or .*=inspect_input\)",
  ),
  ([_TOY, "--mode=decode"], r"--mode=decode requires --job_log_dir"),
  ([_TOY, "--decode_file=x"], r"--decode_file requires --mode=decode \(got"),
  (
    ["--mode=decode", "--job_log_dir=x", "--decode_output=y"],
    r"--decode_output requires --decode_file\.",
  ),
  (
    ["--mode=decode", "--job_log_dir=x", "--decode_file=y", "--prompt=z"],
    r"--prompt and --decode_file must not both be set\.",
  ),
  (
    [
      "--mode=decode",
      "--job_log_dir=x",
      "--decode_file=y",
      "--decode_batch_size=0",
    ],
    r"--decode_batch_size must be positive, got 0\.",
  ),
  ([_TOY, "--mode=eval", "--job_log_dir=no"], r"no does not exist; use"),
  ([_TOY, "--job_log_dir="], r"--job_log_dir is empty"),
  ([_TOY, "--job_log_dir=/dev/null/x"], r"cannot create the directory"),
  ([_TOY, "--job_log_dir=foo://x"], r"--job_log_dir=foo://x: unsupported"),
  ([_TOY, "--fdl.width=3\n4"], r"got the word '3\\n4'"),
  ([_TOY, "--fdl.\x1b[31m=3"], r"cannot read"),
]


@pytest.mark.parametrize(
  ("arguments", "message"), _WRONG, ids=[" ".join(c[0]) for c in _WRONG]
)
def test_wrong_use_is_one_line_and_status_2(call, calls, arguments, message):
  status, out, err = call(*arguments)
  assert status == 2
  assert re.search(message, err.rstrip("\n")), err
  assert err.endswith("\n")
  assert err.count("\n") == 1
  assert err.rstrip("\n").isprintable()
  assert (out, calls) == ("", [])


def test_experiment_that_gives_no_configuration_says_where(call, monkeypatch):
  def task(self):
    raise ValueError("no such\nthing")

  monkeypatch.setattr(toy_experiment.Toy, "task", task)
  status, _, err = call(_TOY)
  assert (status, err.count("\n")) == (2, 1)
  assert re.search(
    r"Toy has no valid configuration: no such thing \(main_test.py:\d+\)", err
  )


def test_knob_without_effect_is_one_line(call, monkeypatch):
  task = toy_experiment.Toy().task()
  monkeypatch.setattr(toy_experiment.Toy, "task", lambda self: task)
  status, _, err = call(_TOY, "--fdl.width=9")
  assert (status, err.count("\n")) == (2, 1)
  assert err.startswith(
    "Toy.width has no effect: task() and datasets() do not read it"
  )


def test_help_explains_every_flag_and_with_exp_the_knobs(call):
  status, out, err = call("--help")
  assert (status, err) == (0, "")
  for name in (*command_line.make_flags(), "fdl.NAME=VALUE"):
    assert f"--{name}" in out
  status, out, err = call("--help", _TOY)
  assert (status, err) == (0, "")
  assert "--fdl.width: int = 8\n      Width of the head." in out
  assert "--fdl.dtype: 'float32' | 'bfloat16' = 'float32'" in out


def test_version_is_that_of_the_package(call):
  # Of the one line that setuptools reads, too.
  assert call("--version") == (0, f"paxon {paxon.__version__}\n", "")


def test_list_prints_the_experiments(call):
  status, out, err = call("--list")
  assert (status, err) == (0, "")
  assert "runner.toy_experiment.Toy  A toy for tests.\n" in out


def test_packages_that_are_missing_are_named(call):
  status, _, err = call("--list", packages=("not_there",))
  assert (status, err.count("\n")) == (2, 1)
  assert "Cannot list the experiments of not_there" in err


def test_train_gets_the_job_its_configuration_and_a_new_folder(call, calls):
  status, out, err = call(_TOY, "--fdl.width=3", "--fdl.seed=5")
  assert (status, err) == (0, "")
  [(module, (built, config, folder), options)] = calls
  assert [str(o) for o in options["overrides"]] == [
    "--fdl.width=3",
    "--fdl.seed=5",
  ]
  assert options["launch"].profile is None
  assert options["launch"].begin <= time.time()
  assert module is train
  assert isinstance(built, job.Job)
  assert (built.seed, config.seed) == (5, 5)
  assert config.task.model.head.width == 3
  assert fdl.get_callable(config) is job.Job
  assert out.splitlines()[0] == f"job_log_dir: {folder}"
  assert re.fullmatch(r"Toy-\d{8}-\d{6}", folder.name)
  assert folder.parent == pathlib.Path.cwd() / "runs"
  assert folder.is_dir()


def test_train_gets_the_steps_to_profile(call, calls):
  assert call(_TOY, "--profile_steps=2:5")[0] == 0
  [(_, _, options)] = calls
  assert options["launch"].profile == range(2, 5)


def test_paths_are_stronger_than_knobs_whatever_their_order(call, calls):
  path = "--fdl.task.model.layers[0].width=3"
  for order in ((path, "--fdl.width=5"), ("--fdl.width=5", path)):
    call(_TOY, *order)
    config = calls.pop()[1][1]
    assert config.task.model.layers[0].width == 3
  call(_TOY, "--fdl.width=5", "--fdl.width=6")
  assert calls.pop()[1][1].task.model.head.width == 6


def test_shared_part_is_remarked_after_the_folder(call, calls):
  status, out, err = call(_TOY, "--fdl.task.model.head.width=3")
  assert (status, err, len(calls)) == (0, "", 1)
  assert "also changes task.model.layers[0]" in out.splitlines()[1]


@pytest.mark.parametrize("form", ["--job_log_dir=mine", "-job_log_dir=mine"])
def test_relative_folder_is_where_the_user_stands(
  call, calls, tmp_path, monkeypatch, form
):
  elsewhere = tmp_path / "elsewhere"
  monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(elsewhere))
  call(_TOY, form)
  call(_TOY)
  assert calls[0][1][2] == elsewhere / "mine"
  assert calls[1][1][2].parent == elsewhere / "runs"
  assert (elsewhere / "mine").is_dir()


def test_eval_and_decode_get_the_folder_of_a_run(call, calls, tmp_path):
  (tmp_path / "run").mkdir()
  at = "--job_log_dir=run"
  assert call(_TOY, "--mode=eval", at)[0] == 7
  assert call(_TOY, "--mode", "decode", at)[0] == 7
  assert call(_TOY, "--mode=decode", at, "--prompt=--x y")[0] == 7
  assert [module for module, *_ in calls] == [evaluate, decode, decode]
  assert [args[1] for _, args, _ in calls] == [tmp_path / "run"] * 3
  assert [args[2:] for _, args, _ in calls] == [(), (None,), ("--x y",)]


def _store_settings(folder, *arguments, experiment=None):
  folder.mkdir()
  run_files.store_settings(
    experiment or toy_experiment.Toy.import_path(),
    [overrides.parse_argument(a) for a in arguments],
    epath.Path(folder),
  )


def test_eval_and_decode_take_the_settings_of_the_run(call, calls, tmp_path):
  _store_settings(tmp_path / "run", "--fdl.width=9", "--fdl.seed=5")
  at = "--job_log_dir=run"
  for exp in ([_TOY], []):
    _, out, _ = call(*exp, "--mode=eval", at)
    _, (built, _), _ = calls.pop()
    assert (built.seed, built.task.model.head.width) == (5, 9)
    assert out.splitlines()[1] == (
      "settings of the run: --fdl.width=9 --fdl.seed=5"
    )
  _, out, _ = call("--mode=decode", at, "--fdl.width=3")
  _, (built, _, _), _ = calls.pop()
  assert (built.seed, built.task.model.head.width) == (5, 3)
  assert out.splitlines()[1] == "settings of the run: --fdl.seed=5"


def test_settings_of_a_run_are_not_those_of_another_experiment(
  call, calls, tmp_path
):
  _store_settings(tmp_path / "run", "--fdl.width=9", experiment="shop.Other")
  _, out, _ = call(_TOY, "--mode=eval", "--job_log_dir=run")
  _, (built, _), _ = calls.pop()
  assert built.task.model.head.width == toy_experiment.Toy().width
  assert "experiment is shop.Other; its settings are not used for" in out


def test_a_run_that_does_not_say_its_experiment(call, calls, tmp_path):
  (tmp_path / "run").mkdir()
  status, _, err = call("--mode=eval", "--job_log_dir=run")
  assert (status, calls) == (2, [])
  assert re.search(r"--exp is missing, and .*/run has no settings.json", err)


def test_training_takes_no_settings_from_the_folder(call, calls, tmp_path):
  _store_settings(tmp_path / "run", "--fdl.width=9")
  call(_TOY, "--job_log_dir=run")
  assert calls[0][1][0].task.model.head.width == toy_experiment.Toy().width


def test_a_run_resumes_with_its_own_settings(call, calls, tmp_path):
  _store_settings(tmp_path / "run", "--fdl.width=9", "--fdl.seed=5")
  status, out, err = call("--job_log_dir=run", "--fdl.seed=6")
  assert (status, err) == (0, "")
  [(module, (built, *_), options)] = calls
  assert module is train
  assert (built.seed, built.task.model.head.width) == (6, 9)
  # Stored again, so that nothing is lost when it resumes once more.
  assert [each.path for each in options["overrides"]] == ["width", "seed"]
  assert out.splitlines()[1] == "settings of the run: --fdl.width=9"


def test_a_run_that_does_not_exist_cannot_resume(call, calls, tmp_path):
  status, _, err = call("--job_log_dir=none")
  assert (status, calls) == (2, [])
  assert "none does not exist" in err
  assert not (tmp_path / "none").exists()


def test_settings_name_the_folder_that_holds_them(call, calls, tmp_path):
  _store_settings(tmp_path / "run", f"--fdl.pgle={run_dir.HERE}/x.pbtxt")
  call("--mode=eval", "--job_log_dir=run")
  assert calls[0][1][0].pgle == f"{tmp_path}/run/x.pbtxt"


def test_serve_gets_its_options(call, calls, tmp_path, monkeypatch):
  (tmp_path / "run").mkdir()
  at = (_TOY, "--mode=serve", "--job_log_dir=run", "--checkpoint_step=4")
  flags = ("--serve_port=0", "--serve_context=9", "--serve_cache_tokens=70")
  assert call(*at, *flags)[0] == 7
  (_, (_, _, options), named) = calls.pop()
  expected = serve.Options(port=0, context=9, cache_tokens=70)
  assert (options, named["step"]) == (expected, 4)
  monkeypatch.setenv("PAXON_API_KEY", "key")
  assert call(*at, "--serve_allowed_hosts=a.org, b")[0] == 7
  expected = serve.Options(allowed_hosts=("a.org", "b"), api_key="key")
  assert calls.pop()[1][2] == expected
  status, _, err = call(*at, "--serve_slots=0")
  assert (status, err.count("\n")) == (2, 1)
  assert "--serve_slots must be from 1 to 4096, got 0" in err


def test_eval_and_decode_get_the_step_of_a_checkpoint(call, calls, tmp_path):
  (tmp_path / "run").mkdir()
  at = ("--job_log_dir=run", "--checkpoint_step=4")
  for mode in ("eval", "decode", "infer"):
    assert call(_TOY, f"--mode={mode}", *at)[0] == 7
    assert calls.pop()[2]["step"] == 4
  for extra, message in (
    ("--checkpoint_step=-1", "--checkpoint_step must not be negative, got -1"),
    ("--continuous", "leave out --checkpoint_step"),
    ("--mode=train", "--checkpoint_step requires --mode=eval or decode or"),
  ):
    status, _, err = call(_TOY, "--mode=eval", *at, extra)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_continuous_evaluation_waits_for_the_run(
  call, calls, tmp_path, monkeypatch
):
  (tmp_path / "run").mkdir()

  def begin(seconds):
    (tmp_path / "run").rmdir()
    _store_settings(tmp_path / "run", "--fdl.width=9")

  monkeypatch.setattr(
    run_files,
    "wait_for_run",
    functools.partial(run_files.wait_for_run, sleep=begin),
  )
  at = ("--mode=eval", "--job_log_dir=run")
  _, out, _ = call(*at, "--continuous")
  _, (built, _), options = calls.pop()
  assert options == {"continuous": True, "step": None, "trained": None}
  assert built.task.model.head.width == 9
  assert re.match(r"waiting for a run to start in .*/run\n", out)
  call(*at)
  assert calls.pop()[2] == options | {"continuous": False}


def test_a_mode_of_one_process_does_not_join_those_of_a_cluster(
  call, calls, monkeypatch
):
  joined = []
  monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
  monkeypatch.setattr(joining, "join", lambda *args: joined.append(args))
  monkeypatch.setattr(inspect_input, "run", lambda job: 7)
  assert call(_TOY, "--mode=inspect_input")[0] == 7
  assert not joined
  assert call(_TOY, "--job_log_dir=run")[0] == 0
  assert len(joined) == 1


def test_user_error_of_a_program_is_one_line(call, monkeypatch):
  def run(*args, **kwargs):
    raise user_error.UserError("No checkpoint\nin here.")

  monkeypatch.setattr(train, "run", run)
  status, _, err = call(_TOY)
  assert (status, err) == (2, "No checkpoint in here.\n")


def test_other_errors_of_a_program_keep_their_traceback(monkeypatch):
  def run(*args, **kwargs):
    raise ValueError("a bug")

  monkeypatch.setattr(train, "run", run)
  with pytest.raises(ValueError, match="a bug"):
    main.run(("paxon.runner",), ["main", _TOY])


def test_a_stopped_training_exits_with_its_signal(call, monkeypatch):
  stopped = types.SimpleNamespace(stopped_by="SIGTERM")
  monkeypatch.setattr(train, "run", lambda *args, **kwargs: stopped)
  assert call(_TOY)[0] == 143


def test_interrupt_before_the_start_is_quiet(call, monkeypatch):
  def run(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr(train, "run", run)
  status, _, err = call(_TOY)
  assert (status, err) == (130, "")


def test_as_a_program_it_answers_before_jax_is_imported():
  code = (
    "import sys\n"
    "from paxon.runner import main\n"
    "try:\n"
    "  main.run(('paxon.runner',), ['main', *sys.argv[1:]])\n"
    "finally:\n"
    "  assert 'jax' not in sys.modules, 'jax was imported'\n"
  )
  environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  for arguments, status in ((["--list"], 0), (["--mode=trian"], 2), ([], 2)):
    done = subprocess.run(
      [sys.executable, "-c", code, *arguments],
      capture_output=True,
      text=True,
      env=environ,
      check=False,
    )
    lines = (done.stderr + done.stdout).splitlines()
    assert done.returncode == status, done.stderr
    assert not any("Traceback" in line for line in lines)
    assert len(done.stderr.splitlines()) == (1 if status else 0)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_reader_that_leaves_is_no_error(is_buffered):
  code = (
    "import sys\n"
    "from paxon.runner import main\n"
    "sys.stdin.read()\n"
    "main.run(('paxon.runner',), ['main', '--list'])\n"
  )
  buffering = [] if is_buffered else ["-u"]
  environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  environ.pop("PYTHONUNBUFFERED", None)
  with subprocess.Popen(
    [sys.executable, *buffering, "-c", code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env=environ,
  ) as process:
    process.stdout.close()
    _, err = process.communicate()
  assert (process.returncode, err) == (141, b"")


def test_a_broken_pipe_that_is_not_the_output_is_a_bug(call, monkeypatch):
  def run(*args, **kwargs):
    raise BrokenPipeError

  monkeypatch.setattr(main, "_run", run)
  with pytest.raises(BrokenPipeError):
    call("--list")
