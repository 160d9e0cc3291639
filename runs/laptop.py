# A small GPT in a few minutes on two CPU cores: python -m scripts.base_train runs/laptop.py
model_tag = "laptop"
depth = 4
aspect_ratio = 48
head_dim = 64
max_seq_len = 512
total_batch_size = 2048  # many small steps: the setting that matters most at this scale (docs/ablations.md)
device_batch_size = 4
num_iterations = 1200
warmdown_ratio = 0.5
eval_every = 120
core_metric_every = 300
sample_every = 300
eval_tokens = -1
save_every = 250
