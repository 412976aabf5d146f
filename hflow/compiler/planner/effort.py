"""What the parts of a search take, in microseconds of one core, as measured on an x86-64 server.

The search adds them up instead of asking the clock, so that equal input gives equal plans on any machine.
"""

from __future__ import annotations

EFFORT = 9_000_000  # of a search, unless seconds are given

BATCH = 120  # to bound some choices at once,
CHOICES = 3  # of which so many are bounded in one more,
JOINT = 500  # to begin with parts of choices that are joined,
CLOSE = 6  # of which each is bounded also by orders of nodes
ALONE = 100  # to bound one allocation by its step,
BUSIEST = 20  # or by its busiest set,
GLANCE = 5  # which is known of most
WITHIN = 250  # to find out how little a set does in an interval of memory
PAIR = 2  # to look at a trainer's assignment with a reader's,
MOVE = 40  # and to find out how long the weights move between their layouts,
DEVICES = 4  # where so many devices take one more,
EXPERTS = 300  # and experts so much
KNOWN = 200  # to bound one by the weights that move,
TIMED = 10  # for which each candidate is looked at that runs in some memory
LOOK = 2_000  # to list the assignments of an allocation
LONGER = 150  # to take each of a node group's assignments after some others,
ROOM = 200  # and to find out which of some choices memory suffices for
INTERVAL = 1_000  # to begin one interval of memory,
COMPARED = 40  # in which so many pairs of choices are compared in one more
PRICE = 1_000  # to price a plan with few edges,
EDGE_PAIR = 4  # and for each pair of edges of one with many, since their order is improved;
ORDERS = 5  # so many times as much where a better order is searched longer for
