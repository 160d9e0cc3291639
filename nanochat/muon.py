"""Muon's update of matrices: orthogonalized momentum, normalized by neuron, with cautious weight decay.

Muon (Jordan et al. 2024) replaces the momentum of each matrix by the nearest orthogonal matrix, so that every
direction moves at the same speed. The orthogonal matrix, called the polar factor, comes from Polar Express
(arXiv 2505.16932). Each neuron's update is then divided by its own running size (NorMuon, arXiv 2510.05491).
Weight decay acts only where it agrees with the update (cautious, arXiv 2510.12402, without its jump).
"""

import math

import torch

# (a, b, c) of X <- a X + (b A + c A A) X with A = X X^T: five steps take every singular value in [0.001, 1]
# close to 1. From algorithm 1 of Polar Express, for lower bound 1e-3, safety 2e-2 and cushion 2e-2
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalize(G, dtype):
    """The polar factor U V^T of each matrix of G (N, rows, columns) float32, in `dtype`.

    Its singular values are between 0.85 and 1.15, which is near enough to 1 for Muon.
    """
    return polar_factor(_scaled(G, dtype))


def _scaled(G, dtype):
    """G in `dtype`, each matrix divided so that no singular value is above 1."""
    return (G / (G.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)).to(dtype)


def polar_factor(X):
    """`orthogonalize` without its scaling: X (N, rows, columns) has no singular value above 1."""
    rows, columns = X.shape[-2:]
    if max(rows, columns) >= 2 * min(rows, columns) >= 256:
        return _gram_iteration(_gram_iteration(X, POLAR_EXPRESS[:2]), POLAR_EXPRESS[2:])
    X = X.mT if rows > columns else X  # X X^T is the smaller one
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.mT if rows > columns else X


def _gram_iteration(X, coefficients):
    """The same iteration on the small matrix A = X X^T alone (Gram Newton-Schulz).

    A step X <- P X turns A into P A P; Q collects the product of all P, which are symmetric. For sides of
    4 : 1 this needs 67 % of the multiplications. Rounding grows with each step on A, so the caller starts
    again from X after two steps. In small matrices bfloat16's rounding does not average out; there the
    plain iteration is better.
    """
    tall = X.size(-2) > X.size(-1)
    A, Q = X.mT @ X if tall else X @ X.mT, None
    identity = torch.eye(A.size(-1), dtype=A.dtype, device=A.device)
    for step, (a, b, c) in enumerate(coefficients):
        P = torch.baddbmm(A, A, A, beta=b, alpha=c) + a * identity
        if step < len(coefficients) - 1:
            A = P @ A @ P
        Q = P if Q is None else P @ Q
    return X @ Q if tall else Q @ X


def muon_update(
    params, grads, momentum, second_moment, lr, beta, beta2, weight_decay, skip, dtype,
    polar_factor=polar_factor,
):  # fmt: skip
    """One Muon step of stacked matrices (N, rows, columns) float32, in place.

    second_moment is (N, rows or columns). lr, beta, beta2 and weight_decay are 0-dim float32 tensors, so that
    nothing is compiled again when they change. If skip, a 0-dim bool, is true, nothing changes.
    """
    lr, weight_decay = torch.where(skip, 0.0, lr), torch.where(skip, 0.0, weight_decay)
    beta, beta2 = torch.where(skip, 1.0, beta), torch.where(skip, 1.0, beta2)
    grads = torch.where(skip, 0.0, grads)
    momentum.lerp_(grads, 1 - beta)
    update = polar_factor(_scaled(grads.lerp(momentum, beta), dtype)).float()  # Nesterov
    neuron = -1 if update.size(-2) >= update.size(-1) else -2  # mean over the shorter side
    size = update.square().mean(dim=neuron)  # (N, neurons)
    second_moment.lerp_(size, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    scaled = (size * scale.square()).sum(-1, keepdim=True)
    scale = scale * (size.sum(-1, keepdim=True) / scaled.clamp_min(1e-10)).sqrt()  # the update keeps its norm
    update = update * scale.unsqueeze(neuron)
    # The update of a matrix of r rows and c columns has an RMS of 1 / sqrt(max(r, c)). With this factor
    # the step of a neuron's output does not depend on its number of inputs.
    lr = lr * math.sqrt(max(1.0, update.size(-2) / update.size(-1)))
    # Cautious decay acts where the update shrinks a weight anyway: fully where the update is at least a
    # tenth of its RMS, in proportion below. A jump at 0 would turn rounding into another run
    # (docs/ablations.md).
    agree = (update * params.sign() * (10 * math.sqrt(max(update.shape[-2:])))).clamp(0, 1)
    params.sub_(lr * (update + weight_decay * params * agree))


def compiled_muon_update():
    """`muon_update`, compiled. Not at import, since loading the compiler takes a second or two.

    On a CPU the products of the polar factor are library calls and little is left to fuse. Eager, the whole
    step of the laptop recipe is 9 % faster on one thread and 1 % slower on two; so it stays eager there.
    """
    compiled, eager = torch.compile(muon_update, dynamic=False), torch.compiler.disable(polar_factor)

    def update(params, *rest):
        return compiled(params, *rest, eager if params.device.type == "cpu" else polar_factor)

    return update
