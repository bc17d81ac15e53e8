"""Tests for decoding a file of prompts."""

import dataclasses
import json

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs.tf_records import tf_example, tf_record_files
from paxon.layers.decoding import beam_search, samplers, sampling, speculative
from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.generation import decode_file, samples
from paxon.runner.session import restore, run_files, serving
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import testing, train

_PROMPTS = ("def ", "x", "", "return x = 1 + y", "()" * 12, "y\n  x = ", "é")


@pytest.fixture(scope="module", name="run")
def make_run(tmp_path_factory):
  """The job and the directory of a trained run."""
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  job, config = testing.make(
    num_train_steps=2, checkpoint_every_steps=2, eval_every_steps=None
  )
  train.run(job, config, folder)
  return testing.make(num_train_steps=2, max_new_tokens=6)[0], folder


def _write(path, lines):
  path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  return str(path)


def _read(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _with(job, **settings):
  settings = dataclasses.replace(job.generation, **settings)
  return dataclasses.replace(job, generation=settings)


def test_greedy_continuations_are_those_of_forward_passes(
  run, tmp_path, capsys
):
  job, folder = run
  path = _write(
    tmp_path / "p.jsonl",
    [{"prompt": p, "id": i} for i, p in enumerate(_PROMPTS)],
  )
  assert decode_file.run(job, folder, path, batch_size=8) == 0
  output = folder / "decode" / "2-p.jsonl"
  lines = _read(output)
  session = session_lib.open_session(job)
  session, state = restore.read_for_evaluation(
    session, serving.checkpoints(job, folder), step=None
  )
  variables = session.evaluation_variables(state)
  for number, (line, prompt) in enumerate(zip(lines, _PROMPTS, strict=True)):
    text, ids = testing.greedy_continuation(session, variables, prompt)
    assert line["prompt"] == prompt
    assert line["id"] == number
    assert line["line"] == number + 1
    assert (line["continuation"], line["ids"]) == (text, ids)
    assert len(line["log_probs"]) == len(ids)
  about = json.loads(epath.Path(f"{output}.json").read_text())
  assert about["samples"] == about["lines"] == len(_PROMPTS)
  assert about["tokens"] == sum(len(line["ids"]) for line in lines)
  printed = capsys.readouterr().out
  assert "decoded 7 of 7 lines, " in printed
  assert f"samples: {output}" in printed
  # Again: nothing is decoded, and the output stays.
  before = output.read_text()
  assert decode_file.run(job, folder, path, batch_size=8) == 0
  assert "decoded" not in capsys.readouterr().out
  assert output.read_text() == before


def _store(folder, *given):
  """Stores what `main` stores of a run of `TinyLm`."""
  run_files.store_settings(
    testing.TinyLm.import_path(),
    [overrides.Override(path=p, text=t) for p, t in given],
    folder,
  )


@pytest.mark.nightly
def test_speculation_changes_no_greedy_id_and_reports_the_drafts(
  run, tmp_path, capsys
):
  job, folder = run
  _store(folder)
  path = _write(tmp_path / "p.jsonl", [{"prompt": p} for p in _PROMPTS])
  decoded = []
  for name, drafts in (
    ("plain", None),
    ("lookup", speculative.PromptLookup(num_tokens=3)),
    # The model itself, so that all of its drafts are accepted.
    ("run", generation.DraftRun(run=str(folder), num_tokens=2)),
  ):
    output = tmp_path / f"{name}.jsonl"
    decode_file.run(
      _with(job, speculation=drafts),
      folder,
      path,
      output=str(output),
      batch_size=8,
    )
    decoded.append(_read(output))
  plain, *others = decoded
  assert not any("speculation" in line for line in plain)
  for lines in others:
    for line, other in zip(lines, plain, strict=True):
      assert line["ids"] == other["ids"]
      assert line["log_probs"] == pytest.approx(other["log_probs"], abs=1e-4)
      counts = line["speculation"]
      # The prefill gives one, and each step one more than it accepts.
      most = 1 + counts["steps"] + counts["accepted"]
      assert most - 1 <= len(line["ids"]) <= most
  for line in others[1]:
    assert line["speculation"]["accepted"] == line["speculation"]["drafted"]
  assert "drafts: 100.0% of " in capsys.readouterr().out


@pytest.mark.nightly
def test_samples_with_lookup_are_those_without(run):
  """Of a run with one sampler for all prompts."""
  job, folder = run
  job = _with(job, sampler=sampling.Settings(temperature=0.7, seed=3))
  drawn = []
  for drafts in (None, speculative.PromptLookup(num_tokens=3)):
    session = session_lib.open_session(_with(job, speculation=drafts))
    session, state = restore.read_for_evaluation(
      session, serving.checkpoints(job, folder)
    )
    drawn.append(samples.draw(session, state))
  assert [s.ids for s in drawn[0]] == [s.ids for s in drawn[1]]


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (None, "is not the directory of a run: it has no settings.json"),
    (
      ("task.model.embedding.vocab_size", "272"),
      "has a vocabulary of 272 ids, and the model one of 264; both must have",
    ),
    (
      ("task.tokenizer", "None"),
      "cannot draft text: its task has no tokenizer",
    ),
  ],
)
def test_a_run_that_cannot_draft(run, tmp_path, given, message):
  job, folder = run
  if given is not None:
    _store(epath.Path(tmp_path), given)
  draft = generation.DraftRun(run=str(tmp_path))
  session = session_lib.open_session(_with(job, speculation=draft))
  session, state = restore.read_for_evaluation(
    session, serving.checkpoints(job, folder)
  )
  with pytest.raises(user_error.UserError, match=message):
    samples.draw(session, state)


