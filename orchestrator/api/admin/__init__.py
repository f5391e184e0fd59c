"""Routes other than generation: admin and scale calls, descriptions of the deployment, keys."""
