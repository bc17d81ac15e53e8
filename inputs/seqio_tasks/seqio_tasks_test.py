"""Tests for examples of SeqIO tasks and mixtures."""

import itertools
import json
import pickle

import numpy as np
import pytest
import seqio
import tensorflow as tf

from paxon.inputs import packed_input
from paxon.inputs import packing as packing_lib
from paxon.inputs.seqio_tasks import (
  feature_converters,
  task_source,
  task_steps,
  task_stream,
  testing,
)
from paxon.inputs.tf_records import tf_example, tf_record_files

LM = feature_converters.LanguageModel()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  """Creates files of texts, a vocabulary, and tasks over them."""
  folder = tmp_path_factory.mktemp("texts")
  for seed, name in enumerate(("text", "other")):
    for shard in range(2):
      testing.write_texts(
        folder / f"{name}-train-{shard}",
        testing.texts(10, seed=10 * seed + shard),
      )
    testing.write_texts(
      folder / f"{name}-validation-0", testing.texts(5, seed=10 * seed + 7)
    )
  made = testing.Tasks(
    folder=str(folder),
    vocabulary_file=testing.train_sentencepiece(folder),
    prefix="made",
  )
  made()
  return made


def _source(**given):
  given = {"task": "made_text", "split": "train", "converter": LM} | given
  return task_source.TaskSource(**given)


def _of_seqio(task, split="train", **given):
  dataset = seqio.get_mixture_or_task(task).get_dataset(
    None, split=split, shuffle=False, num_epochs=1, **given
  )
  return [
    example["targets"].tolist() for example in dataset.as_numpy_iterator()
  ]


def test_examples_equal_those_of_seqio(tasks):
  source = _source()
  # SeqIO interleaves the files; each file's order is the same.
  found = [source[i]["targets"].tolist() for i in range(len(source))]
  assert sorted(found) == sorted(_of_seqio("made_text"))
  vocabulary = tasks.feature().vocabulary
  texts = [*testing.texts(10, seed=0), *testing.texts(10, seed=1)]
  assert found == [[*vocabulary.encode(text), 1] for text in texts]
  assert source[13]["inputs"].tolist() == [0, *found[13][:-1]]
  assert source.required_vocab_size() == testing.SENTENCEPIECE_SIZE


@pytest.mark.usefixtures("tasks")
def test_a_source_can_be_pickled():
  source = _source(register=testing.texts)
  expected = source[3]["targets"].tolist()
  copied = pickle.loads(pickle.dumps(source))
  assert copied[3]["targets"].tolist() == expected


def test_cached_tasks_are_read_from_the_cache(tasks, tmp_path):
  vocabulary = tasks.feature().vocabulary
  ids = [vocabulary.encode(text) for text in testing.texts(7, seed=5)]
  seqio.set_global_cache_dirs([str(tmp_path)])
  testing.write_cache(tmp_path, "made_other", "train", ids)
  source = _source(task="made_other", use_cached=True)
  found = [source[i]["targets"].tolist() for i in range(len(source))]
  # The step after the cache appends the end id.
  assert found == [[*some, 1] for some in ids]
  assert sorted(found) == sorted(_of_seqio("made_other", use_cached=True))
  stats = tmp_path / "made_other" / "stats.train.json"
  stats.write_text(json.dumps({"examples": 8}))
  with pytest.raises(ValueError, match=r"has 7 examples .* its stats list 8"):
    len(_source(task="made_other", use_cached=True))
  (tmp_path / "made_other" / "train.tfrecord-00001-of-00002").unlink()
  with pytest.raises(ValueError, match=r"has 1 files .* its info lists 2"):
    len(_source(task="made_other", use_cached=True))
  with pytest.raises(ValueError, match="no cached split 'validation'"):
    len(_source(task="made_other", use_cached=True, split="validation"))
  with pytest.raises(ValueError, match="made_text is not cached"):
    len(_source(use_cached=True))


def _add(name, source, preprocessors, **features):
  seqio.TaskRegistry.add(
    name, source=source, preprocessors=preprocessors, output_features=features
  )