@pytest.mark.nightly
def test_draws_of_a_line_do_not_depend_on_the_others(run, tmp_path):
  job, folder = run
  job = _with(
    job, sampler=samplers.Temperature(temperature=1.3, top_k=50), num_samples=2
  )
  asked = [
    {"prompt": p, "settings": {"seed": 7 + i}} for i, p in enumerate(_PROMPTS)
  ]
  asked[1]["settings"]["temperature"] = 0.0
  asked[2]["settings"] |= {"max_new_tokens": 2, "min_p": 0.01}
  found = []
  for name, lines in (("a", asked), ("b", asked[::-1] * 2)):
    output = tmp_path / f"{name}_out.jsonl"
    decode_file.run(
      job,
      folder,
      _write(tmp_path / f"{name}.jsonl", lines),
      output=str(output),
      batch_size=8,
    )
    read = _read(output)
    pairs = [read[i : i + 2] for i in range(0, len(read), 2)]
    found.append([[line["ids"] for line in pair] for pair in pairs])
  first, second = found
  assert second == first[::-1] * 2
  assert first[0][0] != first[0][1]
  assert first[1][0] == first[1][1]
  assert max(map(len, first[2])) <= 2


@pytest.mark.nightly
def test_a_stopped_run_resumes_after_its_parts(
  run, tmp_path, monkeypatch, capsys
):
  job, folder = run
  job = _with(job, sampler=sampling.Settings(temperature=1.0))
  monkeypatch.setattr(decode_file, "_WINDOW", 1)
  path = _write(
    tmp_path / "p.jsonl",
    [{"prompt": p, "reference": ["x", p]} for p in _PROMPTS * 3],
  )
  shared = {"batch_size": 8}
  whole = tmp_path / "whole.jsonl"
  decode_file.run(job, folder, path, output=str(whole), **shared)
  draw = samples.Generator.draw
  drawn = []

  def stop(self, *args, **kwargs):
    if len(drawn) == 2:
      raise KeyboardInterrupt
    drawn.append(0)
    return draw(self, *args, **kwargs)

  output = tmp_path / "out.jsonl"
  with monkeypatch.context() as patch:
    patch.setattr(samples.Generator, "draw", stop)
    with pytest.raises(KeyboardInterrupt):
      decode_file.run(job, folder, path, output=str(output), **shared)
  parts = epath.Path(f"{output}.parts")
  assert {part.name for part in parts.iterdir()} == {
    "000000.jsonl",
    "000001.jsonl",
  }
  # A file that a killed process did not finish.
  (parts / "000002.jsonl.0a1b2c3d.part").write_text('{"prom')
  with pytest.raises(
    user_error.UserError, match=r"out.jsonl was begun with another seed \(0,"
  ):
    decode_file.run(
      dataclasses.replace(job, seed=1),
      folder,
      path,
      output=str(output),
      **shared,
    )
  capsys.readouterr()
  decode_file.run(job, folder, path, output=str(output), **shared)
  assert "decoded 21 of 21 lines" in capsys.readouterr().out
  assert output.read_text() == whole.read_text()
  assert not parts.exists()
  (tmp_path / "other.jsonl").write_text("mine\n")
  with pytest.raises(user_error.UserError, match=r"other.jsonl exists; move"):
    decode_file.run(
      job, folder, path, output=str(tmp_path / "other.jsonl"), **shared
    )
  assert (tmp_path / "other.jsonl").read_text() == "mine\n"


