# A small GPT in five minutes on two CPU cores: python -m scripts.base_train runs/laptop.py
model_tag = "laptop"
depth = 4
head_dim = 64
max_seq_len = 512
total_batch_size = 8192  # best in a run of 5 million tokens (docs/ablations.md)
device_batch_size = 8
target_minutes = 5  # the width follows from them: 128 or 192 on two cores (docs/ablations.md)
eval_every = 100
core_metric_every = 200
sample_every = 200
eval_tokens = -1
save_every = 100
