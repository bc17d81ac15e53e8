"""Tests for a task's metrics over batches of results."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import seqio

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.seqio_tasks import (
  feature_converters,
  task_metrics,
  task_source,
  task_stream,
  testing,
  vocabulary_tokenizer,
)

LM = feature_converters.LanguageModel()
TEXTS = testing.texts(5, seed=3)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  testing.write_texts(folder / "text-validation-0", TEXTS)
  testing.write_texts(folder / "other-validation-0", TEXTS[:2])
  made = testing.Tasks(
    folder=str(folder),
    vocabulary_file=testing.train_sentencepiece(folder),
    prefix="measured",
  )
  made()
  return made


def _source(task="measured_text"):
  return task_source.TaskSource(task=task, split="validation", converter=LM)


def _rows(numbers, weights, scores, predictions=None):
  rows = {
    "example_ids": np.array(numbers, np.int32),
    "example_weights": np.array(weights, np.float32),
    "scores": np.array(scores, np.float32),
  }
  return rows if predictions is None else rows | {"predictions": predictions}


def _ids(tasks, texts):
  vocabulary = tasks.feature().vocabulary
  rows = np.zeros((len(texts), 80), np.int32)
  for row, text in enumerate(texts):
    ids = [*vocabulary.encode(text), 1, 7, 7]  # Ids after the end are ignored.
    rows[row, : len(ids)] = ids
  return rows


def test_results_in_any_order_are_joined_by_ids(tasks):
  metrics = task_metrics.TaskMetrics(_source())
  assert metrics.needs_scores
  assert metrics.needs_predictions
  said = [TEXTS[3], TEXTS[1], "the cat", TEXTS[0]]
  metrics.add(
    _rows([3, 1, 2, 0], [1, 1, 1, 0], [-3, -1, -2, -9], _ids(tasks, said))
  )
  # Repeats example 3 and adds 0 and 4.
  said = [TEXTS[0], TEXTS[4], "a dog"]
  metrics.add(_rows([0, 4, 3], [1, 1, 1], [-5, -4, -8], _ids(tasks, said)))
  assert metrics.compute() == {
    "mean_score": -3.0,
    "target_length": sum(map(len, TEXTS)) / 5,
    "exact_match": 0.8,
    "predicted_length": (sum(map(len, TEXTS)) - len(TEXTS[2]) + 7) / 5,
  }


def _first_half(targets):
  """Outputs of a model: half of a text, padded, and a score."""
  ids = targets[targets > 0]
  half = np.append(ids[: len(ids) // 2], 1)
  return np.pad(half, (0, 80 - len(half))), -float(ids.sum())


@pytest.mark.usefixtures("tasks")
def test_metrics_of_a_mixture_are_those_of_the_evaluator_of_seqio():
  evaluator = seqio.Evaluator(
    "measured_both",
    seqio.LMFeatureConverter(pack=False),
    sequence_length={"targets": 80},
    async_compute_metrics=False,
  )

  def make_outputs(dataset, kind):
    return [
      (i, _first_half(example["decoder_target_tokens"])[kind])
      for i, example in dataset.as_numpy_iterator()
    ]

  expected, _ = evaluator.evaluate(
    compute_metrics=True,
    predict_fn=lambda dataset: make_outputs(dataset, 0),
    score_fn=lambda dataset: make_outputs(dataset, 1),
  )
  given = _eval_input(_stream("measured_both"))
  metrics, texts = given.row_metrics(), given.text_metrics()
  for batch in given:
    ids, scores = zip(*map(_first_half, batch["targets"]), strict=True)
    rows = {key: batch[key] for key in ("example_ids", "example_weights")}
    rows |= {"predictions": np.array(ids), "scores": np.array(scores)}
    metrics.add(rows)
    texts.add(rows)
  assert metrics.compute() == {
    f"{task}/{name}": value
    for task, values in expected.result().items()
    for name, value in values.items()
  }
  lines = list(texts.lines())
  assert [line["task"] for line in lines] == [
    *["measured_other"] * 2,
    *["measured_text"] * 5,
  ]
  assert [line["targets"] for line in lines] == [*TEXTS[:2], *TEXTS]
  for line in lines:
    assert line["targets"].startswith(line["prediction"])
  assert not texts.needs_scores
  assert texts.needs_predictions


@pytest.mark.usefixtures("tasks")
def test_only_evaluated_examples_count():
  metrics = task_metrics.TaskMetrics(_source(), kinds=("score",))
  assert not metrics.needs_predictions
  with pytest.raises(ValueError, match="was evaluated, so it has no metrics"):
    metrics.compute()
  metrics.add(_rows([2, 4], [1, 1], [-1, -2]))
  assert metrics.compute() == {
    "mean_score": -1.5,
    "target_length": (len(TEXTS[2]) + len(TEXTS[4])) / 2,
  }
  with pytest.raises(
    ValueError, match="kinds must be of 'score' and 'predict'"
  ):
    task_metrics.TaskMetrics(_source(), kinds=("decode",))


def test_metric_objects_and_postprocessing(tasks):
  @dataclasses.dataclass
  class Longest:
    """Has the signature of SeqIO's metric objects."""

    model_output_type: ClassVar = seqio.metrics.ModelOutputType.SCORE
    value: float = 0.0

    @classmethod
    def from_model_output(cls, inputs, model_output, features):
      assert list(features) == ["targets"]
      lengths = [len(example["targets"]) for example in inputs]
      return cls(float(model_output[np.argmax(lengths)]))

    def compute(self):
      return {"longest": seqio.metrics.Scalar(self.value)}

  def shouted(text, example, is_target):
    del example
    return text.upper() if is_target else text

  def first(targets, scores):
    assert targets[0] == TEXTS[0].upper()
    return {"first": scores[0], "text": seqio.metrics.Text("no number")}

  seqio.TaskRegistry.add(
    "with_objects",
    source=tasks.source("text"),
    preprocessors=[testing.rename_feature, seqio.preprocessors.tokenize],
    output_features={"targets": tasks.feature()},
    metric_fns=[first],
    metric_objs=[Longest()],
    postprocess_fn=shouted,
  )
  metrics = task_metrics.TaskMetrics(_source("with_objects"))
  metrics.add(_rows(range(5), [1] * 5, range(5)))
  longest = np.argmax([len(row) for row in map(_encode(tasks), TEXTS)])
  assert metrics.compute() == {"first": 0.0, "longest": float(longest)}


