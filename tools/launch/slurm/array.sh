#!/bin/bash
# Four learning rates, each on a node of its own: sbatch array.sh
#SBATCH --job-name=rates
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
# To the tasks: each saves a checkpoint, and `sbatch array.sh` again resumes.
#SBATCH --signal=TERM@300
set -euo pipefail

rates=(1e-4 2e-4 4e-4 8e-4)
rate=${rates[$SLURM_ARRAY_TASK_ID]}

export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
exec srun python -m paxon.runner.main \
  --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2B \
  --job_log_dir="/shared/runs/rate-$rate" \
  --fdl.learning_rate="$rate" \
  --num_processes=1
