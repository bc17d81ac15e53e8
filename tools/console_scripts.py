"""Commands of an installation: `paxon`, `paxon-hf`, `paxon-ckpt`, ...

Each is `python -m MODULE`. pyproject.toml lists them.
"""

import os
import pathlib
import runpy
import sys
from typing import Final

MODULES: Final = {
  "paxon": "paxon.runner.main",
  "paxon-bench": "paxon.tools.benchmarks.main",
  "paxon-ckpt": "paxon.tools.checkpoints.ckpt_main",
  "paxon-configs": "paxon.tools.configs_main",
  "paxon-curves": "paxon.tools.curves_main",
  "paxon-hf": "paxon.tools.hugging_face.hf_main",
  "paxon-lm_eval": "paxon.tools.lm_evaluation.lm_eval_main",
  "paxon-migrate_pax": "paxon.tools.pax_migration.migrate_main",
  "paxon-plan": "paxon.runner.plan.functions.plan_main",
  "paxon-plans": "paxon.tasks.plans.main",
  "paxon-sweep": "paxon.tools.sweeps.sweep_main",
  "paxon-tokenize": "paxon.tools.tokenize_main",
  "paxon-watch": "paxon.tools.watch_main",
}


def run() -> None:
  """Runs the module of the command that started this process."""
  name = pathlib.Path(sys.argv[0]).stem
  # All settings as in tools/python. The C library reads the last one when a
  # process starts, so the process starts again. Processes that this one starts
  # would search the working directory first, which may be a run directory.
  os.environ["PYTHONSAFEPATH"] = "1"
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
  if name == "paxon" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, sys.orig_argv)
  # Experiments and tokenizers of the user are imported from where they stand.
  # Last, so that nothing there replaces an installed module.
  sys.path.append(os.getcwd())
  runpy.run_module(MODULES[name], run_name="__main__")


def name_programs(text: str) -> str:
  """Returns a text with programs named as this one was called.

  The commands of an installation are `paxon-hf` instead of `tools/hf`.
  """
  if pathlib.Path(sys.argv[0]).name.startswith("paxon-"):
    return text.replace("tools/", "paxon-")
  return text
