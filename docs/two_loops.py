"""The smallest complete training script with two loops: `python docs/two_loops.py`, a few seconds on a CPU.

A byte-level GPT learns one file of Python. The outer loop makes updates. The inner loop adds up the gradient
of the total batch from micro-batches that fit into memory. scripts/base_train.py does the same with a larger
model, real data, several processes, evaluation and checkpoints. docs/walkthrough.md explains both.
"""

import argparse
import inspect
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

rows_per_step, device_batch_size, max_seq_len = 32, 8, 64  # device_batch_size: rows of a micro-step
num_iterations, warmup_steps, lr, grad_clip, width = 60, 6, 5e-3, 1.0, 64
grad_accum_steps = rows_per_step // device_batch_size  # 4 micro-steps make a step
torch.manual_seed(0)
text = torch.tensor(list(inspect.getsource(argparse).encode()))  # any text: its bytes are the 256 tokens


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(max_seq_len, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.zeros_(self.head.weight)  # every byte equally likely: the first loss is ln 256

    def forward(self, inputs, targets):  # (B, T) int64 each
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1))  # no byte sees later bytes
        x = self.token(inputs) + self.position.weight  # (B, T, C)
        logits = self.head(self.block(x, mask, is_causal=True))  # (B, T, 256)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())  # mean over B * T bytes


def next_batch():
    start = torch.randint(len(text) - max_seq_len, (device_batch_size, 1))
    rows = text[start + torch.arange(max_seq_len + 1)]  # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]  # the target of each byte is the byte after it


model = TinyGPT()  # parameters, .grad and AdamW's state are float32
optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
losses = []
for step in range(num_iterations):  # outer loop: one update
    multiplier = min(1, (step + 1) / warmup_steps) * (1 - step / num_iterations)  # up, then down to zero
    for group in optimizer.param_groups:
        group["lr"] = lr * multiplier
    losses.append(0.0)
    for _ in range(grad_accum_steps):  # inner loop: one forward and one backward pass
        inputs, targets = next_batch()
        with torch.autocast("cpu", torch.bfloat16):  # matrix products in bfloat16
            loss = model(inputs, targets) / grad_accum_steps  # the sum of four quarters is the mean
        loss.backward()  # adds to .grad, and frees what the forward pass kept
        losses[-1] += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)  # after the loop: .grad is complete
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # the next batch must not add to this one
    if step % 10 == 0 or step == num_iterations - 1:
        print(f"step {step:2d} | loss {losses[-1]:.4f} | lr {lr * multiplier:.5f}")

share = torch.bincount(text, minlength=256) / len(text)  # how often each byte occurs
without_context, final = torch.special.entr(share).sum().item(), sum(losses[-10:]) / 10
print(f"from {losses[0]:.3f} (ln 256) to {final:.3f} nats a byte; without context {without_context:.3f}")
if abs(losses[0] - math.log(256)) > 0.01 or final > without_context - 0.3:
    raise SystemExit("wrong: the loss should begin at ln 256 and fall well below that without context")
