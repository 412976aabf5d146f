"""The SGLang engine: generation by SGLang's own server, in processes of its own on a worker's devices.

`server` is a worker's side and imports nothing of SGLang, which neither shares a process with Megatron nor with
Ray; `serve` is the program that it starts; `cpu` is what SGLang needs without CUDA.
"""
