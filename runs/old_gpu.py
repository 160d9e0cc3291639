# GPUs of 16 GB without bfloat16 (T4, V100):
#     python -m scripts.download --name=climbmix --num_shards=11
#     python -m scripts.base_train runs/old_gpu.py --data=climbmix
# A V100 needs PyTorch's build for CUDA 12.6: other builds have no kernels for it (pytorch/pytorch#172352).
# We had no such card. The sizes are computed, and only --plan was run.
model_tag = "old_gpu"
dtype = "float16"  # with a GradScaler; auto chooses the same on these cards
depth = 8
max_seq_len = 1024
device_batch_size = 32  # by the plan 8.3 GiB compiled, with a vocabulary of 32768
