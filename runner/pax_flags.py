"""Command-line flags of Pax: translated, or rejected with a replacement.

`--exp` and `--job_log_dir` are the same. A flag whose meaning holds here anyway
is accepted or renamed, with one line that says what happens. Any other flag of
Pax changes what a run computes or stores; it is an error with its replacement.
"""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Final, NamedTuple

_TUNING = "tools/sweep, a study of runs"
_ALWAYS = "remove it;"


class Accepted(NamedTuple):
  """A flag of Pax that is accepted.

  Attributes:
    note: Effect of the flag, for the line that is printed.
    ours: Our name of the flag, which takes the value; None drops the flag.
    is_bool: Whether the flag is a switch, so that a value needs `=`.
    if_false: The replacement if the switch is off and that is not possible.
    if_true: The argument that replaces the switch if it is on.
  """

  note: str
  ours: str | None = None
  is_bool: bool = True
  if_false: str | None = None
  if_true: str | None = None


# Flags whose meaning holds.
ACCEPTED: Final[Mapping[str, Accepted]] = {
  "async_timeout_secs": Accepted(
    "a run always waits for its checkpoints", is_bool=False
  ),
  "checkpoint_todelete_subdir": Accepted(
    "old checkpoints are deleted in place", is_bool=False
  ),
  "enable_summary_writer": Accepted(
    "summaries are always written",
    if_false="--fdl.summary_every_steps=N sets the interval",
  ),
  "enforce_restore_shape_check": Accepted("shapes are always checked"),
  "exit_after_ondemand_checkpoint": Accepted(
    "SIGTERM makes a run save and exit",
    if_false=f"{_ALWAYS} SIGTERM makes a run save and exit",
  ),
  "globally_use_hardware_rng": Accepted(
    "if on, read as --fdl.task.learner.random_generator=rbg",
    if_true="--fdl.task.learner.random_generator=rbg",
  ),
  "host_idx": Accepted("read as --process_id", "process_id", is_bool=False),
  "jax_fully_async_checkpoint": Accepted("saving is always asynchronous"),
  "maybe_use_persistence_checkpointing": Accepted(
    "it had no effect outside of Google"
  ),
  "multi_host_checkpointing": Accepted("every process saves its shards"),
  "multiprocess_gpu": Accepted(
    "processes are found by --coordinator_address, SLURM, Open MPI or"
    " Kubernetes",
    if_false="--num_processes=1",
  ),
  "num_hosts": Accepted(
    "read as --num_processes", "num_processes", is_bool=False
  ),
  "pmap_use_tensorstore": Accepted(
    "checkpoints are always TensorStore's; --fdl.rules=replicated corresponds"
    " to pmap"
  ),
  "server_addr": Accepted(
    "read as --coordinator_address", "coordinator_address", is_bool=False
  ),
  "startup_random_jitter_max_secs": Accepted(
    "processes start at once", is_bool=False
  ),
  "tensorstore_use_ocdbt": Accepted("checkpoints are always OCDBT"),
}

# Replacements of the flags that are rejected.
FLAGS: Final[Mapping[str, str]] = {
  "controller_mode": _TUNING,
  "decode_during_train": (
    f"{_ALWAYS} experiments with generation() sample at the end, programs()"
    " with programs.DecodeFile or DecodeSplit decodes every N steps, and"
    " --mode=decode at any time"
  ),
  "decode_output_pickle": f"{_ALWAYS} samples are JSON lines",
  "enable_auto_sharding": "--fdl.mesh=auto",
  "enable_checkpoint_saving": (
    "--fdl.checkpoint_every_steps=None saves only at the end"
  ),
  "eval_during_decode": "--mode=eval",
  "eval_on_test": (
    f"{_ALWAYS} training evaluates every --fdl.eval_every_steps, and only at"
    " the end if it is None"
  ),
  "fdl": "--exp names the experiment, --fdl.KNOB=VALUE sets a value",
  "fdl_config": "--exp names the experiment, a class",
  "fdl_set": "--fdl.KNOB=VALUE",
  "fdl_tags": "--fdl.KNOB=VALUE, such as --fdl.dtype=bfloat16",
  "jax_profiler_port": "--profiler_port=9999, or --profile_steps=10:13",
  "jax_traceback_filtering_option": (
    "JAX_TRACEBACK_FILTERING in the environment"
  ),
  "metrics_from": _TUNING,
  "num_trials": _TUNING,
  "pythia_port": _TUNING,
  "restore_checkpoint_dir": (
    "--job_log_dir for --mode=decode and --mode=eval; warm_start() of the"
    " experiment initializes a new run from a checkpoint"
  ),
  "restore_checkpoint_step": (
    "--checkpoint_step for --mode=decode and --mode=eval; training resumes at"
    " the newest checkpoint"
  ),
  "study": _TUNING,
  "tfds_data_dir": "TFDS_DATA_DIR in the environment",
  "tuner_group": _TUNING,
}

