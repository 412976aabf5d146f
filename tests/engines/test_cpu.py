"""Running Megatron without CUDA: what each rule mends, and that nothing else is touched."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hflow.runtime.engines.megatron import cpu, present_device

MEGATRON = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core")))
ENVIRONMENT = {"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

ON_CUDA = torch.device("cuda")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="here Megatron's own code works")


# rule, a file of Megatron that needs it, and an expression that it mends
CASES = [
    ("current device", "tensor_parallel/layers.py", "torch.zeros(1, device=torch.cuda.current_device())"),
    ("device keyword", "pipeline_parallel/schedules.py", "torch.zeros([], dtype=torch.int, device='cuda')"),
    ("synchronize", "pipeline_parallel/p2p_communication.py", "torch.cuda.synchronize()"),
    ("tensor type", "optimizer/clip_grads.py", "1 / (torch.zeros(1).type() == 'torch.cuda.FloatTensor')"),
    ("move to device", "models/common/language_module/language_module.py", "torch.zeros(1).cuda()"),
    ("compiled functions", "jit.py", "enable_jit_fuser()"),
]

# rule, and what it mends in Megatron's linear layers, as often as it is there
PRODUCTS = [
    ("product", ["torch.matmul(input, weight.t())", "torch.matmul(total_input, weight.t())"]),
    ("product of gradients", ["grad_output.matmul(weight)"] * 2 + ["grad_output.t().matmul(total_input)"]),
]

# rule, where Megatron names a collective of torch's that it mends, and what it names
COLLECTIVES = [
    ("reduce-scatter", "distributed/param_and_grad_buffer.py", "torch.distributed.reduce_scatter_tensor"),
    ("reduce-scatter", "distributed/param_and_grad_buffer.py", "reduce_scatter_with_fp32_accumulation"),
    ("reduce-scatter", "tensor_parallel/mappings.py", "torch.distributed.reduce_scatter_tensor"),
    ("reduce-scatter", "tensor_parallel/layers.py", "torch.distributed.reduce_scatter_tensor"),
    ("all-gather", "distributed/param_and_grad_buffer.py", "torch.distributed.all_gather_into_tensor"),
    ("all-gather", "tensor_parallel/mappings.py", "torch.distributed.all_gather_into_tensor"),
    ("all-gather", "tensor_parallel/layers.py", "torch.distributed.all_gather_into_tensor"),
]


def enable_jit_fuser() -> None:
    """As in Megatron: imports the compiler; here it may not."""
    raise RuntimeError


def disable_jit_fuser() -> None: ...


def test_every_rule_has_a_case() -> None:
    cases = [name for name, *_ in [*CASES, *PRODUCTS, *COLLECTIVES]]
    assert list(dict.fromkeys(cases)) == [rule.name for rule in cpu.RULES]


@pytest.fixture
def on_cuda() -> Iterator[None]:
    """What is built next is for a GPU, be there one or not."""
    present_device.work_on(ON_CUDA)
    yield
    present_device.work_on(torch.device("cpu"))


@without_cuda
@pytest.mark.parametrize("name,file,expression", CASES)
def test_a_rule_is_needed_and_works(name: str, file: str, expression: str) -> None:
    rule = next(rule for rule in cpu.RULES if rule.name == name)
    assert re.search(rule.pattern, (MEGATRON / file).read_text()), "Megatron no longer needs this rule"
    with pytest.raises((RuntimeError, AssertionError, ZeroDivisionError)):
        eval(expression)
    eval(cpu.rewrite(expression), globals() | {cpu.NAME: present_device})


@pytest.mark.parametrize("name,expressions", PRODUCTS)
def test_all_products_of_linear_layers_can_be_told_apart(
    name: str, expressions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they do in bf16 is `test_products`'."""
    [rule] = (rule for rule in cpu.RULES if rule.name == name)
    layers = (MEGATRON / "tensor_parallel/layers.py").read_text()
    assert [match.group() for match in re.finditer(rule.pattern, layers)] == expressions
    asked = list[tuple[torch.Tensor, torch.Tensor]]()
    monkeypatch.setattr(present_device, "product", lambda a, b: asked.append((a, b)) or a @ b)
    x, weight = torch.randn(5, 3), torch.randn(5, 3)
    names = {"input": x, "total_input": x, "weight": weight, "grad_output": torch.randn(5, 5), "torch": torch}
    for expression in expressions:
        assert torch.equal(
            eval(cpu.rewrite(expression), names | {cpu.NAME: present_device}), eval(expression, names)
        )
    assert len(asked) == len(expressions)


@pytest.mark.parametrize("name,file,collective", COLLECTIVES)
def test_collectives_are_ours(name: str, file: str, collective: str) -> None:
    """What they do is `test_gloo_collectives`'."""
    variable = f"dist_{name.replace('-', '_')}_func"
    assert f"{variable} = {collective}\n" in (MEGATRON / file).read_text()
    names = {cpu.NAME: present_device}
    exec(cpu.rewrite(f"{variable} = {collective}"), names)
    assert names[variable] is getattr(present_device, name.replace("-", "_"))


@pytest.mark.usefixtures("on_cuda")
def test_on_a_gpu_rewritten_code_does_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    names = {cpu.NAME: present_device, "torch": torch}
    assert eval(cpu.rewrite("torch.cuda.current_device()"), names) == 3
    eval(cpu.rewrite("torch.cuda.synchronize()"), names)
    assert waited == [True]
    for kind in ("Float", "Half", "BFloat16"):
        name = f"torch.cuda.{kind}Tensor"
        assert eval(cpu.rewrite(repr(name)), names) == name
    assert cpu.rewrite("f(device='cuda')") == f"f(device={cpu.NAME}.current_device())"
    assert cpu.rewrite("x.cuda()") == f"x.to({cpu.NAME}.current_device())"


def test_lines_keep_their_numbers() -> None:
    for name in ("optimizer/optimizer.py", "pipeline_parallel/schedules.py"):
        source = (MEGATRON / name).read_text()
        rewritten = cpu.rewrite(source)
        assert rewritten != source
        assert rewritten.count("\n") == source.count("\n")


@pytest.mark.slow
def test_a_worker_starts_without_the_compiler() -> None:
    program = "import hflow.runtime.worker.worker, sys; print('torch._dynamo' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


@pytest.mark.slow
def test_only_megatron_is_rewritten_and_its_compiled_code_kept_apart(tmp_path: Path) -> None:
    """A fresh process with its own cache: the second import compiles nothing."""
    program = """
import sys, hflow.runtime.engines.megatron.cpu as cpu
compiled = []
original = cpu._Loader.source_to_code
def record(self, data, path, **options):
    compiled.append(path)
    return original(self, data, path, **options)
cpu._Loader.source_to_code = record
import megatron.core.tensor_parallel.layers
print(len(compiled), all("/megatron/core/" in path for path in compiled), sys.pycache_prefix)
"""
    counts = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        count, only_megatron, prefix = run.stdout.split()
        counts.append(int(count))
        assert only_megatron == "True" and prefix == "None"
        assert "not installed" not in run.stderr
    assert counts[0] > 50 and counts[1] == 0
    (folder,) = (tmp_path / "hflow").iterdir()
    assert importlib.metadata.version("megatron-core") in folder.name
    assert list(folder.rglob("layers.*.pyc"))


@pytest.mark.slow
def test_a_late_install_is_refused() -> None:
    program = """
import megatron.core
try:
    import hflow.runtime.engines.megatron
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert "before megatron.core" in run.stdout
