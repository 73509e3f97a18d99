"""Apply an adapter to the tokens of its own requests, with one product per adapter of a batch.

vLLM's CPU form takes a token without an adapter (index -1) for one of the adapter in the last place, and
gathers the matrices of each token, [tokens, out, in], before it multiplies.

Leans on: vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU (update_metadata, token_lora_indices,
sampler_indices), whose add_* methods end in those that are overridden here, as vLLM's runner calls every
batch one of prefills; and on its shapes: inputs [tokens, in], matrices [places, 1, out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# An adapter's place on the device, and its rows of the batch; None: all rows.
Rows = list[tuple[int, torch.Tensor | None]]


def rows_of(indices: torch.Tensor) -> Rows:
    """Return the rows of each adapter. indices: [rows], each row's adapter by its place, or -1."""
    places = torch.unique(indices).tolist()
    return [
        (place, None if len(places) == 1 else torch.nonzero(indices == place).flatten())
        for place in places
        if place >= 0
    ]


class GroupedPunica(PunicaWrapperCPU):
    """The products of one model's adapters; each token's adapter is set before each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: Rows = []
        self._sampled: Rows = []
        self._counts = (0, 0)  # rows of both

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Note the adapter of each token and each sampled token of the next step."""
        super().update_metadata(*args, **kwargs)
        tokens, sampled = self.token_lora_indices, self.sampler_indices
        self._tokens, self._sampled = rows_of(tokens), rows_of(sampled)
        self._counts = len(tokens), len(sampled)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Add the adapters of the language model's head to the logits `y`."""
        del kwargs
        if len(x) != self._counts[1]:
            return
        low = x.new_zeros((len(x), lora_b_stacked.size(-1)), dtype=torch.float32)
        _multiply(low, x, lora_a_stacked, self._sampled, scale)
        _add(y, low, lora_b_stacked, self._sampled)

    def _shrink_prefill(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        if len(x) == self._counts[0]:
            _multiply(y, x, w_t_all, self._tokens, scale)

    def _expand_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, add_inputs: bool
    ) -> None:
        del add_inputs  # always
        if len(x) == self._counts[0]:  # else a drafter's, which shares the model's embeddings
            _add(y, x, w_t_all, self._tokens)

    def _expand_slice_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, *how: Any
    ) -> None:
        first, size, _ = how  # columns of y; whether to add, which is always true
        if len(x) == self._counts[0]:
            _add(y[:, first : first + size], x, w_t_all, self._tokens)


def _multiply(y: torch.Tensor, x: torch.Tensor, matrices: torch.Tensor, rows: Rows, scale: float) -> None:
    """Set y [rows, out] to scale * x [rows, in] times its adapter's matrix, for rows that have one."""
    for place, own in rows:
        product = _product(x, matrices, place, own, y.dtype)
        target = slice(None) if own is None else own
        y[target, : product.shape[1]] = scale * product


def _add(y: torch.Tensor, x: torch.Tensor, matrices: torch.Tensor, rows: Rows) -> None:
    """Add x [rows, in] times its adapter's matrix to y [rows, out], for rows that have one."""
    for place, own in rows:
        product = _product(x, matrices, place, own, y.dtype)
        width = min(product.shape[1], y.shape[1])  # vLLM pads both, not always alike
        if own is None:
            y[:, :width] += product[:, :width]
        else:
            y[:, :width].index_add_(0, own, product[:, :width])


def _product(
    x: torch.Tensor, matrices: torch.Tensor, place: int, own: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    matrix = matrices[place].flatten(0, -2).to(dtype)  # [out, in]
    return (x if own is None else x[own]).to(dtype) @ matrix.T