def _encode(tasks):
  return tasks.feature().vocabulary.encode


def _eval_input(stream, **given):
  sizes = {"global_batch_size": 2, "length": 80}
  given = {"packing": packing_lib.Packing.NONE} | sizes | given
  return task_metrics.TaskEvalInput(examples=stream, **given)


def _stream(name, **given):
  given = {"provenance": True, "num_epochs": 1} | given
  return task_stream.TaskStream(
    name_in_registry=name,
    split="validation",
    converter=LM,
    shuffle_seed=None,
    **given,
  )


@pytest.mark.usefixtures("tasks")
def test_an_input_to_evaluate_gives_the_metrics_of_its_task():
  metrics = _eval_input(_stream("measured_text")).row_metrics()
  assert isinstance(metrics, task_metrics.TaskMetrics)
  with pytest.raises(ValueError, match="must be a TaskStream with provenance"):
    _eval_input(_stream("measured_text", provenance=False))
  with pytest.raises(ValueError, match=r"packing must be NONE.* got SPLIT"):
    _eval_input(_stream("measured_text"), packing=packing_lib.Packing.SPLIT)


def test_the_vocabulary_is_the_tokenizer(tasks):
  tokenizer = vocabulary_tokenizer.VocabularyTokenizer(
    name_in_registry="measured_both"
  )
  ids = tokenizer.encode(TEXTS[0])
  assert ids.tolist() == tasks.feature().vocabulary.encode(TEXTS[0])
  assert tokenizer.decode([*ids, tokenizer.end_id, 9]) == TEXTS[0]
  assert tokenizer.vocab_size == testing.SENTENCEPIECE_SIZE
  # Except the space that the vocabulary adds before the first word.
  counts = tokenizer.byte_counts(np.append(ids, tokenizer.end_id))
  assert counts.sum() == len(TEXTS[0]) + 1
  assert counts[-1] == 0
  given = packed_input.PackedInput(
    examples=_stream("measured_text"),
    packing=packing_lib.Packing.NONE,
    global_batch_size=2,
    length=80,
    tokenizer=tokenizer,
  )
  assert given.required_vocab_size() == testing.SENTENCEPIECE_SIZE
  batch = given.get_next()
  lengths = batch["weights"].sum(axis=1).astype(int)
  assert given.ids_to_strings(batch["targets"], lengths) == TEXTS[:2]
  with pytest.raises(ValueError, match="has no output feature 'inputs'"):
    _ = dataclasses.replace(tokenizer, feature="inputs").vocab_size
