"""Muon for the matrices inside the blocks, AdamW for embeddings, head and scalars, on one process or many.

Muon (muon.py): the momentum of a matrix, made orthogonal by Polar Express, normalized by neuron (NorMuon),
with cautious weight decay; matrices of one shape are stacked and updated together. AdamW is torch's fused
one. N-gram rows have an update without momentum (rowwise.py). Several processes share work and state: ZeRO-1
(zero.py). Another optimizer of torch can take the place of MuonAdamW: the functions at the end work for both.
"""

from fnmatch import fnmatchcase
from functools import partial
from inspect import unwrap

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from nanochat import UserError
from nanochat.muon import compiled_muon_update, muon_update
from nanochat.rowwise import rowwise_update
from nanochat.zero import ShardedOptimizer

# How each parameter is trained. The first row that fits its name and its number of dimensions decides.
#   lr: the script's setting of that name x factor.
#   betas: AdamW's two; for Muon its momentum, which the schedule replaces, and NorMuon's second-moment beta.
#   eps: the gradients of scalars begin as rounding alone, which a smaller eps would turn into full steps.
#   decay: lr x weight_decay relative to a block matrix, and x table_decay; Muon's: weight_decay alone.
# Muon takes matrices only. The last row is for what you add (norm weights, biases); it is not tuned.
# fmt: off
PARAMETER_TABLE = [
    # name                     dimensions  method     lr                factor  betas         eps    decay
    ("x0_scales",               (1,),      "adamw",   "scalar_lr",      1.00,   (0.96, 0.95), 1e-5,  0.0),
    ("copying.scales",          (2,),      "adamw",   "scalar_lr",      0.30,   (0.96, 0.95), 1e-5,  0.0),
    ("blocks.*.x_before_scale", (1,),      "adamw",   "scalar_lr",      1.00,   (0.96, 0.95), 1e-5,  0.0),
    ("value_embeddings.*",      (2,),      "adamw",   "embedding_lr",   0.50,   (0.80, 0.95), 1e-10, 0.15),
    ("ngrams.triples.weight",   (2,),      "rowwise", "embedding_lr",   0.40,   (0.00, 0.95), 1e-10, 4.0),
    ("ngrams.values.weight",    (2,),      "rowwise", "embedding_lr",   0.20,   (0.00, 0.95), 1e-10, 1.0),
    ("ngrams.*",                (2,),      "rowwise", "embedding_lr",   0.40,   (0.00, 0.95), 1e-10, 1.0),
    ("*embedding.weight",       (2,),      "adamw",   "embedding_lr",   1.00,   (0.80, 0.95), 1e-10, 0.3),
    ("*head.weight",            (2,),      "adamw",   "unembedding_lr", 1.00,   (0.80, 0.95), 1e-10, 0.3),
    ("blocks.*",                (2,),      "muon",    "matrix_lr",      1.00,   (0.95, 0.90), 0.0,   1.0),
    ("*",                       (0, 1),    "adamw",   "scalar_lr",      0.10,   (0.80, 0.95), 1e-5,  0.0),
]
# fmt: on


