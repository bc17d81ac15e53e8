"""Tests that Pax's flags are answered with what exists."""

import inspect
import re

import pytest

from paxon.learners import learner
from paxon.runner import (
  command_line,
  experiment,
  flag_table,
  main,
  pax_flags,
)

# All that `paxml/main.py` defines, by `DEFINE_` and by Fiddle's own, but for
# `exp`, `job_log_dir` and `mode`; older versions had the last two.
_PAX_S = [
  "eval_on_test",
  "decode_during_train",
  "eval_during_decode",
  "maybe_use_persistence_checkpointing",
  "jax_fully_async_checkpoint",
  "exit_after_ondemand_checkpoint",
  "tensorstore_use_ocdbt",
  "async_timeout_secs",
  "startup_random_jitter_max_secs",
  "jax_traceback_filtering_option",
  "decode_output_pickle",
  "checkpoint_todelete_subdir",
  "restore_checkpoint_dir",
  "restore_checkpoint_step",
  "globally_use_hardware_rng",
  "jax_profiler_port",
  "enable_auto_sharding",
  "enable_checkpoint_saving",
  "enforce_restore_shape_check",
  "study",
  "controller_mode",
  "tuner_group",
  "metrics_from",
  "num_trials",
  "pythia_port",
  "tfds_data_dir",
  "multiprocess_gpu",
  "server_addr",
  "num_hosts",
  "host_idx",
  "fdl",
  "fdl_config",
  "fdl_set",
  "fdl_tags",
  "enable_summary_writer",
  "multi_host_checkpointing",
  "pmap_use_tensorstore",
]
_OURS = list(command_line.make_flags())

_SERVICE = "tf_data_service_worker"


def _stderr(capsys, *arguments: str) -> str:
  with pytest.raises(SystemExit) as exit_:
    main.run(argv=["main", *arguments])
  assert exit_.value.code == 2
  return capsys.readouterr().err


def test_all_of_them_are_answered():
  assert sorted([*pax_flags.FLAGS, *pax_flags.ACCEPTED]) == sorted(_PAX_S)
  assert not set(_PAX_S) & set(_OURS)


@pytest.mark.parametrize("name", sorted(pax_flags.FLAGS))
@pytest.mark.parametrize("form", ["--{}=x", "--{}", "-{}=true", "--no{}"])
def test_each_form_of_a_rejected_flag_is_known(name, form):
  with pytest.raises(ValueError, match="Flags of Pax: ") as error:
    pax_flags.translate([form.format(name)], _OURS)
  assert pax_flags.FLAGS[name] in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(pax_flags.ACCEPTED))
def test_accepted_flags_are_dropped_or_renamed_with_a_line(name):
  flag = pax_flags.ACCEPTED[name]
  value = "true" if flag.is_bool else "3"
  kept = () if flag.ours is None else (f"--{flag.ours}=3",)
  kept += () if flag.if_true is None else (flag.if_true,)
  forms = [[f"--{name}={value}"], [f"-{name}={value}"]]
  forms.append([f"--{name}"] if flag.is_bool else [f"--{name}", "3"])
  for form in forms:
    found = pax_flags.translate(["--exp=a.B", *form, "--mode=train"], _OURS)
    assert found.arguments == ("--exp=a.B", *kept, "--mode=train")
    assert found.notes == (f"Pax's --{name}: {flag.note}.",)


@pytest.mark.parametrize("form", ["--no{}", "--{}=False", "--{}=0"])
def test_a_switch_that_cannot_be_off_is_rejected(form):
  for name, flag in pax_flags.ACCEPTED.items():
    if flag.if_false is not None:
      with pytest.raises(ValueError, match="Flags of Pax: "):
        pax_flags.translate([form.format(name)], _OURS)
    elif flag.is_bool:
      assert not pax_flags.translate([form.format(name)], _OURS).arguments


@pytest.mark.parametrize("value", ["maybe", "", "2", "rbg"])
def test_a_switch_has_no_other_value(value):
  argument = f"--globally_use_hardware_rng={value}"
  with pytest.raises(ValueError, match=rf"{argument}: true or false\.$"):
    pax_flags.translate([argument], _OURS)
  for value in ("True", "yes", "1", "f", "NO"):
    pax_flags.translate([f"--globally_use_hardware_rng={value}"], _OURS)


@pytest.mark.parametrize("form", [[f"--mode={_SERVICE}"], ["--mode", _SERVICE]])
def test_each_form_of_a_rejected_mode_is_known(form):
  with pytest.raises(ValueError, match=f"--mode={_SERVICE}: its input's"):
    pax_flags.translate(form, _OURS)


