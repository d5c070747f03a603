"""Models of other people, tiny and with random weights: of transformers, timm, torchvision, x-transformers and peft, and by hand.

IMAGES take (B, 3, 16, 16) and give 10 classes; TOKENS take (B, 12) of 32 and give the next.
"""

import copy
import importlib
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

Make = Callable[[], nn.Module]


# --- Hugging Face


def hf(kind: str, task: str, **options: Any) -> Make:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        return getattr(transformers, f"{kind}{task}")(config)

    return make


LM = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 16,
}  # fmt: skip
ROTARY = LM | {"num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
GPT2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 4}
VISION = {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 10, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
              "intermediate_size": 24}  # fmt: skip


def lora() -> nn.Module:
    import peft
    import transformers

    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))


def evaluated() -> nn.Module:
    """As `from_pretrained` gives it: in eval mode."""
    return hf("GPT2", "LMHeadModel", **GPT2)().eval()


# --- timm, torchvision, x-transformers


def _timm(name: str, **options: Any) -> Make:
    return lambda: importlib.import_module("timm").create_model(name, num_classes=10, **options)


def _vision(name: str, *sizes: Any, **options: Any) -> Make:
    return lambda: getattr(importlib.import_module("torchvision").models, name)(*sizes, num_classes=10, **options)


def x_transformer() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=3, heads=2, attn_dim_head=8, rotary_pos_emb=True, attn_dropout=0.1, ff_dropout=0.1)
    return TransformerWrapper(num_tokens=32, max_seq_len=12, attn_layers=layers)


# --- by hand


class NanoGPT(nn.Module):
    """As in nanoGPT: a ModuleDict, the blocks in a list in it, a mask in a buffer, functional attention with dropout."""

    class Block(nn.Module):
        def __init__(self, dim: int, heads: int, length: int, dropout: float) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attn, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.heads, self.dropout = heads, dropout
            self.register_buffer("bias", torch.tril(torch.ones(length, length)).bool())

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.attn(self.ln_1(x)).split(C, dim=2))
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:T, :T], dropout_p=p)
            x = x + F.dropout(self.proj(y.transpose(1, 2).reshape(B, T, C)), self.dropout, self.training)
            return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)

    def __init__(self, dim: int = 16, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(32, dim), "wpe": nn.Embedding(12, dim),
            "h": nn.ModuleList(self.Block(dim, 4, 12, dropout) for _ in range(depth)), "ln_f": nn.LayerNorm(dim),
        })  # fmt: skip
        self.lm_head = nn.Linear(dim, 32, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class NamedTraps(nn.Module):
    """Modules that are called what the framework calls its questions."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Linear(3 * 16 * 16, 12)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)))
        self.mixers = nn.ModuleList([nn.Linear(12, 12)])
        self.tensor_plan = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor_plan(self.mixers[0](self.blocks(self.chain(x.flatten(1)))))


class FunctionalDropout(nn.Sequential):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(torch.tanh(self.linear(x)), 0.2, self.training)

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(768, 16), *(self.Layer() for _ in range(4)), nn.Linear(16, 10))


class RecurrentDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=24, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class StochasticDepth(nn.Module):
    """LayerDrop by Python's `random`, a probability by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(768, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        import numpy as np

        x = self.stem(x.flatten(1))
        for layer in self.layers:
            share = np.random.rand() if self.training else 0.5
            x = x + share * layer(x) if not self.training or random.random() > 0.3 else x + 0.0 * layer(x)
        return self.head(x)


class SpectralNorm(nn.Sequential):
    def __init__(self) -> None:
        hidden = [spectral_norm(nn.Linear(16, 16)) for _ in range(2)]
        super().__init__(nn.Flatten(), spectral_norm(nn.Linear(768, 16)), nn.Tanh(), *hidden, nn.Linear(16, 10))


class WeightNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), weight_norm(nn.Linear(768, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 10)))


