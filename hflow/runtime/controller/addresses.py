"""Whether the nodes of a Ray cluster are known by addresses at which others reach them."""

from __future__ import annotations

from collections.abc import Sequence

from hflow.diagnostics import Diagnostic, HflowError
from hflow.runtime.network import is_loopback, network_stack


def check_addresses(addresses: Sequence[str], stacks: Sequence[str]) -> None:
    """Where a host has no route to the world, Ray takes what its name resolves to, often an address of
    loopback. Others would look for it on themselves, for minutes, and then say something else.

    Args:
        addresses: of the nodes that take part, this one's too.
        stacks: the `network_stack` of each worker.

    Raises:
        HflowError: HF404 when workers are not all where this process is, and an address is one of loopback.
    """
    unreachable = sorted(set(filter(is_loopback, addresses)))
    if not unreachable or set(stacks) <= {network_stack()}:
        return
    message = f"a Ray node is known as {', '.join(unreachable)}, where other hosts do not reach it"
    help_ = "start it with `ray start --node-ip-address=ADDRESS`, or give its host a route to the others"
    raise HflowError(Diagnostic("HF404", message, help=help_))