def test_what_replaces_them_exists():
  texts = " ".join(
    [*pax_flags.FLAGS.values(), *pax_flags.MODES.values()]
    + [f"{flag.note} {flag.if_false}" for flag in pax_flags.ACCEPTED.values()]
  )
  for flag in pax_flags.ACCEPTED.values():
    assert flag.ours is None or flag.ours in _OURS
  for name in re.findall(r"--([a-z_]+)\b(?!\.)", texts):
    assert name in _OURS
  for mode in re.findall(r"--mode=(\w+)", texts):
    assert mode in flag_table.MODES
  knobs = set(re.findall(r"--fdl\.([a-z_]+)\b(?!\.)", texts))
  # The fields of a job that an experiment gives by a method.
  fields = set(inspect.get_annotations(experiment.Experiment)) | {"retention"}
  assert knobs
  assert knobs <= fields


def test_keys_of_hardware_are_a_field_of_the_learner():
  flag = pax_flags.ACCEPTED["globally_use_hardware_rng"]
  for form in ("--{}", "--{}=True", "-{}=1"):
    argument = form.format("globally_use_hardware_rng")
    [ours] = pax_flags.translate([argument], _OURS).arguments
    path, _, value = ours.partition("=")
    assert path == "--fdl.task.learner.random_generator"
    assert learner.Learner.__dataclass_fields__["random_generator"]
    assert value in learner.GENERATORS
  assert flag.if_true == ours


def test_a_pasted_command_is_answered_in_one_line(capsys):
  text = _stderr(
    capsys,
    "--exp=paxml.tasks.lm.params.lm_cloud.LmCloudSpmd2BLimitSteps",
    "--job_log_dir=gs://bucket/run",
    "--jax_fully_async_checkpoint",
    "--enable_auto_sharding",
    "--noenable_summary_writer",
    f"--mode={_SERVICE}",
  )
  assert text == (
    "Flags of Pax: --enable_auto_sharding: --fdl.mesh=auto;"
    " --noenable_summary_writer: --fdl.summary_every_steps=N sets the interval;"
    f" --mode={_SERVICE}: its input's num_workers.\n"
  )


@pytest.mark.parametrize(
  ("theirs", "ours"),
  [
    ("paxml.tasks.lm.params.c4.C4SpmdAdam", "tasks.lm.params.c4.C4SpmdAdam"),
    (
      "paxml.contrib.gpu.scripts_gpu.configs.Pile126M",
      "tasks.lm.params.gpu.Pile126M",
    ),
  ],
)
@pytest.mark.parametrize("joint", ["=", None])
def test_paths_in_pax_are_read_as_ours(theirs, ours, joint):
  form = ["--exp", theirs] if joint is None else [f"--exp={theirs}"]
  found = pax_flags.translate([*form, "--fdl.seed=1"], _OURS)
  assert found.arguments == (f"--exp={ours}", "--fdl.seed=1")
  assert found.notes == (f"Pax's --exp={theirs}: read as --exp={ours}.",)


def test_the_command_of_pax_s_readme_is_accepted():
  """Its parsed form, with processes, and a line for each flag."""
  parsed = command_line.parse(
    [
      "main",
      "--exp=paxml.tasks.lm.params.lm_cloud.LmCloudTransformerAdamLimitSteps",
      "--job_log_dir=gs://bucket/run",
      "--pmap_use_tensorstore=True",
      "--num_hosts=4",
      "--host_idx",
      "3",
      "--server_addr=10.0.0.1:1234",
      "--mode=decode_once",
    ]
  )
  flags = parsed.flags
  assert flags.exp == (
    "tasks.lm.params.lm_cloud.LmCloudTransformerAdamLimitSteps"
  )
  assert (flags.num_processes, flags.process_id) == (4, 3)
  assert flags.coordinator_address == "10.0.0.1:1234"
  assert flags.mode == "decode"
  assert len(parsed.notes) == 6


def test_our_own_commands_are_left_alone():
  arguments = ["--exp=tasks.lm.C", "--mode=train", "--fdl.seed=1", "x", "--"]
  found = pax_flags.translate([*arguments, "--exp", "tasks.lm.D"], _OURS)
  assert found == ((*arguments, "--exp", "tasks.lm.D"), ())
  assert pax_flags.translate_experiment("tasks.lm.params.c4.C4SpmdAdam") is None


@pytest.mark.parametrize(
  ("mesh", "bases", "size"),
  [
    ("data=64,tensor=4", ["fsdp=64,tensor=4"], "64"),
    ("data=-1", ["fsdp=4"], "-1"),
    ("dcn.data=2,data=8", ["data=-1", "fsdp=4"], "8"),
    ("data=8,fsdp=4", ["fsdp=4"], None),
    ("dcn.fsdp=2,data=8", ["fsdp=4"], None),
    ("dcn.data=2,tensor=8", ["fsdp=4"], None),
    ("data=1,tensor=8", ["fsdp=4"], None),
    ("data=64", ["data=16"], None),
  ],
)
def test_a_mesh_with_the_data_of_pax_gets_a_hint(mesh, bases, size):
  hint = pax_flags.hint_at_mesh(mesh, bases)
  if size is None:
    assert hint is None
  else:
    assert hint is not None
    assert f"fsdp={size}." in hint