# Replacement by mode; `decode_once` is accepted.
MODES: Final[Mapping[str, str]] = {
  "tf_data_service_dispatcher": "its input's num_workers",
  "tf_data_service_worker": "its input's num_workers",
}

_FALSE: Final = ("false", "f", "0", "no", "n")
_TRUE: Final = ("true", "t", "1", "yes", "y")

# Our names of modules of Pax.
_MODULES: Final = (
  ("paxml.contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("paxml.contrib.gpu.scripts_gpu.llama_utils.", "tasks.lm.params.gpu."),
  ("paxml.tasks.", "tasks."),
  ("contrib.gpu.scripts_gpu.configs.", "tasks.lm.params.gpu."),
  ("google3.third_party.py.paxml.tasks.", "tasks."),
)


class Translation(NamedTuple):
  """A command line without Pax's names, and a line for each that it had."""

  arguments: tuple[str, ...]
  notes: tuple[str, ...]


def translate(arguments: Sequence[str], known: Sequence[str]) -> Translation:
  """Returns a command line with the flags that Pax names otherwise replaced.

  Args:
    arguments: The arguments, without the program.
    known: Our flags.

  Raises:
    ValueError: A flag of Pax has no equal here; the message is one line with
      the replacements of all of them.
  """
  kept: list[str] = []
  notes: list[str] = []
  rejected: dict[str, str] = {}
  rest = list(arguments)
  while rest:
    argument = rest.pop(0)
    name, equals, value = _split(argument)
    is_theirs = name in FLAGS or name in ACCEPTED
    bare = name if is_theirs else name.removeprefix("no")
    flag = None if bare in known else ACCEPTED.get(bare)
    if bare in FLAGS and bare not in known:
      rejected[f"--{name}"] = FLAGS[bare]
    elif flag is not None:
      is_off = name != bare or value.lower() in _FALSE
      if flag.is_bool and equals and value.lower() not in (*_TRUE, *_FALSE):
        rejected[argument] = "true or false"
      if flag.if_false and is_off:
        rejected[argument] = flag.if_false
      if not flag.is_bool and not equals and rest:
        equals, value = "=", rest.pop(0)
      if flag.if_true and not is_off:
        kept.append(flag.if_true)
      if flag.ours is not None:
        kept.append(f"--{flag.ours}{equals}{value}")
      notes.append(f"Pax's --{name}: {flag.note}.")
    elif name in ("exp", "mode"):
      given = [argument]
      if not equals and rest:
        value = rest.pop(0)
        given.append(value)
      ours = translate_experiment(value) if name == "exp" else None
      if name == "mode" and value == "decode_once":
        ours = "decode"
      if name == "mode" and value in MODES:
        rejected[f"--mode={value}"] = MODES[value]
      if ours is not None:
        given = [f"--{name}={ours}"]
        notes.append(f"Pax's --{name}={value}: read as --{name}={ours}.")
      kept += given
    else:
      kept.append(argument)
  if rejected:
    texts = "; ".join(f"{flag}: {what}" for flag, what in rejected.items())
    raise ValueError(f"Flags of Pax: {texts}.")
  return Translation(tuple(kept), tuple(notes))


def hint_at_mesh(mesh: str, bases: Iterable[str]) -> str | None:
  """Returns a line on a mesh that says `data` where Pax's `data` was meant.

  Pax's `data` shards parameters; ours replicates them. A mesh with `data` and
  without `fsdp`, for an experiment whose own mesh has `fsdp`, is likely Pax's.

  Args:
    mesh: The mesh of the run.
    bases: The meshes of the experiment's class and its bases.
  """
  sizes = dict(re.findall(r"((?:dcn\.)?\w+)\s*=\s*(-?\d+)", mesh))
  size = sizes.get("data", "1")
  if size == "1" or any("fsdp" in axis for axis in sizes):
    return None
  if not any("fsdp" in base for base in bases):
    return None
  return (
    f"mesh={mesh} has whole replicas of the parameters along data={size} (Pax's"
    f" replica); Pax's data, which shards them, is fsdp={size}."
  )


def _split(argument: str) -> tuple[str, str, str]:
  """Returns name, `=` and value of a flag; an empty name for other words."""
  match = re.match(r"--?([A-Za-z_0-9]+)(?:(=)(.*))?$", argument, re.DOTALL)
  return (
    ("", "", "")
    if match is None
    else (match[1], match[2] or "", match[3] or "")
  )


def translate_experiment(name: str) -> str | None:
  """Returns the name of an experiment by its path in Pax, or None."""
  for theirs, ours in _MODULES:
    if name.startswith(theirs):
      return ours + name.removeprefix(theirs)
  return None
