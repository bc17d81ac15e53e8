"""Tests for the command line for configurations."""

import pathlib
import runpy

from etils import epath
import jax
import pytest

from paxon.runner.configuration import dump
from paxon.runner.session import run_files
from paxon.runner.training import testing
from paxon.tools import configs_main

_TINY = "runner.training.testing.TinyLm"


@pytest.fixture(scope="module", autouse=True)
def _devices():
  """Starts all devices; a validation would start as many as it needs."""
  jax.devices()


@pytest.fixture(name="call")
def _call(capsys):
  def call(*arguments: str) -> tuple[int, str, str]:
    return configs_main.main(arguments), *capsys.readouterr()

  return call


def test_dump_prints_the_resolved_configuration(call):
  status, out, err = call("dump", _TINY, "--fdl.embed_dim=32")
  assert (status, err) == (0, "")
  assert out == dump.to_text(testing.TinyLm(embed_dim=32).job())
  status, out, _ = call("dump", _TINY, "--json")
  assert out == dump.to_json(testing.TinyLm().job())


def test_code_makes_the_same_configuration(call, tmp_path):
  status, out, err = call("code", _TINY, "--fdl.embed_dim=32")
  assert (status, err) == (0, "")
  # A file, because auto_config reads the source.
  path = tmp_path / "generated.py"
  path.write_text(out)
  made = runpy.run_path(str(path))["config_fixture"].as_buildable()
  assert dump.to_text(made) == dump.to_text(testing.TinyLm(embed_dim=32).job())


def test_picture_names_all_classes(call):
  status, out, err = call("picture", _TINY)
  assert (status, err) == (0, "")
  assert out.startswith("graph {")
  for name in ("Job", "DecoderLm", "TransformerBlock", "AdamW"):
    assert name in out


def test_validate_prints_what_it_amounts_to(call):
  status, out, err = call("validate", _TINY, "--fdl.mesh=fsdp=2")
  assert (status, err) == (0, "")
  lines = out.splitlines()
  assert lines[0].startswith("trainable parameters: ")
  assert "on each of 2 devices (fsdp=2)" in lines[1]
  assert lines[2].startswith("batch: 8 x 16,")
  assert lines[-1] == "ok"


def test_equal_is_status_0(call):
  status, out, _ = call("compare", _TINY, _TINY, "--fdl.num_layers=2")
  assert (status, out.splitlines()[-1]) == (0, "equal")


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("override", "group", "program"),
  [
    ("--fdl.learning_rate=0.1", "numerics", "the training step differs"),
    # Without dropout the seed is in the data and in the initial values only.
    ("--fdl.seed=3", "numerics", "the same training step"),
    (
      "--fdl.train_input.examples.shuffle_seed=3",
      "numerics",
      "the same training step",
    ),
    ("--fdl.mesh=fsdp=-1", "throughput", "the same training step"),
    ("--fdl.scan=False", "throughput", "the training step differs"),
    ("--fdl.max_new_tokens=3", "evaluation", "the same training step"),
    ("--fdl.eval_every_steps=3", "bookkeeping", "the same training step"),
  ],
)
def test_a_difference_is_classed_and_the_program_compared(
  call, override, group, program
):
  status, out, err = call("compare", _TINY, override)
  assert (status, err) == (1, "")
  lines = out.splitlines()
  assert lines[:2] == [f"A: {_TINY}", f"B: {_TINY} {override}"]
  assert lines[2].startswith(f"program: {program}")
  assert [line for line in lines if line and line[0] != " "][3].startswith(
    f"{group}: "
  )


def _run(folder: pathlib.Path, **knobs) -> str:
  folder.mkdir()
  run_files.store_config(testing.TinyLm(**knobs).job(), epath.Path(folder))
  return str(folder)


def test_runs_are_compared_by_what_they_have_stored(call, tmp_path):
  a = _run(tmp_path / "a")
  b = _run(tmp_path / "b", embed_dim=32)
  status, out, _ = call("compare", a, b)
  assert status == 1
  assert "program: not compared; " in out
  assert "task.model.embedding.embed_dim: 16 -> 32" in out
  for folder in (a, b):
    run_files.store_settings(_TINY, [], epath.Path(folder))
  _, out, _ = call("compare", a, _TINY, "--fdl.learning_rate=1")
  assert "program: the training step differs" in out
  _, out, _ = call("compare", b, _TINY)
  assert "b was made by another version of its experiment" in out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["dmup"], "Unknown command 'dmup'; did you mean 'dump'?"),
    (["dump"], "Expected one experiment, such as tasks.lm.C; got 0."),
    (["dump", _TINY, "--exp=x"], "Unknown flag --exp; see --help"),
    (["dump", "--fdl.seed=1", _TINY], "--fdl.seed=1 must follow an experiment"),
    (["dump", _TINY, "--fdl.sede=1"], "did you mean 'seed'?"),
    (["validate", _TINY, "--devices=0"], "--devices=0: N must be between 1"),
    (["validate", _TINY, "--fdl.mesh=tensor=8"], "does not divide by tensor=8"),
    (["validate", _TINY, "--fdl.mesh=data=512"], "use a new process"),
    (["validate", _TINY, "--fdl.embed_dim=0"], "embed_dim must be positive"),
    (
      ["compare", _TINY],
      "compare takes two experiments or run directories, got 1",
    ),
    (["compare", "./none", _TINY], "./none is not a run directory"),
    (["compare", "az://a/b", _TINY], "az://a/b needs the package adlfs"),
  ],
)
def test_wrong_use_is_one_line_and_status_2(call, arguments, message):
  status, out, err = call(*arguments)
  assert (status, out, err.count("\n")) == (2, "", 1)
  assert message in err


def test_help(call):
  status, out, err = call("--help")
  assert (status, err) == (0, "")
  assert all(f"tools/configs {name}" in out for name in configs_main.COMMANDS)
