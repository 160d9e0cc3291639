"""The backends of causal attention. `attention.py` chooses among them, once, at start.

Each is a function of q, k, v (B, H, T, D), a window and, if the backend can, the boundaries of documents. It
returns (B, H, T, D). On 2026-11-26 those for CUDA were right on one H200 with PyTorch 2.11; windows at speed
were not reached. Tests on a CPU replace the CUDA kernel by a slow one.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# SDPA's kernels that need no preparation for a shape. cuDNN builds a plan for each new length: right for
# training, where all batches have one shape, wrong for everything else.
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

BLOCK_MASKS = {}  # (T, window) -> flex_attention's block mask; filled before anything is compiled


def masked(q, k, v, window: int, visible=None):
    """The general way: each of the last Tq of Tk positions, Tq <= Tk, sees the last `window` positions if
    they are `visible`, (B, 1, 1 or Tq, Tk) bool; None: all."""
    Tq, Tk = q.size(2), k.size(2)
    if visible is not None:
        return sdpa(q, k, v, mask=band(Tq, Tk, window, q.device) & visible)
    if Tq == Tk and window >= Tk:
        return sdpa(q, k, v)
    if Tq == Tk and Tk % window == 0:
        return banded(q, k, v, window)
    if Tq == 1:  # one new token: everything in its window is its past
        return sdpa(q, k[:, :, -window:], v[:, :, -window:], causal=False)
    return sdpa(q, k, v, mask=band(Tq, Tk, window, q.device))


def sdpa(q, k, v, window: int = 0, documents=None, *, mask=None, causal: bool = True):
    """PyTorch's fused attention by the kernel that it prefers; without gradients, a kernel of ANY_LENGTH.

    mask: what each query sees, bool; None: all, or with `causal` all up to its own position.
    """
    if mask is None and causal and q.device.type == "mps" and q.dtype != torch.float32:
        # In 16 bit and without gradients, is_causal shows later tokens there (pytorch/pytorch#195910)
        mask = band(q.size(2), k.size(2), k.size(2), q.device)
    causal = causal and mask is None
    if q.device.type == "cuda" and not torch.is_grad_enabled():
        with sdpa_kernel(ANY_LENGTH, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def cudnn(q, k, v, window: int, documents=None):
    """SDPA by cuDNN, in training. Without gradients lengths vary, and each would need a plan of its own."""
    if not torch.is_grad_enabled():
        return sdpa(q, k, v)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash(q, k, v, window: int, documents=None):
    """SDPA by FlashAttention: version 2, or the one that `activate_flash` has put in its place."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def varlen(q, k, v, window: int, documents=None):
    """FlashAttention over sequences that lie one behind another, with a window.

    documents: (N + 1,) int32, where each sequence begins in the B * T positions, and then their end, perhaps
    several times. None: each row is one sequence.
    """
    from torch.nn.attention.varlen import varlen_attn  # the import takes seconds

    B, H, T, D = q.shape
    if documents is None:
        documents = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    q, k, v = (x.transpose(1, 2).reshape(B * T, H, D) for x in (q, k, v))
    # (left, right): how many positions a token sees before and after its own; -1: all
    size = (-1 if window >= T else window - 1, 0)
    y = varlen_attn(q, k, v, documents, documents, T, T, window_size=size)
    return y.view(B, T, H, D).transpose(1, 2)


def flex(q, k, v, window: int, documents=None):
    """FlexAttention with a block mask, for compiled training at the run's row length; else `masked`."""
    T = q.size(2)
    if not torch.is_grad_enabled() or (T, window) not in BLOCK_MASKS:
        return masked(q, k, v, window)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=BLOCK_MASKS[T, window])


def make_block_mask(T: int, window: int, device):
    """Make the mask that `flex` needs, once. Compiled code cannot make it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(b, h, query, key):
        return (query >= key) & (query - key < window)

    BLOCK_MASKS[T, window] = create_block_mask(sees, None, None, T, T, device=device)


def band(Tq: int, Tk: int, window: int, device):
    """(Tq, Tk) bool: which of the Tk positions each of the last Tq positions sees."""
    distance = torch.arange(Tk - Tq, Tk, device=device)[:, None] - torch.arange(Tk, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def banded(q, k, v, window: int, documents=None):
    """A sliding window without a T x T mask: a block of `window` queries sees its own and the one before.

    It computes T * 2 * window scores for each head instead of T * T. `window` divides T.
    """
    B, H, T, D = q.shape
    blocks = T // window
    q = q.reshape(B, H, blocks, window, D)

    def with_previous(x):  # (B, H, T, D) -> (B, H, blocks, 2 * window, D); the first block's past is zeros
        x = x.reshape(B, H, blocks, window, D)
        return torch.cat((F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x), dim=3)

    mask = band(window, 2 * window, window, q.device).repeat(blocks, 1, 1)  # (blocks, window, 2 * window)
    mask[0, :, :window] = False
    q, k, v = q.flatten(1, 2), with_previous(k).flatten(1, 2), with_previous(v).flatten(1, 2)
    y = sdpa(q, k, v, mask=mask.repeat(H, 1, 1)[None])  # a mask of 3 dimensions is not fused
    return y.reshape(B, H, T, D)


def activate_flash(version: str) -> str:
    """Replace PyTorch's FlashAttention 2 by "FA3" or "FA4"; "" undoes it.

    Returns why that failed, or "". The user installs the package.
    """
    try:
        if version:
            torch.nn.attention.activate_flash_attention_impl(version)
        elif torch.nn.attention.current_flash_attention_impl():
            torch.nn.attention.restore_flash_attention_impl()
    except Exception as error:  # whatever a foreign package raises
        return error_in_a_line(error)
    return ""


@contextlib.contextmanager
def for_any_length():
    """Keep SDPA from using cuDNN, which would build a plan for each number of keys; not for compiled code.

    It costs a microsecond; `sdpa_kernel` costs 24, which a token of a small model would feel.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def error_in_a_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")
