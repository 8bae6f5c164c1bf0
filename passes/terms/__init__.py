"""What one element of a tensor is, as a term over the positions of its dimensions.

A fact about a tensor (see `value.py`) is a list of axes, each ranging over variables, and a *term*: the element at
those positions. The vocabulary is small:

    index terms   variables, integers, `lin` (sum of coefficient * term), `div`, `mod`,
                  `perm` (a named bijection or its inverse), `swap` (a rank seen from the other side of an exchange),
                  `seg` (the r-th smallest expert id), `count` and `start` (rows of one expert / of all earlier ones),
                  `choose` (one index where a condition holds, another elsewhere),
                  `delta` (1 where two indices are equal), `lt`, `nonzero` (1 where a number is not 0)
    data terms    `at` (an element of a tensor that the graph computes), `add`, `mul`, `sum` over a bound variable,
                  `const`, `cast`, `valid` (unspecified where a condition fails) and named pointwise functions

Indexing a tensor is substitution, and a match is decided by where the substitutions end: a layer is an MoE layer if
each index has cancelled down to "this token, its j-th choice". Terms are interned, so equal terms are one object.
"""

from mokfx.passes.terms.data import (
    ONE,
    ZERO,
    add,
    apply,
    at,
    choose,
    const,
    delta,
    lt,
    mul,
    nonzero,
    parts_of,
    uncast,
    valid,
)
from mokfx.passes.terms.index import bound, div, integer, lin, minus, mod, perm, plus, radix, swap, unflatten, var
from mokfx.passes.terms.rewriting import rebuild, substitute, visit_marks
from mokfx.passes.terms.rows import (
    block_start,
    count,
    fold_local,
    fold_regrouped,
    fold_sorted,
    local_expert,
    peer,
    received_from,
    running,
    seg,
    sender,
    start,
)
from mokfx.passes.terms.sizes import Size, as_size, at_most, product, quotient
from mokfx.passes.terms.term import (
    CONDITIONS,
    ROUTED,
    Substitution,
    Term,
    children_of,
    factors_of,
    make,
    match,
    render,
    subterms,
    terms_of,
)

__all__ = [
    "CONDITIONS",
    "ONE",
    "ROUTED",
    "ZERO",
    "Size",
    "Substitution",
    "Term",
    "add",
    "apply",
    "as_size",
    "at",
    "at_most",
    "block_start",
    "bound",
    "children_of",
    "choose",
    "const",
    "count",
    "delta",
    "div",
    "factors_of",
    "fold_local",
    "fold_regrouped",
    "fold_sorted",
    "integer",
    "lin",
    "local_expert",
    "lt",
    "make",
    "match",
    "minus",
    "mod",
    "mul",
    "nonzero",
    "parts_of",
    "peer",
    "perm",
    "plus",
    "product",
    "quotient",
    "radix",
    "rebuild",
    "received_from",
    "render",
    "running",
    "seg",
    "sender",
    "start",
    "substitute",
    "subterms",
    "swap",
    "terms_of",
    "uncast",
    "unflatten",
    "valid",
    "var",
    "visit_marks",
]