class MuonAdamW(ShardedOptimizer):
    """Muon and AdamW behind one `step()`.

    Each process needs the gradients of its share alone (gradients.py). It updates its weights and sends them
    to the others while it works on the next group. Muon's matrices of one shape are parts of one tensor.

    A step changes neither weights nor state if `found_inf` (a 0-dim tensor on the device) is not 0.
    `skip_if_not_finite` and torch's GradScaler set it, so Python need not wait for the device.

    compute_dtype: of the forward pass. Muon multiplies in bfloat16 where the forward pass does, else in
    float32. compile_after: steps before Muon's update is compiled (0: from the first, None: never).

    Group keys: method, params, names, lr, initial_lr, betas, eps, weight_decay. The script changes `lr`,
    `betas` and `weight_decay` between steps. State is float32 and filed under the parameter's name.
    """

    _step_supports_amp_scaling = True  # GradScaler gives us grad_scale and found_inf; nothing waits for them
    # Without torch's wrappers: at their first call they load the compiler, which takes a second or two
    add_param_group, _zero_grad = map(unwrap, (Optimizer.add_param_group, Optimizer.zero_grad))

    def __init__(
        self, groups, compute_dtype=torch.float32, compile_after: int | None = None, rank=0, world_size=1
    ):
        super().__init__(groups, rank, world_size)
        # Not float16: its range is too small for the products of the orthogonalization
        self.muon_dtype = torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32
        self.muon_update, self.rowwise_update = muon_update, rowwise_update
        self.compile_after, self.steps = compile_after, 0
        self.kept_gradients = {p: torch.zeros_like(p) for p in self.cuts if world_size == 1}
        self.used = {}  # which rows of a kept gradient are not zero, where that is known: on a CPU
        for p in [p for g in self.param_groups if g["method"] == "rowwise" for p in g["params"]]:
            if p.is_cpu and p in self.kept_gradients:
                p.used = self.used[p] = torch.zeros(len(p), dtype=torch.bool)  # tables.look_up marks them
                p.register_hook(partial(_mark_all, p.used))  # where autograd adds a gradient itself
        self.zero_grad()
        for group in self.param_groups:
            group["initial_lr"], group["initial_weight_decay"] = group["lr"], group["weight_decay"]
            if group["method"] == "muon":
                self._stack(group)
                continue
            for p in group["params"]:
                part = p.data[self.rows(p)]
                if not part.numel():
                    continue
                if group["method"] == "rowwise":
                    moments = {"second_moment": part.new_zeros(len(part))}
                else:
                    moments = {key: torch.zeros_like(part) for key in ("exp_avg", "exp_avg_sq")}
                self.state[p] = moments | {"step": part.new_zeros(())}

    def _stack(self, group):
        """Stack the group's matrices in one tensor (N, rows, columns), sorted by owner, and make the state of
        those that this process owns."""
        group["cuts"] = self.sort_by_owner(group)
        mine = slice(*group["cuts"][self.rank : self.rank + 2]) if group["cuts"] else slice(None)
        group["stacked"] = torch.stack([p.data for p in group["params"]])
        for p, matrix in zip(group["params"], group["stacked"], strict=True):
            p.data = matrix
        group["mine"], stacked = group["params"][mine], group["stacked"][mine]
        momentum = torch.zeros_like(stacked)
        second_moment = stacked.new_zeros(len(stacked), max(stacked.shape[1:]))
        group["tensors"] = stacked, momentum, second_moment
        group["scalars"] = [stacked.new_zeros(()) for _ in range(4)]
        for p, *state in zip(group["mine"], momentum, second_moment, strict=True):
            self.state[p] = {"momentum": state[0], "second_moment": state[1]}

    def zero_grad(self, set_to_none: bool = True):
        """In a single process the gradients of tables stay, as zeros: tables.look_up adds to them."""
        self._zero_grad(set_to_none)
        for p, gradient in self.kept_gradients.items():
            p.grad = gradient
            if (used := self.used_rows(p)) is None:
                gradient.zero_()
            else:
                gradient.index_fill_(0, used, 0.0)
                self.used[p].zero_()

    def used_rows(self, p) -> torch.Tensor | None:
        """The numbers of the rows of a table that have a gradient, (n,) int64; None: perhaps all of them.

        Known on a CPU in a single process. What adds to .grad by itself has to mark its rows in p.used.
        """
        known = p in self.used and p.grad is self.kept_gradients[p]
        return self.used[p].nonzero().squeeze(1) if known else None

    @torch.no_grad()
    def step(self):
        if self.steps == self.compile_after:
            self.muon_update = compiled_muon_update()
            self.rowwise_update = torch.compile(rowwise_update, dynamic=False)
        self.steps += 1
        if unused := [name for name, p in self.named_parameters() if p.grad is None]:
            raise UserError(
                f"{', '.join(unused)} got no gradient; use it in the model's forward, or remove it"
            )
        grad_scale = getattr(self, "grad_scale", None)  # set by a GradScaler that has not unscaled yet
        if grad_scale is not None:
            torch._foreach_div_([p.grad for _, p in self.named_parameters()], grad_scale)
        found_inf = getattr(self, "found_inf", None)  # GradScaler deletes it after its step
        if found_inf is None:
            found_inf = torch.zeros((), device=self.param_groups[0]["params"][0].device)
        elif known_bad(found_inf):
            for used in self.used.values():
                used.fill_(True)  # clipping by a norm that is no number has put NaN into all rows
            return
        sent = []
        for group in self.param_groups:
            if group["method"] == "muon":
                self._muon(group, found_inf)
                sent += self.send(group["stacked"], group["cuts"])
                continue
            update = self._rowwise if group["method"] == "rowwise" else self._adamw
            update(group, [p for p in group["params"] if p in self.state], found_inf)
            for p in group["params"]:
                sent += self.send(p.data, self.cuts.get(p))
        for handle in sent:
            handle.wait()

    def _adamw(self, group, params, found_inf):
        if not params:
            return
        states = [self.state[p] for p in params]
        adamw(
            [p.data[self.rows(p)] for p in params],
            [p.grad[self.rows(p)] for p in params],
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

    def _rowwise(self, group, params, found_inf):
        lr = torch.full_like(found_inf, group["lr"])
        numbers = lr, group["betas"][1], group["eps"], group["weight_decay"]
        skip = found_inf != 0 if found_inf.is_cuda else None  # else `step` has ended
        for p in params:
            update = self.rowwise_update if p.is_cuda else rowwise_update
            rows, state = self.rows(p), self.state[p]
            moment, step = state["second_moment"], state["step"]
            update(p.data[rows], p.grad[rows], moment, step, *numbers, skip, self.used_rows(p))

    def _muon(self, group, found_inf):
        params, (stacked, momentum, second_moment) = group["mine"], group["tensors"]
        if not params:
            return
        if params[-1].data_ptr() != stacked[-1].data_ptr():
            raise RuntimeError("the model was moved after its optimizer was made; make the optimizer again")
        grads = torch.stack([p.grad for p in params])
        numbers = group["lr"], *group["betas"], group["weight_decay"]
        for scalar, number in zip(group["scalars"], numbers, strict=True):
            scalar.fill_(number)  # torch.tensor(number, device="cuda") would copy it and wait
        # Small matrices (gates) are done sooner than compiled code for their shape would load
        update = self.muon_update if params[0].numel() > 2**14 else muon_update
        update(stacked, grads, momentum, second_moment, *group["scalars"], found_inf != 0, self.muon_dtype)


def _mark_all(used, gradient):
    if gradient is not None:  # look_up adds its own by itself, and gives autograd None
        used.fill_(True)


def known_bad(found_inf: torch.Tensor) -> bool:
    """Whether found_inf (0-dim) is not 0. On CUDA always no: Python would have to wait, and the updates look
    themselves. MPS's fused AdamW did not until 2026 (pytorch/pytorch#186360)."""
    return found_inf.device.type != "cuda" and found_inf.item() != 0


def table_row(name: str, p: torch.Tensor) -> int:
    """The index of the row of PARAMETER_TABLE that says how a parameter is trained.

    UserError, naming the parameter and the table, where no row fits.
    """
    for i, (pattern, dimensions, *_) in enumerate(PARAMETER_TABLE):
        if fnmatchcase(name, pattern) and p.ndim in dimensions:
            return i
    raise UserError(
        f"no row of PARAMETER_TABLE in nanochat/optim.py says how to train {name}, of shape "
        f'{tuple(p.shape)}; add one for it, for example with method "adamw" and rate "embedding_lr"'
    )


def parameter_groups(model, rates: dict, weight_decay: float, table_decay: float = 0.0) -> list[dict]:
    """Groups for MuonAdamW: one for each way in which PARAMETER_TABLE trains, and for Muon one a shape.

    `rates` holds embedding_lr, unembedding_lr, matrix_lr and scalar_lr. `weight_decay` is for matrices,
    `table_decay` for embeddings and head. UserError for a parameter without a row.
    """
    groups: dict[tuple, dict] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:  # frozen
            continue
        way = PARAMETER_TABLE[table_row(name, p)][2:]
        method, rate, factor, betas, eps, share = way
        lr = rates[rate] * factor
        decay = weight_decay if method == "muon" else table_decay * rates["matrix_lr"] / lr if lr else 0.0
        fresh = {"method": method, "params": [], "names": [], "lr": lr, "betas": betas, "eps": eps}
        key = (*way, p.shape) if method == "muon" else way
        group = groups.setdefault(key, fresh | {"weight_decay": share * decay})
        group["params"].append(p)
        group["names"].append(name)
    # AdamW's groups first: they are sent while Muon computes. Then by size, so that little is sent last
    return sorted(
        groups.values(), key=lambda g: (g["method"] == "muon", -sum(p.numel() for p in g["params"]))
    )


# For MuonAdamW and for any other optimizer of torch


def skip_if_not_finite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor):
    """Make the next step change nothing if the gradient's norm (0-dim) is infinite or not a number."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # MuonAdamW, and torch's fused ones
        optimizer.found_inf = 1 - grad_norm.isfinite().float()
    elif not grad_norm.isfinite():  # waits for the device
        optimizer.zero_grad(set_to_none=True)


def named_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, rank: int = 0) -> dict:
    """{`<parameter's name>/<key>`: tensor} of the state that this process has to save."""
    if isinstance(optimizer, MuonAdamW):
        return optimizer.named_state()
    if rank > 0:  # every process has the same
        return {}
    names = {p: name for name, p in model.named_parameters()}
    named = {f"{names[p]}/{key}": value for p, kept in optimizer.state.items() for key, value in kept.items()}
    for label, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(
                f"a checkpoint cannot hold {label} of {type(optimizer).__name__}, which is a "
                f"{type(value).__name__} and no tensor; use another optimizer"
            )
    return named


def load_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module, checkpoint) -> None:
    """Restore what `named_state` gave from a checkpoint; UserError if it is of another kind of optimizer."""
    kind, saved = type(optimizer).__name__, checkpoint.state.get("optimizer", "MuonAdamW")
    if kind != saved:
        raise UserError(
            f"{checkpoint.path} has the state of {saved}, not of {kind}; go back to {saved}, or start a new "
            "run, from its weights with --init_from"
        )
    if isinstance(optimizer, MuonAdamW):
        return optimizer.load_named_state(checkpoint.load_optimizer(optimizer.needs))
    index = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    index = {name: index[p] for name, p in model.named_parameters() if p in index}
    state: dict[int, dict] = {}
    for label, tensor in checkpoint.load_optimizer(lambda label: label.rpartition("/")[0] in index).items():
        name, _, key = label.rpartition("/")
        state.setdefault(index[name], {})[key] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
