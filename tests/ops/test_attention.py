"""Every way attention is computed against one masked softmax, written out in float64."""

import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gpt import make_model, random_tokens
from test_loss import largest
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend

from nanochat import engine
from nanochat.gpt import GPTConfig
from nanochat.ops import attention as choices
from nanochat.ops import attention_backends as backends
from nanochat.ops.attention import Attention, attention, previous_token, shift_keys, visible_from


def slow_attention(q, k, v, window):
    """One query at a time: the softmax over the positions it may see."""
    Tq, Tk, D = q.size(2), k.size(2), q.size(3)
    y = torch.empty_like(q)
    for i in range(Tq):
        position = Tk - Tq + i
        seen = slice(max(0, position - window + 1), position + 1)
        scores = (q[:, :, i, None] * k[:, :, seen]).sum(-1) / D**0.5  # (B, H, seen)
        y[:, :, i] = (scores.softmax(-1)[..., None] * v[:, :, seen]).sum(2)
    return y


def random_qkv(Tq, Tk, dtype, B=2, H=3, D=8):
    generator = torch.Generator().manual_seed(Tq * 1000 + Tk)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64).to(dtype) for T in (Tq, Tk, Tk)]


@settings(max_examples=150)
@given(st.data())
def test_attention_is_the_slow_one_for_any_lengths_and_window(data):
    Tk = data.draw(st.integers(1, 40), label="Tk")
    Tq = data.draw(st.one_of(st.just(Tk), st.just(1), st.integers(1, Tk)), label="Tq")
    divisors = [n for n in range(1, Tk + 1) if Tk % n == 0]
    window = data.draw(st.one_of(st.sampled_from(divisors), st.integers(1, 50)), label="window")
    dtype, close = data.draw(st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5)]), label="dtype")
    q, k, v = random_qkv(Tq, Tk, dtype)
    y = attention(q, k, v, window)
    assert y.dtype == dtype
    expected = slow_attention(q.double(), k.double(), v.double(), window)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=close)


def test_a_window_that_divides_the_row_needs_no_mask_of_its_square():
    T, window = 1024, 32
    qkv = random_qkv(T, T, torch.float32, B=1, H=1, D=4)
    assert 0 < largest(lambda: attention(*qkv, window)) <= 2 * T * window


# ------------------------------------------------------------------------------------------------------
# The backends. Those of CUDA run here with a slow kernel in the place of the GPU's


def slow_sequences(q, k, v, starts, left, right, scale):
    """What FlashAttention computes: (total, H, D), one sequence after another."""
    y = torch.zeros_like(q)
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for i in range(first, end):
            low = first if left < 0 else max(first, i - left)
            high = end if right < 0 else min(end, i + right + 1)
            scores = (q[i, None] * k[low:high]).sum(-1) * scale  # (seen, H)
            y[i] = (scores.softmax(0).unsqueeze(-1) * v[low:high]).sum(0)
    return y


