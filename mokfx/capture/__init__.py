"""Lines of eager MoE code that plain Dynamo stops at, captured under assumptions that are proven or not used.

    torch.bincount(ids, minlength=E).tolist()    E numbers
    for e in hit.nonzero(): ...                  the body once for each of the E experts
    if tokens.shape[0] == 0: ...                 as if there were tokens

What a pass sees of each (it never sees a marker of this package, see `proving`):

* bincount: `torch.bincount(ids, minlength=E)` as written, and the assertions by which Dynamo fixes its length
  to E, whose message says that an id was too large. Nothing is cut off: a longer result raises.
* the loop: its body E times, with the number in place of the row: `mask[3]`, `ids == 3`, `weight[3]`
  (`mask[3:4]`, where the row has the shape [1]). The nonzero node is gone.
* the test: the branch for rows.

Three proofs make that exact, and none of them trusts the pass:

1. Syntax (source, effects, plan): what the skipped statements set, they use themselves; what outlives them is
a tensor updated by index, a list that is only concatenated, a running offset, or a value that both branches
give. No Python object tells whether they ran. 2. The graph (empty, chosen): each of those updates and pieces
has no elements when the tested size is 0, or when the expert is not among the very ids that the hit list was
made of. 3. After the pass: the statements are part of a rewritten layer. (An expert without tokens then has
gradients of 0, as the op says; eager code, where it is left alone, has None.)

What cannot be proven is traced again without the assumption, before anything has run, and the reason is kept.

    session = Capture()                          # one for each compiled function
    with substitutions(session):                 # around each call
        compiled(x)
    # in the backend:
    with proving(gm) as misses:
        misses += rewrite(gm).misses
    session.misses                               # for the report
"""

from mokfx.capture.proof import proving
from mokfx.capture.session import Capture, substitutions
from mokfx.capture.unproven import Unproven

__all__ = ["Capture", "Unproven", "proving", "substitutions"]
