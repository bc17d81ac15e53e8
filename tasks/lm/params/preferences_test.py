"""Tests for the experiment of pairs of answers: runs, resuming, bad input."""

import json
import re
import signal
import time

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import stored_kernels
from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import process_programs, train
from paxon.tasks.lm.params import (
  arithmetic,
  distillation,
  hugging_face,
  imported_model,
  model_reward,
  preferences,
  reference_log_probs,
  teacher_log_probs,
)

# Metrics of the machine, which differ between runs.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory").search


def _knobs(tmp_path, **knobs):
  return {
    "weights": str(tmp_path / "model"),
    "train_files": str(tmp_path / "pairs.jsonl"),
    "num_train_steps": 4,
    "global_batch_size": 8,
    "checkpoint_every_steps": 2,
    "summary_every_steps": 1,
    "length": 48,
    "learning_rate": 3e-3,
    "warmup_steps": 1,
    **knobs,
  }


def _experiment(tmp_path, **knobs):
  return preferences.HuggingFacePreferences(**_knobs(tmp_path, **knobs))


def _train(folder, experiment, *, until=None):
  """Trains to a step, as a run that is interrupted there."""
  config = experiment.job()
  if until is not None:
    config.num_train_steps = until
  folder.mkdir(exist_ok=True)
  return train.run(fdl.build(config), config, epath.Path(folder))


def _read(folder):
  found = stored_checkpoint.find_checkpoint(epath.Path(folder))
  return stored_checkpoint.read_numpy(found, list(found.arrays))


def _write_answers(path):
  rows = [
    {"prompt": f"{a} + 1?", "completion": f"{a + b}", "label": b == 1}
    for a in range(4)
    for b in (1, 2)
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _check_policy(start, whole):
  """Checks the variables of a policy that was trained on pairs."""
  # The policy has changed; the reference is the imported model, as it was.
  for name, value in start.items():
    if name == "step":
      continue
    assert not np.array_equal(whole[name], value), name
    frozen = name.replace("params/", "frozen/reference/")
    np.testing.assert_array_equal(whole[frozen], value, err_msg=frozen)
    assert any(n.startswith("opt") and n.endswith(name) for n in whole)
    assert not any(n.startswith("opt") and n.endswith(frozen) for n in whole)


def _check_adapters(start, half, whole, storage=None):
  """Checks that adapters were trained since `half`, and nothing else at all."""
  adapters = 0
  for name, value in whole.items():
    if "/lora_" in name and name.startswith("params/"):
      adapters += 1
      assert not np.array_equal(value, half[name]), name
  assert adapters
  for name, value in start.items():
    if name == "step":
      continue
    stored = name.replace("params/", "stored/")
    layer, _, matmul = stored.rpartition("/")
    stored = f"{layer}/einsum/{matmul}/values"
    if storage is not None and "/layers/" in name and value.ndim > 2:
      # Quantized from the imported kernel, layer by layer.
      assert name not in whole
      inputs = (0, 1) if matmul == "out" else (0,)
      made = stored_kernels.quantize(
        jnp.asarray(value[0]), stored_kernels.Storage(storage), inputs=inputs
      )
      np.testing.assert_array_equal(whole[stored][0], made["values"])
    else:
      np.testing.assert_array_equal(whole[name], value, err_msg=name)
      assert not any(n.startswith("opt") and n.endswith(name) for n in whole)


def test_another_template_and_the_last_turn(tmp_path):
  imported_model.write(tmp_path / "model")
  kept = "m.content if loop.last or m.role == 'user' else ''"
  (tmp_path / "other.jinja").write_text(
    imported_model.TEMPLATE.replace("m.content", kept)
  )
  messages = [
    {"role": role, "content": f"{i}"}
    for i, role in enumerate(["user", "assistant"] * 2)
  ]
  path = tmp_path / "chats.jsonl"
  path.write_text(json.dumps({"messages": messages}))

  def trained(**knobs):
    experiment = hugging_face.HuggingFaceLm(
      **_knobs(tmp_path, train_files=str(path), messages_key="messages"),
      **knobs,
    )
    source = fdl.build(experiment.datasets()["train"]).examples.source
    example = source[0]
    kept = example["targets"][example["weights"] > 0]
    prompt = fdl.build(experiment.generation()).chat_template(messages[:3])
    return source.tokenizer.decode(kept), "part" in example, "1" in prompt

  assert trained() == ("13", False, True)
  assert trained(trained_turns="last") == ("3", False, True)
  # It drops earlier answers, so each turn has a sequence.
  template = str(tmp_path / "other.jinja")
  assert trained(chat_template=template) == ("13", True, False)


# Killed runs are compared in `test_a_killed_run_equals_the_whole`.
def test_a_resumed_run_equals_the_whole(tmp_path):
  start = imported_model.write(tmp_path / "model")
  _write_answers(tmp_path / "pairs.jsonl")
  experiment = _experiment(tmp_path, preference="kto")
  _train(tmp_path / "whole", experiment)
  _train(tmp_path / "parts", experiment, until=2)
  _train(tmp_path / "parts", experiment)
  whole, parts = _read(tmp_path / "whole"), _read(tmp_path / "parts")
  assert whole.keys() == parts.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)
  _check_policy(start, whole)


