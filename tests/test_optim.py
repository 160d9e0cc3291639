"""Muon and the row-wise update against slow float64 implementations, AdamW against torch's, and the state's
names."""

import copy
import math
import re

import pytest
import test_gpt
import torch
from helpers import needs_compiler

from nanochat import UserError
from nanochat.gradients import clip_grad_norm_
from nanochat.muon import POLAR_EXPRESS, orthogonalize
from nanochat.optim import PARAMETER_TABLE, MuonAdamW, parameter_groups, skip_if_not_finite, table_row
from nanochat.rowwise import rowwise_update

RATES = {"embedding_lr": 0.1, "unembedding_lr": 0.01, "matrix_lr": 0.02, "scalar_lr": 0.3}


def express(s):
    """What the polynomials of POLAR_EXPRESS, one after the other, make of a singular value."""
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return s


# ------------------------------------------------------------------------------------------------------
# Orthogonalization by Polar Express


def test_every_singular_value_from_a_thousandth_to_one_comes_close_to_one():
    s = express(torch.logspace(-3, 0, 10_000, dtype=torch.float64))
    assert s.min() > 0.85 and s.max() < 1.15


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("shape", [(48, 48), (48, 160), (160, 48), (4, 32), (128, 512), (384, 128)])
def test_orthogonalize_keeps_singular_vectors_and_brings_singular_values_to_one(shape, dtype, close):
    G = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    X = orthogonalize(G, dtype)
    assert X.dtype == dtype
    U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    in_basis = U.mT @ X.double() @ Vh.mT  # diagonal where the singular vectors are those of G
    values = express(S / (1.02 * G.double().norm(dim=(1, 2))[:, None]))
    torch.testing.assert_close(in_basis, torch.diag_embed(values), rtol=0, atol=close)
    torch.testing.assert_close(X.double(), U @ in_basis @ Vh, rtol=0, atol=close)  # and nothing beside it
    if shape[0] != shape[1]:  # a Gaussian matrix that is not square has no small singular values
        torch.testing.assert_close(X.double(), U @ Vh, rtol=0, atol=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalize_of_a_nearly_singular_matrix_stays_bounded(dtype):
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))
    S = torch.logspace(0, -12, 32, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize((U * S @ V.mT).float()[None], dtype)[0].double())
    assert values.isfinite().all() and values.max() < 1.2
    assert (values > 0.8).sum() >= (S > 2e-3).sum()  # the large ones are brought up all the same


# ------------------------------------------------------------------------------------------------------
# Muon


class SlowMuon:
    """One matrix in float64, written from the papers: no stacking, an SVD, a loop over neurons."""

    def __init__(self, p, decay):
        self.p, self.decay = p.double().clone(), decay
        self.momentum = torch.zeros_like(self.p)
        self.size = [0.0] * max(p.shape)  # of each neuron's update, squared: NorMuon's second moment

    def step(self, grad, lr, beta, beta2):
        grad = grad.double()
        self.momentum = beta * self.momentum + (1 - beta) * grad
        look_ahead = beta * self.momentum + (1 - beta) * grad
        U, S, Vh = torch.linalg.svd(look_ahead, full_matrices=False)
        update = U @ torch.diag(express(S / (1.02 * S.square().sum().sqrt() + 1e-6))) @ Vh
        length = update.norm()
        rows, columns = update.shape
        neurons = list(update) if rows >= columns else list(update.T)
        for i, neuron in enumerate(neurons):
            self.size[i] = beta2 * self.size[i] + (1 - beta2) * float(neuron.square().mean())
            neurons[i] = neuron / self.size[i] ** 0.5
        update = torch.stack(neurons) if rows >= columns else torch.stack(neurons).T
        update = update * length / update.norm()
        lr = lr * max(1, rows / columns) ** 0.5
        for i in range(rows):
            for j in range(columns):
                agrees = float(update[i, j] * self.p[i, j].sign()) * max(rows, columns) ** 0.5  # in RMS
                decay = self.decay * min(1.0, max(0.0, 10 * agrees))
                self.p[i, j] -= lr * (update[i, j] + decay * self.p[i, j])


def muon_group(params):
    named = {"method": "muon", "params": params, "names": [f"w{i}" for i in range(len(params))]}
    return named | {"lr": 0.02, "betas": (0.95, 0.9), "weight_decay": 0.3}


