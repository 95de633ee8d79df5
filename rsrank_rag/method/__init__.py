"""The paper's method: template, two phases, shift, projection, score.

Of this package, these modules import only `errors` and `texts` when they are imported.
"""
