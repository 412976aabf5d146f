"""How evenly the rows of an update are spread over data-parallel replicas."""

MOST_TOKENS = 1.05  # times the mean's that a replica may have before rows are moved
