"""A training state of a given size in the Hugging Face layout: a small decoder, and AdamW that has really stepped.

The parameters have the names and shapes of Qwen2 (no rotary embedding: it has none). One real training step fills
exp_avg, exp_avg_sq and step, so that every byte is as random as in a real run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn import functional

BYTES_PER_PARAMETER = 12  # the weight, exp_avg and exp_avg_sq, each in float32
_HIDDEN_SIZES = (2048, 1536, 1024, 768, 512, 256, 128)
_LEAST_LAYERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions that decide the size of the model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def kv_dim(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden**2 + self.hidden + 2 * (self.hidden + 1) * self.kv_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (self.vocab + 1) * self.hidden


QWEN2_5_1_5B = Shape(hidden=1536, layers=28, heads=12, kv_heads=2, intermediate=8960, vocab=151936)
SMALL = Shape(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=1024, vocab=8192)


def shape_of(total_bytes: int) -> Shape:
    """Choose dimensions for this size of weights and AdamW state: the vocabulary, about a quarter, takes the rest."""
    parameters = total_bytes // BYTES_PER_PARAMETER
    for hidden in _HIDDEN_SIZES:
        heads = hidden // 64
        one = Shape(hidden=hidden, layers=1, heads=heads, kv_heads=heads // 2, intermediate=4 * hidden, vocab=0)
        layers = parameters * 3 // 4 // one.layer_parameters
        if layers >= _LEAST_LAYERS or hidden == _HIDDEN_SIZES[-1]:
            break
    layers = max(1, layers)
    vocab = max(64, (parameters - layers * one.layer_parameters) // hidden - 1)
    return Shape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=heads // 2, intermediate=one.intermediate, vocab=vocab
    )


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head_dim = shape.hidden // shape.heads
        self._groups = shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_dim)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_dim)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = k.repeat_interleave(self._groups, 1), v.repeat_interleave(self._groups, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """tokens → loss. The output layer is the embedding, as in Qwen2.5-1.5B and GPT-2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x[:, :-1]), self.embed_tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class TrainingState:
    """A model, AdamW and a schedule, after one step."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape = shape
        self.device = torch.device(device)
        with torch.device("meta"):
            model = Decoder(shape)
        self.model = model.to_empty(device=self.device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.uniform_(-0.03, 0.03)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.device.type == "cuda")
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _warm_up)
        self.train_step(self.tokens(1, 16))

    def tokens(self, sequences: int, length: int) -> torch.Tensor:
        return torch.randint(self.shape.vocab, (sequences, length), device=self.device)

    def train_step(self, tokens: torch.Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        """The keyword arguments for a Checkpointer."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All live tensors, flat. Collected each time: some loaders replace the tensors."""
        found: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found.update({f"optimizer.{index}.{name}": value for name, value in values.items()})
        return found

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def wipe(self) -> None:
        """Overwrite everything with zeros, so that a restore must bring every byte."""
        for tensor in self.tensors().values():
            tensor.zero_()


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """A fingerprint of the state, computed on each tensor's device."""
    sums = {name: _bit_sums(tensor) if tensor.is_cuda else (_hash(tensor),) for name, tensor in tensors.items()}
    return {name: tuple(int(number) for number in numbers) for name, numbers in sums.items()}


def _hash(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous()
    return int(xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())))


def _bit_sums(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sums over the bits, one of them weighted by position. They stay on the GPU, so that nothing waits."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.int32)
    piece = 2**26
    plain = torch.zeros((), dtype=torch.int64, device=bits.device)
    weighted = torch.zeros_like(plain)
    places = torch.arange(1, min(piece, bits.numel()) + 1, dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(piece)):
        total = part.sum(dtype=torch.int64)
        plain += total
        weighted += (part * places[: part.numel()]).sum() + total * number * piece
    return plain, weighted