# By the definition: the words in common are `cat cat`, of four and three.
@pytest.mark.parametrize(
  ("text", "reference", "expected"),
  [
    ("The Eiffel Tower!", "eiffel tower", 1.0),
    ("in Paris, France", "Paris", 0.5),
    ("a", "the", 1.0),
    ("", "x", 0.0),
    ("4.", "four", 0.0),
    ("the cat sat on the cat", "cat cat mat", 2 * 2 / (4 + 3)),
    ("U.S.A.", "usa", 1.0),
  ],
)
def test_f1_is_that_of_squad(text, reference, expected):
  assert decode_file.word_f1(text, reference) == pytest.approx(expected)


def test_references_are_compared(run, tmp_path):
  job, folder = run
  first = {"prompt": "def "}
  path = _write(tmp_path / "a.jsonl", [first])
  output = tmp_path / "a_out.jsonl"
  decode_file.run(job, folder, path, output=str(output))
  (line,) = _read(output)
  path = _write(
    tmp_path / "b.jsonl",
    [
      {**first, "reference": ["no", line["continuation"]]},
      {**first, "reference": "something else"},
      first,
    ],
  )
  output = tmp_path / "b_out.jsonl"
  decode_file.run(job, folder, path, output=str(output))
  about = json.loads((tmp_path / "b_out.jsonl.json").read_text())
  assert about["references"] == 2
  assert about["exact_match"] == 0.5


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", r"p.jsonl has no line; write one JSON object a line"),
    ("{", r"line 1: not JSON \("),
    ('\n{"prompt": "e"}\n\xff\n', r"line 3: not JSON \("),
    ("[" * 9999, r"line 1: not JSON \("),
    ("3", r"line 1: a line must be a JSON object, got 3"),
    ('{"text": "x"}', r"a line needs either 'prompt' or 'messages'"),
    ('{"prompt": 3}', r"'prompt' must be a text, got 3"),
    ('{"prompt": "x", "ids": 3}', r"'ids' is a field of the output; rename"),
    ('{"messages": []}', r"line 1: 'messages' must be a list of messages"),
    ('{"messages": [{"role": "user", "content": "x"}]}', r"line 1: A chat"),
    ('{"prompt": "x", "reference": 3}', r"must be a text or a list of texts"),
    ('{"prompt": "x", "settings": 3}', r"'settings' must be an object, got 3"),
    (
      '{"prompt": "x", "settings": {"temprature": 3}}',
      r"unknown setting 'temprature'; did you mean 'temperature'\?",
    ),
    (
      '{"prompt": "x", "settings": {"top_p": 3}}',
      r"line 1: top_p must be in \(0, 1\], got 3",
    ),
    (
      '{"prompt": "x", "settings": {"seed": 1.5}}',
      r"setting 'seed' must be an integer, got 1.5",
    ),
    (
      '{"prompt": "x", "settings": {"temperature": true}}',
      r"setting 'temperature' must be a number, got True",
    ),
    (
      '{"prompt": "x", "settings": {"max_new_tokens": 7}}',
      r"'max_new_tokens' must be at most 6, that of the job, got 7",
    ),
  ],
)
def test_lines_that_are_no_requests(run, tmp_path, text, message):
  job, folder = run
  path = tmp_path / "p.jsonl"
  path.write_bytes(text.encode("latin-1" if "\xff" in text else "utf-8"))
  with pytest.raises(user_error.UserError, match=message):
    decode_file.run(job, folder, str(path), output=str(tmp_path / "out.jsonl"))


