"""The run log under every order of events: a simulated store, scripted pods, and a judge of its own."""
