"""Small Python values over torch's default group, as JSON: torch itself would unpickle them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def all_gather_values(value: Any) -> list[Any]:
    """Return every rank's ``value``, as `communicators.all_gather_object` does; collective."""
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    counts = [int(size) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    pairs = zip(parts, counts, strict=True)
    return [json.loads(part[:count].cpu().numpy().tobytes()) for part, count in pairs]
