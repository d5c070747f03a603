"""The loops that one writes by hand for two recipes: the same models, one batch that is on the device, torch's own optimizers.

python benchmarks/comparison/bare_recipes.py gpt2 cuda        prints samples a second
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.gpt import GPT
from models.resnet import ResNet


def bare(name: str, *, device: str) -> float:
    """Return the samples a second of a loop as one writes it by hand."""
    model, inputs, targets, optimizer = {"gpt2": _bare_gpt2, "resnet50": _bare_resnet50}[name](torch.device(device))
    compiled = torch.compile(model) if name == "gpt2" else model
    times: list[float] = []
    for _ in range(60):
        with torch.autocast(device, torch.bfloat16):
            outputs = compiled(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
        loss.backward()
        if name == "gpt2":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if len(times) % 10 == 9:
            loss.item()  # as a loop does that prints now and then
        times.append(time.perf_counter())
    return len(targets) * 30 / (times[59] - times[29])


def _bare_gpt2(device: torch.device) -> tuple[Any, Any, Any, Any]:
    model = GPT(vocab_size=50304, seq_len=1024, dim=768, num_layers=12, num_heads=12, tie_embeddings=True).to(device)
    tokens = torch.randint(50304, (12, 1025), device=device)
    is_fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=is_fused)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), optimizer


def _bare_resnet50(device: torch.device) -> tuple[Any, Any, Any, Any]:
    model = ResNet(in_channels=3, num_classes=1000, depth=50, stem="imagenet", norm="batch", zero_init_last_norm=True)
    model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True, weight_decay=1e-4)
    images = torch.rand(256, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    return model, images, torch.randint(1000, (256,), device=device), optimizer


if __name__ == "__main__":
    print(bare(sys.argv[1], device=sys.argv[2]))
