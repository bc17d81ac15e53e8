"""Table of the command line's flags.

absl's flags, `--help`, and the check that a flag fits the mode come from the
table. `--fdl.PATH=VALUE` are overrides, not flags.
"""

import dataclasses

from paxon.runner import run_code
from paxon.runner.hosts import process_settings

# A mode without an experiment, and a flag; its values.
CHECK_DEVICES = "check_devices"
STRICT = "strict"
DEVICE_CHECKS = ("warn", STRICT)
_MODES_OF_EXPERIMENTS = (
  "train",
  "eval",
  "decode",
  "infer",
  "serve",
  "plan",
  "inspect_input",
)
MODES = (*_MODES_OF_EXPERIMENTS, CHECK_DEVICES)

# These read the experiment and its overrides from the directory of a run.
MODES_OF_TRAINED_RUNS = ("eval", "decode", "infer", "serve")


@dataclasses.dataclass(frozen=True)
class Flag:
  """A command-line flag; its type is that of the default, or str.

  Attributes:
    name: Without dashes.
    default: Value if the flag is not set.
    help: Text for `--help`.
    modes: Values of `--mode` that accept the flag.
    is_number: Whether a flag without a default is an integer.
  """

  name: str
  default: str | int | bool | None
  help: str
  modes: tuple[str, ...] = MODES
  is_number: bool = False


