"""Llama of `transformers` with random weights, before and after the recipe of docs/swap.md."""

import re
from pathlib import Path
from typing import Any

from decoder import VOCABULARY, randomised
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

RECIPE = Path(__file__).parents[2] / "docs" / "swap.md"


def recipe() -> Any:
    """Return the function `swap` as the page gives it, so that what readers copy is what is tested."""
    (code,) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # our own page
    return names["swap"]


def llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int) -> nn.Module:
    """Make a Llama in fp32 with the library's random weights."""
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def small() -> nn.Module:
    """Make the Llama of the tests: 3 layers of width 192, gammas of both signs."""
    return randomised(llama(192, 3, 3, 512, VOCABULARY))


def swapped(network: nn.Module, impl: str = "fused") -> nn.Module:
    """Exchange the norms in place, by the recipe."""
    assert recipe()(network, LlamaRMSNorm, impl) == 2 * network.config.num_hidden_layers + 1
    return network


def logits_of(network: nn.Module) -> Any:
    """Return tokens -> logits of a network whose output is transformers' own record."""
    return lambda tokens: network(input_ids=tokens).logits
