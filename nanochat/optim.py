"""Muon for the matrices inside the blocks, AdamW for embeddings, head and scalars.

Muon (Jordan et al. 2024) replaces each matrix's momentum by the nearest orthogonal matrix: every direction
moves at the same speed. Here the polar factor comes from Polar Express (arXiv 2505.16932), each neuron's
update is then normalised by its own running size (NorMuon, arXiv 2510.05491), and weight decay acts only
where it agrees with the update (cautious, arXiv 2510.12402). Matrices of one shape are stacked and updated
together.
"""

import math

import torch
from torch.optim.adamw import adamw

# One row a kind of parameter: the first whose word is in the parameter's name decides. The rate is a setting
# of the script, times the factor. Muon's betas are its momentum and that of NorMuon's second moment. The
# scalars' gradients begin as nothing but rounding, which a smaller eps would blow up to full steps.
# fmt: off
PARAMETER_TABLE = [
    # word in the name    method   rate              factor  betas         eps    weight decay
    ("residual_scale",    "adamw", "scalar_lr",      0.01,   (0.80, 0.95), 1e-5,  0.0),
    ("x0_scale",          "adamw", "scalar_lr",      1.00,   (0.96, 0.95), 1e-5,  0.0),
    ("value_embeddings",  "adamw", "embedding_lr",   0.50,   (0.80, 0.95), 1e-10, 0.0),
    ("embedding",         "adamw", "embedding_lr",   1.00,   (0.80, 0.95), 1e-10, 0.0),
    ("head",              "adamw", "unembedding_lr", 1.00,   (0.80, 0.95), 1e-10, 0.0),
    ("blocks",            "muon",  "matrix_lr",      1.00,   (0.95, 0.90), 0.0,   1.0),
]
# fmt: on

