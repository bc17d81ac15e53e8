"""Scores and texts are those of the harness's own model for Hugging Face."""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import types

import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.hosts import testing as forks_lib
from paxon.tools import run_page_examples
from paxon.tools.hf_goldens import harness_tasks, imported_models
from paxon.tools.lm_evaluation import (
  lm_eval_main,
  lm_eval_model,
  testing,
)

_METHODS = {
  "tiny_choice": "loglikelihood",
  "tiny_generation": "generate_until",
  "tiny_text": "loglikelihood_rolling",
}
_PAGE = pathlib.Path(__file__).parents[2] / "docs/evaluating.md"
_HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory):
  """The imported models, by name."""
  found = {}
  for name in harness_tasks.MODELS:
    config = imported_models.read_goldens()[name]["config"]
    folder = tmp_path_factory.mktemp(name)
    found[name] = imported_models.import_model(folder, name, config)
  return found


@pytest.fixture(name="responses", scope="module", params=harness_tasks.MODELS)
def _responses(request, runs):
  """A model, and what the harness has asked it with its answers."""
  opened = lm_eval_model.open_run(os.fspath(runs[request.param]))
  assert opened.max_length == 128
  made = lm_eval_model.Responses(
    opened.generator, max_length=opened.max_length, batch_size=3
  )
  return made, harness_tasks.read_goldens()[request.param]["answers"]


def _ask(responses, method, arguments):
  requests = [types.SimpleNamespace(args=tuple(each)) for each in arguments]
  return getattr(responses, method)(requests)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("task", harness_tasks.TASKS)
def test_answers_are_those_of_hflm(responses, task):
  made, answers = responses
  arguments = [each for each, _ in answers[task]]
  found = _ask(made, _METHODS[task], arguments)
  expected = [answer for _, answer in answers[task]]
  if task == "tiny_generation":
    assert found == expected
    return
  if task == "tiny_choice":
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    found, expected = (
      [value for value, _ in each] for each in (found, expected)
    )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_answers_do_not_depend_on_the_batch(responses):
  made, answers = responses
  arguments = [each for each, _ in answers["tiny_choice"]]
  together = _ask(made, "loglikelihood", arguments)
  alone = _ask(made, "loglikelihood", arguments[:1])
  np.testing.assert_allclose(together[0][0], alone[0][0], rtol=1e-6)


def test_each_answer_is_remembered_once(responses):
  made, answers = responses
  kept = []
  made.cache_hook = types.SimpleNamespace(
    add_partial=lambda *each: kept.append(each)
  )
  try:
    for task, method in _METHODS.items():
      kept.clear()
      arguments = [tuple(each) for each, _ in answers[task]]
      found = _ask(made, method, arguments)
      assert {each[0] for each in kept} == {method}
      by_arguments = {str(each[1]): each[2] for each in kept}
      for each, answer in zip(arguments, found, strict=True):
        assert by_arguments[str(each)] == answer
  finally:
    made.cache_hook = None


@pytest.mark.parametrize(
  ("method", "arguments", "message"),
  [
    ("loglikelihood", ("a", ""), "got 0 of ''"),
    ("loglikelihood", ("a", "x " * 200), "1 to 128 .max_length."),
    ("generate_until", ("a", {"best_of": 2}), "best_of"),
    ("generate_until", ("a", {"num_beams": 4}), "num_beams"),
    ("generate_until", ("a", {"max_gen_toks": 128}), "from 1 to 127"),
    (
      "generate_until",
      ("a", {"temperature": -1, "max_tokens": 4}),
      "temperature",
    ),
  ],
)
def test_bad_requests_are_errors(responses, method, arguments, message):
  with pytest.raises(user_error.UserError, match=message):
    _ask(responses[0], method, [arguments])


def test_sampling_depends_on_the_request_alone(responses):
  made, _ = responses
  settings = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
  arguments = [("The fox", settings), ("A dog", settings), ("A dog", settings)]
  found = _ask(made, "generate_until", arguments)
  assert _ask(made, "generate_until", arguments[:1]) == found[:1]
  assert found[1] != found[2]  # Each has its seed.


@pytest.mark.nightly
def test_two_processes_answer_as_one(runs, tmp_path):
  name = harness_tasks.MODELS[0]
  asked = [
    (method, [each for each, _ in answers])
    for task, method in _METHODS.items()
    for answers in [harness_tasks.read_goldens()[name]["answers"][task]]
  ]
  sampled = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 12}
  asked[1][1].append(("The fox", sampled))
  requests = tmp_path / "requests.json"
  requests.write_text(json.dumps(asked))
  found = []
  with forks_lib.Forks(testing.__name__, tmp_path) as forks:
    for count in (1, 2):
      answers = tmp_path / f"answers{count}"
      port = forks_lib.free_port()
      given = [
        runs[name],
        "data=2",
        requests,
        answers,
        f"localhost:{port}",
        count,
      ]
      processes = [
        forks.start("answer", [*map(str, given), str(i)], devices=2 // count)
        for i in range(count)
      ]
      for process in processes:
        assert process.wait() == 0, process.output()
      assert not any(p.output().strip() for p in processes[1:])
      found.append(json.loads(answers.read_text()))
  one, two = found
  assert one.keys() == two.keys() == set(_METHODS.values())
  assert one["generate_until"] == two["generate_until"]
  for method in one.keys() - {"generate_until"}:
    np.testing.assert_allclose(one[method], two[method], rtol=1e-6)


def test_bad_command_lines_are_one_line(runs, tmp_path, capsys):
  assert lm_eval_main.main([os.fspath(tmp_path / "none"), "--tasks=x"]) == 2
  assert "does not exist" in capsys.readouterr().err
  if not _HAS_HARNESS:
    assert lm_eval_main.main([os.fspath(runs["qwen3"]), "--tasks=x"]) == 2
    assert "with its extra `lm_eval`" in capsys.readouterr().err


@pytest.mark.skipif(not _HAS_HARNESS, reason="lm-eval is not installed")
@pytest.mark.parametrize("name", harness_tasks.MODELS)
def test_the_harness_gives_the_same_metrics(runs, name, tmp_path):
  harness_tasks.write(tmp_path)
  out = tmp_path / "results"
  arguments = [
    os.fspath(runs[name]),
    f"--tasks={','.join(harness_tasks.TASKS)}",
    f"--include_path={tmp_path}",
    f"--output_path={out}",
  ]
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert lm_eval_main.main(arguments) == 0
  assert "tiny_choice" in printed.getvalue()
  (path,) = out.rglob("results_*.json")
  results = json.loads(path.read_text())
  assert results["config"]["max_length"] == 128
  expected = harness_tasks.read_goldens()[name]["metrics"]
  found = harness_tasks.summarize(results)
  assert found.keys() == expected.keys()
  for task, metrics in expected.items():
    assert found[task] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.skipif(not _HAS_HARNESS, reason="lm-eval is not installed")
def test_the_page_runs(tmp_path):
  for block in run_page_examples.blocks(_PAGE.read_text()):
    run_page_examples.run(block, tmp_path)
  (path,) = (tmp_path / "results").rglob("results_*.json")
  results = json.loads(path.read_text())["results"]
  assert results.keys() == {"capitals", "sums"}
