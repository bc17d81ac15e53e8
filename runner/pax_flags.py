"""What replaces the flags of Pax, for commands that are pasted from there.

`--exp` and `--job_log_dir` are the same. Of the others a command that has any
is answered with one line that says, for each, what to write instead; none is
taken in silence, because most of them changed what a run computes or keeps.
"""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Final

_TUNING = "there is no tuner: run once for each --fdl.KNOB=VALUE"
_ALWAYS = "leave it out,"
_HOST = "processes find each other by --coordinator_address --num_processes"

# What to write instead, by the name of the flag.
FLAGS: Final[Mapping[str, str]] = {
  "async_timeout_secs": f"{_ALWAYS} a checkpoint is waited for",
  "checkpoint_todelete_subdir": (
    f"{_ALWAYS} old checkpoints are deleted; --fdl.retention.newest=N keeps N"
  ),
  "controller_mode": _TUNING,
  "decode_during_train": (
    f"{_ALWAYS} experiments that generate text do so at the end; --mode=decode"
    " does at any time"
  ),
  "decode_output_pickle": f"{_ALWAYS} samples are JSON lines",
  "enable_auto_sharding": "--fdl.mesh=auto",
  "enable_checkpoint_saving": (
    "--fdl.checkpoint_every_steps=None leaves only the one at the end"
  ),
  "enable_summary_writer": (
    f"{_ALWAYS} --fdl.summary_every_steps=N says how often"
  ),
  "enforce_restore_shape_check": f"{_ALWAYS} shapes are always checked",
  "eval_during_decode": "--mode=eval",
  "eval_on_test": (
    f"{_ALWAYS} a training evaluates every --fdl.eval_every_steps"
  ),
  "exit_after_ondemand_checkpoint": (
    f"{_ALWAYS} SIGTERM makes a run save and exit"
  ),
  "fdl": "--exp names the experiment, --fdl.KNOB=VALUE sets a value",
  "fdl_config": "--exp names the experiment, a class",
  "fdl_set": "--fdl.KNOB=VALUE",
  "fdl_tags": "--fdl.KNOB=VALUE, such as --fdl.dtype=bfloat16",
  "globally_use_hardware_rng": f"{_ALWAYS} keys follow from --fdl.seed",
  "host_idx": "--process_id",
  "jax_fully_async_checkpoint": f"{_ALWAYS} saving is always asynchronous",
  "jax_profiler_port": "--profile_steps=10:13",
  "jax_traceback_filtering_option": (
    "JAX_TRACEBACK_FILTERING in the environment"
  ),
  "maybe_use_persistence_checkpointing": (
    f"{_ALWAYS} outside of Google it did nothing"
  ),
  "metrics_from": _TUNING,
  "multi_host_checkpointing": f"{_ALWAYS} every process saves its shards",
  "multiprocess_gpu": f"{_ALWAYS} {_HOST} --process_id, or by SLURM",
  "num_hosts": "--num_processes",
  "num_trials": _TUNING,
  "pmap_use_tensorstore": (
    f"{_ALWAYS} --fdl.rules=replicated is what pmap was, saved as any other"
  ),
  "pythia_port": _TUNING,
  "restore_checkpoint_dir": (
    "--job_log_dir names the run for --mode=decode and --mode=eval; a new run"
    " begins with another's values by the experiment's warm_start()"
  ),
  "restore_checkpoint_step": f"{_ALWAYS} the newest checkpoint is read",
  "server_addr": "--coordinator_address=HOST:PORT",
  "startup_random_jitter_max_secs": f"{_ALWAYS} processes start as they are",
  "study": _TUNING,
  "tensorstore_use_ocdbt": f"{_ALWAYS} checkpoints are always OCDBT",
  "tfds_data_dir": "TFDS_DATA_DIR in the environment",
  "tuner_group": _TUNING,
}

# What to write instead of Pax's modes that are none here.
MODES: Final[Mapping[str, str]] = {
  "decode_once": "--mode=decode",
  "infer": "--mode=decode",
  "tf_data_service_dispatcher": "its input's num_workers",
  "tf_data_service_worker": "its input's num_workers",
}

# Where modules of Pax are here.
_MODULES: Final = (
  ("paxml.contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("paxml.contrib.gpu.scripts_gpu.llama_utils.", "tasks.lm.params.gpu."),
  ("paxml.tasks.", "tasks."),
  ("contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("google3.third_party.py.paxml.tasks.", "tasks."),
)


def answer(arguments: Iterable[str], known: Sequence[str]) -> str | None:
  """Returns what replaces Pax's flags among arguments; None if there are none.

  Args:
    arguments: The command line without the program's name.
    known: Names of our flags, which mean what they say.
  """
  found: dict[str, str] = {}
  for argument in arguments:
    match = re.match(r"--?([A-Za-z_0-9]+)(?:=(.*))?$", argument, re.DOTALL)
    if match is None:
      continue
    name, value = match[1], match[2] or ""
    bare = name.removeprefix("no")
    if name in FLAGS and name not in known:
      found[f"--{name}"] = FLAGS[name]
    elif bare in FLAGS and bare not in known:
      found[f"--{name}"] = FLAGS[bare]
    elif name == "mode" and value in MODES:
      found[f"--mode={value}"] = MODES[value]
    elif name == "exp" and (ours := experiment(value)) is not None:
      found[f"--exp={value}"] = f"--exp={ours}"
  if not found:
    return None
  texts = "; ".join(f"{flag}: {what}" for flag, what in found.items())
  return f"Instead of Pax's flags write here: {texts}."


def experiment(name: str) -> str | None:
  """Returns the name here of an experiment by its path in Pax, or None.

  Args:
    name: As Pax's `--exp` took it.
  """
  for theirs, ours in _MODULES:
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  return None