FLAGS = (
  Flag(
    "exp",
    None,
    "Experiment, such as tasks.lm.params.quickstart.PythonStdlibLm. Default:"
    " that of the run in --job_log_dir, with its settings.",
    modes=_MODES_OF_EXPERIMENTS,
  ),
  Flag("mode", "train", f"One of {', '.join(MODES)}."),
  Flag(
    "job_log_dir",
    None,
    "Run directory. If it exists, the run resumes from its latest checkpoint."
    " Default: a new directory under ./runs.",
    modes=("train", "eval", "decode", "infer", "serve", "plan"),
  ),
  Flag(
    run_code.FLAG,
    False,
    "Allow Python to import modules that lie in the run directory.",
    modes=("train", "eval", "decode", "infer", "serve", "plan"),
  ),
  Flag(
    "allow_changes",
    None,
    "Settings with which a run may resume although its later steps differ,"
    " separated by commas, such as learning_rate,global_batch_size.",
    modes=("train",),
  ),
  Flag(
    "profile_steps",
    None,
    "Steps to profile, such as 10:13 for steps 10, 11 and 12.",
    modes=("train",),
  ),
  Flag(
    "profiler_port",
    None,
    "Port of each process at which TensorBoard or XProf can capture a profile"
    " while the run trains. Other machines can connect, too.",
    modes=("train",),
    is_number=True,
  ),
  Flag(
    "metrics_port",
    None,
    "Port of each process for Prometheus (GET /metrics) and health checks (GET"
    " /healthz) while the run trains. Other machines can connect, too.",
    modes=("train",),
    is_number=True,
  ),
  Flag(
    "liveness_file",
    None,
    "File that each process rewrites every five seconds, unless a step hangs;"
    " for a livenessProbe of Kubernetes.",
    modes=("train",),
  ),
  Flag(
    CHECK_DEVICES,
    None,
    "Check speed and results of all devices first: `warn` of slow ones, or"
    " `strict` to end with status 69, too. Wrong ones always end it.",
    modes=("train", CHECK_DEVICES),
  ),
  Flag(
    "local_checkpoint_dir",
    None,
    "Directory on a disk of each host, or in its memory (/dev/shm), for the"
    " checkpoints of --fdl.local_checkpoint_every_steps. Each host also keeps"
    " the shards of another one.",
    modes=("train",),
  ),
  Flag(
    "max_restarts",
    0,
    "Number of times the process is restarted from the latest checkpoint after"
    " it, or another process of the run, fails.",
    modes=("train",),
  ),
  Flag(
    "min_processes",
    None,
    "With --max_restarts: if lost processes do not come back within"
    " --host_timeout, continue with at least this many, on a mesh for the"
    " devices that are left. Default: wait for all.",
    modes=("train",),
    is_number=True,
  ),
  Flag(
    "continuous",
    False,
    "Evaluate each new checkpoint until the run is finished.",
    modes=("eval",),
  ),
  Flag(
    "checkpoint_step",
    None,
    "Step of the checkpoint to read. Default: the latest.",
    modes=MODES_OF_TRAINED_RUNS,
    is_number=True,
  ),
  Flag(
    "eval_file",
    None,
    "Text file whose perplexity and bits per byte are computed, instead of the"
    " metrics of the splits.",
    modes=("eval",),
  ),
  Flag(
    "chat",
    False,
    "Apply the model's chat template: a prompt is a user's message, or a JSON"
    " list of messages.",
    modes=("decode",),
  ),
  Flag(
    "prompt",
    None,
    "Prompt to continue, or @FILE with one prompt per line.",
    modes=("decode",),
  ),
  Flag(
    "decode_file",
    None,
    "JSON lines with prompts to continue; resumes where it was stopped.",
    modes=("decode",),
  ),
  Flag(
    "decode_output",
    None,
    "JSON lines to write for --decode_file, or NAME.tfrecord to write both"
    " formats. Default: below decode/ in the run directory.",
    modes=("decode",),
  ),
  Flag(
    "decode_batch_size",
    32,
    "Number of prompts of --decode_file that are decoded together.",
    modes=("decode",),
  ),
  Flag(
    "serve_host",
    "127.0.0.1",
    "Address to listen at; 0.0.0.0 admits other machines.",
    modes=("serve",),
  ),
  Flag("serve_port", 8000, "Port to listen at; 0 for any.", modes=("serve",)),
  Flag(
    "serve_slots",
    8,
    "Number of requests that generate at the same time.",
    modes=("serve",),
  ),
  Flag(
    "serve_context",
    2048,
    "Maximum number of tokens of a prompt and its completion.",
    modes=("serve",),
  ),
  Flag(
    "serve_cache_tokens",
    0,
    "Number of tokens of a cache in pages, which prompts that begin alike"
    " share; 0 gives each slot a cache of --serve_context tokens.",
    modes=("serve",),
  ),
  Flag(
    "serve_allowed_hosts",
    "",
    "Host names of requests to answer, such as llm.example.org, separated by"
    " commas, or * for any. Default: localhost and the address itself.",
    modes=("serve",),
  ),
  Flag(
    "target",
    None,
    "Hardware to plan for, such as cpu:8, h200:64x8, v5e:16x16 or v4:2x(4x4x4);"
    " several separated by commas.",
    modes=("plan",),
  ),
  Flag(
    "plan_search",
    False,
    "Compile the most promising meshes, remat policies, microbatches and"
    " attention kernels, and print them by step time and memory.",
    modes=("plan",),
  ),
  Flag(
    "plan_tokens",
    None,
    "Tokens to train on, such as 1e12: prints days and device-hours.",
    modes=("plan",),
  ),
  Flag(
    "plan_price",
    None,
    "Price of a GPU or TPU chip per hour, such as 2.5: prints the price of"
    " --plan_tokens.",
    modes=("plan",),
  ),
  Flag(
    "plan_days",
    None,
    "Days that training on --plan_tokens may take: plans other sizes of the"
    " target until the smallest that is fast enough.",
    modes=("plan",),
  ),
  Flag(
    "plan_batches",
    None,
    "Values of global_batch_size, such as 64,128,256: prints a table of plans"
    " and the plan with the most tokens/s; or `largest`: finds the largest that"
    " fits.",
    modes=("plan",),
  ),
  Flag(
    "plan_lengths",
    None,
    "Values of length, such as 2048,8192, combined with --plan_batches.",
    modes=("plan",),
  ),
  Flag(
    "plan_decode",
    None,
    "Decoding steps to plan, sequences x slots of their caches, such as"
    " 1x8192,64x8192: prints memory and tokens/s.",
    modes=("plan",),
  ),
  Flag(
    "plan_programs",
    "auto",
    "Programs to compile: train, all (also evaluation and decoding), or auto,"
    " which is all except on TPUs, whose compiler takes minutes.",
    modes=("plan",),
  ),
  Flag(
    "coordinator_address",
    None,
    "HOST:PORT of process 0. Only needed without SLURM, Open MPI, Kubernetes or"
    " a TPU pod, like the next two flags.",
    modes=process_settings.MODES,
  ),
  Flag(
    "num_processes",
    None,
    "Number of processes; 1 ignores any cluster.",
    modes=process_settings.MODES,
    is_number=True,
  ),
  Flag(
    "process_id",
    None,
    "Index of this process, from 0.",
    modes=process_settings.MODES,
    is_number=True,
  ),
  Flag(
    "host_timeout",
    300,
    "Seconds to wait for the other processes at start and exit.",
  ),
  Flag("list", False, "List all experiments and exit."),
  Flag("version", False, "Print Paxon's version and exit."),
  Flag("help", False, "Print this help, with --exp its knobs too, and exit."),
)
