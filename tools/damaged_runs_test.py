"""Damaged files of runs and studies: one clear error, or a valid result.

Each file of a run directory and of a study is damaged (`file_damages`), and
replaced by a pipe, a folder, links, a device, a socket and a huge file. All
that read the file are called. They may return, because not each byte is covered
by a checksum; otherwise the command line prints their error as one line, which
names the file. A checkpoint is covered: it is read as it was, or rejected. All
cases:

  PAXON_DAMAGES=200 bazel test //tools:damaged_runs_test \
      --test_env=PAXON_DAMAGES
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import re
import shutil
import signal
from typing import Any

from etils import epath
import jax
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, tokenizer_protocol
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import (
  checkpointer,
  golden,
  local_tier,
  manifest,
  stored_checkpoint,
)
from paxon.runner.configuration import dump, resolving
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.hosts import membership, process_failures, run_lease
from paxon.runner.monitoring import (
  goodput,
  metrics_file,
  run_page,
  sample_file,
  spikes,
  writers,
)
from paxon.runner.session import output_parts, run_files, same_run
from paxon.runner.training import resume_checks, testing
from paxon.tools import configs_main, file_damages, watch_main
from paxon.tools.checkpoints import ckpt_main
from paxon.tools.hugging_face import hf_main
from paxon.tools.sweeps import sweep_main, sweep_study

# All 200 take minutes; CI draws some of them.
_NUM_DAMAGES = int(os.environ.get("PAXON_DAMAGES") or 12)
_MAX_SECONDS = 20
_ERRORS = (
  *(user_error.UserError, ValueError, OSError),
  checkpointer.DamagedCheckpointError,
)
_TOY = "paxon.runner.toy_experiment.Toy"
_RECORDS = '{"step": 3, "split": "train", "loss": 1.5, "accuracy": "NaN"}\n'
_SPIKE = {
  **{"step": 3, "metric": "loss", "value": 9.0, "expected": 1.0, "limit": 2.0},
  **{"position_before": {}, "position_after": {}, "documents": [1, 2]},
}
_ATTEMPT = {
  **{"begin": 1.0, "end": 2.0, "first_step": 0, "last_step": 3},
  **{"finished": False, "seconds": {goodput.Cause.PRODUCTIVE.value: 1.0}},
}
_EXAMPLES = {
  "split": "train",
  "step": 3,
  "examples": [{"caption": "a", "image": "data:image/png;base64,AA=="}],
}
_SAMPLE = {
  **{"prompt": "a", "continuation": "b", "ids": [1], "log_probs": [-0.5]},
  **{"sample": 0, "step": 7, "sampler": "greedy", "seed": 0, "stop": []},
  **{"max_new_tokens": 3, "finish_reason": "stop"},
}
_EXIT = {
  "process": 0,
  "host": "a",
  "time": 5.0,
  "status": 1,
  "is_secondary": False,
}
_ABOUT = {"step": 7, "file": "x", "samples": 1}


def _config():
  return resolving.resolve(_TOY, ()).config


def _json(value: Any) -> str:
  return f"{json.dumps(value, indent=1)}\n"


def _study() -> sweep_study.Study:
  return sweep_study.Study(
    exp=_TOY,
    knobs=(("width", "8,16"),),
    algorithm="grid",
    trials=2,
    metric="train/loss",
    rungs=(),
    reduction=3,
    seed=0,
    program="paxon.runner.main",
    arguments=("--fdl.num_train_steps=2",),
  )


def _result(number: int) -> str:
  return json.dumps(
    dataclasses.asdict(
      sweep_study.Result(
        status="finished",
        step=3,
        value=1.5,
        rungs={"2": 0.5},
        point=_study().points()[number],
      )
    )
  )


def _make_run(folder: pathlib.Path) -> None:
  golden.write(epath.Path(folder / run_dir.CHECKPOINTS))
  facts = tokenizer_protocol.describe(byte_tokenizer.ByteTokenizer())
  settings = {"experiment": _TOY, "overrides": ["--fdl.width=8"]}
  marker = run_files.FinishedMarker(step=7, num_train_steps=7)
  owner = dataclasses.asdict(run_lease._this_process())
  owner |= {"machine": run_lease._machine(), "started": "1", "pid": 1}
  texts = {
    "settings.json": _json(settings),
    "config.txt": dump.to_text(_config()),
    "tokenizer_facts.json": _json(facts),
    "input_facts.json": _json(
      {"inputs": {}, "warm_start": [], "copies": {"a/b": "/a/b"}}
    ),
    "finished.json": _json(dataclasses.asdict(marker)),
    "owner.json": _json(owner),
    "metrics.jsonl": _RECORDS * 3,
    "eval/metrics.jsonl": _RECORDS.replace("train", "test"),
    "eval/positions.json": _json({"step": 3, "before": {}, "after": {}}),
    "goodput.jsonl": f"{json.dumps(_ATTEMPT)}\n" * 2,
    "spikes.jsonl": f"{json.dumps(_SPIKE)}\n" * 2,
    "samples.jsonl": '{"step": 3, "text": "a"}\n' * 2,
    "samples.txt": "a text\n",
    "examples.json": _json(_EXAMPLES),
    "decode/7.jsonl": f"{json.dumps(_SAMPLE)}\n",
    "decode/7-x.jsonl.json": _json(_ABOUT),
    "decode/7-x.jsonl": "{}\n",
    "hosts/process-0.json": _json(_EXIT),
    "hosts/member-1.json": _json({"host": "a", "restarts": 1}),
    "hosts/fewer.json": _json({"generation": 1, "hosts": {"1": "a"}}),
    "hosts/more.json": _json({"generation": 2, "hosts": {"1": "a"}}),
    "hosts/return-1.json": _json({"host": "a"}),
    "local_checkpoints.json": _json({"run": 32 * "a", "directory": "/a"}),
    "wandb.json": _json({"id": "abc"}),
    "study.json": _json(dataclasses.asdict(_study())),
    "results/trial_0000.json": _result(0),
    "results/trial_0001.json": _result(1),
    "results/point_0000.json": _json(_study().points()[0]),
  }
  for name, text in texts.items():
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def _read_settings(folder):
  found = run_files.read_settings(folder)
  if found is not None:
    # Another name or knob is an error of the command line.
    with contextlib.suppress(user_error.UserError):
      resolving.resolve(found.experiment, found.overrides)
  with contextlib.suppress(user_error.UserError):
    run_files.find_trained_value("width", folder)
  configs_main._side(configs_main.Operand(name=os.fspath(folder)))
  run_page.describe("a", folder)


def _read_config(folder):
  config = _config()
  resume_checks.check(config, folder, job=resolving.build(config))
  stored_checkpoint.read_config(folder)
  configs_main._side(configs_main.Operand(name=os.fspath(folder)))
  run_page.make_frozen(folder, max_lines=9)


def _read_metrics(folder):
  run_page.make_frozen(folder, max_lines=2)
  ckpt_main._read_results(folder)
  sweep_main.read_values(pathlib.Path(folder / "metrics.jsonl"), "train/loss")
  for record in metrics_file.read_run(folder):
    assert record.step >= 0
    assert all(isinstance(value, float) for value in record.values.values())


def _read_positions(folder):
  path = folder / "eval" / "positions.json"
  evaluate.restore_positions(path, {}, done=())


def _read_goodput(folder):
  account = goodput.account(goodput.read(folder / "goodput.jsonl"))
  assert 0 <= account.goodput <= 1 or account.wall_seconds < 0
  run_page.make_frozen(folder, max_lines=9)


def _read_spikes(folder):
  for spike in spikes.read(folder / "spikes.jsonl"):
    spike.line()
  run_page.make_frozen(folder, max_lines=9)


def _read_samples(folder):
  sample_file.SampleFile(folder / "samples.jsonl", resume_step=9)
  run_page.make_frozen(folder, max_lines=9)


def _read_owner(folder):
  same_run._read_owner(folder)
  with run_lease.Lease(folder, sleep=lambda _: None):
    assert json.loads((folder / "owner.json").read_text())["count"] == 0


def _make_member(folder):
  return membership.Membership(
    run_dir=folder,
    coordinator_address="a:1",
    process_id=1,
    num_processes=2,
    min_processes=1,
  )


def _read_hosts(folder):
  for each in process_failures.read(folder, since=0.0):
    each.describe()
  member = _make_member(folder)
  member.make_flags(member.find_present(1))
  member.find_fewer()
  member._read_all("return-")


def _read_output(folder):
  parts = output_parts.Parts(
    folder / "decode/7-x.jsonl", {"step": 7, "file": "x"}
  )
  assert parts.is_finished
  parts.read_about()


def _read_checkpoint(folder):
  # `ckpt ls` and what restores values.
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  specs = golden.specs()
  path = folder / run_dir.CHECKPOINTS
  stored = stored_checkpoint.find_checkpoint(folder, step=golden.STEP)
  stored_checkpoint.verify(stored)
  stored_checkpoint.fingerprint(stored)
  arrays = stored_checkpoint.read_numpy(stored, stored.arrays)
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    restored = checkpoints.restore(
      golden.STEP, specs=specs, shardings=jax.tree.map(lambda _: device, specs)
    )
  assert restored.data == golden.DATA
  for spec, value in zip(
    jax.tree.leaves(specs), jax.tree.leaves(golden.values()), strict=True
  ):
    np.testing.assert_array_equal(arrays[spec.name], value)
  jax.tree.map(np.testing.assert_array_equal, restored.tree, golden.values())


def _read_study(folder):
  study, *_ = sweep_main._open_study([os.fspath(folder)])
  # What is read is what the file says.
  content = json.loads((folder / "study.json").read_text())
  read = json.loads(json.dumps(dataclasses.asdict(study)))
  assert read.items() >= content.items()
  assert study.points()


def _read_results(folder):
  sweep_main.run(_study(), pathlib.Path(folder))
  page = (folder / "report.html").read_text()
  assert page.count("<polyline") == 2
  sweep_main._keep_point(_study(), pathlib.Path(folder), 0, {})


def _read_text(folder):
  run_page.make_frozen(folder, max_lines=9)


@functools.cache
def _job():
  return testing.make()[0]


def _check_tokenizer(folder):
  run_files.check_tokenizer(_job(), folder)


_READERS = {
  "settings.json": _read_settings,
  "config.txt": _read_config,
  "tokenizer_facts.json": _check_tokenizer,
  "finished.json": run_files.read_finished,
  "owner.json": _read_owner,
  "input_facts.json": run_files.read_sources,
  "metrics.jsonl": _read_metrics,
  "eval/metrics.jsonl": _read_metrics,
  "eval/positions.json": _read_positions,
  "goodput.jsonl": _read_goodput,
  "spikes.jsonl": _read_spikes,
  "samples.jsonl": _read_samples,
  "samples.txt": _read_text,
  "examples.json": _read_text,
  "decode/7.jsonl": lambda f: decode._read_samples(f / "decode/7.jsonl"),
  "decode/7-x.jsonl.json": _read_output,
  **{
    f"hosts/{name}.json": _read_hosts
    for name in ("process-0", "member-1", "fewer", "return-1")
  },
  "hosts/more.json": lambda folder: _make_member(folder).find_admission(1),
  "local_checkpoints.json": lambda f: local_tier._find_run(epath.Path(f)),
  "wandb.json": writers._wandb_id,
  "study.json": _read_study,
  "results/trial_0000.json": _read_results,
  "results/point_0000.json": _read_results,
  **{
    f"checkpoints/{golden.STEP}/{name}": _read_checkpoint
    for name in (
      *("metadata/metadata", "data/metadata", "manifest/files.json"),
      *("state/_METADATA", "state/manifest.ocdbt", "_CHECKPOINT_METADATA"),
    )
  },
}


@pytest.fixture(name="valid", scope="module")
def _valid(tmp_path_factory):
  folder = tmp_path_factory.mktemp("valid")
  _make_run(folder)
  return folder


@pytest.fixture(name="run")
def _run(valid, tmp_path):
  shutil.copytree(valid, tmp_path / "run")
  return epath.Path(tmp_path / "run")


@contextlib.contextmanager
def _alarm():
  """Raises TimeoutError in what takes too long, such as an open of a pipe."""

  def stop(*_):
    raise TimeoutError("it takes too long")

  before = signal.signal(signal.SIGALRM, stop)
  signal.alarm(_MAX_SECONDS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _find_mistake(read, name: str, run: epath.Path) -> str | None:
  """Returns what is wrong with how a damaged file is read, None if nothing."""
  try:
    with _alarm():
      read(run)
  except TimeoutError as error:
    return str(error)
  except _ERRORS as error:
    text = user_error.one_line(error)
    shown = [pathlib.PurePath(name).name, f"/{golden.STEP}", "study.json"]
    # A changed text is another configuration.
    shown += ["a run with a different configuration"] * (name == "config.txt")
    if not any(each in text for each in shown):
      return f"does not name the file: {error!r}"
    if len(text) > 1000:
      return f"is no line: {text[:200]}"
  except Exception as error:
    return repr(error)
  return None


@pytest.mark.nightly(keep=7)
@pytest.mark.parametrize("name", _READERS)
def test_damaged_bytes(name, valid, run):
  read, path = _READERS[name], pathlib.Path(run / name)
  assert _find_mistake(read, name, run) is None
  read(run)
  content = (valid / name).read_bytes()
  wrong = []
  for seed in range(_NUM_DAMAGES):
    draw = random.Random(f"{name} {seed}")
    path.write_bytes(file_damages.damage(content, draw))
    mistake = _find_mistake(read, name, run)
    if mistake is not None:
      wrong.append((seed, mistake[:400]))
  assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", _READERS)
def test_other_kinds_of_files(name, valid, run):
  read, wrong = _READERS[name], []
  for kind, make in file_damages.OTHER_KINDS.items():
    # A study or trial without the file begins.
    if kind == "link_to_nowhere" and name.startswith(("study", "results")):
      continue
    path = pathlib.Path(run / name)
    path.unlink()
    make(path)
    mistake = _find_mistake(read, name, run)
    if mistake is not None:
      wrong.append((kind, mistake[:400]))
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    path.unlink(missing_ok=True)
    shutil.copy(valid / name, path)
  assert not wrong, "\n".join(map(str, wrong))


def test_a_checkpoint_does_not_name_files_elsewhere():
  text = manifest.to_text({"../../x": manifest.Entry(1, 2)})
  with pytest.raises(manifest.UnreadableManifestError):
    manifest.from_text(text)


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl"])
def test_a_broken_run_does_not_hide_others(name, valid, tmp_path):
  shutil.copytree(valid, tmp_path / "sound")
  for kind, make in file_damages.OTHER_KINDS.items():
    broken = tmp_path / kind
    shutil.copytree(valid, broken)
    (broken / name).unlink()
    make(broken / name)
  (tmp_path / os.fsdecode(b"\xff")).mkdir()
  (tmp_path / os.fsdecode(b"\xff") / "metrics.jsonl").write_text(_RECORDS)
  with _alarm():
    runs = watch_main.find_runs(tmp_path)
    found = {
      each["name"]: each["problem"]
      for each in (run_page.describe(k, run) for k, run in runs.items())
    }
    curves = watch_main.collect(runs, ["loss"])["curves"]["loss"]
    sections = watch_main.make_sections(runs, ())
  json.dumps(found, ensure_ascii=False).encode()
  assert set(found) == {"sound", "\\xff", *file_damages.OTHER_KINDS}
  assert found["sound"] == found["\\xff"] == ""
  assert {"sound", "\\xff"} <= set(curves)
  for kind in set(file_damages.OTHER_KINDS) - {"link_to_nowhere", "huge"}:
    assert name in found[kind], kind
  assert all(sections.values())


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"program": "evil"}, "pass it again"),
    ({"arguments": ["--exp=evil.C"]}, "does not begin with --fdl."),
    ({"trials": 10**12, "algorithm": "random"}, "at most 100,000"),
    ({"knobs": [[f"k{i}", "1,2,3,4"] for i in range(40)]}, "at most 100,000"),
  ],
)
def test_a_study_decides_neither_programs_nor_endless_work(
  changes, message, run
):
  path = pathlib.Path(run / "study.json")
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  with pytest.raises(user_error.UserError, match=re.escape(message)):
    sweep_main._open_study([os.fspath(run)])


def test_a_log_of_a_trial_is_not_written_elsewhere(run, tmp_path):
  log = pathlib.Path(run / "trial_0000.log")
  log.symlink_to(tmp_path / "profile")
  with pytest.raises(user_error.UserError, match=r"trial_0000\.log"):
    sweep_main._open_log(log)
  log.unlink()
  os.mkfifo(log)
  with pytest.raises(user_error.UserError, match=r"trial_0000\.log"):
    sweep_main._open_log(log)


@pytest.mark.parametrize(
  "text",
  [
    "os.system",
    "subprocess.call",
    "builtins.exec",
    "numpy.load",
    "torch.load",
    "paxon.runner.files.os.system",
    "paxon.tools.file_damages.re.compile",
  ],
)
def test_settings_name_only_functions_of_models(text, run):
  override = f"--fdl.task.model.layers[0].activation={text}"
  settings = {"experiment": _TOY, "overrides": [override]}
  (run / "settings.json").write_text(json.dumps(settings))
  found = run_files.read_settings(run)
  with pytest.raises(user_error.UserError, match="activation"):
    resolving.resolve(found.experiment, found.overrides)


def test_functions_of_models_are_read(run):
  override = "--fdl.task.model.layers[0].activation=jax.nn.relu"
  settings = {"experiment": _TOY, "overrides": [override]}
  (run / "settings.json").write_text(json.dumps(settings))
  found = run_files.read_settings(run)
  config = resolving.resolve(found.experiment, found.overrides).config
  assert config.task.model.layers[0].activation is jax.nn.relu


def test_links_out_of_the_folder_are_not_followed(tmp_path, capsys):
  source, secret = tmp_path / "a", tmp_path / "secret.json"
  secret.write_text('{"secret": 1}')
  source.mkdir()
  (source / "config.json").write_text("{}")
  (source / "generation_config.json").symlink_to(secret)
  command = ["import", os.fspath(source), f"--to={tmp_path / 'run'}"]
  assert hf_main.main(command) == 2
  error = capsys.readouterr().err
  assert "generation_config.json" in error
  assert "outside of the folder" in error
  assert not (tmp_path / "run").exists()
