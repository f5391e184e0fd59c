"""Everything but generation: admin and scale calls, descriptions of the deployment, keys."""
