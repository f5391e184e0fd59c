"""The ranks of a deployment: the table of replicas, their engines, and the state published about them."""