class Codebook(nn.Module):
    """Vector quantisation whose codes, in a buffer, follow what is assigned to them (through `.data`, as it is often written)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(768, 4), nn.Linear(4, 10)
        self.register_buffer("codes", torch.linspace(-1, 1, 24).view(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x.flatten(1))
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        quantised = self.codes[nearest].clone()
        if self.training:
            one_hot = F.one_hot(nearest, 6).to(z.dtype)
            self.counts.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.codes.data.mul_(0.9).add_(one_hot.t() @ z.detach() / self.counts[:, None], alpha=0.1)
        return self.head(z + (quantised - z).detach() + quantised)


class Queue(nn.Module):
    """A queue of earlier samples, as in MoCo, in a buffer with a pointer in another; a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(768, 8), nn.Linear(8, 10)
        self.register_buffer("queue", torch.linspace(-1, 1, 16 * 8).view(16, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.encoder(x.flatten(1)) - self.mean)
        seen = z @ self.queue.clone().t() @ self.queue.clone() / 16
        if self.training:
            with torch.no_grad():
                at = (self.pointer + torch.arange(2, device=x.device)) % 16
                self.queue[at] = z[:2]
                self.pointer[0] = (self.pointer[0] + 2) % 16
                self.mean = 0.9 * self.mean + 0.1 * z.mean(0)
        return self.head(z + seen)


class FrozenPart(nn.Module):
    """A BatchNorm that its author put into eval mode, and keeps there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(768, 12), nn.BatchNorm1d(12), nn.Linear(12, 10)
        self.norm.eval()

    def train(self, mode: bool = True) -> "FrozenPart":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.stem(x.flatten(1)))))


class Teacher(nn.Module):
    """A teacher averaged in the forward, as in byol-pytorch: frozen parameters that move."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(768, 12), nn.Tanh())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters()):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        return self.head(torch.cat([self.student(x), self.teacher(x)], dim=1))


class MixtureOfExperts(nn.Module):
    """Experts in a list, of which a sample uses one: also the whole model may be such a list."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(12, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.router(x).softmax(-1)
            chosen, y = weights.argmax(-1), torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                at = (chosen == i).nonzero().squeeze(-1)
                if len(at):
                    y = y.index_add(0, at, weights[at, i, None] * expert(x[at]))
            return x + y

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(768, 12), nn.Linear(12, 10)
        self.layers = nn.ModuleList(self.Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OneMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.moe, self.head = nn.Linear(768, 12), MixtureOfExperts.Layer(), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.stem(x.flatten(1))))


class UNet(nn.Module):
    class Double(nn.Sequential):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
                             nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([self.Double(3, 4), self.Double(4, 8), self.Double(8, 8)])
        self.ups = nn.ModuleList([self.Double(16, 4), self.Double(8, 4)])
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs[:-1]:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.downs[-1](x)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x.mean((2, 3)))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.fft.fft(x, dim=2).real  # over the features: a token must not see later ones
        return self.head(self.layers(x))


class Penalised(nn.Module):
    """A gradient penalty in the forward: double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(768, 12), nn.Tanh(), nn.Linear(12, 10))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return self.body(x.flatten(1))
        x = x.flatten(1).detach().requires_grad_()
        y = self.body(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 0.01 * slope.square().sum(1, keepdim=True) * torch.linspace(0, 1, 10, dtype=x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.triu(torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool), diagonal=1)
        for attention in self.attentions:
            x = x + attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return self.head(x)


IMAGES: dict[str, Make] = {
    "hf vit": hf("ViT", "ForImageClassification", **VISION, hidden_dropout_prob=0.1),
    "hf resnet": hf("ResNet", "ForImageClassification", num_channels=3, num_labels=10, embedding_size=8, hidden_sizes=[8, 16],
                     depths=[1, 1], layer_type="basic"),
    "timm vit": _timm("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=4, drop_path_rate=0.2),
    "timm convnext": _timm("convnext_atto", patch_size=1, kernel_sizes=3, depths=(1, 1, 2, 1), dims=(4, 4, 8, 8), drop_path_rate=0.2),
    "timm resnet": _timm("resnet10t", channels=(4, 8, 8, 8), stem_width=4),
    "timm swin": _timm("swin_tiny_patch4_window7_224", img_size=16, patch_size=2, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2)),
    "torchvision swin": _vision("SwinTransformer", [2, 2], 8, [2, 2], [2, 2], [4, 4]),
    "torchvision mobilenet": _vision("mobilenet_v3_small", width_mult=0.1),
    "torchvision densenet": _vision("DenseNet", 4, (2, 2), 8),
    "torchvision shufflenet": _vision("ShuffleNetV2", [2, 2, 2], [4, 8, 16, 32, 32]),
    "named traps": NamedTraps,
    "functional dropout": FunctionalDropout,
    "layer drop": StochasticDepth,
    "spectral norm": SpectralNorm,
    "weight norm": WeightNorm,
    "codebook": Codebook,
    "queue": Queue,
    "frozen part": FrozenPart,
    "teacher": Teacher,
    "moe": MixtureOfExperts,
    "one moe": OneMixture,
    "unet": UNet,
    "gradient penalty": Penalised,
}  # fmt: skip
TOKENS: dict[str, Make] = {
    "hf gpt2": hf("GPT2", "LMHeadModel", **GPT2),
    "hf gpt2, in eval mode": evaluated,
    "hf llama": hf("Llama", "ForCausalLM", **ROTARY),
    "hf gpt-neox": hf("GPTNeoX", "ForCausalLM", **LM),
    "hf bert": hf("Bert", "LMHeadModel", **LM, is_decoder=True),
    "hf mamba": hf("Mamba", "ForCausalLM", vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4),
    "hf mixtral": hf("Mixtral", "ForCausalLM", **EXPERTS),
    "hf gemma": hf("Gemma", "ForCausalLM", **ROTARY, head_dim=4),
    "peft lora": lora,
    "x-transformers": x_transformer,
    "nanogpt": NanoGPT,
    "lstm": RecurrentDropout,
    "nn.TransformerEncoder": TorchEncoder,
    "nn.MultiheadAttention": Attention,
    "fft": Fourier,
}  # fmt: skip


def make(name: str) -> nn.Module:
    return (IMAGES | TOKENS)[name]()
