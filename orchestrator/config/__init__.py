"""The configuration of a deployment: every option once, where its value comes from, and what engines get of it."""
