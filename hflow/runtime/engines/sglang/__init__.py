"""The SGLang engine: generation by SGLang's own server, in processes of its own on a worker's devices.

`engine` runs generate nodes on a worker, through `replica`, `requests` and `weights`. `server` is a worker's
side of a server, `serve` the program that it starts, which alone imports SGLang (but for a patch that `share`
needs on CUDA); `tiles` loads weights in there; `cpu` is what SGLang needs without CUDA.
"""
