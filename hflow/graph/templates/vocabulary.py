"""What templates have: filters, tests, methods, functions and statements.

All of it depends on nothing but its arguments, so that every worker, in every run, makes the same text of a
row: no `random`, no `lipsum`, no clock, nothing that writes an address or goes through a set.
"""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
FILTERS = frozenset((
    "abs", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first",
    "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select", "selectattr",
    "slice", "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
    "wordcount", "wordwrap",
))
TESTS = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "boolean", "defined", "divisibleby", "eq", "equalto", "even",
    "false", "float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le", "lessthan", "lower",
    "lt", "mapping", "ne", "none", "number", "odd", "sequence", "string", "true", "undefined", "upper",
))
FUNCTIONS = frozenset(("namespace", "range"))
METHODS: Mapping[str, frozenset[str]] = {
    "text": frozenset((
        "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha",
        "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper", "zfill",
    )),
    "mapping": frozenset((
        "get", "items", "keys", "values",
    )),
    "list": frozenset((
        "count", "index",
    )),
    "loop": frozenset((
        "changed", "cycle",
    )),
}
LOOP_ATTRIBUTES = frozenset((
    "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex",
    "revindex0",
))
# fmt: on
STATEMENTS = frozenset(("for", "if", "set", "with"))
