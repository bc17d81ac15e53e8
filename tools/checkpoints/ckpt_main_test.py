"""Tests of `tools/ckpt`, on checkpoints made on the spot."""

import json
import pathlib
import shutil
import subprocess
import sys

from etils import epath
import fiddle as fdl
import fsspec
from fsspec.implementations import memory
import jax
import jax.numpy as jnp
import pytest

from paxon.runner.checkpoints import checkpointer, manifest
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import testing
from paxon.sharding import variables
from paxon.tools.checkpoints import ckpt_main

KERNEL = (4, 3)


def _save(run, steps, *, kernel=KERNEL, value=0.0):
  specs = [
    variables.VariableSpec("step", (), jnp.dtype("int32"), ()),
    variables.VariableSpec(
      "params/body/scale", (4,), jnp.dtype("float32"), ("embed",)
    ),
    variables.VariableSpec(
      "params/head/kernel", kernel, jnp.dtype("float32"), ("embed", None)
    ),
    variables.VariableSpec(
      "opt_state/0/mu/params/head/kernel",
      kernel,
      jnp.dtype("float32"),
      ("embed", None),
    ),
  ]
  with checkpointer.Checkpointer(
    epath.Path(run) / "checkpoints"
  ) as checkpoints:
    for step in steps:
      arrays = [
        jnp.asarray(step, jnp.int32),
        jnp.full((4,), value, jnp.float32),
        jnp.full(kernel, 1.0 + step, jnp.float32),
        jnp.zeros(kernel, jnp.float32),
      ]
      checkpoints.save(step, arrays, specs=specs, data={"at": step})
  return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = _save(tmp_path_factory.mktemp("run"), (10, 20))
  record = {"step": 20, "split": "validation", "loss": 2.5, "accuracy": 0.5}
  (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
  (folder / "config.txt").write_text("""\
retention: paxon.runner.settings.training.Retention
retention.newest = 2
retention.every_minutes = None
retention.best = 1
retention.metric = "validation/loss"
retention.goal = paxon.runner.settings.training.Goal.MIN
""")
  return folder


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
  """The same names with another head, and values that are not finite."""
  folder = tmp_path_factory.mktemp("wider")
  return _save(folder, (20,), kernel=(4, 5), value=float("nan"))


def _call(capsys, *argv):
  status = ckpt_main.main([str(argument) for argument in argv])
  output = capsys.readouterr()
  return status, output.out, output.err


def test_list_has_a_line_for_each_checkpoint(run, capsys):
  status, out, _ = _call(capsys, "list", run)
  head, _, columns, first, second = out.splitlines()
  assert status == 0
  assert "2 checkpoints" in head
  assert columns.split()[:2] == ["step", "saved"]
  assert first.split()[0] == "10"
  assert second.split()[0] == "20"
  assert second.endswith("validation: loss 2.5000, accuracy 0.5000")
  assert " 4 " in first
  assert first.endswith("  newest")
  assert "  newest, best validation/loss  " in second


@pytest.mark.parametrize(
  ("deleted", "listed"), [((10,), "20"), ((10, 20), "30")]
)
def test_list_while_the_run_deletes(
  run, tmp_path, capsys, monkeypatch, deleted, listed
):
  copy, waiting = tmp_path / "run", [*deleted]
  shutil.copytree(run, copy)
  read = ckpt_main._read

  def delete_before(folder, step):
    if step in waiting:
      waiting.remove(step)
      shutil.rmtree(folder / str(step))
      if not waiting and listed == "30":
        _save(copy, [30])
    return read(folder, step)

  monkeypatch.setattr(ckpt_main, "_read", delete_before)
  status, out, _ = _call(capsys, "list", copy)
  head, _, _, line = out.splitlines()
  assert status == 0
  assert ": 1 checkpoint, " in head
  assert line.split()[0] == listed
  assert "damaged" not in line


def test_list_goes_on_where_one_is_damaged(run, tmp_path, capsys):
  copy = tmp_path / "copy"
  shutil.copytree(run, copy)
  (copy / "checkpoints/10/metadata/metadata").write_text("{")
  status, out, _ = _call(capsys, "list", copy)
  assert status == 0
  assert out.splitlines()[3].endswith("its metadata is damaged")


def test_explain_takes_a_step_and_a_folder_of_names(run, capsys):
  status, out, _ = _call(capsys, "explain", f"{run}@10", "params/head")
  assert status == 0
  assert out.startswith(f"{run}/checkpoints/10: step 10, format version")
  assert "head/kernel  [4,3]  float32  embed -      12  48 B" in out
  assert "scale" not in out


def test_diff_says_by_its_status_whether_two_differ(run, wider, capsys):
  status, out, _ = _call(capsys, "diff", run, run / "checkpoints" / "20")
  assert (status, out.splitlines()[-1]) == (0, "bitwise equal: 4")
  status, out, _ = _call(capsys, "diff", f"{run}@10", run)
  assert status == 1
  assert "params/head/kernel         10     0.476  12 of 12" in out
  status, out, _ = _call(capsys, "diff", run, wider)
  assert status == 1
  assert "params/head/kernel                 float32[4,3]  float32[4,5]" in out
  status, out, _ = _call(capsys, "diff", f"{run}@10", run, "params/body")
  assert status == 0


def test_verify_counts_what_is_not_finite(run, wider, capsys):
  status, out, _ = _call(capsys, "verify", run)
  assert status == 0
  assert [line.split(":")[0] for line in out.splitlines()] == [
    *("step 10", "step 20")
  ]
  assert "sound, 4 arrays of 116 B read" in out
  assert "finite" not in out
  status, out, _ = _call(capsys, "verify", wider)
  assert status == 0
  assert "4 values are not finite, in params/body/scale" in out


@pytest.mark.parametrize("damage", ["truncated", "flipped", "metadata"])
def test_verify_names_what_is_damaged(run, tmp_path, capsys, damage):
  copy = tmp_path / "copy"
  shutil.copytree(run, copy)
  step = copy / "checkpoints" / "20"
  if damage == "metadata":
    (step / "metadata" / "metadata").write_text("{}")
  else:
    files = [f for f in (step / "state").rglob("d/*") if f.is_file()]
    for file in files:
      data = bytearray(file.read_bytes())
      data[len(data) // 2] ^= 1
      file.write_bytes(data[:9] if damage == "truncated" else data)
  status, out, _ = _call(capsys, "verify", copy)
  first, second = out.splitlines()
  assert status == 1
  assert first.startswith("step 10: sound")
  assert second.startswith("step 20: DAMAGED")
  status, out, _ = _call(capsys, "verify", f"{copy}@10")
  assert (status, len(out.splitlines())) == (0, 1)


def test_verify_compares_arrays_with_the_metadata(run, tmp_path, capsys):
  copy = tmp_path / "copy"
  shutil.copytree(run, copy)
  step = epath.Path(copy / "checkpoints" / "20")
  metadata = step / "metadata" / "metadata"
  described = json.loads(metadata.read_text())
  described["arrays"]["params/body/scale"]["shape"] = [5]
  metadata.write_text(json.dumps(described))
  # With checksums of the changed file.
  entries = manifest.compute(step, names=("state", "data", "metadata"))
  text = manifest.to_text(entries)
  (step / "manifest" / manifest.FILE_NAME).write_text(text)
  status, out, _ = _call(capsys, "verify", f"{copy}@20")
  assert status == 1
  assert "holds params/body/scale as float32[4], but its metadata has" in out


def test_preview_between_two_checkpoints(run, wider, capsys):
  status, out, _ = _call(
    *(capsys, "preview", f"{run}@10", f"--to={wider}"),
    *("--pattern=params/head/.*=>", "--all"),
  )
  assert status == 0
  assert out.startswith(f"warm start from step 10 of {run}/checkpoints\n")
  assert "read      1 of 2 variables, 4 of 24 values" in out
  assert "initial   params/head/kernel" in out
  assert "initial  params/head/kernel  [4,5]" in out


def test_preview_for_an_experiment(run, tmp_path, capsys, monkeypatch):
  session = session_lib.open_session(testing.make()[0])
  zeros = jax.tree.map(
    lambda spec: jnp.zeros(spec.shape, spec.dtype), session.state_specs
  )
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(3, zeros, specs=session.state_specs, data={})
  exp = f"--exp={testing.__name__}.TinyLm"
  status, out, _ = _call(
    *(capsys, "preview", tmp_path, exp, "--fdl.mesh=tensor=64"),
    *("--fdl.embed_dim=16", "--pattern=params/final_norm/.*=>"),
  )
  assert status == 0
  assert "read      10 of 11 variables" in out
  status, _, err = _call(capsys, "preview", run, exp)
  assert status == 2
  assert "none of the requested variables" in err
  monkeypatch.setattr(
    testing.TinyLm,
    "warm_start",
    lambda self: fdl.Config(
      training.WarmStart, checkpoint=str(tmp_path), training_state=True
    ),
  )
  status, out, _ = _call(capsys, "preview", exp)
  assert status == 0
  assert "starts at step 3; 25 non-variable arrays read" in out
  # What is given replaces the value of the experiment.
  status, out, _ = _call(capsys, "preview", exp, "--pattern=params/stack/.*=>")
  assert status == 0
  assert "read      2 of 11 variables" in out


@pytest.fixture
def store(run):
  """A copy of the run where there are no disks."""
  fsspec.register_implementation("s3", memory.MemoryFileSystem, clobber=True)
  copy = epath.Path("s3://bucket/run")
  for file in filter(pathlib.Path.is_file, run.rglob("*")):
    target = copy / str(file.relative_to(run))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(file.read_bytes())
  yield copy
  fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)
  memory.MemoryFileSystem.store.clear()


def test_a_store_is_looked_into_like_a_disk(run, store, capsys):
  for command in ("list", "explain"):
    status, there, _ = _call(capsys, command, store)
    assert status == 0
    _, here, _ = _call(capsys, command, run)
    assert there.splitlines()[1:] == here.splitlines()[1:]
    assert there.startswith("s3://bucket/run/checkpoints")
  status, out, _ = _call(
    *(capsys, "preview", store, f"--to={run}", "--training_state")
  )
  assert status == 0
  assert "starts at step 20" in out


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["lst"], "Unknown command 'lst'; did you mean 'list'?"),
    (["list"], "list: the following arguments are required: RUN"),
    (["list", "{run}@10"], "remove @10"),
    (["list", "/nowhere"], "/nowhere does not exist"),
    (["list", " "], "The run directory is empty"),
    (["explain", "{run}@7"], "contains no checkpoint of step 7"),
    (["explain", "{run}/metrics.jsonl"], "does not exist"),
    (["explain", "{run}", "parms"], "No name begins with 'parms'"),
    (["diff", "{run}"], "diff: the following arguments are required: B"),
    (["diff", "{run}", "{run}", "a", "b"], "unrecognized arguments: b"),
    (["verify", "{run}", "--fast"], "unrecognized arguments: --fast"),
    (["verify", "{run}@7"], "contains no checkpoint of step 7"),
    (["preview", "{run}"], "either --exp=a.b.C or --to=RUN"),
    (["preview", "{run}", "--to={run}", "--exp=a.B"], "either --exp"),
    (
      ["preview", "{run}", "--to={run}", "--fdl.a=1"],
      "--fdl.a=1 requires --exp",
    ),
    (["preview", "--to={run}"], "preview needs a SOURCE"),
    (["preview", "{run}", "--to={run}", "--pattern=x"], "has no =>"),
    (
      ["preview", "{run}", "--to={run}", "--pattern=(=>"],
      "WarmStart.patterns[0] is not a regular expression",
    ),
    (
      ["preview", "{run}", "--to={run}", "--pattern=params/hed/.*=>"],
      "did you mean 'params/head/kernel'",
    ),
    (["preview", "{run}", "--exp=nowhere.C"], "nowhere"),
    (["preview", "{run}", "--exp=a.C", "--fdl.x"], "--fdl.x has no value"),
  ],
)
def test_wrong_use_is_one_line(run, capsys, argv, message):
  status, out, err = _call(capsys, *(text.format(run=run) for text in argv))
  assert (status, out) == (2, "")
  assert message in err
  assert len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [["--help"], []])
def test_help_lists_the_commands(capsys, argv):
  status, out, _ = _call(capsys, *argv)
  assert status == (0 if argv else 2)
  for command in ckpt_main.COMMANDS:
    assert f"tools/ckpt {command}" in out


def test_a_reader_that_leaves_is_no_error():
  process = subprocess.Popen(
    [sys.executable, "-m", ckpt_main.__name__, "--help"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  process.stdout.close()
  assert process.stderr.read() == b""
  process.stderr.close()
  assert process.wait() == 0
