"""What CPU kernels allocate and free within themselves, where it is too much to leave out: oneDNN's copies.

oneDNN computes on copies in a layout of its own. With X, W and Y the bytes of a convolution's input, weight and output,
the profiler's record of torch 2.13 shows, beyond the results, at the fullest moment

    forward    the copies of X and W, or the copy of Y beside Y
    backward   the copies of Y and X, or of W beside W, or of Y and of W with its channels padded to 16;
               in 16 bits, the weight's gradient in 32 besides

where X is copied if its channels are a multiple of 8. A matrix product in 16 bits copies its second operand if the
first is transposed, as for a weight's gradient. Other kernels' own memory was measured to be small: some 100 kB.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten
_FORWARD = (_aten.convolution.default, _aten._convolution.default)
_BACKWARD = _aten.convolution_backward.default


def workspace(func, args) -> int:
    """Bytes that an operator holds besides its inputs and results at its fullest moment, on the CPU."""
    if func in _FORWARD:
        x, w, groups = args[0], args[1], args[8]
        if groups != 1 or x.dim() != 4:
            return 0
        return max((_bytes(x) if x.shape[1] % 8 == 0 else 0) + _bytes(w), _result(args))
    if func is _BACKWARD:
        y, x, w, groups = args[0], args[1], args[2], args[9]
        if groups != 1 or x.dim() != 4:
            return 0
        channels = x.shape[1]
        padded = _bytes(w) * (-(-channels // 16) * 16) // channels
        wide = 2 * _bytes(w) if w.element_size() == 2 else 0
        copied = _bytes(x) if channels % 8 == 0 else 0
        return max(_bytes(y) + copied + wide, _bytes(w), _bytes(y) + padded - _bytes(w))
    if func is _aten.mm.default:
        a, b = args
        return _bytes(b) if b.element_size() == 2 and a.stride(0) == 1 and a.shape[0] > 1 else 0
    return 0


def _bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _result(args) -> int:
    """Bytes of a convolution's result."""
    x, w, _, stride, padding, dilation = args[:6]
    size = x.shape[0] * w.shape[0] * x.element_size()
    for n, k, s, p, d in zip(x.shape[2:], w.shape[2:], stride, padding, dilation):
        size *= (n + 2 * p - d * (k - 1) - 1) // s + 1
    return size
