"""Replacements of the command-line flags of Pax.

`--exp` and `--job_log_dir` are the same. Any other flag of Pax is an error with
its replacement. None is ignored silently: most change what a run computes or
stores.
"""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Final

_TUNING = "no tuner; start one run per --fdl.KNOB=VALUE"
_ALWAYS = "remove it;"
_HOST = "use --coordinator_address, --num_processes"

# Replacement by flag.
FLAGS: Final[Mapping[str, str]] = {
  "async_timeout_secs": f"{_ALWAYS} a run always waits for its checkpoints",
  "checkpoint_todelete_subdir": (
    f"{_ALWAYS} old checkpoints are deleted; --fdl.retention.newest=N keeps N"
  ),
  "controller_mode": _TUNING,
  "decode_during_train": (
    f"{_ALWAYS} experiments with generation() sample at the end; --mode=decode"
    " samples at any time"
  ),
  "decode_output_pickle": f"{_ALWAYS} samples are JSON lines",
  "enable_auto_sharding": "--fdl.mesh=auto",
  "enable_checkpoint_saving": (
    "--fdl.checkpoint_every_steps=None saves only at the end"
  ),
  "enable_summary_writer": (
    f"{_ALWAYS} --fdl.summary_every_steps=N sets the interval"
  ),
  "enforce_restore_shape_check": f"{_ALWAYS} shapes are always checked",
  "eval_during_decode": "--mode=eval",
  "eval_on_test": (
    f"{_ALWAYS} training evaluates every --fdl.eval_every_steps"
  ),
  "exit_after_ondemand_checkpoint": (
    f"{_ALWAYS} SIGTERM makes a run save and exit"
  ),
  "fdl": "--exp names the experiment, --fdl.KNOB=VALUE sets a value",
  "fdl_config": "--exp names the experiment, a class",
  "fdl_set": "--fdl.KNOB=VALUE",
  "fdl_tags": "--fdl.KNOB=VALUE, such as --fdl.dtype=bfloat16",
  "globally_use_hardware_rng": f"{_ALWAYS} random keys derive from --fdl.seed",
  "host_idx": "--process_id",
  "jax_fully_async_checkpoint": f"{_ALWAYS} saving is always asynchronous",
  "jax_profiler_port": "--profile_steps=10:13",
  "jax_traceback_filtering_option": (
    "JAX_TRACEBACK_FILTERING in the environment"
  ),
  "maybe_use_persistence_checkpointing": (
    f"{_ALWAYS} it had no effect outside of Google"
  ),
  "metrics_from": _TUNING,
  "multi_host_checkpointing": f"{_ALWAYS} every process saves its shards",
  "multiprocess_gpu": f"{_HOST} and --process_id, or SLURM",
  "num_hosts": "--num_processes",
  "num_trials": _TUNING,
  "pmap_use_tensorstore": (
    f"{_ALWAYS} --fdl.rules=replicated corresponds to pmap"
  ),
  "pythia_port": _TUNING,
  "restore_checkpoint_dir": (
    "--job_log_dir for --mode=decode and --mode=eval; warm_start() of the"
    " experiment initializes a new run from a checkpoint"
  ),
  "restore_checkpoint_step": f"{_ALWAYS} the newest checkpoint is restored",
  "server_addr": "--coordinator_address=HOST:PORT",
  "startup_random_jitter_max_secs": f"{_ALWAYS} processes start at once",
  "study": _TUNING,
  "tensorstore_use_ocdbt": f"{_ALWAYS} checkpoints are always OCDBT",
  "tfds_data_dir": "TFDS_DATA_DIR in the environment",
  "tuner_group": _TUNING,
}

# Replacement by mode.
MODES: Final[Mapping[str, str]] = {
  "decode_once": "--mode=decode",
  "infer": "--mode=decode",
  "tf_data_service_dispatcher": "its input's num_workers",
  "tf_data_service_worker": "its input's num_workers",
}

# Our names of modules of Pax.
_MODULES: Final = (
  ("paxml.contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("paxml.contrib.gpu.scripts_gpu.llama_utils.", "tasks.lm.params.gpu."),
  ("paxml.tasks.", "tasks."),
  ("contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("google3.third_party.py.paxml.tasks.", "tasks."),
)


def find_replacements(
  arguments: Iterable[str], known: Sequence[str]
) -> str | None:
  """Returns replacements of Pax's flags in a command line; None without any."""
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
    elif name == "exp" and (ours := translate_experiment(value)) is not None:
      found[f"--exp={value}"] = f"--exp={ours}"
  if not found:
    return None
  texts = "; ".join(f"{flag}: {what}" for flag, what in found.items())
  return f"Flags of Pax: {texts}."


def translate_experiment(name: str) -> str | None:
  """Returns the name of an experiment by its path in Pax, or None."""
  for theirs, ours in _MODULES:
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  return None