@pytest.mark.parametrize("shape", [(8, 8), (12, 6), (5, 15)])
def test_muon_is_the_slow_per_matrix_implementation_over_several_steps(shape):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for _ in range(3)]
    slow = [SlowMuon(p.detach(), decay=0.3) for p in params]
    optimizer = MuonAdamW([muon_group(params)])
    for step in range(5):
        lr, beta = 0.02 + 0.01 * step, 0.85 + 0.02 * step  # both change from step to step
        optimizer.param_groups[0].update(lr=lr, betas=(beta, 0.9))
        for p, reference in zip(params, slow, strict=True):
            p.grad = torch.randn(*shape, generator=generator)
            reference.step(p.grad, lr, beta, 0.9)
        optimizer.step()
    for p, reference in zip(params, slow, strict=True):
        torch.testing.assert_close(p.detach().double(), reference.p, rtol=0, atol=2e-4)


def test_muon_leaves_a_matrix_without_gradient_as_it_is():
    params = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    before = params[0].detach().clone()
    optimizer = MuonAdamW([muon_group(params)])
    for _ in range(3):
        params[0].grad, params[1].grad = torch.zeros(6, 4), torch.randn(6, 4)
        optimizer.step()
    assert torch.equal(params[0], before)
    assert params[1].isfinite().all()
    params[0].grad = torch.randn(6, 4)  # and its first gradient moves it as far as any other
    optimizer.step()
    assert 0 < (params[0] - before).norm() < 2 * 0.02 * 1.15 * (6 / 4 * 4) ** 0.5


@needs_compiler
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_compiled_and_eager_muon_agree_to_rounding_and_new_rates_compile_nothing_anew(dtype, close):
    torch.manual_seed(0)
    eager = [torch.nn.Parameter(torch.randn(112, 160)) for _ in range(3)]
    compiled = copy.deepcopy(eager)
    optimizers = [
        MuonAdamW([muon_group(params)], dtype, 0 if params is compiled else None)
        for params in (eager, compiled)
    ]
    for step in range(4):
        for p, q in zip(eager, compiled, strict=True):
            p.grad = q.grad = torch.randn(112, 160)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            for optimizer in optimizers:
                optimizer.param_groups[0].update(lr=0.02 / (step + 1), betas=(0.9 + 0.01 * step, 0.9))
                optimizer.step()
    for p, q in zip(eager, compiled, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=close)


# ------------------------------------------------------------------------------------------------------
# AdamW


def test_adamw_is_torchs_over_several_steps_of_changing_rate():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(*shape)) for shape in ([7, 5], [3], [1])]
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.2}
    optimizer = MuonAdamW([{"method": "adamw", "params": ours, "names": ["a", "b", "c"], **options}])
    reference = torch.optim.AdamW(theirs, foreach=False, fused=False, **options)
    for step in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for o in (optimizer, reference):
            o.param_groups[0]["lr"] = 0.1 / (step + 1)
            o.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------
# The row-wise update


