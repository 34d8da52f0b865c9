"""`make demo` and `make ui`: the example DAG on this machine, with everything that it needs under `.demo/`."""
