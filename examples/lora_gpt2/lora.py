"""A frozen GPT-2 of Hugging Face with low-rank adapters, which are trained.

Source: Radford et al. 2019 (GPT-2); Hu et al. 2021 (LoRA): a matrix W becomes W + (alpha / rank) B A, and B starts at zero.
"""

import peft
import transformers
from torch import nn


def lora_gpt2(
    *,
    vocab_size: int,
    seq_len: int,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    rank: int = 8,
    alpha: int = 16,
    dropout: float = 0.0,
    std: float = 0.02,
) -> nn.Module:
    """Return the model. It maps tokens int64 (B, T) to an output with `logits` (B, T, vocab_size).

    The base has random weights, which depend on the run's seed. `model.init_from` replaces them (README.md).
    """
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=seq_len,
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        initializer_range=std,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    # fan_in_fan_out: GPT-2 stores its matrices transposed
    adapter = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=["c_attn", "c_fc", "c_proj"], lora_dropout=dropout, fan_in_fan_out=True
    )
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapter)