def test_the_row_wise_update_is_rmsprop_with_the_mean_square_of_a_row():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 6))
    slow, size = p.detach().double().clone(), torch.zeros(4, dtype=torch.float64)
    options = {"lr": 0.1, "betas": (0.0, 0.95), "eps": 1e-4, "weight_decay": 0.2}
    optimizer = MuonAdamW([{"method": "rowwise", "params": [p], "names": ["rows"], **options}])
    for step in range(6):
        lr = optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        p.grad = torch.randn(4, 6) * torch.tensor([1.0, 1e-3, float(step % 3 == 0), 0.0])[:, None]
        optimizer.step()
        for row, grad in enumerate(p.grad.double()):
            size[row] = 0.95 * size[row] + 0.05 * grad.square().mean()
            rms = (size[row] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-4
            slow[row] = slow[row] * (1 - lr * 0.2) - lr * grad / rms
        torch.testing.assert_close(p.detach().double(), slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("table_decay", [0.0, 0.5])
@pytest.mark.parametrize("more", ["nothing more", "a penalty", "gradients of its own", "NaN"])
def test_on_a_cpu_only_rows_with_a_gradient_are_read_and_the_result_is_the_same(table_decay, more):
    """Whatever adds to the gradients: look-ups, autograd from elsewhere in the loss, a tensor of others."""
    torch.manual_seed(0)
    first = test_gpt.make_model(3, 32, 2, 61, 16, stir=0.05, bigrams=64)
    runs = []
    for model in (first, copy.deepcopy(first)):
        optimizer = MuonAdamW(parameter_groups(model, RATES, 0.1, table_decay))
        runs.append((model, optimizer, [p for n, p in model.named_parameters() if n.startswith("ngrams.")]))
    runs[1][1].used_rows = lambda p: None  # as on other devices
    for step in range(5):
        idx, norms = torch.randint(0, 61, (2, 16)), []
        for model, optimizer, tables in runs:
            for _ in range(2):  # micro-steps
                loss = model(idx, idx.roll(-1, 1))
                if more == "a penalty" and step == 2:
                    loss = loss + tables[0].square().sum()
                (loss * math.nan if more == "NaN" and step == 2 else loss).backward()
            if model is first and more == "nothing more":  # 3,904 rows
                assert len(optimizer.used_rows(tables[0])) <= 2 * 32
            if more == "gradients of its own":
                tables[1].grad = torch.ones_like(tables[1])
            norms.append(clip_grad_norm_(model, optimizer, 0.1 if step == 3 else math.inf))
            skip_if_not_finite(optimizer, norms[-1])
            optimizer.step()
            optimizer.zero_grad()
            assert not any(p.grad.any() for p in tables)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(*[list(model.parameters()) for model, *_ in runs], rtol=1e-4, atol=1e-4)


@needs_compiler
def test_the_compiled_row_wise_update_agrees_and_skips_also_at_the_first_step():
    torch.manual_seed(0)
    eager = torch.randn(64, 48), torch.zeros(64), torch.zeros(())
    compiled, update = copy.deepcopy(eager), torch.compile(rowwise_update, dynamic=False)
    for step in range(4):
        bad, grad = torch.tensor(step % 2 == 0), torch.randn(64, 48)
        numbers = torch.tensor(0.1 / (step + 1)), 0.95, 1e-10, 0.2
        before = copy.deepcopy(eager)
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            for step_of, (weight, second_moment, steps) in ((rowwise_update, eager), (update, compiled)):
                step_of(weight, grad / ~bad, second_moment, steps, *numbers, bad)
        for then, now, other in zip(before, eager, compiled, strict=True):
            assert torch.equal(then, now) == bad
            torch.testing.assert_close(now, other, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------
# The groups of a model, and the state's names


def tiny_model():
    return test_gpt.make_model(3, 32, 2, 61, 16, stir=0)


def make_optimizer(model):
    return MuonAdamW(parameter_groups(model, RATES, weight_decay=0.1))


def random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_every_parameter_is_in_one_group_and_the_matrices_of_blocks_are_muons():
    model = tiny_model()
    groups = parameter_groups(model, RATES, weight_decay=0.1)
    grouped = {name: p for g in groups for name, p in zip(g["names"], g["params"], strict=True)}
    assert sum(len(g["params"]) for g in groups) == len(grouped)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in grouped.items()}
    for group in groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            is_block_matrix = name.startswith("blocks.") and p.ndim == 2
            shared = "rowwise" if name.startswith("ngrams.") else "adamw"
            assert group["method"] == ("muon" if is_block_matrix else shared), name
        assert group["method"] != "muon" or len({p.shape for p in group["params"]}) == 1


@pytest.mark.parametrize(
    ("name", "shape"), [("gain", (32,)), ("x_norm_scale", ()), ("x0_gain", ()), ("y_before_scale", (32,))]
)
def test_a_weight_that_someone_adds_is_trained_by_the_last_row_whatever_it_is_called(name, shape):
    model = tiny_model()
    for block in model.blocks:
        setattr(block, name, torch.nn.Parameter(torch.zeros(shape)))
    (group,) = (g for g in parameter_groups(model, RATES, 0.1) if f"blocks.0.{name}" in g["names"])
    assert {f"blocks.{i}.{name}" for i in range(3)} <= {*group["names"]}
    assert table_row(f"blocks.0.{name}", torch.zeros(shape)) == len(PARAMETER_TABLE) - 1
    assert group["lr"] == RATES[PARAMETER_TABLE[-1][3]] * PARAMETER_TABLE[-1][4]


def test_rates_and_decay_are_the_settings_times_the_tables_factors():
    model = tiny_model()
    for group in parameter_groups(model, RATES, weight_decay=0.1, table_decay=0.03):
        row = PARAMETER_TABLE[table_row(group["names"][0], group["params"][0])]
        assert group["lr"] == RATES[row[3]] * row[4]
        assert group["betas"] == row[5]
        assert group["eps"] == row[6]
        decay = 0.1 if group["method"] == "muon" else 0.03
        assert group["lr"] * group["weight_decay"] == pytest.approx(RATES["matrix_lr"] * decay * row[7])
    assert {group["weight_decay"] for group in parameter_groups(model, RATES, 0.1)} == {0.0, 0.1}
    frozen = parameter_groups(model, RATES | {"embedding_lr": 0.0}, 0.1, 0.03)
    assert all(group["weight_decay"] == 0 for group in frozen if group["lr"] == 0)
    optimizer = make_optimizer(model)
    assert all(g["initial_lr"] == g["lr"] for g in optimizer.param_groups)


def trained(steps):
    """A model and its optimizer after so many steps with random gradients."""
    model = tiny_model()
    optimizer = make_optimizer(model)
    for seed in range(steps):
        random_gradients(model, seed)
        optimizer.step()
    return model, optimizer


def test_named_state_restored_into_a_new_optimizer_goes_on_bit_for_bit():
    model, optimizer = trained(3)
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.named_state()))
    restored = tiny_model()
    restored.load_state_dict(weights)
    new_optimizer = make_optimizer(restored)
    new_optimizer.load_named_state(saved)
    for seed in range(3, 6):
        for m, o in ((model, optimizer), (restored, new_optimizer)):
            random_gradients(m, seed)
            o.step()
    for (name, p), q in zip(model.named_parameters(), restored.parameters(), strict=True):
        assert torch.equal(p, q), name
    for name, tensor in new_optimizer.named_state().items():
        assert torch.equal(tensor, optimizer.named_state()[name]), name
        assert not torch.equal(tensor, saved[name]), f"{name} shares memory with what it was loaded from"
        owner, _, key = name.rpartition("/")
        assert tensor.dtype == torch.float32
        if key in ("momentum", "exp_avg", "exp_avg_sq"):
            assert tensor.shape == model.get_parameter(owner).shape, name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_found_inf_changes_neither_weights_nor_state(bad):
    model, optimizer = trained(2)
    before = copy.deepcopy(model.state_dict() | optimizer.named_state())
    for p in model.parameters():
        p.grad = torch.full_like(p, bad)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = model.state_dict() | optimizer.named_state()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    optimizer.found_inf = torch.zeros(())
    random_gradients(model, 2)
    optimizer.step()
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])