def flash_forward(q, k, v, starts, starts_k, max_q, max_k, dropout, causal, return_debug_mask, **options):
    """In the place of aten::_flash_attention_forward, with its signature."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert starts.dtype == torch.int32 and starts[-1] == len(q) and starts.diff().max() <= max_q
    assert torch.equal(starts, starts_k) and not return_debug_mask and dropout == 0
    left, right = options["window_size_left"], options["window_size_right"]
    scale = options.get("scale") or q.size(-1) ** -0.5
    y = slow_sequences(q.double(), k.double(), v.double(), starts, left, 0 if causal else right, scale)
    empty = torch.empty(0)
    return y.to(q.dtype), torch.zeros(q.size(1), len(q)), empty, empty, empty


def flash_backward(dy, q, k, v, y, sums, starts, starts_k, max_q, max_k, dropout, causal, *rest, **options):
    """In the place of aten::_flash_attention_backward."""
    left, right = options["window_size_left"], options["window_size_right"]
    scale = options.get("scale") or q.size(-1) ** -0.5
    qkv, dy = [x.double() for x in (q, k, v)], dy.double()

    def gradients():
        leaves = [x.requires_grad_() for x in qkv]
        again = slow_sequences(*leaves, starts, left, 0 if causal else right, scale)
        return [g.to(q.dtype) for g in torch.autograd.grad(again, leaves, dy)]

    with ThreadPoolExecutor(1) as thread:  # inside of a kernel this thread records no operations
        return tuple(thread.submit(gradients).result())


@pytest.fixture(scope="module")
def slow_flash():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_that_runs_here_is_equal_to_float64(dtype):
    results = choices.check_backends("cpu", dtype, shape=(2, 2, 32, 8))
    ran = {name for name, result in results.items() if isinstance(result, dict)}
    assert ran >= {"sdpa", "banded", "mask", "blocks"} and all(results[name]["ok"] for name in ran), results
    assert {results[name] for name in results.keys() - ran} == {"needs CUDA"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_backend_that_runs_on_a_gpu_is_equal_to_float64(dtype):
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has no bfloat16")
    results = choices.check_backends("cuda", dtype, shape=(2, 4, 512, 128))
    ran = {name: result for name, result in results.items() if isinstance(result, dict)}
    assert len(ran) >= 4 and all(result["ok"] for result in ran.values()), results


@pytest.mark.parametrize(
    ("kind", "window"),
    [("full", 12), ("window", 1), ("window", 5), ("documents", 1), ("documents", 4), ("documents", 50)],
)
def test_varlen_gives_the_kernel_the_right_sequences_and_windows(slow_flash, kind, window):
    found = choices.errors("varlen", kind, (3, 2, 12, 4), window, torch.device("cpu"), torch.float32)
    assert max(found) < 1e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_has_the_windows_of_the_slow_one(monkeypatch):
    backends.make_block_mask(12, 5, "cpu")
    module = torch.nn.attention.flex_attention
    kernel = mock.Mock(wraps=module.flex_attention)
    monkeypatch.setattr(module, "flex_attention", kernel)
    q, k, v = random_qkv(12, 12, torch.float32)  # its backward pass needs a GPU
    expected = slow_attention(q, k, v, 5)
    torch.testing.assert_close(backends.flex(q, k, v, 5), expected, rtol=0, atol=1e-5)
    kernel.assert_called_once()
    with torch.no_grad():  # the compiled kernel is for training
        torch.testing.assert_close(backends.flex(q, k, v, 5), expected, rtol=0, atol=1e-5)
    kernel.assert_called_once()


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=30))
def test_both_forms_of_documents_say_the_same(rows):
    inputs = torch.tensor(rows)  # 0 is <|bos|>
    numbers = Attention(documents="mask").boundaries(inputs, 0)
    starts = Attention(documents="varlen").boundaries(inputs, 0)
    by_hand = []  # where a document begins, one row behind another
    for b, row in enumerate(rows):
        by_hand += [6 * b + t for t in range(6) if t == 0 or (row[t] == 0 and row[t - 1] != 0)]
    size = len(starts) - 1
    assert size >= 64 and size.bit_count() == 1 and starts.dtype == torch.int32
    assert starts.tolist() == by_hand + [inputs.numel()] * (size + 1 - len(by_hand))
    number = torch.searchsorted(starts, torch.arange(inputs.numel(), dtype=torch.int32), right=True)
    same = number.view(-1, 6, 1) == number.view(-1, 1, 6)
    assert torch.equal(choices.visible_from(numbers)[:, 0], same)


def small_model(pattern="SL"):
    model = make_model(2, 32, 2, 20, 16, pattern)
    return model, random_tokens(model, 3)


def check_same_gradients(*ways, with_documents: bool):
    """A model's loss and gradients by these backends are those of SDPA."""
    model, inputs = small_model()
    found = []
    for chosen in (Attention(), Attention(*ways)):
        choices.use(model, chosen)
        documents = chosen.boundaries(inputs, 0) if with_documents else None
        loss = model(inputs, inputs, documents=documents)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("with_documents", [False, True])
def test_a_model_has_the_same_gradients_by_varlen_as_by_sdpa(slow_flash, with_documents):
    check_same_gradients("varlen", "varlen", "varlen", with_documents=with_documents)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [("varlen",) * 3, ("flash", "flex", "mask"), ("blocks",) * 3])