@pytest.mark.nightly
def test_resumed_quantized_adapters_on_chats_equal_the_whole(tmp_path):
  start = imported_model.write(tmp_path / "model")
  _write_chats(tmp_path / "chats.jsonl")
  storage = "nf4"
  chats = hugging_face.HuggingFaceLm(
    weights=str(tmp_path / "model"),
    train_files=str(tmp_path / "chats.jsonl"),
    messages_key="messages",
    lora_rank=2,
    frozen_storage=storage,
    num_train_steps=4,
    checkpoint_every_steps=2,
    eval_every_steps=None,
    length=48,
    learning_rate=3e-3,
    warmup_steps=1,
    prompts=None,
    max_new_tokens=None,
  )
  _train(tmp_path / "whole", chats)
  _train(tmp_path / "parts", chats, until=2)
  half = _read(tmp_path / "parts")
  _train(tmp_path / "parts", chats)
  whole, parts = _read(tmp_path / "whole"), _read(tmp_path / "parts")
  assert whole.keys() == parts.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)
  _check_adapters(start, half, whole, storage)


def test_chats_of_other_formats_are_the_same_examples(tmp_path):
  imported_model.write(tmp_path / "model")
  _write_chats(tmp_path / "messages.jsonl")
  names = {"user": "human", "assistant": "gpt"}
  rows = {"sharegpt": [], "alpaca": []}
  for line in (tmp_path / "messages.jsonl").read_text().splitlines():
    chat = json.loads(line)["messages"]
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in chat]
    rows["sharegpt"].append({"conversations": turns})
    question, answer = (m["content"] for m in chat)
    rows["alpaca"].append({"instruction": question, "output": answer})
  for form, lines in rows.items():
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / f"{form}.jsonl").write_text(text)

  def make(form, **knobs):
    return hugging_face.HuggingFaceLm(
      weights=str(tmp_path / "model"),
      train_files=str(tmp_path / f"{form}.jsonl"),
      length=48,
      prompts=None,
      max_new_tokens=None,
      **knobs,
    )

  expected = fdl.build(make("messages", messages_key="messages").job())
  batch = expected.train_input.get_next()
  assert batch["weights"].any()
  for form in ("messages", *rows):
    job = fdl.build(make(form, chat_format=form).job())
    for key, value in job.train_input.get_next().items():
      np.testing.assert_array_equal(value, batch[key], err_msg=form)
  with pytest.raises(user_error.UserError, match=r"'alpaca' has no key"):
    make("alpaca", chat_format="alpaca", messages_key="messages").job()
  # Packed chats are counted, too.
  steps = make("alpaca", chat_format="alpaca", num_epochs=4).job()
  finite = fdl.build(steps.train_input)
  finite.examples.num_epochs = 4
  assert steps.num_train_steps == len(list(finite))
  schedule = steps.task.learner.optimizer.schedule
  assert schedule.total_steps == steps.num_train_steps


@pytest.fixture(name="forks", scope="module")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


