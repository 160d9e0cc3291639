"""Muon for the matrices inside the blocks, AdamW for embeddings, head and scalars, on one process or many.

Matrices of one shape are stacked and updated together (muon.py). Several processes share the work and the
state (zero.py). Another optimizer of torch can take its place: the functions at the end work for both.
"""

import re
from bisect import bisect_left
from fnmatch import fnmatchcase
from inspect import unwrap
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from nanochat import UserError
from nanochat.muon import compiled_muon_update, muon_update
from nanochat.zero import is_shared_out, share_out

# How each parameter is trained. The first row that fits its name and its number of dimensions decides.
# The rate is a setting of the script times the factor. Muon's betas are its momentum, which the script's
# schedule replaces, and that of NorMuon's second moment. Muon takes matrices only. The gradients of scalars
# begin as nothing but rounding; a smaller eps would turn that into full steps. The last column is rate x
# decay as a share of that of the matrices, for AdamW times `table_decay` too. The last row is for what you
# add (norm weights, biases) and not tuned.
# fmt: off
PARAMETER_TABLE = [
    # name                     dimensions  method   rate              factor  betas         eps    decay
    ("blocks.*.x*_scale",       (0, 1),    "adamw", "scalar_lr",      1.00,   (0.96, 0.95), 1e-5,  0.0),
    ("value_embeddings.*",      (2,),      "adamw", "embedding_lr",   0.50,   (0.80, 0.95), 1e-10, 0.15),
    ("*embedding.weight",       (2,),      "adamw", "embedding_lr",   1.00,   (0.80, 0.95), 1e-10, 0.3),
    ("*head.weight",            (2,),      "adamw", "unembedding_lr", 1.00,   (0.80, 0.95), 1e-10, 0.3),
    ("blocks.*",                (2,),      "muon",  "matrix_lr",      1.00,   (0.95, 0.90), 0.0,   1.0),
    ("*",                       (0, 1),    "adamw", "scalar_lr",      0.10,   (0.80, 0.95), 1e-5,  0.0),
]
# fmt: on

# The name of a tensor of the state in a checkpoint: the parameter, its rows unless it has all, the key
STATE_LABEL = re.compile(r"(?P<name>.+?)(?:\[(?P<first>\d+):(?P<last>\d+)\])?/(?P<key>\w+)")


