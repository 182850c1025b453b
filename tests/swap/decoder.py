"""A small decoder like Llama's, with norms before attention, before the MLP, on queries and keys, and at the end.

It brings the calls that a network makes of a norm: (B, T, N) rows of the residual stream, and heads cut from a fused
projection, whose rows lie two strides apart and which autocast hands over in 16 bits beside an fp32 gamma.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

VOCABULARY = 257
LAYERS = 2
NORMS = 4 * LAYERS + 1

MakeNorm = Callable[[int], nn.Module]


class LlamaNorm(nn.Module):
    """The norm as model code writes it out: x · rstd rounded to x's dtype, then times the weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x."""
        hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * hat.to(x.dtype)


class Block(nn.Module):
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, inner: int, norm: MakeNorm) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = norm(width), norm(width)
        self.query_norm, self.key_norm = norm(width // heads), norm(width // heads)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block, (B, T, N)."""
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * value)


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, VOCABULARY); `reentrant` not None checkpoints each block in that way."""

    def __init__(self, norm: MakeNorm, width: int = 192, heads: int = 3, inner: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner, norm) for _ in range(LAYERS))
        self.last, self.head = norm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.last(x))


def randomised(network: nn.Module, seed: int = 1) -> nn.Module:
    """Give every parameter random values, gammas of both signs among them, the same for every network of one form."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(network.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator)
        spread = drawn if parameter.dim() == 1 else drawn / parameter.shape[-1] ** 0.5
        with torch.no_grad():
            parameter.copy_(spread)
    return network


def batch(seed: int = 2, rows: int = 3, length: int = 65) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets, (rows, length) each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, rows, length), generator=generator)
    return tokens[0], tokens[1]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, taken in no less than float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(wide.flatten(0, -2), targets.flatten())