def test_a_compiled_model_is_one_graph_with_each_backend(slow_flash, monkeypatch, ways):
    # A CPU has no kernel of these names. What cuts a graph happens before a kernel is called
    monkeypatch.setattr(backends, "SDPBackend", types.SimpleNamespace(FLASH_ATTENTION=SDPBackend.MATH))
    model, inputs = small_model()
    backends.make_block_mask(16, 4, "cpu")
    trained = list(model.parameters())
    if "flex" in ways:  # its backward pass needs a GPU
        model.requires_grad_(False)
        trained = []
    found = {}
    for compiled, chosen in ((False, Attention()), (True, Attention(*ways))):
        choices.use(model, chosen)
        run = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else model
        for documents in (None, chosen.boundaries(inputs, 0)):
            loss = run(inputs, inputs, documents=documents)
            gradients = torch.autograd.grad(loss, trained) if trained else ()
            found[compiled, documents is None] = [loss, *gradients]
    for plain in (False, True):
        for a, b in zip(found[False, plain], found[True, plain], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------------
# Kernels that must not be used


class Recorder:
    """In the place of F.scaled_dot_product_attention: what it was given, and which kernels were allowed."""

    def __init__(self, monkeypatch):
        self.calls, band = [], backends.band
        monkeypatch.setattr(backends, "band", lambda Tq, Tk, window, device: band(Tq, Tk, window, "cpu"))
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q, k, v, attn_mask=None, is_causal=False):
        allowed = torch.nn.attention._cur_sdpa_kernel_backends()
        self.calls.append(types.SimpleNamespace(mask=attn_mask, is_causal=is_causal, allowed=set(allowed)))
        return torch.zeros_like(q)


@pytest.mark.parametrize(("dtype", "own_mask"), [(torch.float16, True), (torch.bfloat16, True),
                                                 (torch.float32, False)])  # fmt: skip
def test_mps_in_16_bit_gets_a_mask_since_its_causal_kernel_shows_later_tokens(monkeypatch, dtype, own_mask):
    recorder = Recorder(monkeypatch)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 4, device="mps", dtype=dtype)
    attention(q, q, q, 8)
    (call,) = recorder.calls
    assert call.is_causal != own_mask and (call.mask is not None) == own_mask
    if own_mask:
        assert torch.equal(call.mask, torch.ones(8, 8).tril().bool())


@pytest.mark.parametrize("chosen", [Attention(), Attention(full="cudnn")])
def test_cudnn_is_for_training_alone(monkeypatch, chosen):
    recorder = Recorder(monkeypatch)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 4, device="cuda", dtype=torch.bfloat16)
    chosen(q, q, q, 8)
    with torch.no_grad():
        chosen(q, q, q, 8)
        chosen(q, q, q, 5)
    training, *inference = recorder.calls
    assert training.allowed == ({SDPBackend.CUDNN_ATTENTION} if chosen.full == "cudnn" else training.allowed)
    for call in inference:
        assert SDPBackend.CUDNN_ATTENTION not in call.allowed and len(call.allowed) == 3


def test_writing_text_keeps_off_cudnn_which_plans_for_each_length(monkeypatch):
    model, _ = small_model()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert before, "torch allows cuDNN unless told otherwise"
    stream = engine.Stream(model.eval().requires_grad_(False))
    if stream.step is None:
        pytest.skip("the fast decoding does not know this model: tests/test_engine.py says so")
    stream.read([[1, 2, 3]])
    recorder = Recorder(monkeypatch)
    assert len(list(stream.write(4, seeds=[0]))) == 4
    assert recorder.calls and all(SDPBackend.CUDNN_ATTENTION not in call.allowed for call in recorder.calls)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


# ------------------------------------------------------------------------------------------------------
# The choice

CONFIG = GPTConfig(4, 256, 2, 100, 2048, "SSSL")


class FakeMachine:
    def __init__(self, device="cuda", others=()):
        self.device, self.others = torch.device(device), others

    def all_gather(self, value):
        return [value, *self.others]


def choose_on(monkeypatch, capability, dtype=torch.bfloat16, failing=(), flash3=False, **options):
    """The choice on a GPU of a compute capability, where the backends in `failing` do not pass the probe."""

    def activate(version):
        return "" if flash3 or not version else "ModuleNotFoundError: no"

    def probe(name, *rest):
        return "RuntimeError: no kernel" if name in failing else ""

    monkeypatch.setattr(choices, "_capability", lambda device: capability)
    monkeypatch.setattr(choices, "_probe", probe)
    monkeypatch.setattr(backends, "activate_flash", activate)
    monkeypatch.setattr(backends, "make_block_mask", lambda *size: None)
    machine = FakeMachine(others=options.pop("others", ()))
    defaults = {"config": CONFIG, "compiled": True, "documents": False, "resolved": {}}
    return choices.choose(machine=machine, dtype=dtype, **defaults | options)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "expected"),
    [
        ((9, 0), torch.bfloat16, {}, ("cudnn", "varlen")),  # H100
        ((9, 0), torch.bfloat16, {"flash3": True}, ("flash", "varlen")),
        ((8, 0), torch.bfloat16, {}, ("flash", "varlen")),  # A100
        ((8, 9), torch.float16, {}, ("flash", "varlen")),  # 4090
        ((7, 5), torch.float16, {}, ("sdpa", "flex")),  # T4
        ((7, 0), torch.float16, {"compiled": False}, ("sdpa", "banded")),  # V100, eager
        ((9, 0), torch.bfloat16, {"failing": ("cudnn", "varlen")}, ("flash", "flex")),
        ((9, 0), torch.bfloat16, {"failing": ("cudnn", "flash", "varlen", "flex")},
         ("sdpa", "banded")),
    ],
)  # fmt: skip
def test_the_first_backend_that_a_gpu_can_run_is_chosen(monkeypatch, capability, dtype, options, expected):
    chosen = choose_on(monkeypatch, capability, dtype, **options)
    assert (chosen.full, chosen.window) == expected
    assert chosen.flash == ("FA3" if options.get("flash3") else "")
    assert f"{expected[0]}{' FA3' * bool(chosen.flash)} for full layers" in chosen.reason
    for name in options.get("failing", ()):
        assert f"{name} (RuntimeError: no kernel)" in chosen.reason


