"""Weights of one process, read by a child without a copy: how they are handed to an SGLang server."""

from __future__ import annotations

import base64
import io
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing  # it teaches ForkingPickler tensors
from torch import Tensor

from hflow.runtime.engines.sglang.share import handle
from scripts.gpu_acceptance.stage import Figures, Setting, Skipped, main, need

ELEMENTS = {"cuda": 2**28, "cpu": 2**16}
TOLD_S = 50
CHILD = """
import base64, pickle, sys
import torch, torch.multiprocessing
[(name, tensor)] = pickle.loads(base64.b64decode(sys.stdin.readline()))
print(name, tensor.device.type, int(tensor.long().sum()))
tensor[:3] = 7  # the memory itself, not a copy of it
if tensor.is_cuda:
    torch.cuda.synchronize()
"""


def run(setting: Setting) -> Figures:
    count = ELEMENTS[setting.device.type]
    weights = torch.ones(count, dtype=torch.bfloat16, device=setting.device)
    told = _handle(weights) if setting.on_gpu else handle("weights", weights)
    setting.wait()
    free = torch.cuda.mem_get_info()[0] if setting.on_gpu else 0
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=told,
        capture_output=True,
        text=True,
        timeout=TOLD_S,
        env=os.environ,
    )
    figures: Figures = {"bytes": weights.nbytes, "child": child.stdout.strip()}
    need(not child.returncode, child.stderr.strip().splitlines()[-1] if child.stderr.strip() else "", figures)
    setting.wait()
    need(
        child.stdout.split() == ["weights", setting.device.type, str(count)], "it read other numbers", figures
    )
    need(weights[:4].tolist() == [7, 7, 7, 1], "the child had a copy", figures)
    if not setting.on_gpu:
        raise Skipped("shared memory of a CPU works; handles to CUDA's memory need CUDA", figures)
    figures["bytes_not_given_back"] = free - torch.cuda.mem_get_info()[0]
    need(figures["bytes_not_given_back"] < weights.nbytes / 2, "the child left memory behind", figures)
    return figures


def _handle(weights: Tensor) -> str:
    """As `share.handle`, without SGLang's own numbering of devices: there is one."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump([("weights", weights)])
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main(run)
