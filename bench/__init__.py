"""One script per claim. Each writes `bench/results/<name>.json` and names its peers."""