class MuonAdamW(Optimizer):
    """Muon and AdamW behind one `step()`. Processes share its work and its state (zero.py).

    Each process needs the gradients of its share alone (gradients.py). It updates its weights and sends them
    to the others while it works on the next group. Muon's matrices of one shape lie in one stacked tensor;
    from then on the `.data` of each is a part of it.

    A step changes nothing, neither weights nor state, where `found_inf` (a 0-dim tensor on the device) is not
    0. `skip_if_not_finite` and torch's GradScaler set it, so no step waits for the device to know.

    compute_dtype is that of the forward pass. Muon multiplies in bfloat16 where the forward pass does,
    else in float32.

    Group keys: method, params, names, lr, initial_lr, betas, eps, weight_decay. The script changes `lr`,
    `betas` and `weight_decay` between steps. State is float32 and filed under the parameter's name.
    """

    _step_supports_amp_scaling = True  # GradScaler gives us grad_scale and found_inf; nothing waits for them
    # Without torch's wrappers: at their first call they load the compiler, which takes a second or two
    add_param_group, zero_grad = map(unwrap, (Optimizer.add_param_group, Optimizer.zero_grad))

    def __init__(
        self, groups, compute_dtype=torch.float32, compile_after: int | None = None, rank=0, world_size=1
    ):
        super().__init__(groups, {})
        self.found_inf = None
        # Not float16: its range is too small for the products of the orthogonalization
        self.muon_dtype = torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32
        self.muon_update, self.compile_after, self.steps = muon_update, compile_after, 0
        self.rank, self.world_size = rank, world_size
        matrices, tables = (
            [p for g in self.param_groups if g["method"] == m for p in g["params"] if is_shared_out(p.shape)]
            for m in ("muon", "adamw")
        )
        owners, cuts = share_out([p.shape for p in matrices], [p.shape for p in tables], world_size)
        self._cuts = dict(zip(tables, cuts, strict=True))  # process r has the rows from cut r to cut r + 1
        self._owner_of = dict(zip(matrices, owners, strict=True))
        for group in self.param_groups:
            group["initial_lr"], group["initial_weight_decay"] = group["lr"], group["weight_decay"]
            if group["method"] == "muon":
                self._stack(group)
            else:
                for p in group["params"]:
                    part = p.data[self._rows(p)]
                    if part.numel():
                        step = torch.zeros((), dtype=torch.float32, device=p.device)
                        moments = torch.zeros_like(part), torch.zeros_like(part)
                        self.state[p] = {"exp_avg": moments[0], "exp_avg_sq": moments[1], "step": step}

    def _stack(self, group):
        """Lay the group's matrices into one tensor (N, rows, columns), sorted by owner, and make the state of
        those that this process owns."""
        group["cuts"], mine, owner_of = None, slice(None), self._owner_of
        if group["params"][0] in owner_of:
            order = sorted(range(len(group["params"])), key=lambda i: owner_of[group["params"][i]])
            for key in ("params", "names"):
                group[key] = [group[key][i] for i in order]
            owners = [owner_of[p] for p in group["params"]]
            group["cuts"] = [bisect_left(owners, r) for r in range(self.world_size + 1)]
            mine = slice(*group["cuts"][self.rank : self.rank + 2])
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

    def _rows(self, p):
        """The index of the part of a parameter that this process updates: some rows of a table, or all."""
        cuts = self._cuts.get(p)
        return slice(*cuts[self.rank : self.rank + 2]) if cuts else ...

    def owners(self, p) -> list[tuple[int, slice]]:
        """Which process updates which rows of a parameter; empty if every process updates all of it."""
        if p in self._owner_of:
            return [(self._owner_of[p], slice(None))]
        cuts = enumerate(pairwise(self._cuts.get(p, ())))
        return [(r, slice(first, last)) for r, (first, last) in cuts if last > first]

    @torch.no_grad()
    def step(self):
        if unused := [name for name, p in self._named_parameters() if p.grad is None]:
            raise UserError(
                f"{', '.join(unused)} got no gradient; use it in the model's forward, or remove it"
            )
        grad_scale = getattr(self, "grad_scale", None)  # of a GradScaler
        if grad_scale is not None:  # it is still in the gradients
            torch._foreach_div_([p.grad for _, p in self._named_parameters()], grad_scale)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "mps" and found_inf.item():
            return  # MPS's fused AdamW ignored found_inf until 2026 (pytorch/pytorch#186360)
        if self.steps == self.compile_after:
            self.muon_update = compiled_muon_update()
        self.steps += 1
        sent = []
        for group in self.param_groups:
            if group["method"] == "muon":
                self._muon(group)
                sent += self._send(group["stacked"], group["cuts"])
            else:
                self._adamw(group)
                for p in group["params"]:
                    sent += self._send(p.data, self._cuts.get(p))
        for handle in sent:
            handle.wait()

    def _send(self, tensor, cuts):
        """Begin to broadcast each part of a tensor from its owner. All processes do it in the same order."""
        if cuts is None or self.world_size == 1:
            return []
        parts = [(r, tensor[first:last]) for r, (first, last) in enumerate(pairwise(cuts)) if last > first]
        return [dist.broadcast(part, src=r, async_op=True) for r, part in parts]

    def _adamw(self, group):
        params = [p for p in group["params"] if p in self.state]
        states = [self.state[p] for p in params]
        if not params:
            return
        adamw(
            [p.data[self._rows(p)] for p in params],
            [p.grad[self._rows(p)] for p in params],
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
            found_inf=getattr(self, "found_inf", None),
        )

    def _muon(self, group):
        params, (stacked, momentum, second_moment) = group["mine"], group["tensors"]
        if not params:
            return
        if params[-1].data_ptr() != stacked[-1].data_ptr():
            raise RuntimeError("the model was moved after its optimizer was made; make the optimizer again")
        grads = torch.stack([p.grad for p in params])
        numbers = group["lr"], *group["betas"], group["weight_decay"]
        for scalar, number in zip(group["scalars"], numbers, strict=True):
            scalar.fill_(number)  # torch.tensor(number, device="cuda") would copy it and wait
        found_inf = getattr(self, "found_inf", None)  # GradScaler deletes it after its step
        skip = grads.new_zeros(()) if found_inf is None else found_inf.to(grads.device)
        # Small matrices (gates) are done sooner than compiled code for their shape would load
        update = self.muon_update if params[0].numel() > 2**14 else muon_update
        update(stacked, grads, momentum, second_moment, *group["scalars"], skip != 0, self.muon_dtype)

    def _named_parameters(self):
        for group in self.param_groups:
            yield from zip(group["names"], group["params"], strict=True)

    def named_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the state that this process keeps, as {`<parameter's name>/<key>`: tensor}.

        If it keeps some rows only, the name has them: `embedding.weight[0:2048]/exp_avg`. State that all
        processes keep alike is given by the first.
        """
        named = {}
        for name, p in self._named_parameters():
            if p in self.state and (self.rank == 0 or is_shared_out(p.shape)):
                rows = self._rows(p)
                if rows is not ... and (rows.start, rows.stop) != (0, len(p)):
                    name = f"{name}[{rows.start}:{rows.stop}]"
                named |= {f"{name}/{key}": tensor for key, tensor in self.state[p].items()}
        return named

    def needs(self, label: str) -> bool:
        """Whether this process keeps any of the state under that name, which may be of another process."""
        parsed = STATE_LABEL.fullmatch(label)
        p = parsed and next((p for name, p in self._named_parameters() if name == parsed["name"]), None)
        if p is None or p not in self.state:
            return False
        rows = self._rows(p)
        if rows is ... or parsed["first"] is None:
            return True
        return max(int(parsed["first"]), rows.start) < min(int(parsed["last"]), rows.stop)

    @torch.no_grad()
    def load_named_state(self, named: dict[str, torch.Tensor]):
        """Restore the `named_state` of any number of processes; UserError if a tensor is missing, or of
        another shape or type."""
        parts: dict[tuple, list] = {}  # by name of parameter and of state: (first row, tensor)
        for label, tensor in named.items():
            if parsed := STATE_LABEL.fullmatch(label):
                found = parts.setdefault((parsed["name"], parsed["key"]), [])
                found.append((int(parsed["first"] or 0), tensor))
        for name, p in self._named_parameters():
            rows = self._rows(p)
            start = 0 if rows is ... else rows.start
            for key, mine in self.state[p].items() if p in self.state else ():
                missing = mine.numel()
                for first, tensor in parts.get((name, key), ()):
                    if (tensor.ndim, tensor.shape[1:]) != (mine.ndim, mine.shape[1:]):
                        continue  # it counts as missing, and so does another type
                    if tensor.dtype != mine.dtype:
                        continue
                    if mine.ndim == 0:
                        missing -= mine.copy_(tensor).numel()
                        break
                    low, high = max(first, start), min(first + len(tensor), start + len(mine))
                    if low < high:
                        part = mine[low - start : high - start]
                        missing -= part.copy_(tensor[low - first : high - first]).numel()
                if missing:
                    raise UserError(
                        f"the optimizer's state {name}/{key} is not in the checkpoint, or not whole, or of "
                        "another shape or type; go back to the model that the run began with, or start a "
                        "new run from its weights with --init_from"
                    )


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
    """Groups for MuonAdamW from PARAMETER_TABLE. Muon has one group a shape, so that it can stack them.

    `rates` holds embedding_lr, unembedding_lr, matrix_lr and scalar_lr. `table_decay` is for embeddings and
    head what `weight_decay` is for matrices. UserError for a parameter without a row.
    """
    groups: dict[tuple, dict] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:  # frozen
            continue
        row = table_row(name, p)
        _, _, method, rate, factor, betas, eps, share = PARAMETER_TABLE[row]
        key = (row, tuple(p.shape)) if method == "muon" else (row,)
        lr = rates[rate] * factor
        decay = weight_decay if method == "muon" else table_decay * rates["matrix_lr"] / lr if lr else 0.0
        fresh = {"method": method, "params": [], "names": [], "lr": lr, "betas": betas, "eps": eps}
        group = groups.setdefault(key, fresh | {"weight_decay": share * decay})
        group["params"].append(p)
        group["names"].append(name)
    # AdamW's first: they are sent while Muon works on its own. Then the largest, so that little is sent last.
    return sorted(
        groups.values(), key=lambda g: (g["method"] == "muon", -sum(p.numel() for p in g["params"]))
    )


# What base_train.py does with its optimizer, ours or another one of torch's


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
