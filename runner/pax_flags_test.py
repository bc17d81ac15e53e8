"""Tests that Pax's flags are answered with what exists."""

import inspect
import re

import pytest

from paxon.runner import command_line, experiment, main, pax_flags

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


def _stderr(capsys, *arguments: str) -> str:
  with pytest.raises(SystemExit) as exit_:
    main.run(argv=["main", *arguments])
  assert exit_.value.code == 2
  return capsys.readouterr().err


def test_all_of_them_are_answered():
  assert sorted(pax_flags.FLAGS) == sorted(_PAX_S)
  assert not set(pax_flags.FLAGS) & set(_OURS)


@pytest.mark.parametrize("name", _PAX_S)
@pytest.mark.parametrize("form", ["--{}=x", "--{}", "-{}=true", "--no{}"])
def test_each_form_is_known(name, form):
  found = pax_flags.find_replacements([form.format(name)], _OURS)
  assert found is not None
  assert pax_flags.FLAGS[name] in found
  assert "\n" not in found


def test_what_replaces_them_exists():
  texts = " ".join([*pax_flags.FLAGS.values(), *pax_flags.MODES.values()])
  for name in re.findall(r"--([a-z_]+)\b(?!\.)", texts):
    assert name in _OURS
  for mode in re.findall(r"--mode=(\w+)", texts):
    assert mode in command_line.MODES
  knobs = set(re.findall(r"--fdl\.([a-z_]+)", texts))
  # The fields of a job that an experiment gives by a method.
  fields = set(inspect.get_annotations(experiment.Experiment)) | {"retention"}
  assert knobs
  assert knobs <= fields


def test_a_pasted_command_is_answered_in_one_line(capsys):
  text = _stderr(
    capsys,
    "--exp=tasks.lm.params.lm_cloud.LmCloudSpmd2BLimitSteps",
    "--job_log_dir=gs://bucket/run",
    "--jax_fully_async_checkpoint",
    "--multiprocess_gpu=true",
    "--server_addr=10.0.0.1:1234",
    "--mode=decode_once",
  )
  assert text == (
    "Flags of Pax: --jax_fully_async_checkpoint: remove it; saving is always"
    " asynchronous; --multiprocess_gpu: use --coordinator_address,"
    " --num_processes and --process_id, or SLURM; --server_addr:"
    " --coordinator_address=HOST:PORT; --mode=decode_once: --mode=decode.\n"
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
def test_paths_in_pax_are_told_as_ours(capsys, theirs, ours):
  assert _stderr(capsys, f"--exp={theirs}") == (
    f"Flags of Pax: --exp={theirs}: --exp={ours}.\n"
  )


def test_our_own_commands_are_left_alone():
  arguments = ["--exp=tasks.lm.C", "--mode=train", "--fdl.seed=1", "x", "--"]
  assert pax_flags.find_replacements(arguments, _OURS) is None
  assert pax_flags.translate_experiment("tasks.lm.params.c4.C4SpmdAdam") is None
