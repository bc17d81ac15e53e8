"""Tests that the commands of Pax's README run, with small sizes.

Flags after `--exp` and `--job_log_dir` set sizes and text files.
"""

import json

import pytest

from paxon.runner import main

_PARAMS = "tasks.lm.params."
_SMALL = (
  "--fdl.num_layers=2",
  "--fdl.embed_dim=32",
  "--fdl.head_dim=8",
  "--fdl.length=32",
  "--fdl.vocab_size=264",
  "--fdl.global_batch_size=8",
  "--fdl.num_train_steps=2",
  "--fdl.eval_every_steps=2",
  "--fdl.summary_every_steps=1",
)


def _run(*arguments: str) -> int:
  with pytest.raises(SystemExit) as exit_:
    main.run(argv=["main", *arguments])
  assert isinstance(exit_.value.code, int)
  return exit_.value.code


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory):
  """Files like those of C4: JSON lines with one text each."""
  folder = tmp_path_factory.mktemp("c4")
  flags = []
  for split in ("train", "validation"):
    path = folder / f"c4-{split}.00000-of-01024.json"
    texts = [f"Text {i} of the {split} split, in a line." for i in range(40)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    flags.append(f"--fdl.{split}_files={path}")
  return flags


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("experiment", "mesh"),
  [
    ("lm_cloud.LmCloudSpmd2BLimitSteps", "fsdp=4,data=2"),
    ("lm_cloud.LmCloudTransformerAdamLimitSteps", None),
    ("c4.C4Spmd1BAdam4Replicas", "fsdp=4,data=2"),
    ("c4.C4Spmd16BAdam32Replicas", "fsdp=4,tensor=2"),
    ("c4_multislice.C4Spmd22BAdam2xv4_128", "fsdp=4,data=2"),
  ],
)
def test_trains(experiment, mesh, files, tmp_path, capsys):
  run = tmp_path / "run"
  small = [*_SMALL, *([] if mesh is None else [f"--fdl.mesh={mesh}"])]
  if experiment.startswith("c4"):
    small += files
  command = [f"--exp={_PARAMS}{experiment}", f"--job_log_dir={run}"]
  assert _run(*command, *small) == 0
  assert (run / "checkpoints" / "2").exists()
  assert "validation" in capsys.readouterr().out


def test_error_without_files_names_the_knob(tmp_path, capsys):
  command = [f"--exp={_PARAMS}c4.C4Spmd1BAdam4Replicas"]
  command += [f"--job_log_dir={tmp_path / 'run'}", "--fdl.mesh=fsdp=8"]
  assert _run(*command, *_SMALL) == 2
  text = capsys.readouterr().err
  assert (
    "train_files is not set. Set it to files, such as --fdl.train_files="
    in (text)
  )
  assert text.count("\n") == 1
