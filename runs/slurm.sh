#!/bin/bash
# Pretrain on several GPU nodes under SLURM. A job that reaches its time limit continues in the next one:
#
#     sbatch runs/slurm.sh --depth=24 --data=climbmix --base_dir=/a/folder/that/all/nodes/share
#
# Download the data into that folder first: python -m scripts.download --name=climbmix --base_dir=...
# srun starts one task for each GPU, without torchrun, which would not pass on the warning before the time
# limit. At the warning, every process finishes its step, saves and exits with 0. Then the job goes back into
# the queue. Change the #SBATCH lines for your cluster.
#SBATCH --job-name=nanochat
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS=1

again=() # after a requeue the run continues, also if the command has --resume=never
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && again=(--resume=auto)

warned=no
trap 'warned=yes; kill -USR1 "$srun_pid"' USR1 # srun sends it to every task

# shellcheck disable=SC2016 # each task expands them, not this shell
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    exec python -m scripts.base_train "$@"' base_train "$@" "${again[@]}" &
srun_pid=$!
wait "$srun_pid"
status=$?
if [ "$warned" = yes ]; then # the trap ended `wait`, not srun
    wait "$srun_pid"
    status=$?
fi

if [ "$warned" = yes ] && [ "$status" = 0 ]; then
    scontrol requeue "$SLURM_JOB_ID" # the same command continues from the newest checkpoint
fi
exit "$status"
