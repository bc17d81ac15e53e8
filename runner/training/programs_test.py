"""Tests for the programs: training, evaluation and decoding of one job."""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import math
import os
import re

from etils import epath
import jax
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.decoding import beam_search, sampling
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import (
  evaluate,
  evaluation,
  text_evaluation,
)
from paxon.runner.generation import (
  decode,
  generation_limits,
  generation_program,
  samples,
)
from paxon.runner.hosts import run_lease
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import restore, run_files
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import hooks, testing, train

MESH = "data=2,fsdp=2,tensor=2"


class _Fives(hooks.Hook):
  """A user's hook, as the docstring of `hooks` shows."""

  every_steps = 5

  def start(self, progress):
    self._start = progress.step

  def run(self, progress):
    values = {"since_start": float(progress.step - self._start)}
    progress.writer.write(progress.step, "hook", values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The folder of a finished run on a mesh."""
  path = epath.Path(tmp_path_factory.mktemp("run"))
  job, config = testing.make(mesh=MESH)
  job = dataclasses.replace(job, baselines=lambda: {"xz": 2.5, "trigram": 9.0})
  with contextlib.redirect_stdout(io.StringIO()) as output:
    train.run(job, config, path, more_hooks=[_Fives()])
  (path / "output.txt").write_text(output.getvalue())
  return path


def _records(folder, name="metrics.jsonl"):
  lines = (folder / name).read_text().splitlines()
  return [json.loads(line) for line in lines]


def _restored(folder, mesh=MESH):
  session = session_lib.open_session(testing.make(mesh=mesh)[0])
  path = folder / "checkpoints"
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    state = restore.restore_for_evaluation(session, checkpoints, path)
  return session, state


@pytest.fixture(scope="module")
def restored(folder):
  """The job on its mesh, and what evaluation needs of the finished run."""
  return _restored(folder)


def test_training_writes_everything(folder):
  names = {path.name for path in folder.iterdir()}
  assert names >= {
    "checkpoints",
    "config.txt",
    "events",
    "finished.json",
    "metrics.jsonl",
    "report.html",
    "samples.txt",
    "settings.json",
  }
  steps = {path.name for path in (folder / "checkpoints").iterdir()}
  assert steps == {"4", "8", "12"}
  assert "--- sample 2 ---\nx" in (folder / "samples.txt").read_text()


def test_metrics_have_the_promised_keys(folder):
  records = {(r["step"], r["split"]): r for r in _records(folder)}
  assert {step for step, split in records if split == "train"} == set(
    range(1, 13)
  )
  assert {s for s, split in records if split == "validation"} == {6, 12}
  wanted = {"loss", "log_pplx", "bits_per_byte", "tokens_per_second"}
  assert wanted <= set(records[12, "validation"])
  more = {"learning_rate", "grad_norm", "param_norm"}
  assert wanted | more <= set(records[12, "train"])
  assert records[12, "train"]["loss"] < records[1, "train"]["loss"]
  assert records[0, "baseline/xz"]["bits_per_byte"] == 2.5


def test_a_hook_runs_at_its_interval(folder):
  found = [r for r in _records(folder) if r["split"] == "hook"]
  assert [(r["step"], r["since_start"]) for r in found] == [(5, 5), (10, 10)]


def test_evaluation_is_exact_over_the_whole_split(folder, restored):
  session, state = restored
  source = session.job.eval_inputs["validation"]
  source.reset()
  apply = jax.jit(session.job.task.model.apply)
  nats, weight, source_bytes, batches = 0.0, 0.0, 0, 0
  for batch in source:
    batches += 1
    logits = apply(
      state.variables,
      *(batch[k] for k in ("inputs", "positions", "segment_ids")),
    )
    logits = np.asarray(logits, np.float64)
    log_sum = np.log(np.sum(np.exp(logits), -1))
    at_target = np.take_along_axis(logits, batch["targets"][..., None], -1)
    nll = log_sum - at_target[..., 0]
    nats += np.sum(nll * batch["weights"])
    weight += np.sum(batch["weights"])
    source_bytes += np.sum(batch["target_bytes"] * batch["weights"])
  assert batches > 1
  written = {(r["step"], r["split"]): r for r in _records(folder)}
  values = written[12, "validation"]
  assert values["loss"] == pytest.approx(nats / weight, rel=1e-5)
  assert values["log_pplx"] == values["loss"]
  assert values["bits_per_byte"] == pytest.approx(
    nats / math.log(2) / source_bytes, rel=1e-5
  )


def test_evaluating_gives_up_when_asked(restored):
  session, state = restored
  evaluator = evaluation.Evaluator(session)
  assert evaluator.evaluate(state, is_stopped=lambda: True) is None


def test_each_evaluation_is_shown_once(folder):
  output = (folder / "output.txt").read_text()
  assert output.count("step 6/12  validation  loss") == 1
  assert output.count("step 12/12  validation  loss") == 1
  assert output.count("validation") == 3  # The third compares with baselines.


def test_evaluate_reads_the_checkpoint_and_writes_the_same_metrics(
  folder, capsys
):
  before = (folder / "metrics.jsonl").read_text()
  report = (folder / "report.html").read_text()
  assert evaluate.run(testing.make(mesh=MESH)[0], folder) == 0
  assert "step 12: validation: bits_per_byte" in capsys.readouterr().out
  # A run that is training meanwhile writes its own file.
  assert (folder / "metrics.jsonl").read_text() == before
  (own,) = _records(folder, "eval/metrics.jsonl")
  assert (own["step"], own["split"]) == (12, "validation")
  (trained,) = (
    r for r in _records(folder) if (r["step"], r["split"]) == (12, "validation")
  )
  assert own.keys() == trained.keys()
  for name, value in trained.items():
    if name != "tokens_per_second":
      assert own[name] == value
  joined = metrics_file.read_run(folder)
  assert len(joined) == len(_records(folder))
  assert (folder / "report.html").read_text() != report


def test_decode_equals_the_forward_pass(folder, restored, capsys):
  session, state = restored
  assert decode.run(testing.make(mesh=MESH)[0], folder, "return x") == 0
  printed = capsys.readouterr().out
  text, ids = testing.greedy_continuation(session, state.variables, "return x")
  assert f"return x{text}\nsamples: {folder}/decode/12.jsonl\n" in printed
  (line,) = _records(folder, "decode/12.jsonl")
  assert (line["continuation"], line["ids"]) == (text, ids)
  assert (line["prompt"], line["step"], line["seed"]) == ("return x", 12, 0)


def test_several_samples_of_an_earlier_checkpoint(folder, capsys):
  job, _ = testing.make(mesh=MESH, num_samples=2, temperature=1.0)
  assert decode.run(job, folder, "return x", step=8) == 0
  lines = _records(folder, "decode/8.jsonl")
  assert [(line["step"], line["sample"]) for line in lines] == [(8, 0), (8, 1)]
  assert lines[0]["ids"] != lines[1]["ids"]
  assert "--- sample 2 ---\nreturn x" in capsys.readouterr().out


def test_evaluates_an_earlier_checkpoint(folder, capsys):
  assert evaluate.run(testing.make(mesh=MESH)[0], folder, step=4) == 0
  assert capsys.readouterr().out.startswith("step 4: validation: ")


@dataclasses.dataclass(frozen=True)
class _HighIds(byte_tokenizer.ByteTokenizer):
  def encode(self, text):
    return super().encode(text) + 1000


def test_texts_that_a_model_cannot_read(folder, tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("return x")
  job = testing.make(mesh=MESH)[0]
  with pytest.raises(user_error.UserError, match=r"^The id \d+ is not in the"):
    generation_limits.check_ids(job, _HighIds().encode("x"))
  converting = dataclasses.replace(job, weights="int8:convert")
  with pytest.raises(user_error.UserError, match="does not convert weights"):
    text_evaluation.run(converting, folder, str(path))


@pytest.mark.parametrize(
  "program",
  [evaluate.run, functools.partial(decode.run, prompt=None)],
  ids=["eval", "decode"],
)
def test_a_checkpoint_that_does_not_exist(folder, program):
  job, _ = testing.make(mesh=MESH)
  with pytest.raises(
    user_error.UserError, match=r"no checkpoint of step 5; this run has 4, 8, 1"
  ):
    program(job, folder, step=5)


def test_any_end_id_ends_a_sample_and_is_not_in_its_text(folder, restored):
  session, state = restored
  [free] = samples.draw(session, state, prompts=["return x"])
  assert session.job.generation is not None
  ended = dataclasses.replace(
    session.job.generation, end_ids=(free.ids[2], 2), max_new_tokens=4
  )
  session = session_lib.open_session(
    dataclasses.replace(session.job, generation=ended)
  )
  [sample] = samples.draw(session, state, prompts=["return x"])
  end = free.ids.index(free.ids[2])
  assert sample.ids == free.ids[: end + 1]
  assert session.job.task.tokenizer is not None
  assert sample.continuation == session.job.task.tokenizer.decode(
    np.asarray(free.ids[:end], np.int32)
  )


def test_drawing_uses_the_program_that_was_checked():
  """Which is traced once before a run, and compiled once."""
  session = session_lib.open_session(testing.make(max_new_tokens=2)[0])
  state = session.initial_state()
  generation_program.trace(session)
  events = []

  def listen(event, duration, *, fun_name="", **_):
    del duration
    if fun_name in ("run", "jit(run)"):
      events.append(event.rpartition("/")[2])

  jax.monitoring.register_event_duration_secs_listener(listen)
  one, two = (samples.draw(session, state) for _ in range(2))
  jax.monitoring.unregister_event_duration_listener(listen)
  assert one == two
  assert events.count("jaxpr_trace_duration") == 0
  assert events.count("backend_compile_duration") == 1


def test_a_run_without_a_tokenizer_has_no_samples(tmp_path, capsys):
  job, config = testing.make(num_train_steps=2, eval_every_steps=None)
  task = dataclasses.replace(job.task, tokenizer=None)
  result = train.run(
    dataclasses.replace(job, task=task, eval_inputs={}),
    config,
    epath.Path(tmp_path),
  )
  assert result.step == 2
  assert re.search(
    r"^no samples: .*TinyLm cannot generate text: its task has no tokenizer$",
    capsys.readouterr().out,
    re.MULTILINE,
  )
  assert not (tmp_path / "samples.txt").exists()


def test_decode_takes_prompts_from_a_file(folder, tmp_path, capsys):
  (tmp_path / "prompts.txt").write_text("def \nx\n")
  job, _ = testing.make(mesh=MESH)
  assert decode.run(job, folder, f"@{tmp_path / 'prompts.txt'}") == 0
  printed = capsys.readouterr().out
  # The prompts of the job are the same, and greedy.
  assert printed.startswith((folder / "samples.txt").read_text())


def test_a_search_with_penalties_is_an_error(restored):
  session, state = restored
  settings = generation.GenerationSettings(
    search=beam_search.BeamSearch(beam_size=2),
    sampler=sampling.Settings(temperature=0.0, repetition_penalty=1.2),
  )
  job = dataclasses.replace(session.job, generation=settings)
  with pytest.raises(user_error.UserError, match="a beam search does not use"):
    samples.draw(dataclasses.replace(session, job=job), state)


def test_samples_are_the_same_on_another_mesh(folder, restored):
  other = _restored(folder, "sequence=2,data=4")
  drawn = [samples.draw(*each) for each in (restored, other)]
  for one, two in zip(*drawn, strict=True):
    # Sums are in another order.
    np.testing.assert_allclose(one.log_probs, two.log_probs, rtol=1e-4)
    assert one == dataclasses.replace(two, log_probs=one.log_probs)
  assert [sample.prompt for sample in drawn[0]] == ["def ", "x"]


def test_a_finished_run_trains_no_more(folder, capsys):
  job, config = testing.make(mesh=MESH)
  before = _records(folder)
  result = train.run(job, config, folder)
  output = capsys.readouterr().out
  assert "step 12 already exists" in output
  # It was evaluated, too, and that is shown, not made again.
  assert output.count("step 12: validation: bits_per_byte") == 1
  assert "step 12/12" not in output
  assert _records(folder) == before
  assert result.step == 12
  assert list(result.evaluations) == [6, 12]


@pytest.mark.parametrize(
  "program",
  [evaluate.run, functools.partial(decode.run, prompt=None)],
  ids=["eval", "decode"],
)
def test_without_a_checkpoint(tmp_path, program):
  job, _ = testing.make()
  with pytest.raises(
    user_error.UserError, match=r"There is no checkpoint in .*; train first"
  ):
    program(job, epath.Path(tmp_path))


def test_a_checkpoint_of_another_model(folder):
  job, _ = testing.make(mesh=MESH, embed_dim=32)
  with pytest.raises(
    user_error.UserError,
    match=r"params/.* has shape \(.*16\) in the checkpoint and \(.*32\) in",
  ):
    evaluate.run(job, folder)


def test_nothing_to_evaluate_on(folder):
  job = dataclasses.replace(testing.make()[0], eval_inputs={})
  with pytest.raises(user_error.UserError, match=r"TinyLm has no split to ev"):
    evaluate.run(job, folder)


def test_nothing_to_generate(folder):
  job = testing.make(mesh=MESH)[0]
  job = dataclasses.replace(
    job, task=dataclasses.replace(job.task, tokenizer=None)
  )
  with pytest.raises(user_error.UserError, match=r"TinyLm cannot generate te"):
    decode.run(job, folder, "x")


def test_data_of_another_kind_than_the_checkpoint_was_trained_on(folder):
  job, _ = testing.make(mesh=MESH, seed=5)
  session = session_lib.open_session(job)
  with (
    checkpointer.Checkpointer(
      folder / "checkpoints", read_only=True
    ) as checkpoints,
    pytest.raises(
      user_error.UserError, match=r"does not fit the checkpoint of step 12: .*5"
    ),
  ):
    restore.restore_or_start(session, checkpoints)


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    (
      {"mesh": "fsdp=16"},
      r"mesh 'fsdp=16' needs exactly 16 devices, but there are 8",
    ),
    (
      {"mesh": "data=8", "global_batch_size": 3},
      r"global_batch_size \(3\) of the split 'train' must be a multiple of 8",
    ),
    (
      {"mesh": "data=4,tensor=2", "num_microbatches": 4},
      r"global_batch_size \(8\) .* must be a multiple of 16: num_microbatches"
      r" \(4\) times the 4 shards into which mesh 'data=4,tensor=2'",
    ),
    (
      {"mesh": "tensor=8"},
      r"mesh 'tensor=8': .*axis 'heads' of size 2 does not divide by tensor=8",
    ),
  ],
)
def test_a_mesh_that_does_not_fit(knobs, message):
  with pytest.raises(user_error.UserError, match=message):
    session_lib.open_session(testing.make(**knobs)[0])


def test_an_input_without_a_batch():
  job, _ = testing.make()
  empty = job.eval_inputs["validation"]
  for _ in empty:
    pass
  job = dataclasses.replace(job, train_input=empty)
  with pytest.raises(user_error.UserError, match=r"input has no batch; use"):
    session_lib.open_session(job)


def test_an_input_that_ends_as_tensorflow_does_has_no_batch_either():
  class OutOfRangeError(Exception):
    __module__ = "tensorflow.python.framework.errors_impl"

  def raises(error):
    def get_next():
      raise error

    return get_next

  job, _ = testing.make()
  empty = job.eval_inputs["validation"]
  job = dataclasses.replace(job, train_input=empty)
  empty.get_next = raises(OutOfRangeError())
  with pytest.raises(user_error.UserError, match=r"input has no batch; use"):
    session_lib.open_session(job)
  empty.get_next = raises(RuntimeError("no such file"))
  with pytest.raises(RuntimeError, match="no such file"):
    session_lib.open_session(job)


@pytest.mark.nightly
def test_a_run_returns_its_state_and_its_metrics(tmp_path):
  """As in a notebook."""
  for num_train_steps in (4, 6):
    job, config = testing.make(
      num_train_steps=num_train_steps, eval_every_steps=2, max_new_tokens=0
    )
    result = train.run(job, config, epath.Path(tmp_path))
  assert int(result.state.step) == result.step == 6
  assert result.stopped_by is None
  assert result.ended_early is None
  # Of both processes.
  assert list(result.evaluations) == [2, 4, 6]
  losses = {
    record.step: record.values["loss"]
    for record in result.history()
    if record.split == "train"
  }
  assert list(losses) == [1, 2, 3, 4, 5, 6]
  assert losses[6] < losses[1]
  evaluated = result.evaluations[6]["validation"]["loss"]
  session = session_lib.open_session(job)
  again = evaluation.Evaluator(session).evaluate(result.state)
  assert again["validation"]["loss"] == evaluated


def test_a_second_training_in_a_folder_is_an_error(tmp_path):
  job, config = testing.make(num_train_steps=4, max_new_tokens=0)
  folder = epath.Path(tmp_path)
  with run_lease.Lease(folder):
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(user_error.UserError, match="by another training"):
      train.run(job, config, folder)
    assert {path.name for path in folder.iterdir()} == before
  assert train.run(job, config, folder).step == 4


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_store_that_fails_is_one_line(tmp_path, monkeypatch, code):
  def fail(*args):
    del args
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(run_files, "store_settings", fail)
  job, config = testing.make(num_train_steps=4, max_new_tokens=0)
  with pytest.raises(
    user_error.UserError, match=f"cannot be written to: {os.strerror(code)}"
  ):
    train.run(job, config, epath.Path(tmp_path))
  assert not (tmp_path / "owner.json").exists()
  code = errno.ENOENT
  with pytest.raises(FileNotFoundError):
    train.run(job, config, epath.Path(tmp_path))


@pytest.mark.nightly
def test_a_finite_training_input_ends_the_run(tmp_path, capsys):
  job, config = testing.make(num_train_steps=1000)
  finite = testing.make()[0].eval_inputs["validation"]
  count = len(list(finite))
  finite.reset()
  job = dataclasses.replace(job, train_input=finite, eval_inputs={})
  result = train.run(job, config, epath.Path(tmp_path))
  output = capsys.readouterr().out
  assert f"the training input ended after {count} steps" in output
  assert result.step == count
  assert result.ended_early == f"the training input ended after {count} steps"
  assert len(jax.devices()) == 8
