"""Trainers: what runs on the GPU cluster. One module per example DAG, started as `python -m trainers.<name>`."""