def test_guided_samples_have_scores_of_suffixes(run, tmp_path):
  """A scale of 1 leaves the prompt alone; the greedy text is the likeliest."""
  job, folder = run
  path = _write(tmp_path / "p.jsonl", [{"prompt": "def "}, {"prompt": "x"}])
  method = generation.NegativePrompt(scale=1.0, prompt="return")
  plain, guided = tmp_path / "plain.jsonl", tmp_path / "guided.jsonl"
  decode_file.run(job, folder, path, output=str(plain), batch_size=8)
  job = _with(job, method=method, suffixes=("a", " é"))
  records = guided.with_suffix(".tfrecord")
  decode_file.run(job, folder, path, output=str(records), batch_size=8)
  parsed = [*map(tf_example.parse, tf_record_files.TfRecordFile(str(records)))]
  for line, found in zip(_read(guided), parsed, strict=True):
    assert found["continuation"].tolist() == [line["continuation"].encode()]
    assert found["ids"].tolist() == line["ids"]
    np.testing.assert_allclose(found["log_probs"], line["log_probs"], rtol=1e-6)
  for line, other in zip(_read(guided), _read(plain), strict=True):
    assert line["ids"] == other["ids"]
    # Bytes are tokens, so the second suffix has three.
    first, second = line["suffix_log_probs"]
    assert second < first < 0


def test_a_function_draws_by_the_seed_and_the_batch(run, tmp_path):
  def draw(logits, key):
    return jax.random.categorical(key, logits).astype(jnp.int32)

  job, folder = run
  job = _with(job, sampler=draw)
  path = _write(tmp_path / "p.jsonl", [{"prompt": "def "}] * 9)
  found = []
  for number, seed in enumerate((0, 0, 1)):
    output = tmp_path / f"{number}.jsonl"
    given = dataclasses.replace(job, seed=seed)
    decode_file.run(given, folder, path, output=str(output), batch_size=8)
    found.append([line["ids"] for line in _read(output)])
  assert found[0] == found[1] != found[2]
  # The ninth line is the first one of the second batch.
  assert found[0][8] != found[0][0]


def test_a_search_has_no_settings_of_lines(run, tmp_path):
  job, folder = run
  job = _with(job, search=beam_search.BeamSearch(beam_size=2))
  path = _write(
    tmp_path / "p.jsonl", [{"prompt": "x", "settings": {"seed": 1}}]
  )
  with pytest.raises(user_error.UserError, match=r"not possible with a search"):
    decode_file.run(job, folder, path)
  path = _write(tmp_path / "q.jsonl", [{"prompt": "x"}])
  assert decode_file.run(job, folder, path) == 0


def test_a_file_that_is_not_there(run, tmp_path):
  job, folder = run
  with pytest.raises(
    user_error.UserError, match=r"no.jsonl cannot be read \(No such file"
  ):
    decode_file.run(job, folder, str(tmp_path / "no.jsonl"))
