"""When attention takes the prompts that rows share once, and not each row whole.

Kernels take time for each query that is multiplied by a key, and to bring tokens to them and back: more
where what a token sees is put together of parts. Measured on one core with 4 heads of 64 dims, as so many
products of a query and a key.
"""

WORTH = 0.95  # of the time of whole rows
OF_TOKEN, OF_TOKEN_IN_PARTS, OF_PARTS = 60, 90, 20_000


def is_worth_sharing(seen_once: float, tokens: float, seen_whole: float, row_tokens: float) -> bool:
    """Args: products of a query and a key, and tokens, where each prompt is taken once; and of whole rows."""
    shared = seen_once + OF_TOKEN_IN_PARTS * tokens + OF_PARTS
    return shared < WORTH * (seen_whole + OF_TOKEN * row_tokens)