def test_a_resumed_run_keeps_its_backends_where_they_run_and_says_where_not(monkeypatch):
    before = Attention("flash", "flex", "mask").resolved
    chosen = choose_on(monkeypatch, (9, 0), resolved={"attention": before}, documents=True)
    assert chosen.resolved == before
    assert "flash for full layers, as at the run's first start" in chosen.reason
    before = Attention("cudnn", "varlen", "varlen", "FA3").resolved
    chosen = choose_on(monkeypatch, (7, 5), torch.float16, resolved={"attention": before}, documents=True)
    assert chosen.resolved == Attention("sdpa", "flex", "mask").resolved
    assert "sdpa for full layers, not cudnn as at the run's first start" in chosen.reason
    assert "cudnn (needs compute capability 8.0)" in chosen.reason
    chosen = choices.choose(CONFIG, FakeMachine("cpu"), torch.float32, True, True, {"attention": before})
    assert chosen.resolved == Attention("sdpa", "blocks", "blocks").resolved
    assert "not varlen as at the run's first start" in chosen.reason and "needs CUDA" in chosen.reason


@pytest.mark.parametrize(
    ("here", "there", "before", "together"),
    [
        ((9, 0), "flash", {}, "flash"),  # H100 and A100, which prefers flash to cudnn
        ((8, 0), "cudnn", {}, "flash"),  # the same two, asked on the other one
        ((8, 0), "cudnn", {"attention": {"full": "sdpa"}}, "cudnn"),  # there it does not run any longer
    ],
)
def test_processes_on_different_gpus_take_the_same(monkeypatch, here, there, before, together):
    config = GPTConfig(4, 256, 2, 100, 2048, "L")
    assert choose_on(monkeypatch, here, config=config, others=[there], resolved=before).full == together


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda q, k, v, window, documents: attention(q, k, v, 15), "differs from float64"),
        (lambda q, k, v, window, documents: attention(q, k, v, 16).detach(), "RuntimeError"),
        (backends.sdpa, ""),
    ],
)
def test_the_probe_turns_down_what_is_wrong_or_fails(monkeypatch, function, said):
    monkeypatch.setitem(choices.BACKENDS, "flash", (function, ("full",)))
    config = GPTConfig(2, 32, 2, 20, 16)
    found = choices._probe("flash", "full", config, torch.device("cpu"), torch.float32, 16)
    assert found.startswith(said) and bool(found) == bool(said)


# ------------------------------------------------------------------------------------------------------
# The key of the token before


def test_a_position_has_key_and_stream_of_the_token_before_it_and_none_at_the_start_of_a_document():
    k = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    x = k[:, 0]  # (B, T, C)
    alone = shift_keys(k)
    assert torch.equal(alone[:, :, 1:], k[:, :, :-1]) and not alone[:, :, 0].any()
    assert torch.equal(previous_token(x), alone[:, 0])
    numbers = torch.tensor([[1, 1, 2, 2, 2, 3], [1, 1, 1, 1, 1, 1]])
    begins = torch.tensor([0, 2, 5, 6, 12, 12, 12], dtype=torch.int32)  # the same documents, for varlen
    expected = alone.clone()
    expected[0, :, [2, 5]] = 0
    for documents in (numbers, begins):
        assert torch.equal(shift_keys(k, visible_from(documents)), expected)
        assert torch.equal(previous_token(x, visible_from(documents)), expected[:, 0])
