import os

from hflow.ops.op import op


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits(text: list[list[str]], answer: list[str]) -> list[list[float]]:
    """The share of characters that are digits of the answer: some reward for any text."""
    return [[_share(t, a) for t in samples] for samples, a in zip(text, answer)]


@op("text: str[rows*k], answer: str[rows] -> score: f32[rows*k]")
def digits_without_gpus(text: list[list[str]], answer: list[str]) -> list[list[float]]:
    """As `digits`, on a worker of a plan for CPUs."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if seen:
        raise RuntimeError(f"this worker sees GPUs: {seen}")
    return digits(text, answer)


def _share(text: str, answer: str) -> float:
    return sum(c in answer for c in text) / max(1, len(text))


@op("text: str[rows] -> observation: str[rows]")
def remark(text: list[str]) -> list[str]:
    """An answer to every text of even length; the others are finished."""
    return ["1+1=" if len(t) % 2 == 0 else "" for t in text]
