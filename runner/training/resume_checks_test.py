"""Tests for what a run may change when it resumes."""

import dataclasses
import json
import os

from etils import epath
import fiddle as fdl
import pytest

from paxon.inputs import packing, synthetic_lm_input
from paxon.inputs.sources import text_files
from paxon.inputs.tokenizers import chat_template, chats
from paxon.learners import privacy
from paxon.learners.optimizers import lion
from paxon.runner import run_dir, user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.configuration import overrides, resolving
from paxon.runner.session import run_files
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import resume_checks, testing

_TINY = testing.TinyLm.import_path()


def _config(**knobs):
  return testing.make(**knobs)[1]


def _stored(tmp_path, config=None):
  """Returns a directory in which a run has stored its configuration."""
  folder = epath.Path(tmp_path)
  run_files.store_config(_config() if config is None else config, folder)
  return folder


def _check(config, folder, **arguments):
  return resume_checks.check(config, folder, job=fdl.build(config), **arguments)


def _changes(config, folder, **arguments):
  return [
    line.partition(": ")[2]
    for line in _check(config, folder, **arguments).lines
  ]


def test_the_same_configuration_has_no_changes(tmp_path):
  assert _changes(_config(), _stored(tmp_path)) == []
  assert _changes(_config(), epath.Path(tmp_path / "none")) == []


def test_a_run_may_be_extended_and_its_schedule_with_it(tmp_path):
  folder = _stored(tmp_path)
  changes = _changes(_config(num_train_steps=24), folder)
  assert "num_train_steps was 12 and is now 24" in changes
  assert len(changes) == 2
  assert any("schedule.total_steps was 12 and" in line for line in changes)


@pytest.mark.parametrize(
  "knobs",
  [
    {"mesh": "fsdp=-1"},
    {"eval_every_steps": 2},
    {"checkpoint_every_steps": 2},
    {"summary_every_steps": 2},
    {"max_new_tokens": 3},
    {"num_microbatches": 2},
    {"compiler_options": {"xla_cpu_enable_fast_math": False}},
    {"num_train_steps": 12, "scan": False},
  ],
  ids=lambda knobs: list(knobs)[-1],
)
def test_what_may_change_freely(tmp_path, knobs):
  assert len(_changes(_config(**knobs), _stored(tmp_path))) == 1


# A knob, and other names that allow the change.
_ASK = [
  ({"learning_rate": 0.1}, "schedule", r"schedule.peak was 0.003 and is now"),
  ({"global_batch_size": 16}, "global_batch_size", "was 8 and is now 16"),
  ({"dtype": "bfloat16"}, "dtype", r"dtype was .* and is now bfloat16"),
]


@pytest.mark.parametrize("length", [12, 24])
@pytest.mark.parametrize(
  ("knobs", "name", "message"), _ASK, ids=["rate", "batch", "dtype"]
)
def test_what_needs_a_flag(tmp_path, knobs, name, message, length):
  # Another number of steps lets nothing else through.
  folder, config = _stored(tmp_path), _config(**knobs, num_train_steps=length)
  with pytest.raises(user_error.UserError, match=message) as raised:
    _check(config, folder)
  assert "--allow_changes=" in str(raised.value)
  changes = _check(config, folder, allowed=[name])
  assert {each["path"] for each in changes.records}
  assert any(line.startswith("changed, as allowed: ") for line in changes.lines)


def _edit(config, path, value):
  *parents, last = path.split(".")
  node = config
  for parent in parents:
    node = node[parent] if isinstance(node, dict) else getattr(node, parent)
  setattr(node, last, value)
  return config