def _numbers(number, **more):
  """Returns a function source of examples with inputs and targets."""

  def make(split, shuffle_files, seed=None):
    del split, shuffle_files, seed
    examples = [
      {"inputs": [i, i + 1], "targets": [10 * i, 10 * i + 1, 1]}
      for i in range(3, 3 + number)
    ]
    return tf.data.Dataset.from_generator(
      lambda: iter(examples),
      output_signature={
        key: tf.TensorSpec([None], tf.int32) for key in ("inputs", "targets")
      },
    )

  return seqio.FunctionDataSource(make, splits=["train"], **more)


_IDS = {
  "inputs": seqio.Feature(seqio.PassThroughVocabulary(1000)),
  "targets": seqio.Feature(seqio.PassThroughVocabulary(1000)),
}


def test_a_task_without_records_is_held_in_memory():
  _add("numbers", _numbers(4), [], **_IDS)
  source = _source(task="numbers")
  assert [source[i]["targets"].tolist() for i in (3, 0)] == [
    [60, 61, 1],
    [30, 31, 1],
  ]
  with pytest.raises(ValueError, match=r"more than TaskSource\.max_in_memory"):
    len(_source(task="numbers", max_in_memory=3))
  converter = feature_converters.LanguageModel(feature="text")
  with pytest.raises(ValueError, match="has no dense feature 'text'"):
    len(_source(task="numbers", converter=converter))


@pytest.mark.parametrize(
  ("converter", "expected"),
  [
    (
      feature_converters.LanguageModel(end_id=2),
      {"inputs": [0, 30, 31, 1], "targets": [30, 31, 1, 2]},
    ),
    (
      feature_converters.PrefixLm(),
      {
        "inputs": [0, 3, 4, 30, 31],
        "targets": [3, 4, 30, 31, 1],
        "weights": [0, 0, 1, 1, 1],
        "prefix": [True, True, True, False, False],
      },
    ),
    (
      feature_converters.PrefixLm(loss_on_inputs=True, begin_id=7),
      {
        "inputs": [7, 3, 4, 30, 31],
        "targets": [3, 4, 30, 31, 1],
        "weights": [1, 1, 1, 1, 1],
        "prefix": [True, True, True, False, False],
      },
    ),
    (
      feature_converters.EncoderDecoder(),
      {
        "encoder_inputs": [3, 4],
        "inputs": [0, 30, 31],
        "targets": [30, 31, 1],
      },
    ),
  ],
)
def test_converters_return_model_inputs(converter, expected):
  features = {"inputs": np.array([3, 4]), "targets": np.array([30, 31, 1])}
  found = converter(features)
  assert {k: v.tolist() for k, v in found.items()} == expected
  assert found["inputs"].dtype == np.int32


def test_encoder_weights_select_masked_tokens():
  converter = feature_converters.Encoder(mask_id=9)
  features = {"inputs": np.array([3, 9]), "targets": np.array([3, 4])}
  found = converter(features)
  assert found["weights"].tolist() == [0, 1]
  with pytest.raises(
    ValueError, match="as many inputs as targets, got 2 and 1"
  ):
    converter({**features, "targets": np.array([3])})
  with pytest.raises(ValueError, match="'inputs' must be integers"):
    converter({**features, "inputs": np.array([0.5, 1])})


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", ["lm", "prefix_lm", "encoder_decoder"])
def test_features_agree_with_seqios_own_converters(kind):
  features = {"inputs": [3, 4], "targets": [30, 31, 1]}
  dataset = tf.data.Dataset.from_tensors(
    {k: tf.constant(v, tf.int32) for k, v in features.items()}
  )
  lengths = {"inputs": 2, "targets": 3}
  if kind == "lm":
    theirs = seqio.LMFeatureConverter(pack=False)(
      dataset.map(lambda x: {"targets": x["targets"]}), {"targets": 3}
    )
    ours = LM
  elif kind == "prefix_lm":
    theirs = seqio.PrefixLMFeatureConverter(pack=False)(dataset, lengths)
    ours = feature_converters.PrefixLm()
  else:
    theirs = seqio.EncDecFeatureConverter(pack=False)(dataset, lengths)
    ours = feature_converters.EncoderDecoder()
  (expected,) = theirs.as_numpy_iterator()
  found = ours({k: np.array(v) for k, v in features.items()})
  names = {
    "inputs": "decoder_input_tokens",
    "targets": "decoder_target_tokens",
    "weights": "decoder_loss_weights",
    "prefix": "decoder_causal_attention",
    "encoder_inputs": "encoder_input_tokens",
  }
  for key, value in found.items():
    assert value.tolist() == expected[names[key]].tolist(), key


