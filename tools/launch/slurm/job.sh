#!/bin/bash
# A training run on four nodes with eight GPUs each: sbatch job.sh
#SBATCH --job-name=llama
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --open-mode=append
# After a failed node, and where the partition preempts by it.
#SBATCH --requeue
# To this script, five minutes before the time limit.
#SBATCH --signal=B:USR1@300
set -uo pipefail

# All GPUs of the node; JAX would give a task only the one of SLURM_LOCALID.
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7

stopped=
# Called by the trap.
# shellcheck disable=SC2317
stop() {
  stopped=1
  # srun passes it on to all tasks, which save a checkpoint.
  kill -TERM "$step"
}

srun --kill-on-bad-exit=1 \
  python -m paxon.runner.main \
  --exp=tasks.lm.params.llama.Llama3_8B \
  --job_log_dir=/shared/runs/8b \
  --fdl.mesh=fsdp=8,dcn.data=4 \
  --fdl.global_batch_size=32 \
  --fdl.train_files='/shared/c4/en/c4-train.0000?-of-01024.json.gz' \
  --max_restarts=3 &
step=$!
trap stop USR1

wait "$step"
status=$?
# The signal ends `wait` before the step ends.
while kill -0 "$step" 2> /dev/null; do
  wait "$step"
  status=$?
done

# At the time limit the same job continues later, from its checkpoint. A run that
# failed or was cancelled does not.
if [[ -n $stopped && $status -ne 0 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
