"""The update of rows that pairs and triples of tokens share: RMSprop with one second moment for each row.

Most steps do not use such a row. Momentum would only delay its gradients, and with a second moment for each
element, an element whose gradient is rounding alone would make full steps (docs/ablations.md, "Shared rows").
"""

import torch


def rowwise_update(
    weight, grad, second_moment, step, lr, beta2: float, eps: float, weight_decay: float, skip=None, used=None
):  # fmt: skip
    """One step of a table `weight` (rows, columns) float32, in place. second_moment is (rows,).

    step, the number of updates, and lr are 0-dim float32 tensors, so that nothing is compiled again when they
    change. If skip, a 0-dim bool, is true, nothing changes. used: the numbers of the rows that have a
    gradient, (n,) int64, if they are known: then no other row is read, but for a decay.
    """
    grad = grad if used is None else grad[used]
    if skip is not None:
        grad, beta2 = torch.where(skip, 0.0, grad), torch.where(skip, 1.0, beta2)
    step += 1 if skip is None else ~skip
    squares = torch.linalg.vector_norm(grad, dim=1).square() / grad.size(1)
    if used is not None:
        squares = torch.zeros_like(second_moment).index_copy_(0, used, squares)
    second_moment.lerp_(squares, 1 - beta2)
    rate = lr / ((second_moment / (1 - beta2**step)).sqrt() + eps)
    if skip is not None:
        lr, rate = torch.where(skip, 0.0, lr), torch.where(skip, 0.0, rate)
    if weight_decay:
        weight.mul_(1 - lr * weight_decay)
    if used is None:
        weight.addcmul_(grad, rate[:, None], value=-1)
    else:
        weight.index_add_(0, used, grad * rate[used, None], alpha=-1)