# (a, b, c) of X <- a X + (b A + c A A) X with A = X X^T, five steps that take every singular value in
# [0.001, 1] close to 1: algorithm 1 of Polar Express for lower bound 1e-3, safety 2e-2, cushion 2e-2
# (tests/test_optim.py derives them).
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalize(G, dtype):
    """The polar factor U V^T of each matrix of G (N, rows, columns) float32, computed in `dtype`, returned
    in it.

    Singular values end between 0.85 and 1.15, which is all that Muon needs.
    """
    X = G / (G.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    X = X.to(dtype)
    tall = X.size(-2) > X.size(-1)
    if tall:  # X X^T is the smaller one
        X = X.mT
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.mT if tall else X


def muon_update(params, grads, momentum, second_moment, lr, beta, beta2, weight_decay, dtype):
    """One Muon step of stacked matrices, in place; all (N, rows, columns) float32, second_moment (N, rows
    or columns).

    lr, beta, beta2 and weight_decay are 0-dim float32 tensors, so that compiled code is not compiled again
    when they change.
    """
    momentum.lerp_(grads, 1 - beta)
    update = orthogonalize(grads.lerp(momentum, beta), dtype).float()  # Nesterov
    neuron = -1 if update.size(-2) >= update.size(-1) else -2  # mean over the shorter side
    size = update.square().mean(dim=neuron)  # (N, neurons)
    second_moment.lerp_(size, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    scaled = (size * scale.square()).sum(-1, keepdim=True)
    scale = scale * (size.sum(-1, keepdim=True) / scaled.clamp_min(1e-10)).sqrt()  # the update keeps its norm
    update = update * scale.unsqueeze(neuron)
    # A matrix of r rows and c columns has an update of RMS 1 / sqrt(max(r, c)); this makes the step of a
    # neuron's output independent of its fan-in.
    lr = lr * math.sqrt(max(1.0, update.size(-2) / update.size(-1)))
    params.sub_(lr * (update + weight_decay * params * (update * params > 0)))


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW behind one `step()`.

    A step whose `found_inf`, a 0-dim tensor, is not 0 changes nothing: neither weights nor state. The script
    sets it where the gradient is not finite; torch's GradScaler does the same, so nobody waits for the
    device.

    Group keys: method, params, names, lr, initial_lr, betas, eps, weight_decay. The script changes `lr`,
    `betas` and `weight_decay` between steps. State is float32 and filed under the parameter's name.
    """

    _step_supports_amp_scaling = True  # GradScaler hands us its found_inf instead of asking the device for it

    def __init__(self, groups, muon_dtype=torch.float32, compile=False):
        super().__init__(groups, {})
        self.found_inf = None
        self.muon_dtype = muon_dtype
        self.muon_update = torch.compile(muon_update, dynamic=False) if compile else muon_update
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (self._muon if group["method"] == "muon" else self._adamw)(group)

    def _adamw(self, group):
        found_inf = getattr(self, "found_inf", None)  # GradScaler deletes it after its step
        params = group["params"]
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                }
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=found_inf,
        )

    def _muon(self, group):
        params = group["params"]
        state = self.state[params[0]]  # the stacked state of the whole group stands with its first parameter
        if not state:
            rows, columns = params[0].shape
            state["momentum"] = torch.zeros(len(params), rows, columns, device=params[0].device)
            state["second_moment"] = torch.zeros(len(params), max(rows, columns), device=params[0].device)
        stacked = torch.stack([p.data for p in params])
        grads = torch.stack([p.grad for p in params])
        scalars = torch.tensor([group["lr"], *group["betas"], group["weight_decay"]], device=grads.device)
        if (found_inf := getattr(self, "found_inf", None)) is not None:  # rate 0, betas 1: nothing moves
            skip = found_inf.to(grads.device) != 0
            scalars = torch.where(skip, torch.tensor([0.0, 1.0, 1.0, 0.0], device=grads.device), scalars)
            grads = torch.where(skip, 0.0, grads)
        state_tensors = state["momentum"], state["second_moment"]
        # Small matrices (gates) are over before compiled code for their shape would be loaded
        update = self.muon_update if params[0].numel() > 2**14 else muon_update
        update(stacked, grads, *state_tensors, *scalars.unbind(), self.muon_dtype)
        torch._foreach_copy_(params, list(stacked.unbind()))

    def named_state(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state as `<parameter's name>/<name of the state>`."""
        named = {}
        for group in self.param_groups:
            for i, (name, p) in enumerate(zip(group["names"], group["params"], strict=True)):
                stacked = group["method"] == "muon"
                state = self.state[group["params"][0]] if stacked else self.state[p]
                for key, tensor in state.items():
                    named[f"{name}/{key}"] = tensor[i] if stacked else tensor
        return named

    @torch.no_grad()
    def load_named_state(self, named: dict[str, torch.Tensor]):
        """The inverse of `named_state`, into a new optimizer of the same parameters."""
        for group in self.param_groups:
            states = []
            for name, p in zip(group["names"], group["params"], strict=True):
                mine = {k.rpartition("/")[2]: v for k, v in named.items() if k.rpartition("/")[0] == name}
                states.append({key: tensor.to(p.device, copy=True) for key, tensor in mine.items()})
            if group["method"] == "muon":
                self.state[group["params"][0]] = {
                    key: torch.stack([s[key] for s in states]) for key in states[0]
                }
            else:
                self.state.update(zip(group["params"], states, strict=True))


def parameter_groups(model, rates: dict[str, float], weight_decay: float) -> list[dict]:
    """Groups for MuonAdamW from PARAMETER_TABLE; Muon's are one a shape, so that they can be stacked.

    `rates` holds embedding_lr, unembedding_lr, matrix_lr and scalar_lr; weight_decay is multiplied with the
    table's.
    """
    groups: dict[tuple, dict] = {}
    for name, p in model.named_parameters():
        row = next(i for i, (word, *_) in enumerate(PARAMETER_TABLE) if word in name)
        _, method, rate, factor, betas, eps, decay = PARAMETER_TABLE[row]
        key = (row, tuple(p.shape)) if method == "muon" else (row,)
        group = groups.setdefault(
            key,
            {
                "method": method,
                "params": [],
                "names": [],
                "lr": rates[rate] * factor,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay * decay,
            },
        )
        group["params"].append(p)
        group["names"].append(name)
    return list(groups.values())