@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("task.learner.max_grad_norm", 0.5),
    ("task.learner.max_grad_norm", None),
    ("task.learner.optimizer.weight_decay", 0.2),
    ("task.learner.optimizer.b1", 0.8),
    ("task.learner.optimizer.schedule.warmup_steps", 3),
    ("task.learner.losses", {"loss": 2.0}),
    ("task.metrics", ()),
    ("train_input.length", 32),
    ("eval_inputs.validation.length", 32),
    ("train_input.packing", packing.Packing.BEST_FIT),
  ],
)
def test_fields_that_need_a_flag(tmp_path, path, value):
  folder, config = _stored(tmp_path), _config()
  _edit(config, path, value)
  with pytest.raises(user_error.UserError, match=r"--allow_changes=") as raised:
    _check(config, folder)
  names = str(raised.value).rpartition("--allow_changes=")[2]
  assert _check(config, folder, allowed=names.split(",")).records
  last = path.rpartition(".")[2]
  assert _check(config, folder, allowed=[last]).records


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    ({"seed": 3}, r"seed was 0 and is now 3.*would mean other documents"),
    ({"embed_dim": 32}, r"was 16 and is now 32 \(and .* belong to the old mod"),
    ({"average_decay": 0.9}, r"training state is that of the old one"),
  ],
)
def test_what_never_changes(tmp_path, knobs, message):
  folder, names = _stored(tmp_path), [*knobs, "task", "train_input"]
  for length in (12, 24):
    config = _config(**knobs, num_train_steps=length)
    with pytest.raises(user_error.UserError, match=message) as raised:
      _check(config, folder, allowed=names)
    assert "(a warm start)" in str(raised.value)


@pytest.mark.parametrize(
  ("path", "value"),
  [
    ("task.learner.optimizer.momentum_dtype", "bfloat16"),
    ("task.learner.count_tokens", True),
    ("train_input.examples.source.source.num_documents", 21),
    ("train_input.examples.num_epochs", 3),
    ("trainable", (".*",)),
    ("task.model.stack.num_layers", 3),
  ],
)
def test_fields_that_never_change(tmp_path, path, value):
  folder, config = _stored(tmp_path), _config()
  with pytest.raises(user_error.UserError, match="never resumes with another"):
    _check(_edit(config, path, value), folder, allowed=[path])


def test_the_length_of_conversations_never_changes(tmp_path):
  """Their examples are cut to it, and the position has a hash of examples."""

  def make(length):
    config = _config()
    config.train_input.examples.source = fdl.Config(
      chats.TokenizedChats,
      source=config.train_input.examples.source.source,
      template=fdl.Config(chat_template.ChatTemplate, source=""),
      tokenizer=config.train_input.examples.source.tokenizer,
      length=length,
    )
    return config

  message = (
    r"source\.length was 16 and is now 32; .*, because its position is only"
    r" valid for examples cut to the same length\. Use"
  )
  with pytest.raises(user_error.UserError, match=message):
    _check(make(32), _stored(tmp_path, make(16)), allowed=["length"])


def test_another_optimizer_never_resumes(tmp_path):
  config = _config()
  schedule = config.task.learner.optimizer.schedule
  config.task.learner.optimizer = fdl.Config(lion.Lion, schedule=schedule)
  with pytest.raises(user_error.UserError, match=r"Lion.*training state is"):
    _check(config, _stored(tmp_path), allowed=["optimizer"])


def test_a_batch_size_changes_only_if_positions_do_not_depend_on_it(tmp_path):
  def make(size, private=False):
    config = _config(global_batch_size=size)
    if private:
      config.task.learner.privacy = fdl.Config(
        privacy.Privacy, clip_norm=1.0, noise_multiplier=1.0
      )
    else:
      config.train_input = fdl.Config(
        synthetic_lm_input.SyntheticLmInput,
        global_batch_size=size,
        length=16,
        vocab_size=264,
      )
    return config

  for private in (False, True):
    folder = _stored(tmp_path, make(8, private))
    with pytest.raises(user_error.UserError, match="depends on the batches"):
      _check(make(16, private), folder, allowed=["global_batch_size"])


def _given(*texts):
  return tuple(overrides.Override(*text.split("=", 1)) for text in texts)


def test_a_knob_covers_what_it_changes_and_the_length_its_schedule(tmp_path):
  given = _given("learning_rate=1e-3", "num_train_steps=6")
  folder = epath.Path(tmp_path)
  run_files.store_config(resolving.resolve(_TINY, given).config, folder)
  run_files.store_settings(_TINY, given, folder)
  given = _given("learning_rate=2e-3", "num_train_steps=7")
  config = resolving.resolve(_TINY, given).config
  config_given = {"given": given}
  with pytest.raises(user_error.UserError) as raised:
    _check(config, folder, **config_given)
  assert str(raised.value).endswith("--allow_changes=learning_rate")
  changes = _check(config, folder, allowed=["learning_rate"], **config_given)
  assert changes.records == (
    {
      "name": "learning_rate",
      "path": "task.learner.optimizer.schedule.peak",
      "before": "0.001",
      "after": "0.002",
    },
  )


