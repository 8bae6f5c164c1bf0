"""The page of `Report.html` and `mokfx explain --html`.

    take      a graph's reading -> its pictures (picture.py), by stages.py (which part of a layer a node is),
              steps.py, meaning.py and indices.py (a fact in words), fold.py (equal steps as one)
    layout    where each step goes: graphviz.py, or layered.py without it; svg.py draws it
    work      FLOPs and bytes of a layer, and its floor on one of the cards
    render    all of it on one page: page.html, page.css, page.js
"""
