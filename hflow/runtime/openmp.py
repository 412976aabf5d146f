"""How long threads of torch's operations look out for the next one before they sleep."""

from __future__ import annotations

import os

VARIABLE, ROUNDS = "GOMP_SPINCOUNT", "2000"  # some 50 microseconds, about what it takes to wake a thread
OF_USERS = VARIABLE, "OMP_WAIT_POLICY"


def sleep_soon() -> None:
    """In processes that are started from now on, and in this one if torch has not been imported yet.

    GNU's OpenMP looks for 300,000 rounds. On cores that something else uses, too, threads then hold up those
    that they wait for: beside one busy process a GRPO step of a small model on two cores took 1.5 to 2.0 s,
    with 2,000 rounds 1.1 to 1.3 s, alone as long either way. What the user has set stays.
    """
    if not any(name in os.environ for name in OF_USERS):
        os.environ[VARIABLE] = ROUNDS
