"""The SGLang engine: generation by SGLang's own server, in processes of its own on a worker's devices.

`engine` runs generate nodes on a worker, through `replica`, `requests` and `weights`. `server` is a worker's
side of a server and imports nothing of SGLang, which shares a process with neither Megatron nor Ray; `serve`
is the program that it starts; `tiles` loads weights in there; `cpu` is what SGLang needs without CUDA.
"""
