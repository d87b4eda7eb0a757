#!/bin/bash
# Pretrain on several nodes under Slurm, one task per GPU, without torchrun: sbatch slurm.sh RUN.toml FOLDER
# FOLDER and the prepared data must lie where all nodes see them.
#SBATCH --job-name=tenfold
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

run=${1:?RUN.toml is missing}
out=${2:?FOLDER is missing}

# 300 s before the time is over every task gets SIGTERM: all save the same step, and end with 0.
# A rank that fails ends the others itself, once they have said why: Slurm must not be quicker.
srun --kill-on-bad-exit=0 python -m tenfold train "$run" --out "$out" --resume
code=$?

# 75: a rank died or hung; above 128: killed. 0 without an end: saved after the signal. These go on where they stopped;
# after 1 and 2 somebody must look.
if [ "$code" = 75 ] || [ "$code" -gt 128 ] || { [ "$code" = 0 ] && ! grep -q '"event": "end"' "$out/metrics.jsonl"; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
