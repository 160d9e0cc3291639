"""Gradients of several processes: each is averaged in the process that needs it; their norm covers all.

Plain DDP gives every process the average of all gradients, by an all_reduce. But a process updates only its
share of the weights (zero.py), so a reduce_scatter is enough: half of an all_reduce. The other half is the
broadcast of the new weights (optim.py), so a step sends as many bytes as with plain DDP.

After the backward pass a process has the average of the gradients that it owns, and of the small tensors that
every process updates. The rest of its `.grad` is not an average and is not used. So the squares of the norm
for clipping are summed over the processes.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from nanochat.machine.runtime import DDP_OPTIONS
from nanochat.optim import MuonAdamW


def wrap_in_ddp(model, optimizer: torch.optim.Optimizer, gradient_dtype: str):
    """The model for training: unchanged in a single process, else in DDP with `exchange_gradients`."""
    if not dist.is_initialized():
        return model
    ddp = DistributedDataParallel(model, **DDP_OPTIONS)
    exchange_gradients(ddp, optimizer, gradient_dtype)
    return ddp


def exchange_gradients(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, gradient_dtype: str):
    """Send each gradient to the process that updates its weights, while `backward` goes on.

    gradient_dtype: float32 or bfloat16, in which they are sent. An optimizer of torch updates all weights in
    every process, so it keeps the all_reduce of plain DDP.
    """
    # Dynamo would cut the compiled model at DDP's buckets, so that parts of the exchange overlap with the
    # backward pass. It takes the size of a parameter's whole storage for its size, and Muon's matrices of one
    # shape share one: 12 layers of width 768 fall into 74 graphs, and nothing is fused across a cut.
    torch._dynamo.config.optimize_ddp = False
    if isinstance(optimizer, MuonAdamW):
        if not ddp.gradient_as_bucket_view:
            raise ValueError("the exchange works in DDP's buckets; make DDP with DDP_OPTIONS")
        by_backend = {"nccl": Exchange.reduce, "gloo": Exchange.all_to_all}
        state = Exchange(optimizer, getattr(torch, gradient_dtype))
        ddp.register_comm_hook(state, by_backend[dist.get_backend()])
    elif gradient_dtype == "bfloat16":
        ddp.register_comm_hook(None, bf16_compress_hook)


@torch.profiler.record_function("clip")  # its name in a trace
def clip_grad_norm_(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, also where each process has the average of only its gradients.

    Scales the gradients so that the norm of all together is at most max_norm (math.inf: no limit). Returns
    the norm before, 0-dim and the same on all processes; nothing waits for the device.
    """
    if not isinstance(optimizer, MuonAdamW) or optimizer.world_size == 1:
        trained = [p for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([_used_part(p, optimizer) for p in trained])
        _limit([p.grad for p in trained], norm, max_norm)
        return norm
    by_owner, everywhere = _parts([p for g in optimizer.param_groups for p in g["params"]], optimizer)
    owned = by_owner[optimizer.rank]
    counted = owned + everywhere if optimizer.rank == 0 else owned
    device = next(model.parameters()).device
    norms = torch._foreach_norm(counted) if counted else [torch.zeros((), device=device)]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    _limit(owned + everywhere, norm, max_norm)
    return norm


def _used_part(p, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The gradient of a parameter, without the rows of a table that are known to be zero."""
    used = optimizer.used_rows(p) if isinstance(optimizer, MuonAdamW) else None
    return p.grad if used is None else p.grad[used]


def _limit(gradients: list[torch.Tensor], norm: torch.Tensor, max_norm: float):
    """Scale gradients. A CPU skips a factor of 1; to look at it on a GPU, Python would have to wait."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients and (factor.device.type != "cpu" or factor != 1):  # a process may own none
        torch._foreach_mul_(gradients, factor)


class Exchange:
    """DDP's communication hook. It sends one bucket, DDP's name for gradients that travel together.

    `reduce` and `all_to_all` have the same result. Both begin the exchange and return at once; the Future is
    done when this process has its averages.
    """

    def __init__(self, optimizer: MuonAdamW, dtype: torch.dtype):
        self.optimizer, self.dtype = optimizer, dtype
        self.rank, self.world_size = optimizer.rank, optimizer.world_size

    def reduce(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """For NCCL: a reduce to each owner, and an all_reduce of the small tensors.

        NCCL sums on the way, in `dtype`, and a process sends and receives each byte once. The processes could
        also exchange their parts pairwise and let the owner add them. But a bucket is often one or two
        matrices, and their owner would then receive it from all others at once.
        """
        by_owner, everywhere = _parts(bucket.parameters(), self.optimizer)
        sent = [*by_owner, everywhere]
        flat = _flat(sent, self.dtype)
        parts = flat.split([_size(part) for part in sent])
        works = [dist.reduce(p, dst=r, async_op=True) for r, p in enumerate(parts[:-1]) if p.numel()]
        works += [dist.all_reduce(parts[-1], async_op=True)] if everywhere else []
        *before, last = works

        def finish(future):
            future.wait()  # raises an error of the exchange
            for work in before:
                work.wait()
            total = torch.cat([parts[self.rank], parts[-1]]).float()
            return self._write(bucket, by_owner[self.rank] + everywhere, total)

        return last.get_future().then(finish)

    def all_to_all(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """For gloo: each process sends to every other one what that one needs, and adds up what it receives.

        That takes as many bytes as a reduce_scatter; gloo's own reduce sends half as much again. The sum is
        in float32 and in the order of ranks, so it does not depend on how DDP fills its buckets.
        """
        by_owner, everywhere = _parts(bucket.parameters(), self.optimizer)
        needed = [part + everywhere for part in by_owner]  # by each process
        sizes = [_size(part) for part in needed]
        sent = _flat(needed, self.dtype)
        received = sent.new_empty(self.world_size * sizes[self.rank])
        work = dist.all_to_all_single(
            received, sent, [sizes[self.rank]] * self.world_size, sizes, async_op=True
        )

        def finish(future):
            future.wait()
            first, *others = received.view(self.world_size, sizes[self.rank])
            total = first.float()
            for other in others:
                total += other
            return self._write(bucket, needed[self.rank], total)

        return work.get_future().then(finish)

    def _write(self, bucket, gradients: list[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
        """Put the average into the bucket, given the sums of these gradients."""
        total /= self.world_size
        for grad, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            grad.copy_(part.view_as(grad))
        return bucket.buffer()


def _parts(params, optimizer: MuonAdamW) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Views of each process's own gradients, and of the gradients that every process needs."""
    by_owner, everywhere = [[] for _ in range(optimizer.world_size)], []
    for p in params:
        if p.grad is not None:
            owners = optimizer.owners(p)
            for rank, rows in owners:
                by_owner[rank].append(p.grad[rows])
            everywhere += [] if owners else [p.grad]
    return by_owner, everywhere


def _size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _flat(lists: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The elements of all tensors one after another."""
    tensors = [tensor.flatten() for tensors in lists for tensor in tensors]
    flat = torch.empty(_size(tensors), dtype=dtype, device=tensors[0].device)
    return torch.cat(tensors, out=flat)
