"""`python -m pipeline.preflight RECIPE`, the name of `python -m pipeline.plan` that documents and scripts know."""
