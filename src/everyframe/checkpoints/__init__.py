"""Finding, fetching, verifying and strictly loading checkpoints. No model code lives here.

Read next: `known` (the models that have a short name), `find` (what a name means and what of it
is on disk), `fetch` (the only module that uses the network), `headers` (facts of a file without
torch), `tensors` (one tensor at a time), `strict` (into a module, nothing missing, nothing left
over), `digest` (the hash in the provenance record). Nothing here imports torch until tensors are
read, so that listing and planning stay quick.
"""