def test_a_name_that_is_no_setting_is_rejected(tmp_path):
  with pytest.raises(user_error.UserError, match="did you mean 'learning_rate"):
    _check(_config(), _stored(tmp_path), allowed=["learnin_rate"])
  # Of a change that was made before.
  assert not _check(_config(), _stored(tmp_path), allowed=["seed"]).lines


def test_allowed_changes_are_recorded_once_with_their_step(tmp_path):
  folder = epath.Path(tmp_path)
  change = {"name": "a", "path": "a.b", "before": "1", "after": "2"}
  changes = resume_checks.Changes(records=(change,))
  resume_checks.record(resume_checks.Changes(), folder, step=3)
  assert not (folder / run_dir.CHANGES).exists()
  for step in (4, 4, 8):
    resume_checks.record(changes, folder, step=step)
  lines = (folder / run_dir.CHANGES).read_text().splitlines()
  assert [json.loads(line) for line in lines] == [
    {"step": 4, **change},
    {"step": 8, **change},
  ]


def _without(folder, line):
  stored = folder / run_dir.CONFIG_TEXT
  text = stored.read_text()
  assert f"{line}\n" in text
  stored.write_text(text.replace(f"{line}\n", ""))


@pytest.mark.parametrize(
  "line",
  [
    "task.learner.optimizer.max_update_rms = None",
    "warm_start = None",
    "compiler_options = {}",
    "compiler_option_sets = ()",
  ],
)
def test_a_field_that_a_later_version_added_may_have_its_default(
  tmp_path, line
):
  folder = _stored(tmp_path)
  _without(folder, line)
  path = line.partition(" ")[0]
  (change,) = _changes(_config(), folder)
  assert change.startswith(f"{path} was nothing and is now")


def test_a_field_that_was_not_there_may_not_be_set(tmp_path):
  folder, config = _stored(tmp_path), _config()
  _without(folder, "task.learner.optimizer.max_update_rms = None")
  config.task.learner.optimizer.max_update_rms = 1.0
  with pytest.raises(user_error.UserError, match=r"max_update_rms was nothing"):
    _check(config, folder)


def _place(tmp_path, name, text="one\ntwo\n"):
  folder = tmp_path / name
  folder.mkdir()
  (folder / "a.txt").write_text(text)
  return folder


def _of_files(folder, **fields):
  """A configuration that evaluates text files, and starts from a run."""
  config = _config()
  validation = config.eval_inputs["validation"]
  validation.source = fdl.Config(text_files.TextFiles, files=f"{folder}/*.txt")
  config.warm_start = fdl.Config(
    training.WarmStart, checkpoint=f"{folder}/base", **fields
  )
  return config


def _save_base(folder, step=2):
  session = session_lib.open_session(testing.make()[0])
  with checkpointer.Checkpointer(folder / "base" / "checkpoints") as opened:
    state = session.initial_state()
    state = dataclasses.replace(state, step=state.step + step)
    opened.save(step, state, specs=session.state_specs, data={})


def test_moved_inputs_are_compared_by_content(tmp_path):
  old, run = epath.Path(_place(tmp_path, "old")), epath.Path(tmp_path / "run")
  _save_base(old)
  run.mkdir()
  config = _of_files(old)
  run_files.store_config(config, run)
  facts = resume_checks.describe_inputs(fdl.build(config), run)
  resume_checks.store_inputs(facts, run)
  assert facts["inputs"]["validation"]["position"]["data"]["num_documents"] == 1

  new = tmp_path / "new"
  os.rename(old, new)
  assert _check(_of_files(new), run).lines == (
    f"moved: {old}/*.txt is now {new}/*.txt",
    f"moved: {old}/base is now {new}/base",
  )
  # Nothing is read from the base again.
  os.rename(new / "base", tmp_path / "gone")
  assert len(_check(_of_files(new), run).lines) == 2
  _save_base(epath.Path(new), step=3)
  with pytest.raises(user_error.UserError, match=r"it is another model"):
    _check(_of_files(new), run)
  other = _place(tmp_path, "other", "one\ntwi\n")
  with pytest.raises(
    user_error.UserError,
    match=r"files has moved from .*data.content was \w+ and is now",
  ):
    _check(_of_files(other), run)
  # Only the place of a warm start may change.
  with pytest.raises(user_error.UserError, match=r"only when a run starts"):
    _check(_of_files(new, step=3), run)