def _text_source(folder, texts):
  testing.write_texts(folder / "texts-0", texts)
  return seqio.TFExampleDataSource(
    {"train": f"{folder}/texts-*"},
    {"text": tf.io.FixedLenFeature([], tf.string)},
  )


def _ids_of_length(text):
  ids = tf.range(tf.strings.length(text), dtype=tf.int32)
  return {"targets": ids}


TARGETS = {"targets": _IDS["targets"]}


def test_filtered_examples_are_empty(tmp_path):
  def steps(dataset):
    dataset = dataset.map(lambda x: _ids_of_length(x["text"]))
    return dataset.filter(lambda x: tf.size(x["targets"]) > 2)

  source = _text_source(tmp_path, ["a", "bcd", "", "efgh"])
  _add("filtered", source, [steps], **TARGETS)
  lengths = [len(_source(task="filtered")[i]["targets"]) for i in range(4)]
  assert lengths == [0, 3, 0, 4]
  stream = task_stream.TaskStream(
    name_in_registry="filtered",
    split="train",
    converter=LM,
    shuffle_seed=None,
    num_epochs=1,
  )
  given = packed_input.PackedInput(
    examples=stream, global_batch_size=1, length=7
  )
  (batch,) = given
  assert batch["targets"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_rejects_steps_that_split_examples(tmp_path):
  def split(dataset):
    dataset = dataset.map(lambda x: _ids_of_length(x["text"]))
    return dataset.flat_map(
      lambda x: tf.data.Dataset.from_tensor_slices(x["targets"]).map(
        lambda token: {"targets": token[None]}
      )
    )

  _add("split", _text_source(tmp_path, ["ab"]), [split], **TARGETS)
  with pytest.raises(
    ValueError, match="texts-0, record 0: the task 'split' makes 2 examples"
  ):
    _ = _source(task="split")[0]


def test_random_steps_are_run_once_and_held(tmp_path):
  @seqio.map_over_dataset(num_seeds=1)
  def noisy(example, seed):
    noise = tf.random.stateless_uniform([4], seed, 0, 100, tf.int32)
    return {"targets": noise + tf.strings.length(example["text"])}

  _add("noisy", _text_source(tmp_path, ["a", "a", "a"]), [noisy], **TARGETS)
  source = _source(task="noisy")
  found = [source[i]["targets"].tolist() for i in range(3)]
  # The numbers differ between examples, but not between runs.
  assert found[0] != found[1]
  again = _source(task="noisy")
  assert [again[i]["targets"].tolist() for i in range(3)] == found


def test_a_corrupt_record_is_named(tmp_path):
  source = _text_source(tmp_path, ["first", "second"])
  _add(
    "corrupt",
    source,
    [lambda d: d.map(lambda x: _ids_of_length(x["text"]))],
    **TARGETS,
  )
  path = tmp_path / "texts-0"
  data = bytearray(path.read_bytes())
  data[-6] ^= 1
  path.write_bytes(bytes(data))
  found = _source(task="corrupt")
  assert len(found[0]["targets"]) == 5
  with pytest.raises(ValueError, match="texts-0, record 1: the data does not"):
    _ = found[1]


def test_rejects_unregistered_names():
  with pytest.raises(ValueError, match="SeqIO knows no task 'nobody'"):
    len(_source(task="nobody"))
  with pytest.raises(ValueError, match="has no split 'test'; it has"):
    len(_source(task="numbers", split="test"))
  stream = _stream(name_in_registry="nobody")
  with pytest.raises(ValueError, match="neither a task nor a mixture 'nobody'"):
    stream.signature()


def _stream(**given):
  given = {
    "name_in_registry": "made_both",
    "split": "train",
    "converter": LM,
    "shuffle_seed": 3,
  } | given
  return task_stream.TaskStream(**given)


def _input(packing=packing_lib.Packing.SPLIT, **given):
  sizes = {
    key: given.pop(key)
    for key in ("global_batch_size", "length")
    if key in given
  }
  sizes = {"global_batch_size": 4, "length": 32} | sizes
  return packed_input.PackedInput(
    examples=_stream(**given), packing=packing, **sizes
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(
  "packing", [packing_lib.Packing.SPLIT, packing_lib.Packing.FIRST_FIT]
)
def test_a_mixture_resumes_from_any_batch_on_any_hosts(packing):
  given = _input(packing)
  batches, states = [], []
  for _ in range(6):
    states.append(json.loads(json.dumps(given.get_state())))
    batches.append(given.get_next())
  for start, hosts in itertools.product((0, 1, 4), (1, 2)):
    rows = []
    for host in range(hosts):
      other = _input(packing)
      other.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=hosts)
      other.set_state(states[start])
      rows.append(other.get_next())
    for key, value in batches[start].items():
      found = np.concatenate([row[key] for row in rows])
      np.testing.assert_array_equal(found, value)


@pytest.mark.usefixtures("tasks")
def test_a_mixture_keeps_its_rates():
  stream = _stream(shuffle_seed=None)
  position, names = stream.start(), []
  for _ in range(16):
    reference, position = stream.next_example(position, step=0)
    names.append(reference[0])
  assert names.count("made_text") == 12
  assert names.count("made_other") == 4


@pytest.mark.usefixtures("tasks")
def test_evaluation_examples_have_provenance():
  given = _input(
    packing_lib.Packing.NONE,
    name_in_registry="made_text",
    split="validation",
    num_epochs=1,
    shuffle_seed=None,
    provenance=True,
    length=64,
  )
  first, last = given
  assert first["example_ids"].tolist() == [0, 1, 2, 3]
  assert last["example_ids"].tolist() == [4, 0, 0, 0]
  assert last["example_weights"].tolist() == [1, 0, 0, 0]
  assert last["weights"][1:].sum() == 0
  assert first["_seqio_provenance/task"].tolist() == ["made_text"] * 4
  assert first["_seqio_provenance/file"][0].endswith("text-validation-0")
  assert last["_seqio_provenance/index"][0] == 4


def test_specs_of_elements_have_strings_booleans_and_ragged_tensors():
  # Praxis's issue 49: its conversion gave a wrong object for strings.
  dataset = tf.data.Dataset.from_tensors(
    {
      "text": tf.constant(["a", "b"]),
      "flag": tf.constant(True),
      "rows": tf.ragged.constant([[1, 2], [3]], dtype=tf.int32),
      "inner": {"score": tf.constant([0.5])},
    }
  )
  specs = task_steps.find_specs(dataset.element_spec)
  assert specs == {
    "text": ((2,), np.dtype(object)),
    "flag": ((), np.dtype(bool)),
    "rows": ((2, None), np.dtype(np.int32)),
    "inner/score": ((1,), np.dtype(np.float32)),
  }
  with pytest.raises(ValueError, match="must be dictionaries"):
    task_steps.find_specs(tf.TensorSpec([], tf.int32))
  with pytest.raises(ValueError, match="'x' must be a tensor"):
    task_steps.find_specs({"x": tf.data.DatasetSpec(tf.TensorSpec([]))})
  with pytest.raises(ValueError, match="'x' has no known number of"):
    task_steps.find_specs({"x": tf.TensorSpec(None, tf.int32)})


def test_tf_records_round_trip_with_tensorflow(tmp_path):
  features = {
    "ids": np.array([1, -2, 2**40]),
    "scores": np.array([0.5, -1.25], np.float32),
    "texts": np.array([b"one", b""], object),
  }
  ours = tf_example.serialize(features)
  theirs = tf.train.Example.FromString(ours)
  assert tf_example.parse(theirs.SerializeToString()).keys() == features.keys()
  feature = theirs.features.feature
  assert list(feature["ids"].int64_list.value) == [1, -2, 2**40]
  assert list(feature["scores"].float_list.value) == [0.5, -1.25]
  assert list(feature["texts"].bytes_list.value) == [b"one", b""]
  parsed = tf_example.parse(theirs.SerializeToString())
  assert parsed["ids"].tolist() == [1, -2, 2**40]
  tf_record_files.write(tmp_path / "ours", [ours, b"x" * 5000])
  dataset = tf.data.TFRecordDataset(str(tmp_path / "ours"))
  assert list(dataset.as_numpy_iterator()) == [ours, b"x" * 5000]
  with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
    for record in (b"y" * 1500, ours):
      writer.write(record)
  file = tf_record_files.TfRecordFile(str(tmp_path / "theirs"))
  assert [file[1], file[0]] == [ours, b"y" * 1500]
