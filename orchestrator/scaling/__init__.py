"""Scale operations: ranks come and go while the deployment serves."""
