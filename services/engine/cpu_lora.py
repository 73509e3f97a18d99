"""Apply each LoRA adapter to the tokens of its own requests on a CPU, with one product per adapter.

vLLM's CPU code applies the last adapter to tokens without one (index -1), and gathers the matrices of every
token, [tokens, out, in], before it multiplies. Its runner treats every batch as prefills, so the add_*
methods end up in the methods overridden here. Shapes: inputs [tokens, in], matrices [places, 1, out, in].
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

# Each adapter's place on the device, and its rows of the batch (None: all rows).
Rows = list[tuple[int, torch.Tensor | None]]


def rows_of(indices: torch.Tensor) -> Rows:
    """Return the rows of each adapter. indices: [rows], the place of each row's adapter, or -1."""
    places = torch.unique(indices).tolist()
    return [
        (place, None if len(places) == 1 else torch.nonzero(indices == place).flatten())
        for place in places
        if place >= 0
    ]


class GroupedPunica(PunicaWrapperCPU):
    """Multiplies by the adapters of one model. vLLM sets each token's adapter before a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: Rows = []
        self._sampled: Rows = []
        self._counts = (0, 0)  # numbers of tokens and of sampled tokens

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
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
        del add_inputs  # always true
        if len(x) == self._counts[0]:  # else this is a drafter's pass, which shares the model's embeddings
            _add(y, x, w_t_all, self._tokens)

    def _expand_slice_prefill(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, *how: Any
    ) -> None:
        first, size, _ = how  # the third is add_inputs
        if len(x) == self._counts[0]:
            _add(y[:, first : first + size], x, w_t_all, self._tokens)


def _multiply(y: torch.Tensor, x: torch.Tensor, matrices: torch.Tensor, rows: Rows, scale: float) -> None:
    """Set the rows of y [rows, out] that have an adapter to scale * x [rows, in] times its matrix."""
    for place, own in rows:
        product = _product(x, matrices, place, own, y.dtype)
        target = slice(None) if own is None else own
        y[target, : product.shape[1]] = scale * product


def _add(y: torch.Tensor, x: torch.Tensor, matrices: torch.Tensor, rows: Rows) -> None:
    """Add x [rows, in] times the matrix of each row's adapter to the rows of y [rows, out] that have one."""
    for place, own in rows:
        product = _product(x, matrices, place, own, y.dtype)
        width = min(product.shape[1], y.shape[1])  # vLLM pads both, sometimes differently
        if own is None:
            y[:, :width] += product[:, :width]
        else:
            y[:, :width].index_add_(0, own, product[:, :width])


def _product(
    x: torch.Tensor, matrices: torch.Tensor, place: int, own: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    matrix = matrices[place].flatten(0, -2).to(dtype)  # [out, in]
    return (x if own is None else x[own]).to(dtype) @ matrix.T