def _read_metrics(folder):
  """Returns the metrics of training by step, without measured times."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return {
    row["step"]: {k: v for k, v in row.items() if not _MEASURED(k)}
    for row in rows
    if row["split"] == "train"
  }


def _write_chats(path):
  chats = [
    [
      {"role": "user", "content": f"{a} + 1?"},
      {"role": "assistant", "content": f"{a + 1}"},
    ]
    for a in range(20)
  ]
  lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
  path.write_text("".join(lines))


def _write_killable(tmp_path, kind):
  """Writes what an experiment reads.

  Returns:
    Its class, its knobs, and the imported variables, if it has some.
  """
  if kind == "grpo":
    shared = {"checkpoint_every_steps": 2, "summary_every_steps": 1}
    sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 32, "mlp_dim": 64}
    knobs = {"num_train_steps": 12, "beta": 0.01, "head_dim": 8}
    return arithmetic.ArithmeticGrpo, {**knobs, **sizes, **shared}, None
  start = imported_model.write(tmp_path / "model")
  knobs = _knobs(tmp_path, num_train_steps=16)
  if kind == "dpo":
    imported_model.write_pairs(tmp_path / "pairs.jsonl")
    return preferences.HuggingFacePreferences, knobs, start
  _write_chats(tmp_path / "pairs.jsonl")
  chats = {"messages_key": "messages", "lora_rank": 2}
  none = {"prompts": None, "max_new_tokens": None}
  return hugging_face.HuggingFaceLm, {**knobs, **chats, **none}, start


def _is_saved(folder):
  # The name of an incomplete checkpoint is longer.
  files = folder.glob("*/commit_success.txt")
  return any(file.parent.name.isdigit() for file in files)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_killed_run_equals_the_whole(tmp_path, forks, kind):
  """Kills a process by SIGKILL after its first checkpoint."""
  cls, knobs, start = _write_killable(tmp_path, kind)
  experiment = cls(**knobs)
  _train(tmp_path / "whole", experiment)
  killed = tmp_path / "killed"
  arguments = [
    f"--exp={cls.import_path()}",
    f"--job_log_dir={killed}",
    *(f"--fdl.{k}={v}" for k, v in knobs.items()),
  ]
  number = len(jax.devices())
  process = forks.start("command_line", arguments, devices=number)
  while not _is_saved(killed / "checkpoints"):
    assert process.poll() is None, process.output()
    time.sleep(0.01)
  process.kill()
  assert process.wait() == -signal.SIGKILL, process.output()
  reached = stored_checkpoint.find_checkpoint(epath.Path(killed)).step
  assert 0 < reached < experiment.num_train_steps
  half = _read(killed)
  process = forks.start("command_line", arguments, devices=number)
  assert process.wait() == 0, process.output()
  assert re.search(r"resuming from the checkpoint of step \d", process.output())
  whole, found = _read(tmp_path / "whole"), _read(killed)
  assert whole.keys() == found.keys()
  assert any(name.startswith("opt") for name in whole)
  for name, value in whole.items():
    np.testing.assert_array_equal(value, found[name], err_msg=name)
  metrics = _read_metrics(tmp_path / "whole")
  assert len(metrics) == experiment.num_train_steps
  assert _read_metrics(killed) == metrics
  if kind == "dpo":
    _check_policy(start, whole)
  if kind == "sft":
    _check_adapters(start, half, whole)


@pytest.mark.nightly
def test_log_probabilities_of_the_reference_computed_once(tmp_path):
  imported_model.write(tmp_path / "model")
  imported_model.write_pairs(tmp_path / "pairs.jsonl")
  knobs = _knobs(tmp_path, num_train_steps=2, checkpoint_every_steps=None)
  file = tmp_path / "log_probs.npz"
  flags = [f"--fdl.{name}={value}" for name, value in knobs.items()]
  name = preferences.HuggingFacePreferences.import_path()
  assert reference_log_probs.main([str(file), f"--exp={name}", *flags]) == 0
  _train(tmp_path / "live", _experiment(tmp_path, **knobs))
  stored = {**knobs, "reference_log_probs": str(file)}
  _train(tmp_path / "stored", _experiment(tmp_path, **stored))
  live, found = (_read_metrics(tmp_path / run) for run in ("live", "stored"))
  for step, values in live.items():
    for key in ("loss", "reward_margin", "log_prob_chosen"):
      np.testing.assert_allclose(
        found[step][key], values[key], rtol=1e-4, atol=1e-6, err_msg=key
      )
  assert not any(n.startswith("frozen") for n in _read(tmp_path / "stored"))
  # Other data, another number of pairs, another reference.
  pairs = tmp_path / "pairs.jsonl"
  text = pairs.read_text()
  pairs.write_text(text.replace('"3"', '"9"'))
  source = fdl.build(_experiment(tmp_path, **stored).job()).train_input
  with pytest.raises(ValueError, match="log probability of another pair 2 of"):
    source.get_next()
  pairs.write_text(text + text)
  with pytest.raises(ValueError, match="of 8 pairs of train, and the data has"):
    fdl.build(_experiment(tmp_path, **stored).job())
  pairs.write_text(text)
  imported_model.write(tmp_path / "other", scale=0.9)
  other = {**stored, "reference": str(tmp_path / "other")}
  with pytest.raises(ValueError, match="of the reference crc32"):
    fdl.build(_experiment(tmp_path, **other).job())
  missing = {**stored, "reference_log_probs": str(tmp_path / "none.npz")}
  with pytest.raises(ValueError, match="no log probabilities of train"):
    fdl.build(_experiment(tmp_path, **missing).job())


class _Judged(arithmetic.ArithmeticGrpo):
  """GRPO with the rewards of a model."""

  judge: str

  def adjust(self, config):
    """Sets the reward."""
    config.task.reward = fdl.Config(
      model_reward.ModelReward, folder=self.judge, length=48
    )


@pytest.mark.nightly
def test_a_trained_reward_model_rewards_samples(tmp_path):
  imported_model.write(tmp_path / "model")
  imported_model.write_pairs(tmp_path / "pairs.jsonl")
  knobs = _knobs(tmp_path, num_train_steps=30, checkpoint_every_steps=None)
  judge = tmp_path / "judge"
  _train(judge, preferences.HuggingFaceReward(**knobs))
  metrics = _read_metrics(judge)
  assert metrics[1]["reward_accuracy"] < metrics[30]["reward_accuracy"] == 1
  reward = model_reward.ModelReward(folder=str(judge), length=48)
  for a in range(8):
    assert reward(f"{a} + 1?", f"{a + 1}") > reward(f"{a} + 1?", f"{a}."), a
  # It may be the reward of GRPO.
  sizes = {"num_layers": 1, "num_heads": 2, "embed_dim": 32, "mlp_dim": 64}
  grpo = _Judged(
    judge=str(judge), num_train_steps=1, summary_every_steps=1, **sizes
  )
  _train(tmp_path / "grpo", grpo)
  assert np.isfinite(_read_metrics(tmp_path / "grpo")[1]["reward"])
  with pytest.raises(
    user_error.UserError, match="not one of a trained Hugging"
  ):
    model_reward.ModelReward(folder=str(tmp_path / "model"))("1?", "2")
  with pytest.raises(user_error.UserError, match="length is 8, and a conv"):
    model_reward.ModelReward(folder=str(judge), length=8)("1?", "2")


def test_rejects_other_vocabularies(tmp_path):
  imported_model.write(tmp_path / "model")
  imported_model.write(
    tmp_path / "larger", {**imported_model.CONFIG, "vocab_size": 320}
  )
  imported_model.write(tmp_path / "renamed")
  path = tmp_path / "renamed" / "hugging_face" / "tokenizer.json"
  text = path.read_text()
  found = json.loads(text)
  vocabulary = found["model"]["vocab"]
  vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
  path.write_text(json.dumps(found))
  for other, message in (
    ("larger", "whose vocab_size is 320, and that of weights is 264"),
    ("renamed", "whose tokenizer has another vocabulary"),
  ):
    reference = str(tmp_path / other)
    with pytest.raises(user_error.UserError, match=message):
      _experiment(tmp_path, reference=reference).job()


def test_equal_answers_end_a_run(tmp_path):
  imported_model.write(tmp_path / "model")
  row = {"prompt": "1?", "chosen": "2", "rejected": "2"}
  (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
  job = fdl.build(_experiment(tmp_path).job())
  with pytest.raises(ValueError, match=r"answer are equal.*\(line 1 of"):
    job.train_input.get_next()


@pytest.mark.nightly
def test_a_student_and_its_teacher(tmp_path):
  small = imported_model.write(tmp_path / "model")
  large = imported_model.write(
    tmp_path / "large", {**imported_model.CONFIG, "hidden_size": 64}
  )
  (tmp_path / "text.jsonl").write_text(json.dumps({"text": "abc" * 200}) + "\n")

  given = {
    "weights": str(tmp_path / "model"),
    "train_files": str(tmp_path / "text.jsonl"),
    "num_train_steps": 1,
    "global_batch_size": 8,
    "length": 48,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "prompts": None,
    "max_new_tokens": None,
  }

  def student(**knobs):
    return distillation.HuggingFaceStudent(**{**given, **knobs})

  teacher = {"teacher": str(tmp_path / "large")}
  _train(tmp_path / "run", student(**teacher, hidden_weight=1.0))
  found = _read(tmp_path / "run")
  assert "params/hidden_projection/kernel" in found
  for name in small.keys() - {"step"}:
    assert not np.array_equal(found[name], small[name]), name
  for name in large.keys() - {"step"}:
    frozen = name.replace("params/", "frozen/teacher/")
    np.testing.assert_array_equal(found[frozen], large[name], err_msg=frozen)
  # The same without the teacher in memory.
  knobs = {**teacher, "num_train_steps": 2, "temperature_of_loss": 2.0}
  _train(tmp_path / "live", student(**knobs))
  folder = str(tmp_path / "stored")
  name = distillation.HuggingFaceStudent.import_path()
  flags = [f"--fdl.{k}={v}" for k, v in {**given, **knobs}.items()]
  arguments = [folder, "--top=264", f"--exp={name}", *flags]
  assert teacher_log_probs.main(arguments) == 0
  with pytest.raises(user_error.UserError, match="exists; pass another"):
    teacher_log_probs.main(arguments)
  _train(tmp_path / "light", student(**knobs, teacher_log_probs=folder))
  live, light = (_read_metrics(tmp_path / run) for run in ("live", "light"))
  for step, values in live.items():
    for key in ("loss", "teacher_kl"):
      np.testing.assert_allclose(light[step][key], values[key], rtol=1e-4)
  assert not any(n.startswith("frozen") for n in _read(tmp_path / "light"))
  with pytest.raises(user_error.UserError, match="teacher is not set"):
    student().job()
  imported_model.write(
    tmp_path / "other", {**imported_model.CONFIG, "vocab_size": 320}
  )
  with pytest.raises(user_error.UserError, match="must have the same vocab"):
    student(teacher=str(tmp_path / "other")).job()


def _write_chains(path, number, seed):
  """Writes texts of 24 letters, each drawn by the one before it."""
  table = np.random.RandomState(0).dirichlet(np.full(24, 0.15), size=24)
  random = np.random.RandomState(seed)
  with path.open("w") as file:
    for _ in range(number):
      letters = [0]
      for _ in range(200):
        letters.append(random.choice(24, p=table[letters[-1]]))
      text = "".join(chr(97 + letter) for letter in letters)
      file.write(json.dumps({"text": text}) + "\n")


@pytest.mark.nightly
def test_a_teacher_knows_more_than_a_few_texts(tmp_path):
  """A student of 4 texts and of a teacher of 200, and one of the 4 alone."""
  sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
  for name, config in (("small", {}), ("large", sizes)):
    imported_model.write(tmp_path / name, {**imported_model.CONFIG, **config})
  for name, number, seed in (("few", 4, 1), ("many", 200, 2), ("held", 40, 3)):
    _write_chains(tmp_path / f"{name}.jsonl", number, seed)

  def held_out(run, cls, steps, **knobs):
    shared = {
      "validation_files": str(tmp_path / "held.jsonl"),
      "num_train_steps": steps,
      "eval_every_steps": steps,
      "checkpoint_every_steps": None,
      "summary_every_steps": 50,
      "learning_rate": 3e-3,
      "warmup_steps": 5,
      "length": 64,
      "prompts": None,
      "max_new_tokens": None,
    }
    _train(tmp_path / run, cls(**shared, **knobs))
    lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [x["log_pplx"] for x in found if x["split"] == "validation"][-1]

  of_many, of_few = (str(tmp_path / f"{x}.jsonl") for x in ("many", "few"))
  large, small = (str(tmp_path / x) for x in ("large", "small"))
  plain, student = hugging_face.HuggingFaceLm, distillation.HuggingFaceStudent
  held_out("teacher", plain, 200, weights=large, train_files=of_many)
  given = {"weights": small, "train_files": of_few}
  alone = held_out("alone", plain, 120, **given)
  teacher = {"teacher": str(tmp_path / "teacher"), "teacher_share": 0.9}
  taught = held_out("taught", student, 120, **given, **teacher)
  # Nats for each byte. A smaller teacher or fewer texts give less.
  print(f"alone {alone:.3f}, taught {taught:.3f}")
  assert taught < alone - 0.15
