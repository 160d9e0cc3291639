"""The update of rows that pairs and triples of tokens share: RMSprop with one second moment for each row.

Most steps do not use such a row. Momentum would only delay its gradients, and with a second moment for each
element, an element whose gradient is rounding alone would make full steps (docs/ablations.md, "Shared rows").
"""

import torch


def rowwise_update(
    weight, grad, second_moment, step, lr, beta2: float, eps: float, weight_decay: float, skip=None
):  # fmt: skip
    """One step of a table `weight` (rows, columns) float32, in place. second_moment is (rows,).

    step, the number of updates, and lr are 0-dim float32 tensors, so that nothing is compiled again when they
    change. If skip, a 0-dim bool, is true, nothing changes.
    """
    if skip is not None:
        grad, beta2 = torch.where(skip, 0.0, grad), torch.where(skip, 1.0, beta2)
    step += 1 if skip is None else ~skip
    second_moment.lerp_(torch.linalg.vector_norm(grad, dim=1).square() / grad.size(1), 1 - beta2)
    rate = lr / ((second_moment / (1 - beta2**step)).sqrt() + eps)
    if skip is not None:
        lr, rate = torch.where(skip, 0.0, lr), torch.where(skip, 0.0, rate)
    if weight_decay:
        weight.mul_(1 - lr * weight_decay)
    weight.addcmul_(grad, rate[:, None], value=-1)
