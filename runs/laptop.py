# A small GPT in a few minutes on two CPU cores: python -m scripts.base_train runs/laptop.py
model_tag = "laptop"
depth = 4
head_dim = 64
max_seq_len = 512
total_batch_size = 4096  # small steps, many of them: at this scale the strongest lever (docs/ablations.md)
device_batch_size = 8
num_iterations = 500
warmup_steps = 20
eval_every = 250
eval_tokens = -1
save_every = 100