@pytest.mark.parametrize("strange", [
    lambda name, t: {},
    lambda name, t: {name.replace("/", f"[0:{len(t) - 1}]/"): t[:-1]} if t.ndim else {},
    lambda name, t: {name.replace("/", f"[{'9' * 5000}:1]/"): t},
    lambda name, t: {name: t[None]},
    lambda name, t: {name: t.reshape(-1)[0]} if t.ndim else {},
    lambda name, t: {name: t.double()},
    lambda name, t: {name: t.new_empty(0)},
])  # fmt: skip
def test_state_that_lacks_or_has_another_shape_or_type_is_refused_by_name(strange):
    optimizer = make_optimizer(tiny_model())
    good = {name: tensor.clone() for name, tensor in optimizer.named_state().items()}
    for name, tensor in good.items():
        others = {other: kept for other, kept in good.items() if other != name}
        with pytest.raises(UserError, match=re.escape(f"{name} is not in the checkpoint, or not whole")):
            optimizer.load_named_state(others | strange(name, tensor))
    optimizer.load_named_state(good)


@pytest.mark.parametrize("share", [0.5, 0.999, 1.001, math.inf, math.nan])
def test_clipping_gives_the_bits_of_torchs_and_on_a_cpu_leaves_small_gradients_alone(share):
    model, other = tiny_model(), tiny_model()
    optimizer = make_optimizer(model)
    random_gradients(model, seed=0)
    random_gradients(other, seed=0)
    if math.isnan(share):
        for one in (model, other):
            one.head.weight.grad[0, 0] = math.nan
    whole = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
    limit = 1.0 if math.isnan(share) else share * whole.item()
    versions = [p.grad._version for p in model.parameters()]
    norm = clip_grad_norm_(model, optimizer, limit)
    assert torch.equal(norm.nan_to_num(), whole.nan_to_num())
    torch.nn.utils.clip_grad_norm_(other.parameters(), limit)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad.nan_to_num(), q.grad.nan_to_num())
    left_alone = versions == [p.grad._version for p in model.parameters()]
    assert left_alone == (share in (1.001, math.inf))
